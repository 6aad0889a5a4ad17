"""``mode=``, ``options=``, ``fxfuse.config`` and the environment: what is refused and how it says so, and which goes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, rows
from torch import Tensor

import fxfuse


def run(*, mode: str | None = None, **options: Any) -> fxfuse.Report:
    """Compile and run one block."""
    torch._dynamo.reset()
    more: dict[str, Any] = {"mode": mode} if mode else {"options": {"lower": "eager", **options}}
    torch.compile(Block(), backend="fxfuse", **more)(rows())
    return fxfuse.last_report()


def refused(call: Callable[[], Any], kind: type[Exception] = fxfuse.OptionError) -> str:
    """The first line of the error that fxfuse raised, inside the one that Dynamo makes of it; no plan is left."""
    with pytest.raises(Exception) as caught:
        call()
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, kind):
        error = getattr(error, "inner_exception", None) or error.__cause__
    assert error is not None, caught.value
    assert fxfuse.plan_info().plans == []
    return str(error).splitlines()[0]


# ---------------------------------------------------------------- unknown names
@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("strct", "strict"), ("fusion", "fusions"), ("Lower", "lower"), ("max_autotun", "max_autotune"), ("freezng", "freezing")],
)
def test_unknown_option_suggests_the_nearest(name: str, suggestion: str) -> None:
    assert refused(lambda: run(**{name: True})) == f"option {name!r} is unknown; did you mean {suggestion!r}?"


def test_unknown_option_that_resembles_nothing_lists_ours() -> None:
    message = refused(lambda: run(qqqqqq=1))
    assert "recipe, fusions, lower, autotune, strict, expect, verify" in message and "torch._inductor.config" in message


@pytest.mark.parametrize(("mode", "says"), [("max-autotun", "did you mean 'max-autotune'"), ("fast", "mode 'fast' is unknown")])
def test_unknown_mode(mode: str, says: str) -> None:
    assert says in refused(lambda: run(mode=mode))


def test_lite_mode_says_why_it_cannot_work() -> None:
    assert "switches off the graph passes" in refused(lambda: run(mode="lite"))


def test_switching_off_the_joint_passes_says_why_it_cannot_work() -> None:
    assert "switches off the hook" in refused(lambda: run(use_joint_graph_passes=False))


MISSPELLED = [{"fusions": {"only": ["linear_gleu"]}}, {"fusions": {"disable": ["linear_gleu"]}}, {"expect": {"linear_gleu": 1}}]


@pytest.mark.parametrize("option", MISSPELLED, ids=str)
def test_unknown_fusion_suggests_the_nearest(option: dict[str, Any]) -> None:
    (name,) = option
    assert refused(lambda: run(**option)) == f"option {name!r}: no fusion is named 'linear_gleu'; did you mean 'linear_gelu'?"


def test_unknown_configuration_field() -> None:
    with pytest.raises(AttributeError, match="strct"):
        fxfuse.config.strct = True
    with pytest.raises(AttributeError, match="strct"), fxfuse.config.patch(strct=True):
        pass


# ---------------------------------------------------------------- wrong values
WRONG: list[tuple[str, Any, str]] = [
    ("strict", "yes", "expected True or False"),
    ("strict", 1, "expected True or False"),
    ("lower", "fast", "expected one of 'auto', 'eager'"),
    ("lower", ["eager"], "expected one of 'auto', 'eager'"),
    ("lower", None, "expected one of 'auto', 'eager'"),
    ("autotune", True, "expected one of 'off', 'quick', 'max'"),
    ("verify", "once", "expected one of 'off', 'first', 'always'"),
    ("recipe", "fp9", "not a fxfuse.Recipe nor one of the short names"),
    ("recipe", 5, "not a fxfuse.Recipe"),
    ("recipe", fxfuse.Recipe, "an instance is needed: Recipe()"),
    ("fusions", ["linear_gelu"], "expected {'only': [names], 'disable': [names]}"),
    ("fusions", {"without": []}, "expected {'only': [names], 'disable': [names]}"),
    ("fusions", {"only": "linear_gelu"}, "expected a list of names"),
    ("fusions", {"only": [3]}, "expected a list of names"),
    ("fusions", {"only": None}, "expected a list of names"),
    ("fusions", "{only: []}", "is not JSON"),
    ("expect", 3, "expected {fusion name: count}"),
    ("expect", ["linear_gelu"], "expected {fusion name: count}"),
    ("expect", {"linear_gelu": 1.5}, "expected {fusion name: count}"),
    ("expect", {"linear_gelu": True}, "expected {fusion name: count}"),
    ("expect", {"linear_gelu": -1}, "expected {fusion name: count}"),
    ("expect", "linear_gelu", "is not JSON"),
    ("max_autotune", 1, "expected bool"),
    ("max_fusion_size", "64", "expected int"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG, ids=[f"{n}={v!r}" for n, v, _ in WRONG])
def test_wrong_value(name: str, value: Any, says: str) -> None:
    message = refused(lambda: run(**{name: value}))
    assert name in message and says in message


def test_explain_checks_its_options_at_once() -> None:
    with pytest.raises(fxfuse.OptionError, match="did you mean 'fusions'"):
        fxfuse.explain(Block(), fusion={})


def test_option_error_is_raised_again_at_every_call() -> None:
    broken = torch.compile(Block(), backend="fxfuse", options={"lower": "fast"})
    for _ in range(2):
        refused(lambda: broken(rows()))


# ---------------------------------------------------------------- right values
def test_options_of_inductor_are_taken_with_dashes_and_underscores() -> None:
    assert_fused(run(**{"max-autotune": False, "epilogue_fusion": True}), FUSED)


@pytest.mark.parametrize(
    ("fusions", "fuses"),
    [
        (None, FUSED),
        ({}, FUSED),
        ({"only": ["linear_gelu"]}, {"linear_gelu": 1}),
        ({"disable": ["linear_gelu", "gelu_backward_bias", "dgrad_add"]}, {"linear_add": 1}),
        ({"only": ["linear_gelu", "linear_add"], "disable": ["linear_add"]}, {"linear_gelu": 1}),
        ({"only": ()}, {}),
        ('{"only": ["linear_gelu"]}', {"linear_gelu": 1}),
    ],
    ids=str,
)
def test_fusions_that_may_fire(fusions: Any, fuses: dict[str, int]) -> None:
    assert_fused(run(fusions=fusions), fuses)


def test_dynamos_mode_default_is_no_mode() -> None:
    with fxfuse.config.patch(lower="eager"):
        assert_fused(run(mode="default"), FUSED)


@pytest.mark.parametrize(
    ("mode", "level"), [("max-autotune", "max"), ("max-autotune-no-cudagraphs", "max"), ("reduce-overhead", "quick")]
)
def test_mode_decides_the_autotune_level(mode: str, level: str) -> None:
    with fxfuse.config.patch(lower="eager"):
        run(mode=mode)
    assert fxfuse.plan_info().plans[0].key.options[1] == level


# ---------------------------------------------------------------- expectations
def test_expectation_that_is_met() -> None:
    assert_fused(run(expect={**FUSED, "linear_relu": 0}), FUSED)


def test_expectation_that_is_not_met_gives_the_reasons() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        pre = F.linear(x, w)
        return F.gelu(pre) + pre

    def call() -> None:
        options = {"lower": "eager", "expect": {"linear_gelu": 1}}
        torch.compile(fn, backend="fxfuse", options=options)(rows(), torch.randn(8, 16))

    message = refused(call, fxfuse.FusionCountError)
    assert message.startswith("fusion 'linear_gelu' fired 0 times, expected 1")
    with pytest.raises(Exception, match=r"linear_gelu: .* is used by .*test_options.py:\d+"):
        torch._dynamo.reset()
        call()


def test_expectation_of_none_raises_where_one_fired() -> None:
    assert "fired 1 times, expected 0" in refused(lambda: run(expect={"linear_gelu": 0}), fxfuse.FusionCountError)


@pytest.mark.filterwarnings("ignore::fxfuse.FxfuseWarning")
def test_expectation_does_not_strike_the_unfused_plan() -> None:
    assert run(expect={"linear_gelu": 1}, verify="always").count("linear_gelu") == 1
    assert_fused(fxfuse.reports()[0], FUSED)


# ---------------------------------------------------------------- precedence
def numerics() -> str:
    """Which recipe a plan was built for."""
    return fxfuse.plan_info().plans[-1].recipe.numerics


def test_options_go_before_patch_before_assignment() -> None:
    assert not run(fusions=None).failures and numerics() == "default"
    try:
        fxfuse.config.recipe = "strict"
        run()
        assert numerics() == "strict"
        with fxfuse.config.patch(recipe="default"):
            run()
            assert numerics() == "default"
            run(recipe="strict")
            assert numerics() == "strict"
            run(recipe=None)
            assert numerics() == "default"
        run()
        assert numerics() == "strict"
    finally:
        fxfuse.config.recipe = None
    run()
    assert numerics() == "default"


ENVIRONMENT = {
    "FXFUSE_RECIPE": "strict",
    "FXFUSE_FUSIONS": '{"only": ["linear_gelu"]}',
    "FXFUSE_LOWER": "eager",
    "FXFUSE_AUTOTUNE": "off",
    "FXFUSE_STRICT": "1",
    "FXFUSE_EXPECT": '{"linear_gelu": 1}',
    "FXFUSE_VERIFY": "first",
    "FXFUSE_DEBUG": "1",
}
SCRIPT = """
import json, torch, torch.nn.functional as F, fxfuse

