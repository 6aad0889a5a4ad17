"""What a fusion may say beside its pattern: required operators, examples, a name with a family, numbers, hooks that ask for
the recipe; and what the report keeps of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import cases
import compare
import moe_blocks
import pytest
import torch
import torch.nn.functional as F
from moe_blocks import EXPERTS, INNER, TOKENS, WIDTH, K
from torch import Tensor

import fxfuse
from fxfuse import PatternError
from fxfuse.naming import family, is_among, is_called

aten = torch.ops.aten
BF16 = torch.bfloat16


def rows(*shapes: tuple[int, ...], grad: bool = True) -> list[Tensor]:
    """Normal inputs."""
    return [torch.randn(s).requires_grad_(grad) for s in shapes]


def ran(fn: Callable[..., Any], args: Sequence[Tensor], **options: Any) -> fxfuse.Report:
    """Compile and run in inference, compare with eager; the report."""
    with torch.no_grad():
        got = cases.compiled(fn, **options)(*args)
        torch.testing.assert_close(got, fn(*args))
    return fxfuse.last_report()


def forward_fusion(name: str, pattern: Callable[..., Any], **options: Any) -> fxfuse.Fusion:
    """A fusion whose rewrite is its pattern."""
    fusion = fxfuse.register_forward_fusion(name=name, check_on_register=False, **options)(pattern)
    fusion.rewrite(pattern)
    return fusion


# ------------------------------------------------------------------------------------------------ requires

LINEAR = {"x": "m k", "w": "n k"}


def watched(calls: list[bool]) -> Callable[..., Tensor]:
    """A pattern that notes how it is traced: with a bias or without."""

    def pattern(x, w, b=None):
        calls.append(b is not None)
        return F.gelu(F.linear(x, w, b)).exp()

    return pattern


def test_a_fusion_is_not_looked_for_where_a_required_operator_is_missing() -> None:
    calls: list[bool] = []
    forward_fusion("needs_cos", watched(calls), example={**LINEAR, "b": "n"}, requires=(aten.cos.default,))
    calls.clear()
    report = ran(lambda x, w: F.gelu(F.linear(x, w)).exp() + x.sum().sin(), rows((6, 16), (32, 16)))
    assert (calls, report.count("needs_cos")) == ([], 0)
    assert not [m for m in report.missed if m.name == "needs_cos"]


def test_a_fusion_is_looked_for_where_the_required_operator_is_anywhere() -> None:
    calls: list[bool] = []
    forward_fusion("needs_cos", watched(calls), example={**LINEAR, "b": "n"}, requires=(aten.cos.default,))
    calls.clear()
    report = ran(lambda x, w: F.gelu(F.linear(x, w)).exp() + x.sum().cos(), rows((6, 16), (32, 16)), only=["needs_cos"])
    assert calls and report.count("needs_cos") == 1


def test_every_required_operator_is_needed() -> None:
    both = (aten.cos.default, aten.sin.default)
    forward_fusion("needs_both", lambda x, w: F.linear(x, w).exp(), example=LINEAR, requires=both)
    args = rows((6, 16), (32, 16))
    for extra, count in (((torch.cos,), 0), ((torch.sin,), 0), ((torch.cos, torch.sin), 1)):
        report = ran(lambda x, w, e=extra: (F.linear(x, w).exp(), *[f(x) for f in e]), args, only=["needs_both"])
        assert report.count("needs_both") == count


def test_a_required_operator_of_the_backward_counts_too() -> None:
    fusion = fxfuse.register_forward_backward_fusion(
        name="needs_backward", example=LINEAR, requires=(aten.tanh_backward.default,), check_on_register=False
    )(lambda x, w: F.linear(x, w).tanh())
    fusion.rewrite(lambda x, w: F.linear(x, w).tanh())
    args = rows((6, 16), (32, 16))
    only = ["needs_backward"]
    assert ran(lambda x, w: F.linear(x, w).tanh(), args, only=only).count("needs_backward") == 0
    compare.run(cases.compiled(lambda x, w: F.linear(x, w).tanh(), only=only), args)
    assert fxfuse.last_report().count("needs_backward") == 1


def taken(cosines: int) -> fxfuse.Report:
    """A graph with some cosines, the first of which another fusion takes before ``after`` is looked for."""
    forward_fusion("taker", lambda x, w: F.linear(x, w).cos(), example=LINEAR)
    forward_fusion("after", lambda x, w: F.linear(x, w).exp(), example=LINEAR, requires=(aten.cos.default,))

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(x, w).cos(), F.linear(x.sin(), w).exp(), *[x.cos() for _ in range(cosines - 1)])

    return ran(fn, rows((6, 16), (32, 16)), only=["taker", "after"])


def test_a_required_operator_that_another_fusion_took_does_not_count() -> None:
    report = taken(1)
    assert (report.count("taker"), report.count("after")) == (1, 0)


def test_a_required_operator_that_is_left_counts() -> None:
    report = taken(2)
    assert (report.count("taker"), report.count("after")) == (1, 1)


def test_the_next_form_is_not_traced_once_the_required_operator_is_gone() -> None:
    calls: list[bool] = []
    forward_fusion("forms", watched(calls), example={**LINEAR, "b": "n"}, requires=(aten.gelu.default,))
    calls.clear()
    report = ran(lambda x, w, b: F.gelu(F.linear(x, w, b)).exp(), rows((6, 16), (32, 16), (32,)), only=["forms"])
    assert report.count("forms") == 1 and all(calls)  # the form with a bias is the first


# ------------------------------------------------------------------------------------------------ example


def dims(fusion: fxfuse.Fusion) -> list[tuple[Any, ...]]:
    """The examples' dimensions, None where a hole is absent."""
    return [tuple(s and s.dims for s in e) for e in fusion.examples]


