"""A table of cases: small functions, the inputs they take, and which fusions must fire in them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import compare
import pytest
import torch
from torch import Tensor

import fxfuse

Inputs = Callable[[], Sequence[Any]]


def normal(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 0.5, frozen: Iterable[int] = ()
) -> Inputs:
    """Random inputs of these shapes, drawn anew at each call; those whose positions are ``frozen`` need no gradient."""
    frozen = set(frozen)
    return lambda: [(torch.randn(s) * scale).to(dtype).requires_grad_(i not in frozen) for i, s in enumerate(shapes)]


def compiled(
    fn: Callable[..., Any], *, only: Iterable[str] | None = None, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """``fn`` through the fxfuse backend, run by torch itself; only the fusions named in ``only`` may fire."""
    torch._dynamo.reset()
    options = {"lower": "eager", **options}
    if only is not None:
        options["fusions"] = {"only": list(only)}
    return torch.compile(fn, backend="fxfuse", fullgraph=True, dynamic=dynamic, options=options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One function and what must hold when it is compiled."""

    name: str
    fn: Callable[..., Any]
    inputs: Inputs
    only: tuple[str, ...]
    """The fusions that may fire; no other is active."""
    fuses: Mapping[str, int]
    """How often each of them must fire; those not named must not."""
    train: bool = True
    autocast: torch.dtype | None = None
    dynamic: bool | None = None
    dynamic_dims: tuple[tuple[int, int], ...] = ()
    """(input, dimension) pairs that are marked dynamic."""
    other_inputs: tuple[Inputs, ...] = ()
    """Inputs of other sizes, which must run without another compilation."""
    recipe: str | None = None
    loss: compare.Loss = compare.weighted_squares
    retain_graph: bool = False
    tolerance: float = 1e-5
    forward_tolerance: float | None = None
    bit_equal: bool = False
    """The result has exactly the bits of the same function compiled with no fusion."""
    gone: tuple[str, ...] = ()
    """aten ops that the rewritten graph no longer holds."""
    reason: str | None = None
    """A regular expression that one of the reported misses matches."""


class Table(list[Case]):
    """Cases that share defaults, collected by decorating their functions."""

    def __init__(self, **defaults: Any) -> None:
        super().__init__()
        self.defaults = defaults

    def case(self, inputs: Inputs, **fields: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the decorated function, under its own name unless ``name`` is given."""

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.append(Case(**{"name": fn.__name__, "fn": fn, "inputs": inputs, **self.defaults, **fields}))
            return fn

        return add

    def parametrize(self) -> pytest.MarkDecorator:
        """One test per case."""
        names = [c.name for c in self]
        assert len(set(names)) == len(names), "two cases of one name"
        return pytest.mark.parametrize("case", self, ids=names)


def identities(pattern: Callable[..., Any], **defaults: Any) -> Table:
    """Cases of ``local_fusions.identity(pattern)``, which fires once where nothing else is said."""
    name = f"identity_{pattern.__name__}"
    return Table(**{"only": (name,), "fuses": {name: 1}, **defaults})


def in_inference(cases: Iterable[Case]) -> Table:
    """Those cases in which nothing may fuse, without gradients."""
    table = Table()
    table += [dataclasses.replace(c, train=False, reason=None) for c in cases if not c.fuses]
    return table


def check(case: Case) -> fxfuse.Report:
    """Compile the case, compare it with eager, and check what fused; returns the report of the compilation."""
    args = case.inputs()
    fn = compiled(case.fn, only=case.only, dynamic=case.dynamic, **_recipe(case))
    got = _run(case, _marked(fn, case.dynamic_dims), args)
    report = fxfuse.last_report()
    compare.assert_same(got, _run(case, case.fn, args), case.tolerance, case.forward_tolerance)
    assert {name: n for name in case.only if (n := report.count(name))} == dict(case.fuses), report.missed
    for op in case.gone:
        assert not holds_op(report, op), f"aten.{op} is left in the rewritten graph"
    if case.reason is not None:
        reasons = [m.reason for m in report.missed]
        assert any(re.search(case.reason, r) for r in reasons), reasons
    _check_other_sizes(case, fn)
    if case.bit_equal:
        unfused = compiled(case.fn, only=(), dynamic=case.dynamic, **_recipe(case))
        compare.assert_bit_equal(got, _run(case, _marked(unfused, case.dynamic_dims), args))
    return report


def holds_op(report: fxfuse.Report, op: str) -> bool:
    """Whether a rewritten graph still calls ``aten.<op>``."""
    return any(re.search(rf"\baten\.{re.escape(op)}\b", graph.after) for graph in report.graphs)


def _recipe(case: Case) -> dict[str, str]:
    return {"recipe": case.recipe} if case.recipe else {}


def _run(case: Case, fn: Callable[..., Any], args: Sequence[Any]) -> compare.Run:
    return compare.run(fn, args, train=case.train, autocast=case.autocast, loss=case.loss, retain_graph=case.retain_graph)


def _marked(fn: Callable[..., Any], dims: Iterable[tuple[int, int]]) -> Callable[..., Any]:
    def call(*args: Tensor) -> Any:
        for i, dim in dims:
            torch._dynamo.mark_dynamic(args[i], dim)
        return fn(*args)

    return call


def _check_other_sizes(case: Case, fn: Callable[..., Any]) -> None:
    for inputs in case.other_inputs:
        args = inputs()
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = _run(case, fn, args)
        compare.assert_same(got, _run(case, case.fn, args), case.tolerance, case.forward_tolerance)
