"""Test your own fusions: do they fire, do they agree with eager, do they stay away where one condition is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .dispatch import reports
from .errors import FusionCountError
from .faults import STAGES, inject
from .report import Report

__all__ = ["STAGES", "assert_fuses", "assert_matches_eager", "inject", "near_misses"]


def _run(
    function: Callable[..., Any], args: Sequence[Any], train: bool
) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """Outputs, gradients of every leaf that requires one, and the arguments afterwards."""
    module = function if isinstance(function, torch.nn.Module) else None
    tensors = [a for a in pytree.tree_leaves(args) if isinstance(a, Tensor)]
    parameters = list(module.parameters()) if module is not None else []
    leaves = [t for t in (*tensors, *parameters) if t.requires_grad]
    torch.manual_seed(0)
    with torch.set_grad_enabled(train):
        outputs = [o for o in pytree.tree_leaves(function(*args)) if isinstance(o, Tensor)]
    gradients: list[Tensor | None] = []
    if train:
        loss = sum((_weighted(o) for o in outputs if o.requires_grad), torch.zeros(()))
        if loss.requires_grad:
            gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return [o.detach() for o in outputs], gradients, [t.detach() for t in tensors]


def _weighted(o: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, o.numel(), dtype=torch.float64, device=o.device).reshape(o.shape)
    return (o.double() * weights).sum().cpu()


def _compiled(function: Callable[..., Any], options: Mapping[str, Any] | None) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend="fxfuse", options={"lower": "eager", **(options or {})})


def _fresh(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments again, as leaves of their own with the same strides."""

    def again(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        copied = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) if 0 not in a.stride() else None
        copied = copy.deepcopy(a.detach()) if copied is None else copied.copy_(a.detach())
        return copied.requires_grad_(a.requires_grad)

    return pytree.tree_map(again, args)


def assert_fuses(
    function: Callable[..., Any],
    args: Sequence[Any],
    expected: Mapping[str, int],
    *,
    train: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compile ``function``, run it on ``args`` and check how often each fusion of ``expected`` fired; returns the report.

    Args:
        train: run it with gradients, so that joint fusions can replace the backward too.
        options: as for torch.compile; ``lower="eager"`` unless they say otherwise.

    Raises:
        FusionCountError: with the reasons of the near misses.
    """
    compiled = _compiled(function, options)
    _run(compiled, _fresh(args), train)
    report = Report.merge(reports())
    for name, count in expected.items():
        if report.count(name) != count:
            raise FusionCountError(f"fusion {name!r} fired {report.count(name)} times, expected {count}\n{report.why_not(name)}")
    return report


def assert_matches_eager(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    train: bool = True,
    options: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
) -> Report:
    """Compile ``function`` and compare outputs, every gradient and in-place changes with eager; returns the report.

    Args:
        tolerance: allowed relative error (in norm); by dtype if None: 1e-5 for fp32, 2e-2 for bf16 and fp16, 1e-10 for fp64.

    Raises:
        AssertionError: naming what differs.
    """
    eager_function = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    want = _run(eager_function, _fresh(args), train)
    got = _run(_compiled(function, options), _fresh(args), train)
    for kind, ours, theirs in zip(("output", "gradient", "argument after the call"), got, want, strict=True):
        assert len(ours) == len(theirs), f"{len(ours)} {kind}s, eager has {len(theirs)}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            _assert_close(f"{kind} {i}", a, b, tolerance, strides=kind != "gradient")
    return Report.merge(reports())


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def _assert_close(what: str, a: Tensor | None, b: Tensor | None, tolerance: float | None, strides: bool) -> None:
    assert (a is None) == (b is None), f"{what}: one of the two is missing"
    if a is None or b is None:
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{what}: {a.dtype} {tuple(a.shape)}, eager {b.dtype} {tuple(b.shape)}"
    assert not strides or a.stride() == b.stride(), f"{what}: strides {a.stride()}, eager {b.stride()}"
    if not b.is_floating_point():
        assert torch.equal(a, b), f"{what}: differs"
        return
    assert torch.equal(a.isfinite(), b.isfinite()) and torch.equal(a.isnan(), b.isnan()), f"{what}: NaN or inf at other places"
    x, y = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    error = ((x - y).norm() / (y.norm() + 1e-30)).item() if y.norm() > 0 else x.norm().item()
    allowed = _TOLERANCE[b.dtype] if tolerance is None else tolerance
    assert error <= allowed, f"{what}: relative error {error:.2g}, allowed {allowed:.2g}"


# ------------------------------------------------------------------------------------------------ near misses


def near_misses(fusion: Any) -> list[tuple[str, Callable[..., Any], list[Any]]]:
    """Functions that are almost the fusion's pattern: ``(what was broken, function, arguments)``, one condition each.

    A fusion may leave them alone or not, but compiled they must give eager's results.
    """
    from .nearmiss import generate

    return generate(fusion)
