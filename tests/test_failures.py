"""Whatever raises inside fxfuse: results stay right, one warning is given, the report says what happened, ``strict`` raises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, rows, step
from torch import Tensor, nn

import fxfuse
from fxfuse import compat
from fxfuse.testing import STAGES, inject


class Planted(Exception):
    """What the tests make fxfuse raise."""


ONLY = {"forward": "linear_add", "backward": "dgrad_add"}
"""One fusion, with one operator, in each pass."""


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of ``lower="auto"`` but Inductor's code generation."""
    monkeypatch.setattr(compat, "compile_fx_inner", lambda gm, inputs, **_: compat.boxed(gm.forward))


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    """fxfuse's warnings as they come."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", fxfuse.FxfuseWarning)
        yield found


def compiled(model: nn.Module, side: str, stage: str, **options: Any) -> Callable[..., Any]:
    """The model with the fusions of one pass; the stages of lowering exist with ``lower="auto"`` only."""
    lower = "auto" if stage == "lower" else "eager"
    options = {"lower": lower, "fusions": {"only": [ONLY[side]]}, **options}
    return torch.compile(model, backend="fxfuse", fullgraph=True, dynamic=False, options=options)


CASES = [(s, d) for s in STAGES for d in ("forward", "backward") if (s, d) not in (("compile", "backward"), ("backward", "forward"))]
"""A backward is compiled at stage "backward", a forward at stage "compile"."""
cases = pytest.mark.parametrize(("stage", "side"), CASES)


@cases
@pytest.mark.parametrize("when", ["first_call", "second_shape"])
@pytest.mark.usefixtures("no_codegen")
def test_failure_is_survived_told_once_and_recorded(
    stage: str, side: str, when: str, caught: list[warnings.WarningMessage]
) -> None:
    model = Block()
    eager, run = copy.deepcopy(model), compiled(model, side, stage)
    x = rows()
    if when == "second_shape":
        assert_same(step(run, model, x), step(eager, eager, x))
        x = rows(4, 16)
    with inject(stage, Planted("planted")):
        for _ in range(3):
            assert_same(step(run, model, x), step(eager, eager, x))
    assert_same(step(run, model, x), step(eager, eager, x))
    assert [str(w.message) for w in caught if "planted" not in str(w.message)] == []
    assert len(caught) == 1, [str(w.message) for w in caught]
    failures = fxfuse.last_report().failures
    assert {f.stage for f in failures} == {stage} and all("Planted: planted" in f.error for f in failures), failures
    assert when == "first_call" or not fxfuse.reports()[0].failures


@cases
@pytest.mark.usefixtures("no_codegen")
def test_strict_raises(stage: str, side: str) -> None:
    model = Block()
    run = compiled(model, side, stage, strict=True)
    with inject(stage, Planted("planted")), pytest.raises(Exception, match="planted"):
        step(run, model, rows())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.usefixtures("no_codegen")
def test_next_compilation_fuses_again(stage: str, caught: list[warnings.WarningMessage]) -> None:
    model, x = Block(), rows()
    want = step(copy.deepcopy(model), model, x)[:1]
    side = "backward" if stage == "backward" else "forward"
    run = compiled(model, side, stage)
    for i in (1, 2):
        with inject(stage, Planted("planted")):
            assert_same(step(run, model, x)[:1], want)
        torch._dynamo.reset()
        fxfuse.reset()
        assert_same(step(run, model, x)[:1], want)
        assert_fused(fxfuse.last_report(), {ONLY[side]: 1})
        assert len(caught) == i
        torch._dynamo.reset()
        fxfuse.reset()


def test_interrupt_is_not_swallowed() -> None:
    model, x = Block(), rows()
    run = compiled(model, "forward", "match")
    with inject("match", KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run(x)
    torch.testing.assert_close(run(x), model(x))


def test_unknown_stage() -> None:
    with pytest.raises(ValueError, match="match, lower, compile, launch, backward"), inject("lunch", Planted):
        pass


# ---------------------------------------------------------------- a user's fusion whose parts raise
def named(**options: Any) -> fxfuse.Fusion:
    """``flawed``: linear + GELU, tried first; without a rewrite yet."""

    @fxfuse.register_forward_backward_fusion(name="flawed", prepend=True, check_on_register=False, **options)
    def flawed(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    return flawed


def survives(model: nn.Module, x: Tensor, **options: Any) -> fxfuse.Report:
    """Run three steps against eager and return the report of the first plan."""
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="fxfuse", fullgraph=True, options={"lower": "eager", **options})
    for _ in range(3):
        assert_same(step(run, model, x), step(eager, eager, x))
    return fxfuse.reports()[0]


def test_check_that_raises_leaves_the_place_to_other_fusions(caught: list[warnings.WarningMessage]) -> None:
    flawed = named()
    flawed.rewrite(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    flawed.check(lambda m: m.no_such_argument)
    report = survives(Block(), rows())
    assert report.count("linear_gelu") == 1 and report.count("flawed") == 0
    assert [(f.stage, f.name) for f in report.failures] == [("match", "flawed")]
    assert "no_such_argument" in report.failures[0].error
    (warning,) = caught
    assert "flawed" in str(warning.message) and "test_failures.py" in str(warning.message)


def test_rewrite_that_raises_leaves_the_place_to_other_fusions(caught: list[warnings.WarningMessage]) -> None:
    def broken(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        raise Planted("no kernel today")

    named().rewrite(broken)
    report = survives(Block(), rows())
    assert report.count("linear_gelu") == 1
    assert [(f.stage, f.name) for f in report.failures] == [("match", "flawed")]
    assert len(caught) == 1 and "no kernel today" in str(caught[0].message)


@pytest.mark.parametrize("hook", ["check", "rewrite"])
def test_strict_raises_what_a_users_hook_raises(hook: str) -> None:
    def broken(*_: Any) -> Any:
        raise Planted("no kernel today")

    flawed = named()
    flawed.rewrite((lambda x, w, b: broken()) if hook == "rewrite" else lambda x, w, b: F.gelu(F.linear(x, w, b)))
    if hook == "check":
        flawed.check(broken)
    with pytest.raises(Exception, match="no kernel today"):
        torch.compile(Block(), backend="fxfuse", options={"lower": "eager", "strict": True})(rows())


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "dtype": (lambda x, w, b: F.gelu(F.linear(x, w, b)).double(), "float64"),
    "shape": (lambda x, w, b: F.gelu(F.linear(x, w, b)).flatten(), "strides"),
    "strides": (lambda x, w, b: F.gelu(F.linear(x, w, b)).t().contiguous().t(), "strides"),
}


@pytest.mark.parametrize("name", WRONG)
def test_rewrite_with_another_output_is_refused_without_a_warning(name: str) -> None:
    rewrite, reason = WRONG[name]
    named().rewrite(lambda x, w, b: rewrite(x, w, b))
    report = survives(Block().requires_grad_(False), rows(6, 16, grad=False), fusions={"only": ["flawed"]})
    assert report.count("flawed") == 0 and not report.failures
    assert reason in report.why_not("flawed")


# ---------------------------------------------------------------- opaque operators that raise at run time
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
    return torch.compile(model, backend="fxfuse", options={"lower": "eager", "fusions": {"only": ["flawed"]}, **more}, dynamic=True)


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


def test_joint_fusion_falls_back_operator_by_operator(caught: list[warnings.WarningMessage]) -> None:
    model, x = Block(20), rows(6, 20)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="fxfuse", options={"lower": "eager", "fusions": {"only": ["linear_gelu"]}})
    with inject("launch", Planted("planted")):
        for _ in range(2):
            assert_same(step(run, model, x), step(eager, eager, x))
    assert [str(w.message).split()[0] for w in caught] == ["fxfuse::linear_act", "fxfuse::act_backward"]
    assert [(f.stage, f.name) for f in fxfuse.last_report().failures] == [("launch", "linear_act"), ("launch", "act_backward")]


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


@pytest.mark.usefixtures("opaque")
def test_failure_is_recorded_with_the_model_that_failed(caught: list[warnings.WarningMessage]) -> None:
    first, second, x = Block(), Block(24), rows()
    options = {"lower": "eager", "fusions": {"only": ["linear_add"]}}
    run = torch.compile(first, backend="fxfuse", options=options)
    step(run, first, x)
    step(torch.compile(second, backend="fxfuse", options=options), second, rows(6, 24))
    with inject("launch", Planted("planted")):
        assert_same(step(run, first, x), step(first, first, x))
    assert [[f.stage for f in r.failures] for r in fxfuse.reports()] == [["launch"], []]
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


_library.define("count(Tensor(a!) counter) -> ()")
_library.impl("count", lambda counter: counter.add_(1), "CPU")
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
        for _ in range(2):
            torch.testing.assert_close(run(x), eager(x))
    assert torch.equal(model.counter, eager.counter)


@pytest.mark.inductor
@pytest.mark.parametrize(("stage", "side"), [("match", "forward"), ("lower", "forward"), ("compile", "forward"), ("backward", "backward")])
def test_failure_with_inductor(stage: str, side: str, caught: list[warnings.WarningMessage]) -> None:
    model, x = Block(), rows()
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="fxfuse", fullgraph=True)
    with inject(stage, Planted("planted")):
        assert_same(step(run, model, x), step(eager, eager, x))
    assert len(caught) == 1
    assert {f.stage for f in fxfuse.last_report().failures} == {stage}
