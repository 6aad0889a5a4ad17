"""Registering a fusion: what is wrong is refused with a message that says what, where and why, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from wrong_joint_rewrites import PLANTS, Plant

import fxfuse
from fxfuse import PatternError, registry

HERE = Path(__file__).name


def first_line(refusal: pytest.ExceptionInfo[PatternError]) -> str:
    return str(refusal.value).splitlines()[0]


def is_registered(name: str) -> bool:
    return any(f.name == name for f in fxfuse.list_fusions())


# ------------------------------------------------------------------------------------------------ wrong rewrites
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_wrong_rewrite_is_refused(plant: Plant) -> None:
    with pytest.raises(PatternError, match=plant.differs) as refusal:
        plant.register(plant.wrong)
    line = plant.pattern.__code__.co_firstlineno
    assert f"fusion {plant.name!r} at {plant.pattern.__code__.co_filename}:{line}: " in first_line(refusal)
    assert not is_registered(plant.name)
    fusion = plant.register(plant.right)  # the name is free again
    assert fusion.name == plant.name
    assert fusion.source.endswith(f":{line}")
    assert is_registered(plant.name)


def test_a_refusal_says_what_to_do() -> None:
    plant = PLANTS[0]
    with pytest.raises(PatternError) as refusal:
        plant.register(plant.wrong)
    text = first_line(refusal)
    assert "x=[6, 10]" in text
    assert "float64" in text
    assert ".check" in text
    assert "check_on_register=False" in text


def test_a_refused_rewrite_changes_no_plan() -> None:
    before = fxfuse.list_fusions()
    for plant in PLANTS[:3]:
        with pytest.raises(PatternError):
            plant.register(plant.wrong)
    assert fxfuse.list_fusions() == before


def test_an_unchecked_rewrite_is_registered_and_can_be_verified_later() -> None:
    @fxfuse.register_forward_fusion(name="unchecked", check_on_register=False)
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    @fusion.rewrite
    def _(x, w):
        return F.linear(x, w)

    assert is_registered("unchecked")
    with pytest.raises(PatternError, match="unchecked"):
        fusion.verify()
    assert is_registered("unchecked")


def test_a_check_excuses_the_inputs_that_it_refuses() -> None:
    @fxfuse.register_forward_fusion(name="not_one_row")
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    @fusion.check
    def _(match):
        return match.reject("one row") if match.x.shape[0] == 1 else None

    @fusion.rewrite
    def _(x, w):
        return F.relu(F.linear(x.squeeze(0), w))

    assert is_registered("not_one_row")


def test_a_check_that_refuses_everything_is_refused() -> None:
    @fxfuse.register_forward_fusion(name="never")
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    @fusion.check
    def _(match):
        return match.reject("on principle")

    with pytest.raises(PatternError, match=r"fusion 'never' at .*refuses every input"):

        @fusion.rewrite
        def _(x, w):
            return F.relu(F.linear(x, w))

    assert not is_registered("never")


def test_a_missing_kernel_is_a_warning_and_the_rest_is_compared() -> None:
    def only_fp32(x: Any, result: Callable[[], Any]) -> Any:
        if x.dtype is not torch.float32:
            raise NotImplementedError("no Triton kernel for this dtype")
        return result()

    @fxfuse.register_forward_fusion(name="kernel_for_float32")
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    with pytest.warns(fxfuse.FxfuseWarning, match="kernel_for_float32.*could not be checked.*Triton"):

        @fusion.rewrite
        def _(x, w):
            return only_fp32(x, lambda: F.relu(F.linear(x, w)))

    with pytest.raises(PatternError, match=r"relative error.*float32"):

        @fusion.rewrite
        def _(x, w):
            return only_fp32(x, lambda: F.linear(x, w))

    assert not is_registered("kernel_for_float32")


BUILT_IN = [f for f in fxfuse.list_fusions() if f.pack == registry.BUILTIN_PACK]


@pytest.mark.parametrize("fusion", BUILT_IN, ids=lambda f: f.name)
def test_every_built_in_fusion_is_right(fusion: fxfuse.Fusion) -> None:
    fusion.verify()
    assert fusion.ready


@pytest.mark.parametrize("fusion", BUILT_IN, ids=lambda f: f.name)
def test_sample_inputs_are_what_the_pattern_takes(fusion: fxfuse.Fusion) -> None:
    inputs = fusion.sample_inputs()
    fusion.pattern(*inputs)
    assert all(t.dtype is torch.float32 for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point())


# ------------------------------------------------------------------------------------------------ wrong patterns
def with_variadic(*tensors):
    return tensors[0] + tensors[1]


def with_keywords(x, **others):
    return x + others["y"]


def with_keyword_only(x, *, y):
    return x + y


def with_default(x, w, b=1.0):
    return F.linear(x, w) + b


def without_tensor(s: float):
    return s * 2


def never_runs(x, w):
    raise ValueError("this pattern runs on nothing")


def contradictory(x, w):
    return F.linear(x, w) + F.linear(x, w.t().reshape(3, 5, 7))


PATTERNS = {
    "variadic": (with_variadic, r"\*tensors must be an ordinary named argument"),
    "keywords": (with_keywords, r"\*\*others must be an ordinary named argument"),
    "keyword_only": (with_keyword_only, r"y must be an ordinary named argument"),
    "default": (with_default, r"the only default a hole may have is None.*b has 1\.0"),
    "no_tensor": (without_tensor, "takes no tensor"),
    "never_runs": (never_runs, r"runs on none of the shapes.*ValueError.*runs on nothing.*pass example="),
    "contradictory": (contradictory, r"runs on none of the shapes.*pass example=\{'x': shape, 'w': shape\}"),
}
sides = pytest.mark.parametrize(
    "register",
    [fxfuse.register_forward_fusion, fxfuse.register_backward_fusion, fxfuse.register_forward_backward_fusion],
    ids=["forward", "backward", "joint"],
)


@sides
@pytest.mark.parametrize(("pattern", "message"), PATTERNS.values(), ids=PATTERNS)
def test_a_wrong_pattern_is_refused(register: Any, pattern: Callable[..., Any], message: str) -> None:
    with pytest.raises(PatternError, match=message) as refusal:
        register(pattern)
    assert pattern.__name__ in first_line(refusal)
    assert f"{HERE}:{pattern.__code__.co_firstlineno}" in first_line(refusal)
    assert not is_registered(pattern.__name__)


def test_what_is_no_pattern_at_all_is_refused() -> None:
    with pytest.raises(PatternError, match="register a function or a WindowFusion class, not 7"):
        fxfuse.register_forward_fusion()(7)


EXAMPLES = {
    "an entry missing": ({"x": "m k"}, "no entry for 'w'"),
    "an unknown dimension": ({"x": "m k", "w": "n q"}, "q"),
    "neither names nor a shape": ({"x": "m k", "w": 7}, "example= of w is 7, not a shape or a tensor"),
    "shapes that do not fit": ({"x": (4, 3), "w": (5, 7)}, "does not run on its example="),
}


@pytest.mark.parametrize(("example", "message"), EXAMPLES.values(), ids=EXAMPLES)
def test_a_wrong_example_is_refused(example: dict[str, Any], message: str) -> None:
    def linear_sin(x, w):
        return F.linear(x, w).sin()

    with pytest.raises(PatternError, match=message) as refusal:
        fxfuse.register_forward_fusion(example=example)(linear_sin)
    assert "linear_sin" in first_line(refusal)
    assert not is_registered("linear_sin")


def test_an_example_spares_the_search() -> None:
    def in_groups(x, w):
        return F.linear(x.reshape(3, 5, 7), w)

    with pytest.raises(PatternError, match="runs on none"):
        fxfuse.register_forward_fusion(in_groups)
    fusion = fxfuse.register_forward_fusion(example={"x": (15, 7), "w": ("n", 7)})(in_groups)
    fusion.rewrite(in_groups)
    assert is_registered("in_groups")


# ------------------------------------------------------------------------------------------------ names of arguments
def joint_relu() -> fxfuse.Fusion:
    @fxfuse.register_forward_backward_fusion(name="joint_relu")
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    return fusion


SIGNATURES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "another name": ("rewrite", lambda x, weight: x, r"takes \(x, weight\); the pattern's arguments are \(x, w\)"),
    "another order": ("rewrite", lambda w, x: x, r"takes \(w, x\)"),
    "one too many": ("rewrite", lambda x, w, b: x, r"takes \(x, w, b\)"),
    "one too few": ("rewrite", lambda x: x, r"takes \(x\)"),
    "a forward without save": ("forward", lambda x, w: (x, ()), r"arguments are \(x, w, \*, save\)"),
    "a forward of another name": ("forward", lambda x, weight, *, save: (x, ()), r"takes \(x, weight, save\)"),
    "a backward without the gradient": ("backward", lambda x, w, *, mask: (x, w), r"needs \(grad, x, w, \*saved, \*, mask\)"),
    "a backward of another order": ("backward", lambda grad, w, x, *, mask: (x, w), r"backward takes \(grad, w, x"),
}


@pytest.mark.parametrize(("hook", "function", "message"), SIGNATURES.values(), ids=SIGNATURES)
def test_unknown_argument_names_are_refused(hook: str, function: Callable[..., Any], message: str) -> None:
    fusion = joint_relu()
    with pytest.raises(PatternError, match=message) as refusal:
        getattr(fusion, hook)(function)
    assert first_line(refusal).startswith(f"fusion 'joint_relu' at {fusion.source}: ")
    assert not is_registered("joint_relu")
    joint_relu()


@pytest.mark.parametrize("hook", ["forward", "backward"])
@pytest.mark.parametrize("register", [fxfuse.register_forward_fusion, fxfuse.register_backward_fusion])
def test_one_sided_fusions_take_a_rewrite_alone(register: Any, hook: str) -> None:
    @register(name="one_sided")
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    with pytest.raises(PatternError, match=rf"fusion 'one_sided' at .*\.{hook} belongs to register_forward_backward_fusion"):
        getattr(fusion, hook)(lambda x, w: x)
    assert not is_registered("one_sided")


def test_a_backward_that_takes_other_values_than_are_saved_is_refused() -> None:
    fusion = joint_relu()
    fusion.forward(lambda x, w, *, save: (F.relu(F.linear(x, w)), ()))
    with pytest.raises(PatternError, match=r"fusion 'joint_relu' at .*missing 1 required positional argument: 'out'"):
        fusion.backward(lambda grad, x, w, out, *, mask: (grad @ w, grad.t() @ x))
    assert not is_registered("joint_relu")


def test_an_unknown_attribute_of_a_match_names_the_arguments() -> None:
    @fxfuse.register_forward_fusion(name="asks_for_more")
    def fusion(x, w):
        return F.relu(F.linear(x, w))

    @fusion.check
    def _(match):
        return match.bias is None

    with pytest.raises((AttributeError, PatternError), match=r"no argument 'bias'; it has \['x', 'w'\]"):

        @fusion.rewrite
        def _(x, w):
            return F.relu(F.linear(x, w))


# ------------------------------------------------------------------------------------------------ names of fusions
@sides
def test_a_name_is_taken_once(register: Any) -> None:
    first = fxfuse.register_forward_fusion(name="taken")(lambda x: x.sin().cos())
    with pytest.raises(PatternError, match=r"fusion 'taken' at .* is already registered at .*unregister") as refusal:
        register(name="taken")(lambda x: x.cos().sin())
    assert first.source in first_line(refusal)
    assert [f for f in fxfuse.list_fusions() if f.name == "taken"] == [first]
    first.unregister()
    register(name="taken")(lambda x: x.cos().sin())


def test_unregistering_twice_is_harmless() -> None:
    fusion = fxfuse.register_forward_fusion(name="twice")(lambda x: x.sin().cos())
    fusion.unregister()
    fusion.unregister()
    assert not is_registered("twice")


def test_a_fusion_without_a_rewrite_is_registered_and_does_nothing() -> None:
    fusion = fxfuse.register_forward_fusion(name="unfinished")(lambda x: x.sin().cos())
    assert not fusion.ready
    assert fusion in fxfuse.list_fusions()
    assert fusion not in registry.active()


def test_disabling_what_is_not_registered_suggests_a_name() -> None:
    with pytest.raises(PatternError, match=r"no such fusion; did you mean 'linear_gelu'\?"), fxfuse.disable("linear_gel"):
        pass


def test_a_new_fusion_comes_last_unless_it_is_prepended() -> None:
    last = fxfuse.register_forward_fusion(name="last")(lambda x: x.sin().cos())
    first = fxfuse.register_forward_fusion(name="first", prepend=True)(lambda x: x.cos().sin())
    forward = [f for f in fxfuse.list_fusions() if f.side == "forward"]
    assert forward[0] is first
    assert forward[-1] is last
