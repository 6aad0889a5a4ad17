"""Whatever raises inside fxfuse: results stay right, one warning is given, the report says what happened, ``strict`` raises."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from failing import Planted, fxfuse_warnings, named  # noqa: F401  (a fixture)
from situations import Block, assert_fused, assert_same, rows, step
from torch import Tensor, nn

import fxfuse
from fxfuse import compat
from fxfuse.testing import STAGES, inject

ONLY = {"forward": "linear_add", "backward": "dgrad_add"}
"""One fusion, with one operator, in each pass."""


@pytest.fixture
def no_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of ``lower="auto"`` but Inductor's code generation."""
    monkeypatch.setattr(compat, "compile_fx_inner", lambda gm, inputs, **_: compat.boxed(gm.forward))


def compiled(model: nn.Module, side: str, stage: str, **options: Any) -> Callable[..., Any]:
    """The model with the fusions of one pass; the stages of lowering exist with ``lower="auto"`` only."""
    lower = "auto" if stage == "lower" else "eager"
    options = {"lower": lower, "fusions": {"only": [ONLY[side]]}, **options}
    return torch.compile(model, backend="fxfuse", fullgraph=True, dynamic=False, options=options)


CASES = [
    (s, d) for s in STAGES for d in ("forward", "backward") if (s, d) not in (("compile", "backward"), ("backward", "forward"))
]
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


def test_joint_fusion_falls_back_operator_by_operator(caught: list[warnings.WarningMessage]) -> None:
    model, x = Block(20), rows(6, 20)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="fxfuse", options={"lower": "eager", "fusions": {"only": ["linear_gelu"]}})
    with inject("launch", Planted("planted")):
        for _ in range(2):
            assert_same(step(run, model, x), step(eager, eager, x))
    assert [str(w.message).split()[0] for w in caught] == ["fxfuse::linear_act", "fxfuse::act_backward"]
    assert [(f.stage, f.name) for f in fxfuse.last_report().failures] == [("launch", "linear_act"), ("launch", "act_backward")]


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
@pytest.mark.parametrize(
    ("stage", "side"), [("match", "forward"), ("lower", "forward"), ("compile", "forward"), ("backward", "backward")]
)
def test_failure_with_inductor(stage: str, side: str, caught: list[warnings.WarningMessage]) -> None:
    model, x = Block(), rows()
    eager = copy.deepcopy(model)
    run = compiled(model, side, stage, lower="auto")
    with inject(stage, Planted("planted")):
        assert_same(step(run, model, x), step(eager, eager, x))
    assert len(caught) == 1
    assert {f.stage for f in fxfuse.last_report().failures} == {stage}


# ---------------------------------------------------------------- a user's fusion whose parts raise
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
    assert "flawed" in str(warning.message) and "failing.py" in str(warning.message)


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