def linear_sin(x, w, b=None):
    return F.linear(x, w, b).sin()


def test_one_example_stands_for_itself_with_and_without_what_is_optional() -> None:
    fusion = forward_fusion("linear_sin", linear_sin, example={**LINEAR, "b": "n"})
    assert dims(fusion) == [(("m", "k"), ("n", "k"), ("n",)), (("m", "k"), ("n", "k"), None)]


def test_a_list_of_examples_is_taken_with_and_without_what_is_optional() -> None:
    fusion = forward_fusion("linear_sin", linear_sin, example=[{**LINEAR, "b": "n"}, {"x": "b m k", "w": "n k", "b": "n"}])
    assert sorted(map(str, dims(fusion))) == sorted(
        str((x, ("n", "k"), b)) for x in (("m", "k"), ("b", "m", "k")) for b in (("n",), None)
    )


def test_where_an_example_leaves_a_hole_out_all_are_taken_as_they_are() -> None:
    fusion = forward_fusion("linear_sin", linear_sin, example=[{**LINEAR, "b": None}, {"x": "b m k", "w": "n k", "b": "n"}])
    assert dims(fusion) == [(("m", "k"), ("n", "k"), None), (("b", "m", "k"), ("n", "k"), ("n",))]


@pytest.mark.parametrize("bias", [None, "n"], ids=["without", "with"])
def test_a_form_that_no_example_has_is_not_found(bias: str | None) -> None:
    forward_fusion("linear_sin", linear_sin, example=[{**LINEAR, "b": bias}] + ([{**LINEAR, "b": None}] if bias is None else []))
    without = ran(lambda x, w: F.linear(x, w).sin(), rows((6, 16), (32, 16)), only=["linear_sin"])
    with_bias = ran(lambda x, w, b: F.linear(x, w, b).sin(), rows((6, 16), (32, 16), (32,)), only=["linear_sin"])
    assert (without.count("linear_sin"), with_bias.count("linear_sin")) == (1, 0 if bias is None else 1)


def test_examples_of_several_dtypes_are_several_forms() -> None:
    def product(x, w):
        return (x.to(w.dtype) @ w.t()).sin()

    half = {"x": torch.zeros(6, 16), "w": torch.zeros(32, 16, dtype=BF16)}
    forward_fusion("cast_sin", product, example=[LINEAR, half])
    args = [torch.randn(6, 16), torch.randn(32, 16, dtype=BF16)]
    report = ran(lambda x, w: F.linear(x.bfloat16(), w).sin(), args, only=["cast_sin"])
    assert report.count("cast_sin") == 1