def fn(x, w):
    return F.gelu(F.linear(x, w)) + x.sum()

def run(**options):
    torch._dynamo.reset()
    fxfuse.reset()
    try:
        torch.compile(fn, backend="fxfuse", options=options)(torch.ones(4, 8), torch.ones(16, 8))
    except Exception as error:
        return str(getattr(error, "inner_exception", error)).splitlines()[0]
    plan = fxfuse.plan_info().plans[-1]
    return [plan.recipe.numerics, [f.name for f in fxfuse.reports()[0].fused], *plan.key.options[:3]]

results = {"environment": run()}
fxfuse.config.recipe = "default"
fxfuse.config.fusions = None
results["assigned"] = run()
with fxfuse.config.patch(autotune="max", expect={"linear_gelu": 2}):
    results["patched"] = run()
    results["options"] = run(expect=None, strict=False, autotune="quick", fusions={"only": []})
results["fields"] = [fxfuse.config.debug, fxfuse.config.verify, fxfuse.config.lower]
print(json.dumps(results))
"""


def test_environment_twins_come_last() -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, **ENVIRONMENT}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "environment": ["strict", ["linear_gelu"], "eager", "off", True],
        "assigned": ["default", ["linear_gelu"], "eager", "off", True],
        "patched": "fusion 'linear_gelu' fired 1 times, expected 2",
        "options": ["default", [], "eager", "quick", False],
        "fields": [True, "first", "eager"],
    }


def test_every_option_has_a_configuration_field_and_an_environment_twin() -> None:
    from fxfuse.settings import OWN

    for name in OWN:
        assert hasattr(fxfuse.config, name)
        assert f"FXFUSE_{name.upper()}" in ENVIRONMENT


# ---------------------------------------------------------------- models that raise by themselves
class Custom(Exception):
    """A user's own exception."""


