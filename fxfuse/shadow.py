"""``verify="first"`` and ``"always"``: run a fused plan beside its unfused form, on copies of the arguments, and compare.

Outputs are compared, and in training the gradients of every input for random cotangents. Both runs start from the same random
state, so that they draw the same dropout masks. The call itself comes afterwards, on the plan that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Allowed difference in norm, relative to the unfused result."""
Run = Callable[..., Any]


def difference(fused: Run, unfused: Run, args: Sequence[Any], train: bool) -> str | None:
    """What differs, in words, or None. Neither run sees the arguments themselves or changes the random state."""
    devices = sorted({a.device.index for a in args if isinstance(a, torch.Tensor) and a.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        state = [torch.get_rng_state(), *[torch.cuda.get_rng_state(d) for d in devices]]
        want = _results(unfused, args, train)
        torch.set_rng_state(state[0])
        for device, saved in zip(devices, state[1:], strict=True):
            torch.cuda.set_rng_state(saved, device)
        got = _results(fused, args, train)
    for (name, a), (_, b) in zip(got, want, strict=True):
        error = _error(a, b)
        if error is not None:
            return f"{name} {error}"
    return None


def _results(run: Run, args: Sequence[Any], train: bool) -> list[tuple[str, Any]]:
    copies = [_copy(a) for a in args]
    outputs = [o for o in pytree.tree_leaves(run(*copies)) if isinstance(o, torch.Tensor)]
    named: list[tuple[str, Any]] = [(f"output {i}", o.detach()) for i, o in enumerate(outputs)]
    if train:
        named += list(_gradients(outputs, copies))
    return named


def _gradients(outputs: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    trained = [o for o in outputs if o.requires_grad]
    wanted = [(i, t) for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not trained or not wanted:
        return
    cotangents = [torch.linspace(0.5, 1.5, o.numel(), device=o.device).to(o.dtype).reshape(o.shape) for o in trained]
    gradients = torch.autograd.grad(trained, [t for _, t in wanted], cotangents, allow_unused=True)
    yield from ((f"gradient of input {i}", g) for (i, _), g in zip(wanted, gradients, strict=True))


def _copy(a: Any) -> Any:
    """The argument with memory of its own, in the same layout."""
    if not isinstance(a, torch.Tensor):
        return a
    with torch.no_grad():
        extent = 1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)) if a.numel() else 0
        memory = a.detach().as_strided((extent,), (1,)).clone()
        copied = memory.as_strided(a.shape, a.stride())
    return copied.requires_grad_(a.requires_grad)


def _error(a: Any, b: Any) -> str | None:
    if a is None or b is None:
        return None if a is b else "is missing in one of the two"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"is {tuple(a.shape)} {a.dtype}, unfused {tuple(b.shape)} {b.dtype}"
    if not b.is_floating_point():
        return None if torch.equal(a, b) else "differs"
    if not torch.equal(a.isfinite(), b.isfinite()):
        return "has NaN or inf at other places"
    x, y = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    error = ((x - y).norm() / y.norm().clamp_min(1e-30)).item()
    allowed = TOLERANCE.get(b.dtype, 1e-9)
    return None if error <= allowed else f"has relative error {error:.2g} (allowed {allowed:g})"
