"""Recipes: values that are compared by identity, what they refuse, and how one is chosen at run time."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import frames
from torch import Tensor, nn

import fxfuse
from fxfuse import fp8_recipes
from fxfuse.recipe import as_recipe, from_key, short_names

CLASSES = (
    fxfuse.Recipe,
    fxfuse.Float8CurrentScaling,
    fxfuse.Float8BlockScaling,
    fxfuse.DelayedScaling,
    fxfuse.MXFP8BlockScaling,
    fxfuse.NVFP4BlockScaling,
)
OTHER: dict[str, Any] = {
    "numerics": "strict",
    "activation_memory": "recompute",
    "deterministic": True,
    "backward_override": "dequantized",
    "use_power_2_scales": True,
    "use_f32_scales": True,
    "x_block_scaling_dim": 2,
    "w_block_scaling_dim": 1,
    "grad_block_scaling_dim": 2,
    "margin": 2,
    "amax_history_len": 16,
    "amax_compute_algo": "most_recent",
    "reduce_amax": False,
    "emulate": True,
    "disable_2d_quantization": True,
}
"""Another value of each field that has one."""


def changed(cls: type[fxfuse.Recipe]) -> Iterator[tuple[str, fxfuse.Recipe, fxfuse.Recipe]]:
    """A field, a recipe, and the same with only that field changed."""
    for field in cls.fields():
        base = cls(**({"emulate": True} if "emulate" in OTHER and hasattr(cls, "emulate") and field.name != "emulate" else {}))
        value = OTHER.get(field.name)
        if field.name == "fp8_format":
            value = next(v for v in fp8_recipes.FORMATS if v != field.default)
        if field.name.startswith("fp8_gemm_") and cls is fxfuse.Float8CurrentScaling:
            value = fxfuse.MMParams(use_split_accumulator=not field.default.use_split_accumulator)
        if field.name in ("x_block_scaling_dim", "grad_block_scaling_dim"):
            base = base.replace(w_block_scaling_dim=1)
        if value is None or value not in cls.CHOICES.get(field.name, (value,)):
            continue  # one value only
        yield field.name, base, base.replace(**{field.name: value})


CHANGES = [pytest.param(a, b, id=f"{cls.__name__}-{name}") for cls in CLASSES for name, a, b in changed(cls)]
every_class = pytest.mark.parametrize("cls", CLASSES)
every_change = pytest.mark.parametrize("a, b", CHANGES)


def test_every_field_with_more_than_one_value_is_changed() -> None:
    named = {(type(p.values[0]).__name__, p.id.split("-")[1]) for p in CHANGES}
    for cls in CLASSES:
        for field in cls.fields():
            fixed = len(cls.CHOICES.get(field.name, (0, 1))) == 1
            assert fixed != ((cls.__name__, field.name) in named), (cls, field.name)


# ------------------------------------------------------------------------------------------------ values


@every_class
def test_equal_recipes_are_one_object(cls: type[fxfuse.Recipe]) -> None:
    one = cls()
    assert cls() is one
    assert copy.copy(one) is copy.deepcopy(one) is pickle.loads(pickle.dumps(one)) is dataclasses.replace(one) is one
    assert eval(repr(one), vars(fxfuse) | {n: getattr(fxfuse, n) for n in dir(fxfuse)}) is one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.numerics = "strict"  # type: ignore[misc]


@every_change
def test_every_field_tells_recipes_apart(a: fxfuse.Recipe, b: fxfuse.Recipe) -> None:
    assert a is not b and a != b and repr(a) != repr(b)
    assert len({a, b}) == 2
    (name,) = [f.name for f in a.fields() if getattr(a, f.name) != getattr(b, f.name)]
    assert b.replace(**{name: getattr(a, name)}) is a
    for recipe in (a, b):
        assert pickle.loads(pickle.dumps(recipe)) is recipe
        assert eval(repr(recipe), {n: getattr(fxfuse, n) for n in dir(fxfuse)}) is recipe


def test_hash_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = fxfuse.Float8CurrentScaling(backward_override="dequantized")
    monkeypatch.setattr(type(recipe), "fields", None)
    assert hash(recipe) == hash(recipe)


def test_two_classes_with_equal_fields_differ() -> None:
    assert fxfuse.MXFP8BlockScaling(emulate=True) != fxfuse.NVFP4BlockScaling(emulate=True)
    assert fxfuse.Recipe() != fxfuse.DelayedScaling()


def test_defaults_are_transformer_engines() -> None:
    delayed = fxfuse.DelayedScaling()
    assert (delayed.margin, delayed.amax_history_len, delayed.amax_compute_algo, delayed.fp8_format) == (0, 1024, "max", "HYBRID")
    block = fxfuse.Float8BlockScaling()
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim, block.grad_block_scaling_dim) == (1, 2, 1)
    assert (block.fp8_format, block.use_f32_scales) == ("E4M3", False)
    current = fxfuse.Float8CurrentScaling()
    products = (current.fp8_gemm_fprop, current.fp8_gemm_dgrad, current.fp8_gemm_wgrad)
    assert [p.use_split_accumulator for p in products] == [False, True, True]


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: fxfuse.Recipe(numerics="exact"), r"Recipe\(numerics='exact'\): numerics takes one of 'default', 'strict'"),
        (lambda: fxfuse.Recipe(deterministic=1), "deterministic takes one of False, True"),
        (lambda: fxfuse.Recipe(numerics=["strict"]), "numerics takes one of"),
        (lambda: fxfuse.Recipe(nummerics="strict"), "Recipe has no field 'nummerics'; it has"),
        (lambda: fxfuse.Recipe().replace(margin=1), "Recipe has no field 'margin'"),
        (lambda: fxfuse.Float8CurrentScaling(fp8_format="E5M2"), "fp8_format takes one of 'E4M3', 'HYBRID'"),
        (lambda: fxfuse.Float8CurrentScaling(fp8_gemm_fprop=True), "takes an MMParams"),
        (lambda: fxfuse.Float8CurrentScaling(fp8_dpa=True), "fp8_dpa takes one of False"),
        (lambda: fxfuse.MMParams(use_split_accumulator="yes"), "takes True or False"),
        (lambda: fxfuse.Float8BlockScaling(x_block_scaling_dim=3), "x_block_scaling_dim takes one of 1, 2"),
        (lambda: fxfuse.Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim and w_block_scaling_dim are 2"),
        (lambda: fxfuse.Float8BlockScaling(fp8_gemm_dgrad=fxfuse.MMParams(False)), "fp8_gemm_dgrad takes one of"),
        (lambda: fxfuse.DelayedScaling(margin=0.5), "margin takes an integer"),
        (lambda: fxfuse.DelayedScaling(margin=65), "margin takes an integer from -64 to 64"),
        (lambda: fxfuse.DelayedScaling(amax_history_len=0), "amax_history_len takes a positive integer"),
        (lambda: fxfuse.DelayedScaling(amax_compute_algo=max), "amax_compute_algo takes one of 'max', 'most_recent'"),
        (lambda: fxfuse.DelayedScaling(backward_override="high_precision"), "backward_override takes one of None"),
        (lambda: fxfuse.NVFP4BlockScaling(disable_rht=False), "disable_rht takes one of True"),
        (lambda: fxfuse.use_recipe("fp9"), r"use_recipe: 'fp9' is not a fxfuse.Recipe nor one of the short names \['default'"),
        (lambda: fxfuse.use_recipe(fxfuse.DelayedScaling), r"got the class DelayedScaling, an instance is needed: Del.*\(\)"),
        (lambda: fxfuse.use_recipe([]), "is not a fxfuse.Recipe"),
        (lambda: fxfuse.set_default_recipe(None), "set_default_recipe: None is not a fxfuse.Recipe"),
        (lambda: from_key("Recipe(numerics=print())", "there"), "there: 'Recipe"),
        (lambda: from_key("__import__('os')", "there"), "there: "),
    ],
)
def test_bad_recipes_say_what_is_wrong(make: Any, text: str) -> None:
    with pytest.raises(fxfuse.RecipeError, match=text):
        make()


def test_short_names_and_keys_give_the_recipes() -> None:
    assert as_recipe("fp8_block") is fxfuse.Float8BlockScaling()
    assert as_recipe("strict") is fxfuse.Recipe(numerics="strict")
    for make in short_names().values():
        recipe = make()
        if recipe.unsupported() is None:
            assert from_key(recipe.key, "") is recipe
    assert from_key("strict", "") is fxfuse.Recipe(numerics="strict")
    exact = fxfuse.Float8CurrentScaling(fp8_gemm_fprop=fxfuse.MMParams())
    assert from_key(exact.key, "") is exact


@pytest.mark.parametrize(
    "capability, runs",
    [
        (None, {"fp8_current", "fp8_block", "fp8_delayed"}),
        ((8, 0), set()),
        ((8, 9), {"fp8_current", "fp8_delayed"}),
        ((9, 0), {"fp8_current", "fp8_block", "fp8_delayed"}),
        ((10, 0), {"fp8_current", "fp8_block", "fp8_delayed"}),
    ],
)
def test_recipes_that_the_hardware_cannot_run_are_refused_at_once(
    capability: Any, runs: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_recipes, "capability", lambda: capability)
    monkeypatch.setattr("fxfuse.recipe._runs_here", set())
    for name in ("fp8_current", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4"):
        if name in runs:
            assert fxfuse.use_recipe(name)
            continue
        with pytest.raises(fxfuse.RecipeError, match=f"use_recipe: .* cannot run here: .*{'GPU|kernel'}") as caught:
            fxfuse.use_recipe(name)
        assert ("emulate=True" in str(caught.value)) == (name in ("mxfp8", "nvfp4"))
    assert fxfuse.use_recipe(fxfuse.MXFP8BlockScaling(emulate=True))
    assert fxfuse.use_recipe(fxfuse.NVFP4BlockScaling(emulate=True))


# ------------------------------------------------------------------------------------------------ choosing at run time


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="fxfuse", fullgraph=True, options={"lower": "eager", **options})


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    torch._dynamo.utils.counters.clear()


@every_change
def test_changing_one_field_builds_one_plan_and_changing_it_back_none(a: fxfuse.Recipe, b: fxfuse.Recipe) -> None:
    if a.unsupported() or b.unsupported():
        pytest.skip("one of them does not run here")
    run, x = compiled(Block()), torch.randn(4, 16)
    builds = []
    for recipe in (a, b, a, b):
        with fxfuse.use_recipe(recipe):
            run(x)
        builds.append(fxfuse.plan_info().builds)
    assert builds == [1, 2, 2, 2]
    assert frames() == 1


def test_use_recipe_nests_and_decorates() -> None:
    strict = fxfuse.Recipe(numerics="strict")

    @fxfuse.use_recipe("strict")
    def inside() -> fxfuse.Recipe:
        with fxfuse.use_recipe("default") as default:
            assert fxfuse.current_recipe() is default is fxfuse.Recipe()
        return fxfuse.current_recipe()

    assert inside() is inside() is strict
    assert fxfuse.current_recipe() is fxfuse.Recipe()
    with pytest.raises(KeyError), fxfuse.use_recipe("strict"):
        raise KeyError
    assert fxfuse.current_recipe() is fxfuse.Recipe()


def test_entered_inside_a_compiled_function_says_what_to_use() -> None:
    def inside(x: Tensor) -> Tensor:
        with fxfuse.use_recipe("strict"):
            return x.sin()

    for fullgraph in (True, False):
        torch._dynamo.reset()
        run = torch.compile(inside, backend="fxfuse", fullgraph=fullgraph, options={"lower": "eager"})
        with pytest.raises(Exception, match=r"RecipeError: use_recipe was entered inside a compiled function.*recipe_region"):
            run(torch.randn(4))
    assert torch.equal(inside(torch.ones(4)), torch.ones(4).sin())


# ------------------------------------------------------------------------------------------------ regions


@pytest.fixture
def seen() -> Iterator[dict[str, fxfuse.Recipe]]:
    """The recipe under which each weight width was asked about."""
    found: dict[str, fxfuse.Recipe] = {}

    @fxfuse.register_forward_backward_fusion(prepend=True, example={"x": "m k", "w": "n k", "b": "n"}, check_on_register=False)
    def watched(x, w, b):
        return F.gelu(F.linear(x, w, b))

    @watched.check
    def _(m):
        found[str(m.w.shape[0])] = m.recipe

    @watched.rewrite
    def _(x, w, b):
        found[f"{w.shape[0]} as it was traced"] = fxfuse.current_recipe()
        return fxfuse.ops.linear_act(x, w, b, "gelu")

    yield found
    watched.unregister()


class Regions(nn.Module):
    def __init__(self, recipe: fxfuse.Recipe | str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipe
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(24, 40), nn.Linear(40, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.a(x))
        with fxfuse.recipe_region(self.recipe):
            x = F.gelu(self.b(x))
        return F.gelu(self.c(x))


@pytest.mark.parametrize("recipe", [fxfuse.Recipe(numerics="strict"), "strict"])
def test_region_has_its_own_recipe_in_forward_and_backward(recipe: Any, seen: dict[str, fxfuse.Recipe]) -> None:
    model, x = Regions(recipe), torch.randn(5, 16, requires_grad=True)
    eager = copy.deepcopy(model)
    run = compiled(model)
    default, strict = fxfuse.Recipe(), fxfuse.Recipe(numerics="strict")
    out = run(x)
    assert [seen[w] for w in ("24", "40", "8")] == [default, strict, default]
    assert seen["40 as it was traced"] is strict and seen["24 as it was traced"] is default
    out.sum().backward()
    want = eager(x.detach().requires_grad_())
    want.sum().backward()
    torch.testing.assert_close(out, want)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert fxfuse.last_report().count("watched", "backward") == 3


def test_region_is_not_overridden_from_outside(seen: dict[str, fxfuse.Recipe]) -> None:
    run, x = compiled(Regions("default")), torch.randn(5, 16)
    default, strict = fxfuse.Recipe(), fxfuse.Recipe(numerics="strict")
    with fxfuse.use_recipe("strict"):
        run(x)
    assert [seen[w] for w in ("24", "40", "8")] == [strict, default, strict]
    assert frames() == 1


def test_fusion_does_not_cross_the_border_of_a_region() -> None:
    @fxfuse.register_forward_fusion(example={"x": "m k", "w": "n k"}, check_on_register=False, prepend=True)
    def two(x, w):
        return torch.tanh(torch.sin(F.linear(x, w)))

    @two.rewrite
    def _(x, w):
        return torch.tanh(torch.sin(F.linear(x, w)))

    def crossing(x: Tensor, w: Tensor) -> Tensor:
        with fxfuse.recipe_region("strict"):
            y = torch.sin(F.linear(x, w))
        return torch.tanh(y)

    def inside(x: Tensor, w: Tensor) -> Tensor:
        with fxfuse.recipe_region("strict"):
            return torch.tanh(torch.sin(F.linear(x, w)))

    x, w = torch.randn(3, 8), torch.randn(6, 8)
    try:
        with torch.no_grad():
            compiled(crossing)(x, w)
            assert fxfuse.last_report().count("two") == 0
            assert "it crosses the border of a recipe_region" in fxfuse.last_report().why_not("two")
            compiled(inside)(x, w)
            assert fxfuse.last_report().count("two") == 1
    finally:
        two.unregister()


@pytest.mark.parametrize("recipe", ["fp9", fxfuse.MXFP8BlockScaling()])
def test_region_with_a_recipe_that_cannot_run_is_an_error(recipe: Any) -> None:
    with pytest.raises(Exception, match=r"recipe_region: .*(cannot run here|nor one of the short names)"):
        compiled(Regions(recipe))(torch.randn(5, 16))


def test_region_is_part_of_the_graphs_hash() -> None:
    x = torch.randn(5, 16)
    for recipe in ("default", "strict"):
        compiled(Regions(recipe))(x)
    a, b = fxfuse.reports()[-2:]
    assert a.graph_hash != b.graph_hash


def test_region_does_nothing_in_eager() -> None:
    model, x = Regions("strict"), torch.randn(5, 16)
    assert torch.equal(model(x), F.gelu(model.c(F.gelu(model.b(F.gelu(model.a(x)))))))


# ------------------------------------------------------------------------------------------------ recomputation


def test_no_grad_and_grad_alternate_between_two_plans() -> None:
    run, x = compiled(Block()), torch.randn(4, 16)
    for _ in range(100):
        with torch.no_grad():
            run(x)
        run(x).sum().backward()
    info = fxfuse.plan_info()
    assert (info.builds, info.hits, frames()) == (2, 198, 2)
    assert {(p.grad_mode, p.saved_bytes is None) for p in info.plans} == {(False, True), (True, False)}


def test_two_recipes_and_two_grad_modes_are_four_plans() -> None:
    run, x = compiled(Block()), torch.randn(4, 16)
    for _ in range(100):
        for recipe in ("default", "fp8_current"):
            with fxfuse.use_recipe(recipe):
                with torch.no_grad():
                    run(x)
                run(x).sum().backward()
    info = fxfuse.plan_info()
    assert (info.builds, info.hits, frames()) == (4, 396, 2)


def checkpointed(run: Any, recipe: str, **settings: Any) -> None:
    x = torch.randn(4, 16, requires_grad=True)
    with fxfuse.use_recipe(recipe):
        out = torch.utils.checkpoint.checkpoint(run, x, **settings)
    out.sum().backward()


def test_checkpoint_context_carries_the_recipe() -> None:
    run = compiled(Block())
    for _ in range(3):
        for recipe in ("fp8_current", "strict"):
            checkpointed(run, recipe, use_reentrant=False, context_fn=fxfuse.checkpoint_context)
    plans = {p.recipe.key: p.calls for p in fxfuse.plan_info().plans}
    assert plans == {"Float8CurrentScaling()": 6, "Recipe(numerics='strict')": 6}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_with_another_recipe_warns(reentrant: bool) -> None:
    run = compiled(Block())
    with pytest.warns(
        fxfuse.FxfuseWarning, match=r"is recomputed in the backward with Recipe\(\), its forward ran with Recipe\(num"
    ):
        checkpointed(run, "strict", use_reentrant=reentrant)


def test_recomputation_that_keeps_other_tensors_is_also_torchs_error() -> None:
    run = compiled(Block())
    with (
        pytest.warns(fxfuse.FxfuseWarning, match="its forward ran with Float8CurrentScaling"),
        pytest.raises(torch.utils.checkpoint.CheckpointError),
    ):
        checkpointed(run, "fp8_current", use_reentrant=False)


def test_recomputing_with_another_recipe_warns_also_after_it_went_well() -> None:
    run = compiled(Block())
    for _ in range(2):
        checkpointed(run, "default", use_reentrant=True)
    with pytest.warns(fxfuse.FxfuseWarning, match="is recomputed in the backward"):
        checkpointed(run, "fp8_current", use_reentrant=True)


def test_pinned_recipe_needs_no_context() -> None:
    run = compiled(Block(), recipe="fp8_current")
    for reentrant in (False, True):
        checkpointed(run, "strict", use_reentrant=reentrant)
    assert {p.recipe.key for p in fxfuse.plan_info().plans} == {"Float8CurrentScaling()"}


def test_evaluation_in_between_is_no_recomputation() -> None:
    run = compiled(Block())
    for _ in range(3):
        checkpointed(run, "fp8_current", use_reentrant=False, context_fn=fxfuse.checkpoint_context)
        with torch.no_grad():
            run(torch.randn(4, 16))


# ------------------------------------------------------------------------------------------------ what a plan says


def test_plan_says_what_it_keeps_for_the_backward() -> None:
    model = Block()
    model.down.weight.requires_grad_(False)
    run = compiled(model, fusions={"only": []})
    run(torch.randn(4, 16)).sum().backward()
    (plan,) = fxfuse.plan_info().plans
    assert plan.saved_bytes == 4 * 32 * 4  # the pre-activation; the product's weight is frozen, so GELU's result is not needed
    assert sorted(plan.mask) == [False, False, True, True, True]
