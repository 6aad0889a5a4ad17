"""Run a function on equal inputs, eagerly and compiled, and compare everything that its caller can see."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[tuple[Tensor, ...]], Tensor]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one call, and its backward, produced."""

    outputs: tuple[Tensor, ...]
    grads: tuple[Tensor | None, ...]
    """One per tensor input, in order; None where autograd left none."""
    inputs: tuple[Tensor, ...]
    """The inputs after the call: they show what was changed in place."""
    kept: tuple[tuple[int, ...], ...] = ()
    """Shapes of what autograd kept for the backward of the first output, the inputs themselves left out."""


def copied(args: Iterable[Any]) -> list[Any]:
    """Equal arguments with storage of their own; a tensor that is passed twice stays one tensor."""
    made: dict[int, Tensor] = {}

    def copy(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in made:
            made[id(arg)] = arg.detach().clone().requires_grad_(arg.requires_grad)
        return made[id(arg)]

    return [copy(arg) for arg in args]


def in_fp64(args: Iterable[Any]) -> list[Any]:
    """The same arguments in double precision: the reference that neither side has."""
    return [
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]


def weighted_squares(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss that weighs every column differently, so that a swapped or transposed gradient shows."""
    return sum((o.float() * torch.linspace(0.5, 1.5, o.shape[-1] if o.dim() else 1)).square().sum() for o in outputs)


def total(outputs: tuple[Tensor, ...]) -> Tensor:
    """The outputs' sum: their cotangent is an expanded scalar."""
    return sum(o.sum() for o in outputs)


def run(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    train: bool = True,
    autocast: torch.dtype | None = None,
    loss: Loss = weighted_squares,
    retain_graph: bool = False,
) -> Run:
    """Call ``fn`` on copies of ``args`` and, when training, take its backward (twice with ``retain_graph``)."""
    args = copied(args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    cast = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
    with torch.set_grad_enabled(train), cast:
        out = fn(*args)
    outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
    kept: tuple[tuple[int, ...], ...] = ()
    if train and any(o.requires_grad for o in outputs):
        kept = _kept(outputs[0], tensors)
        value = loss(tuple(o for o in outputs if o.requires_grad))
        if retain_graph:
            value.backward(retain_graph=True)
        value.backward()
    return Run(
        outputs=tuple(o.detach() for o in outputs),
        grads=tuple(t.grad for t in tensors),
        inputs=tuple(t.detach() for t in tensors),
        kept=kept,
    )


def _kept(output: Tensor, inputs: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    saved = getattr(output.grad_fn, "saved_tensors", ())
    own = {t.untyped_storage().data_ptr() for t in inputs}
    return tuple(sorted(tuple(s.shape) for s in saved if s is not None and s.untyped_storage().data_ptr() not in own))


def relative_error(got: Tensor, want: Tensor) -> float:
    """``|got - want| / |want|`` in the 2-norm; NaN when either side is not finite (and no comparison holds for NaN)."""
    if got.numel() == 0 and want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    scale = want.norm()
    return got.norm().item() if scale == 0 else ((got - want).norm() / scale).item()


def assert_same(got: Run, want: Run, tolerance: float, forward_tolerance: float | None = None) -> None:
    """Values within tolerance; dtypes, shapes, strides, missing gradients and in-place changes exactly alike."""
    assert len(got.outputs) == len(want.outputs)
    for i, (g, w) in enumerate(zip(got.outputs, want.outputs, strict=True)):
        _assert_close(f"output {i}", g, w, forward_tolerance or tolerance)
        assert g.stride() == w.stride(), f"output {i}: stride {g.stride()}, eager {w.stride()}"
    for i, (g, w) in enumerate(zip(got.grads, want.grads, strict=True)):
        assert (g is None) == (w is None), f"gradient {i}: {'missing' if g is None else 'present'}, unlike eager"
        if g is not None and w is not None:
            _assert_close(f"gradient {i}", g, w, tolerance)
    for i, (g, w) in enumerate(zip(got.inputs, want.inputs, strict=True)):
        assert torch.equal(g, w), f"input {i} differs after the call"


def _assert_close(what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, eager {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
    error = relative_error(got, want)
    assert error <= tolerance, f"{what}: relative error {error:.2e}, allowed {tolerance:.0e}"


def assert_bit_equal(got: Run, want: Run) -> None:
    """Not one bit differs, in no output and no gradient."""
    for kind in ("outputs", "grads"):
        for i, (g, w) in enumerate(zip(getattr(got, kind), getattr(want, kind), strict=True)):
            assert (g is None) == (w is None), f"{kind}[{i}]"
            assert g is None or torch.equal(g, w), f"{kind}[{i}] differs by {relative_error(g, w):.1e}"


def assert_as_near_to_fp64(got: Run, want: Run, truth: Run, factor: float = 1.5, slack: float = 1e-6) -> None:
    """Every value is at most ``factor`` times as far from the double-precision result as eager's own."""
    pairs: Mapping[str, tuple[tuple[Tensor | None, ...], ...]] = {
        kind: (getattr(got, kind), getattr(want, kind), getattr(truth, kind)) for kind in ("outputs", "grads")
    }
    for kind, (gs, ws, ts) in pairs.items():
        for i, (g, w, t) in enumerate(zip(gs, ws, ts, strict=True)):
            if g is not None and w is not None and t is not None:
                mine, eager = relative_error(g, t), relative_error(w, t)
                assert mine <= factor * eager + slack, f"{kind}[{i}]: {mine:.1e} from fp64, eager {eager:.1e}"