def raises_in_python(x: Tensor) -> Tensor:
    raise Custom("not my day")


def raises_in_a_shape(x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, torch.ones(8, 17)))


def raises_for_a_dtype(x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, torch.ones(8, 16, dtype=torch.float64)))  # only when it runs


@pytest.mark.parametrize("fn", [raises_in_python, raises_in_a_shape, raises_for_a_dtype])
@pytest.mark.parametrize("fullgraph", [True, False], ids=["fullgraph", "breaks"])
def test_error_of_the_model_is_the_one_that_dynamo_gives_without_us(fn: Callable[[Tensor], Tensor], fullgraph: bool) -> None:
    errors = []
    for backend, options in (("eager", None), ("fxfuse", {"lower": "eager"})):
        torch._dynamo.reset()
        with pytest.raises(Exception) as caught:
            torch.compile(fn, backend=backend, fullgraph=fullgraph, options=options)(rows(6, 16, grad=False))
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]
    assert fxfuse.plan_info().plans == [] or fn is raises_for_a_dtype
    assert not any(r.failures for r in fxfuse.reports())


def test_error_at_run_time_is_eagers_and_the_plan_goes_on() -> None:
    def fn(i: Tensor, table: Tensor, w: Tensor) -> Tensor:
        return F.gelu(F.linear(F.embedding(i, table), w))

    table, w = torch.randn(10, 16), torch.randn(8, 16)
    compiled = torch.compile(fn, backend="fxfuse", options={"lower": "eager"})
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 30])
    for _ in range(2):
        torch.testing.assert_close(compiled(good, table, w), fn(good, table, w))
        with pytest.raises(IndexError, match="out of range"):
            compiled(bad, table, w)
    assert fxfuse.reports()[0].count("linear_gelu") == 1
    assert not any(r.failures for r in fxfuse.reports())
