"""Operators that raise when they run: the fused form is given up, the results stay right."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from failing import Planted, fxfuse_warnings, named  # noqa: F401  (a fixture)
from situations import Block, assert_same, rows, step
from torch import Tensor, nn

import fxfuse

_library = torch.library.Library("fxfuse_failing", "DEF")
raises: dict[str, Callable[[Tensor], bool]] = {}
"""By operator: whether it raises on this input; tests fill it."""
calls: list[str] = []


def _define(schema: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def run(x: Tensor, *more: Any) -> Any:
        calls.append(name)
        if name in raises and raises[name](x):
            raise Planted(f"{name} cannot launch")
        return compute(x, *more)

    _library.impl(name, run, "CPU")
    _library.impl(name, compute, "Meta")
    return getattr(torch.ops.fxfuse_failing, name)


def _gradient(grad: Tensor, pre: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(grad, pre)


forward_op = _define("linear(Tensor x, Tensor w, Tensor b) -> Tensor", lambda x, w, b: F.linear(x, w, b))
backward_op = _define("gelu_backward(Tensor grad, Tensor pre) -> Tensor", _gradient)
plain_op = _define("plain(Tensor x) -> Tensor", lambda x: x.clone())


@pytest.fixture
def opaque() -> Iterator[fxfuse.Fusion]:
    """A joint fusion whose forward and backward call operators that may raise."""
    fusion = named()

    @fusion.forward
    def _(x: Tensor, w: Tensor, b: Tensor, *, save: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        pre = forward_op(x, w, b)
        return F.gelu(pre), (pre,) if save else ()

    @fusion.backward
    def _(grad: Tensor, x: Tensor, w: Tensor, b: Tensor, pre: Tensor, *, mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
        d = backward_op(grad, pre)
        return d @ w if mask[0] else None, d.t() @ x if mask[1] else None, d.sum(0) if mask[2] else None

    yield fusion
    raises.clear()
    calls.clear()


def opaque_only(model: nn.Module, **more: Any) -> Callable[..., Any]:
    """The model with no other fusion than the opaque one."""
    return torch.compile(
        model, backend="fxfuse", options={"lower": "eager", "fusions": {"only": ["flawed"]}, **more}, dynamic=True
    )


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("when", ["first_call", "second_shape"])
def test_opaque_operator_that_raises_in_the_forward(when: str, caught: list[warnings.WarningMessage]) -> None:
    model = Block()
    eager, run = copy.deepcopy(model), opaque_only(model)
    if when == "second_shape":
        x = rows(8, 16)
        assert_same(step(run, model, x), step(eager, eager, x))
        assert calls == ["linear", "gelu_backward"]
    raises["linear"] = lambda t: t.shape[0] == 5
    for _ in range(3):
        x = rows(5, 16)
        assert_same(step(run, model, x), step(eager, eager, x))
    assert len(caught) == 1, [str(w.message) for w in caught]
    failures = [(f.stage, f.error) for r in fxfuse.reports() for f in r.failures]
    assert failures == [("launch", "Planted: linear cannot launch")]


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("when", ["first_call", "second_shape"])
def test_opaque_operator_that_raises_in_the_backward(when: str, caught: list[warnings.WarningMessage]) -> None:
    """What the unfused backward needs was not saved: this backward raises, and from the next forward on torch runs both."""
    model = Block()
    eager, run = copy.deepcopy(model), opaque_only(model)
    if when == "second_shape":
        x = rows(8, 16)
        assert_same(step(run, model, x), step(eager, eager, x))
    raises["gelu_backward"] = lambda t: t.shape[0] == 5
    with pytest.raises(Exception, match="gelu_backward cannot launch"):
        step(run, model, rows(5, 16))
    for _ in range(3):
        x = rows(5, 16)
        assert_same(step(run, model, x), step(eager, eager, x))
    assert len(caught) == 1, [str(w.message) for w in caught]
    failures = [(f.stage, f.error) for r in fxfuse.reports() for f in r.failures]
    assert failures == [("launch", "Planted: gelu_backward cannot launch")]


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("name", ["linear", "gelu_backward"])
def test_opaque_operator_that_raises_under_strict(name: str) -> None:
    raises[name] = lambda t: True
    model = Block()
    run = torch.compile(model, backend="fxfuse", options={"lower": "eager", "strict": True, "fusions": {"only": ["flawed"]}})
    with pytest.raises(Planted, match="cannot launch"):
        step(run, model, rows())


@pytest.mark.usefixtures("opaque")
def test_error_of_the_model_itself_is_the_models_error_and_no_failure() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return plain_op(super().forward(x))

    raises["plain"] = lambda t: True
    model, x = Model(), rows(6, 16, grad=False)
    run = torch.compile(model, backend="fxfuse", options={"lower": "eager"})
    with torch.no_grad():
        with pytest.raises(Planted, match="plain cannot launch"):
            run(x)
        del raises["plain"]
        torch.testing.assert_close(run(x), model(x))
    assert fxfuse.last_report().failures == [] and fxfuse.reports()[0].count("flawed") == 1


@pytest.mark.usefixtures("opaque")
def test_inputs_changed_before_the_failure_are_changed_once(caught: list[warnings.WarningMessage]) -> None:
    class Model(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x.mul_(2)
            return super().forward(x)

    raises["linear"] = lambda t: True
    model, x = Model(), rows(6, 16, grad=False)
    eager, other = copy.deepcopy(model), x.clone()
    run = torch.compile(model, backend="fxfuse", options={"lower": "eager", "fusions": {"only": ["flawed"]}})
    for _ in range(2):
        torch.testing.assert_close(run(x), eager(other))
    assert torch.equal(x, other) and model.calls == 2
    assert len(caught) == 1


@pytest.mark.inductor
@pytest.mark.usefixtures("opaque")
def test_opaque_operator_that_raises_in_inductors_code(caught: list[warnings.WarningMessage]) -> None:
    raises["linear"] = lambda t: True
    model, x = Block(), rows()
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="fxfuse", options={"fusions": {"only": ["flawed"]}})
    for _ in range(2):
        assert_same(step(run, model, x), step(eager, eager, x))
    assert len(caught) == 1


def _count(counter: Tensor) -> None:
    counter.add_(1)


_library.define("count(Tensor(a!) counter) -> ()")
_library.impl("count", _count, "CPU")
_library.impl("count", lambda counter: None, "Meta")


@pytest.mark.inductor
@pytest.mark.usefixtures("opaque")
def test_mutation_that_inductor_runs_in_place_happens_once(caught: list[warnings.WarningMessage]) -> None:
    class Model(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counter", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            torch.ops.fxfuse_failing.count(self.counter)
            return super().forward(x + self.counter[0])

    raises["linear"] = lambda t: True
    model, x = Model(), rows(6, 16, grad=False)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="fxfuse", options={"fusions": {"only": ["flawed"]}})
    with torch.no_grad():
        with pytest.raises(fxfuse.LoweringError, match="may have changed its inputs already"):
            run(x)
        eager(x)  # the failed call had counted before it failed
        for _ in range(2):
            torch.testing.assert_close(run(x), eager(x))
    assert torch.equal(model.counter, eager.counter)