BAD: dict[str, tuple[Any, str]] = {
    "second lacks an entry": ([{**LINEAR, "b": "n"}, {"x": "m k", "b": "n"}], "no entry for 'w'"),
    "an optional hole is not named": (LINEAR, "no entry for 'b'"),
    "none for what is not optional": ({"x": "m k", "w": None, "b": "n"}, "example= of w is None, not a shape or a tensor"),
    "second has an unknown dimension": ([{**LINEAR, "b": "n"}, {"x": "m k", "w": "n q", "b": None}], "names 'q'"),
    "second does not run": ([{**LINEAR, "b": None}, {"x": "m k", "w": "n i", "b": None}], "does not run on its example="),
    "runs only without the bias": ([{**LINEAR, "b": None}, {"x": "m k", "w": "n k", "b": "k"}], "does not run on its example="),
    "no example": ([], "example="),
    "not a mapping": (["m k", "n k", "n"], "example="),
}


@pytest.mark.parametrize(("example", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize(
    "register", [fxfuse.register_forward_fusion, fxfuse.register_forward_backward_fusion], ids=["forward", "joint"]
)
def test_a_wrong_example_is_refused_when_it_is_registered(register: Any, example: Any, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        register(name="linear_sin", example=example, check_on_register=False)(linear_sin)
    assert "linear_sin" not in [f.name for f in fxfuse.list_fusions()]


IDS = torch.tensor([[5, 0], [3, 5], [1, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_integers_of_an_example_are_the_ones_that_the_rewrite_is_checked_on(dtype: torch.dtype) -> None:
    seen: list[Tensor] = []
    fusion = fxfuse.register_forward_fusion(name="lookup", example={"table": "i k", "ids": IDS.to(dtype)})(
        lambda table, ids: table[ids].sin()
    )

    @fusion.rewrite
    def _(table, ids):
        seen.append(ids)
        return table.sin()[ids]

    assert seen and all(ids.dtype == dtype and torch.equal(ids, IDS.to(dtype)) for ids in seen)
    assert torch.equal(fusion.sample_inputs()[1], IDS.to(dtype))


def test_a_rewrite_that_is_wrong_for_an_integer_of_the_example_is_refused() -> None:
    fusion = fxfuse.register_forward_fusion(name="lookup", example={"table": "i k", "ids": IDS})(
        lambda table, ids: table[ids].sin()
    )
    with pytest.raises(PatternError, match="output 0 has relative error"):
        fusion.rewrite(lambda table, ids: table[ids.clamp(max=4)].sin())


# ------------------------------------------------------------------------------------------------ family[form]

NAMES = ("own[sinh exp]", "own[sin]", "owner")


@pytest.fixture
def forms() -> None:
    """Two forms of ``own``, and a fusion whose name begins alike."""
    forward_fusion(NAMES[0], lambda x, w: F.linear(x, w).sinh().exp(), example=LINEAR)
    forward_fusion(NAMES[1], lambda x, w: F.linear(x, w).sin(), example=LINEAR)
    forward_fusion(NAMES[2], lambda x, w: F.linear(x, w).cos(), example=LINEAR)


def all_three(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Each of them once."""
    return F.linear(x, w).sinh().exp(), F.linear(x + 1, w).sin(), F.linear(x + 2, w).cos()


ARGS = ((6, 16), (32, 16))


@pytest.mark.parametrize(
    ("name", "kin", "asked", "called"),
    [
        ("own[a]", "own", "own", True),
        ("own[a]", "own", "own[a]", True),
        ("own[a]", "own", "own[b]", False),
        ("own[a]", "own", "ow", False),
        ("own[a]", "own", "own[", False),
        ("own[a]", "own", "[a]", False),
        ("own", "own", "own", True),
        ("own", "own", "own[a]", False),
        ("a[b[c]]", "a", "a", True),
    ],
)
def test_a_name_is_its_familys_name_and_a_form(name: str, kin: str, asked: str, called: bool) -> None:
    assert family(name) == kin
    assert is_called(name, asked) == called
    assert is_among(name, ["other", asked]) == called


@pytest.mark.usefixtures("forms")
def test_a_report_counts_a_family_a_form_and_a_glob() -> None:
    report = ran(all_three, rows(*ARGS))
    counted = {name: report.count(name) for name in ("own", *NAMES, "own*", "own[[]*", "ow", "own[", "own[cos]")}
    assert counted == {"own": 2, **dict.fromkeys(NAMES, 1), "own*": 3, "own[[]*": 2, "ow": 0, "own[": 0, "own[cos]": 0}
    assert (report.count("own", "forward"), report.count("own", "backward")) == (2, 0)


@pytest.mark.usefixtures("forms")
def test_why_not_of_a_family_that_fired_says_where() -> None:
    text = ran(all_three, rows(*ARGS)).why_not("own")
    assert text.startswith("own fused 2 times:") and text.count("test_fusion_options.py") == 2


@pytest.mark.usefixtures("forms")
def test_why_not_of_a_family_gives_the_nearest_miss_of_its_forms() -> None:
    report = ran(lambda x, w: F.linear(x, w).cosh().exp(), rows(*ARGS), only=["own"])
    for name in ("own", "own[sinh exp]"):
        assert "cosh" in report.why_not(name)


@pytest.mark.usefixtures("forms")
def test_a_drawing_of_a_region_of_a_family() -> None:
    report = ran(all_three, rows(*ARGS))
    assert report.to_mermaid("own") == report.to_mermaid("own#0") == report.to_mermaid("own[sinh exp]")
    assert report.to_mermaid("own#1") == report.to_mermaid("own[sin]#0")
    for name in ("own#2", "own[sin]#1", "own[cos]", "ow"):
        with pytest.raises(ValueError, match="no fused region"):
            report.to_mermaid(name)


CHOSEN: dict[str, tuple[dict[str, Any], set[str]]] = {
    "only the family": ({"only": ["own"]}, set(NAMES[:2])),
    "only a form": ({"only": ["own[sin]"]}, {NAMES[1]}),
    "only a form and another": ({"only": ["own[sin]", "owner"]}, set(NAMES[1:])),
    "without the family": ({"disable": ["own"]}, {"owner"}),
    "without a form": ({"disable": ["own[sin]"]}, {NAMES[0], "owner"}),
    "the family without a form": ({"only": ["own"], "disable": ["own[sin]"]}, {NAMES[0]}),
    "a form without the family": ({"only": ["own[sin]"], "disable": ["own"]}, set()),
}


def fired(report: fxfuse.Report) -> set[str]:
    """Which of the fixture's fusions fired."""
    return {f.name for f in report.fused} & set(NAMES)


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize(("fusions", "names"), CHOSEN.values(), ids=CHOSEN)
def test_option_fusions_takes_a_familys_name(fusions: dict[str, Any], names: set[str]) -> None:
    assert fired(ran(all_three, rows(*ARGS), fusions=fusions)) == names


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize(
    ("off", "names"), [(("own",), {"owner"}), (("own[sin]",), {NAMES[0], "owner"}), (("owner", "own"), set())]
)
def test_disable_takes_a_familys_name(off: tuple[str, ...], names: set[str]) -> None:
    call, args = cases.compiled(all_three), rows(*ARGS)
    with torch.no_grad():
        with fxfuse.disable(*off):
            call(*args)
            assert fired(fxfuse.last_report()) == names
        call(*args)
        assert fired(fxfuse.last_report()) == set(NAMES)


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("name", ["ow", "own[", "own[cos]", "own[sin"])
def test_disabling_half_a_name_is_refused(name: str) -> None:
    with pytest.raises(PatternError, match="no such fusion"), fxfuse.disable(name):
        pass


def test_a_misspelled_family_is_suggested() -> None:
    with pytest.raises(PatternError, match="did you mean 'grouped_mlp'"), fxfuse.disable("grouped_mpl"):
        pass


@pytest.mark.usefixtures("forms")
def test_option_expect_takes_a_familys_name() -> None:
    args = rows(*ARGS)
    ran(all_three, args, expect={"own": 2, "own[sin]": 1, "owner": 1})
    for expected, count in (({"own": 1}, 2), ({"own[sin]": 0}, 1), ({"own": 3}, 2)):
        with pytest.raises(Exception, match=f"fired {count} times, expected"):
            ran(all_three, args, expect=expected)


@pytest.mark.usefixtures("forms")
def test_an_expected_family_that_did_not_fire_gives_the_reasons_of_its_forms() -> None:
    with pytest.raises(Exception, match=r"'own' fired 0 times, expected 1(.|\n)*own\[sinh exp\]: .*cosh"):
        ran(lambda x, w: F.linear(x, w).cosh().exp(), rows(*ARGS), only=["own"], expect={"own": 1})


# ------------------------------------------------------------------------------------------------ near misses


def long_chain(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w)).exp().sin().cos()


def short_chain(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w)).cos()


def almost_long(x: Tensor, w: Tensor) -> Tensor:
    """``long_chain`` but for its activation; of ``short_chain`` only the cosine."""
    return F.relu(F.linear(x, w)).exp().sin().cos()


@pytest.fixture(params=[False, True], ids=["long_first", "short_first"])
def near(request: pytest.FixtureRequest) -> None:
    """Two forms of ``near``, in either order."""
    forms = [("near[long]", long_chain), ("near[short]", short_chain)]
    for name, pattern in forms[::-1] if request.param else forms:
        forward_fusion(name, pattern, example=LINEAR)


def near_misses(report: fxfuse.Report) -> list[str]:
    return [m.name for m in report.missed if family(m.name) == "near"]


@pytest.mark.usefixtures("near")
def test_of_a_family_only_the_nearest_miss_is_kept() -> None:
    report = ran(almost_long, rows(*ARGS), only=["near"])
    assert near_misses(report) == ["near[long]"]
    assert report.missed[0].matched > 1 and "gelu" in report.missed[0].reason


@pytest.mark.usefixtures("near")
def test_of_a_family_that_fired_no_near_miss_is_kept() -> None:
    report = ran(lambda x, w: (almost_long(x, w), short_chain(x + 1, w)), rows(*ARGS), only=["near"])
    assert (report.count("near"), near_misses(report)) == (1, [])


@pytest.mark.usefixtures("near")
def test_another_family_that_fired_elsewhere_does_not_hide_a_near_miss() -> None:
    forward_fusion("far", lambda x: x.sin().tanh(), example={"x": "m k"})
    report = ran(lambda x, w: (almost_long(x, w), x.sin().tanh()), rows(*ARGS), only=["near", "far"])
    assert (report.count("far"), near_misses(report)) == (1, ["near[long]"])


@pytest.mark.usefixtures("near")
def test_a_near_miss_is_kept_where_a_smaller_fusion_took_the_place() -> None:
    forward_fusion("small", lambda x: x.sin().cos(), example={"x": "m k"})
    report = ran(almost_long, rows(*ARGS), only=["near", "small"])
    assert (report.count("small"), near_misses(report)) == (1, ["near[long]"])


@pytest.mark.usefixtures("near")
def test_a_near_miss_is_dropped_where_a_larger_fusion_took_the_place() -> None:
    forward_fusion("large", lambda x, w: F.relu(F.linear(x, w)).exp().sin().cos(), example=LINEAR)
    report = ran(almost_long, rows(*ARGS), only=["near", "large"])
    assert (report.count("large"), near_misses(report)) == (1, [])


@pytest.mark.usefixtures("near")
def test_a_refusal_is_kept_besides_a_form_that_fired_elsewhere() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        interior = F.gelu(F.linear(x, w))
        return interior.exp().sin().cos(), interior, short_chain(x + 1, w)

    report = ran(fn, rows(*ARGS), only=["near"])
    assert (report.count("near[short]"), report.count("near[long]"), near_misses(report)) == (1, 0, ["near[long]"])
    assert "used outside" in report.why_not("near")


# ------------------------------------------------------------------------------------------------ a number and its negative


@pytest.fixture
def limits() -> list[tuple[float, ...]]:
    """The numbers with which the rewrites of ``between`` and ``above`` were traced."""
    seen: list[tuple[float, ...]] = []
    between = fxfuse.register_forward_fusion(name="between", example=LINEAR, check_on_register=False)
    above = fxfuse.register_forward_fusion(name="above", example=LINEAR, check_on_register=False)

    def clamped(x, w, limit: float):
        return F.linear(x, w).clamp(min=-limit, max=limit)

    def at_least(x, w, limit: float):
        return F.linear(x, w).clamp(min=-limit)

    def rewritten(fusion: fxfuse.Fusion) -> None:
        @fusion.rewrite
        def _(x, w, limit):
            seen.append((limit,))
            return fusion.pattern(x, w, limit)

    rewritten(between(clamped))
    rewritten(above(at_least))
    return seen


CLAMPED: dict[str, tuple[Callable[[Tensor], Tensor], str, float]] = {
    "symmetric": (lambda y: y.clamp(min=-0.7, max=0.7), "between", 0.7),
    "positional": (lambda y: y.clamp(-0.25, 0.25), "between", 0.25),
    "integers": (lambda y: y.clamp(-1, 1), "between", 1),
    "negative": (lambda y: y.clamp(min=0.5, max=-0.5), "between", -0.5),
    "zero": (lambda y: y.clamp(min=-0.0, max=0.0), "between", 0.0),
    "below only": (lambda y: y.clamp(min=-0.7), "above", 0.7),
    "below only, positive": (lambda y: y.clamp(min=0.7), "above", -0.7),
}


@pytest.mark.parametrize(("clamp", "name", "limit"), CLAMPED.values(), ids=CLAMPED)
def test_a_negated_number_binds(clamp: Callable[[Tensor], Tensor], name: str, limit: float, limits: list[Any]) -> None:
    report = ran(lambda x, w: clamp(F.linear(x, w)), rows(*ARGS), only=["between", "above"])
    assert [f.name for f in report.fused] == [name]
    assert limits[-1] == (limit,)


NOT_CLAMPED: dict[str, Callable[[Tensor], Tensor]] = {
    "other lower bound": lambda y: y.clamp(min=-0.5, max=0.7),
    "same sign": lambda y: y.clamp(min=0.5, max=0.5),
    "lower bound alone missing": lambda y: y.clamp(max=0.7),
}


@pytest.mark.parametrize("clamp", NOT_CLAMPED.values(), ids=NOT_CLAMPED)
@pytest.mark.usefixtures("limits")
def test_a_number_that_is_not_the_negative_does_not_bind(clamp: Callable[[Tensor], Tensor]) -> None:
    assert not ran(lambda x, w: clamp(F.linear(x, w)), rows(*ARGS), only=["between"]).fused


def test_a_number_is_bound_from_several_places_of_one_model(limits: list[Any]) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, w).clamp(-0.7, 0.7), F.linear(x + 1, w).clamp(-0.2, 0.2)

    assert ran(fn, rows(*ARGS), only=["between"]).count("between") == 2
    assert sorted(limits) == [(0.2,), (0.7,)]


# ------------------------------------------------------------------------------------------------ hooks and the recipe

RECOMPUTE = fxfuse.Recipe(activation_memory="recompute")
RECIPES = {"default": fxfuse.Recipe(), "strict": fxfuse.Recipe(numerics="strict"), "recompute": RECOMPUTE}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@pytest.fixture
def asked() -> list[tuple[str, fxfuse.Recipe]]:
    """Which hooks asked for the recipe, and what they were told.

    ``explicit`` (linear, sin) keeps the linear's output unless the recipe says otherwise, ``derived`` (linear, cos) is
    differentiated, ``one_sided`` (linear, tanh, exp) has a rewrite alone.
    """
    told: list[tuple[str, fxfuse.Recipe]] = []

    def ask(who: str) -> bool:
        told.append((who, fxfuse.current_recipe()))
        return told[-1][1].activation_memory == "recompute"

    joint = fxfuse.register_forward_backward_fusion

    @joint(name="explicit", example=LINEAR, check_on_register=False)
    def explicit(x, w):
        return F.linear(x, w).sin()

    @explicit.forward
    def _(x, w, *, save):
        h = F.linear(x, w)
        return h.sin(), () if ask("forward") or not save else (h,)

    @explicit.backward
    def _(grad, x, w, *saved, mask):
        d = grad * ((w @ x.t()).t() if ask("backward") else saved[0]).cos()
        return d @ w if mask[0] else None, d.t() @ x if mask[1] else None

    @joint(name="derived", example=LINEAR, check_on_register=False)
    def derived(x, w):
        return F.linear(x, w).cos()

    @derived.rewrite
    def _(x, w):
        ask("rewrite")
        return F.linear(x, w).cos()

    @fxfuse.register_forward_fusion(name="one_sided", example=LINEAR, check_on_register=False)
    def one_sided(x, w):
        return F.linear(x, w).tanh().exp()

    @one_sided.rewrite
    def _(x, w):
        ask("one-sided rewrite")
        return F.linear(x, w).tanh().exp()

    return told


MODELS: dict[str, tuple[Callable[..., Tensor], str, bool, set[str]]] = {
    "explicit": (lambda x, w: F.linear(x, w).sin(), "explicit", True, {"forward", "backward"}),
    "explicit in inference": (lambda x, w: F.linear(x, w).sin(), "explicit", False, {"forward"}),
    "derived": (lambda x, w: F.linear(x, w).cos(), "derived", True, {"rewrite"}),
    "derived in inference": (lambda x, w: F.linear(x, w).cos(), "derived", False, {"rewrite"}),
    "one-sided": (lambda x, w: F.linear(x, w).tanh().exp(), "one_sided", False, {"one-sided rewrite"}),
}
models = pytest.mark.parametrize(("fn", "name", "train", "hooks"), MODELS.values(), ids=MODELS)


def check(fn: Callable[..., Any], name: str, train: bool, call: Callable[..., Any]) -> compare.Run:
    """The fusion fired and the values are eager's."""
    args = rows(*ARGS)
    got = compare.run(call, args, train=train)
    assert fxfuse.last_report().count(name) == 1
    compare.assert_same(got, compare.run(fn, args, train=train), 1e-5)
    return got


@models
@recipes
@pytest.mark.parametrize("given", ["option", "context"])
def test_hooks_are_told_the_plans_recipe(
    fn: Any, name: str, train: bool, hooks: set[str], recipe: fxfuse.Recipe, given: str, asked: list[Any]
) -> None:
    if given == "option":
        check(fn, name, train, cases.compiled(fn, only=[name], recipe=recipe))
    else:
        with fxfuse.use_recipe(recipe):
            check(fn, name, train, cases.compiled(fn, only=[name]))
    assert {who for who, _ in asked} == hooks
    assert {told for _, told in asked} == {recipe}


@models
def test_the_option_goes_before_the_context(fn: Any, name: str, train: bool, hooks: set[str], asked: list[Any]) -> None:
    with fxfuse.use_recipe("strict"):
        check(fn, name, train, cases.compiled(fn, only=[name], recipe=RECOMPUTE))
        assert fxfuse.current_recipe() == RECIPES["strict"]
    assert {told for _, told in asked} == {RECOMPUTE}


@models
def test_each_recipe_has_a_trace_of_its_own(fn: Any, name: str, train: bool, hooks: set[str], asked: list[Any]) -> None:
    for recipe in (*RECIPES.values(), fxfuse.Recipe()):
        check(fn, name, train, cases.compiled(fn, only=[name], recipe=recipe))
    assert {told for _, told in asked} == set(RECIPES.values())


def test_what_is_kept_follows_the_recipe_of_each_call(asked: list[Any]) -> None:
    fn = MODELS["explicit"][0]
    call = cases.compiled(fn, only=["explicit"])
    for recipe in (fxfuse.Recipe(), RECOMPUTE, fxfuse.Recipe(), RECIPES["strict"], RECOMPUTE):
        with fxfuse.use_recipe(recipe):
            args = rows(*ARGS)
            got = compare.run(call, args)
        compare.assert_same(got, compare.run(fn, args), 1e-5)
        assert got.kept == (() if recipe is RECOMPUTE else ((6, 32),))


# ------------------------------------------------------------------------------------------------ recomputed activations


def routed(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block with its arguments in the order of ``Region.inputs``."""
    return lambda x, w_gate, w_down, ids, p, *w_up: fn(x, ids, p, w_gate, w_down, *w_up)


def experts_packed(x: Tensor, w_gate_up: Tensor, w_down: Tensor, ends: Tensor) -> Tensor:
    gate, up = F.grouped_mm(x, w_gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return F.grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=ends)


def experts_plain(x: Tensor, w_up: Tensor, w_down: Tensor, ends: Tensor) -> Tensor:
    a = F.relu(F.grouped_mm(x, w_up.transpose(1, 2), offs=ends)).square()
    return F.grouped_mm(a, w_down.transpose(1, 2), offs=ends)


def experts_separate(x: Tensor, w_gate: Tensor, w_down: Tensor, ends: Tensor, w_up: Tensor) -> Tensor:
    gate, up = (F.grouped_mm(x, w.transpose(1, 2), offs=ends) for w in (w_gate, w_up))
    return F.grouped_mm(F.gelu(gate) * up, w_down.transpose(1, 2), offs=ends)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A block, or its experts alone, whose linear outputs are ``linears`` wide."""

    fn: Callable[..., Tensor]
    name: str
    gate: int
    """Rows of its first weight."""
    separate: bool
    routed: bool

    def inputs(self) -> list[Tensor]:
        """x, w_gate, w_down, then ids and router weights or ends, then w_up where there is one."""

        def draw(*shape: int, scale: float = 0.3) -> Tensor:
            return (torch.randn(shape) * scale).to(BF16).requires_grad_()

        ids = torch.rand(TOKENS, EXPERTS).argsort(-1)[:, :K].contiguous()
        how = [ids, draw(TOKENS, K, scale=1)] if self.routed else [torch.tensor([6, 6, 13, TOKENS], dtype=torch.int32)]
        weights = [draw(EXPERTS, self.gate, WIDTH), draw(EXPERTS, WIDTH, INNER)]
        return [draw(TOKENS, WIDTH, scale=1), *weights, *how, *([draw(EXPERTS, INNER, WIDTH)] if self.separate else [])]


GROUPED = {
    "sorted packed": Grouped(routed(moe_blocks.unmasked), "grouped_mlp[sorted, packed silu]", 2 * INNER, False, True),
    "masked packed": Grouped(routed(moe_blocks.masked), "grouped_mlp[masked, packed silu]", 2 * INNER, False, True),
    "scattered separate": Grouped(routed(moe_blocks.scattered), "grouped_mlp[scattered, separate silu]", INNER, True, True),
    "experts packed": Grouped(experts_packed, "grouped_mlp[experts, packed silu]", 2 * INNER, False, False),
    "experts separate": Grouped(experts_separate, "grouped_mlp[experts, separate gelu]", INNER, True, False),
    "experts plain": Grouped(experts_plain, "grouped_mlp[experts, plain relu2]", INNER, False, False),
}
grouped = pytest.mark.parametrize("block", GROUPED.values(), ids=GROUPED)


def linear_outputs(kept: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """Those of the shapes that are a linear's output, or what the activation made of it."""
    return [s for s in kept if len(s) == 2 and s[-1] in (INNER, 2 * INNER, WIDTH)]


@grouped
def test_recomputing_keeps_no_linear_output_of_the_experts(block: Grouped) -> None:
    args = block.inputs()
    saving = compare.run(cases.compiled(block.fn, only=[block.name]), args)
    got = compare.run(cases.compiled(block.fn, only=[block.name], recipe=RECOMPUTE), args)
    (fused,) = fxfuse.last_report().fused
    assert fused.directions == ("forward", "backward")
    assert linear_outputs(saving.kept) and not linear_outputs(got.kept)
    compare.assert_bit_equal(got, saving)
    compare.assert_same(got, compare.run(block.fn, args), 4e-2)


@pytest.mark.parametrize("name", ["scattered separate", "experts packed"])
def test_recomputing_with_one_input_frozen(name: str) -> None:
    block = GROUPED[name]
    compiled = cases.compiled(block.fn, only=[block.name], recipe=RECOMPUTE)
    for position, a in enumerate(args := block.inputs()):
        if a.requires_grad:
            given = [a.detach() if i == position else a for i, a in enumerate(args)]
            got = compare.run(compiled, given)
            assert fxfuse.last_report().count(block.name) == 1 and not linear_outputs(got.kept)
            compare.assert_same(got, compare.run(block.fn, given), 4e-2)
