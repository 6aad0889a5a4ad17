"""Plans: switching recipes and fusions between calls, what identifies a plan, and the hash that is the same everywhere."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, compiled, frames, rows, step
from torch import Tensor

import fxfuse
from fxfuse.plan import PlanKey

STRICT = fxfuse.Recipe(numerics="strict")


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    torch._dynamo.utils.counters.clear()


# ---------------------------------------------------------------- switching between calls
def test_recipe_switches_the_plan_and_not_dynamos_frame() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    want = step(copy.deepcopy(model), model, x)[:1]
    for recipe, builds in ((None, 1), ("strict", 2), (None, 2), ("strict", 2), (fxfuse.Recipe(), 2), (STRICT, 2)):
        if recipe is None:
            assert_same(step(run, model, x)[:1], want)
        else:
            with fxfuse.use_recipe(recipe):
                assert_same(step(run, model, x)[:1], want)
        assert (fxfuse.plan_info().builds, frames()) == (builds, 1)
    assert {p.recipe.numerics: p.calls for p in fxfuse.plan_info().plans} == {"default": 3, "strict": 3}
    assert fxfuse.plan_info().hits == 4


def test_default_recipe_of_the_process() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    step(run, model, x)
    fxfuse.set_default_recipe("strict")
    try:
        step(run, model, x)
        assert [r.recipe for r in fxfuse.reports()] == [repr(fxfuse.Recipe()), repr(STRICT)]
    finally:
        fxfuse.set_default_recipe("default")
    step(run, model, x)
    assert (fxfuse.plan_info().builds, frames()) == (2, 1)


def test_pinned_recipe_ignores_the_active_one() -> None:
    model, x = Block(), rows()
    run = compiled(model, recipe="strict")
    step(run, model, x)
    with fxfuse.use_recipe("default"):
        step(run, model, x)
    assert [p.recipe for p in fxfuse.plan_info().plans] == [STRICT]


def test_backward_keeps_the_recipe_of_its_forward() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    with fxfuse.use_recipe("strict"):
        out = run(x)
    builds = fxfuse.plan_info().builds
    out.sum().backward()
    assert fxfuse.plan_info().builds == builds
    torch.testing.assert_close(x.grad, torch.autograd.grad(model(x).sum(), x)[0])


def test_disabled_fusion_is_another_plan_and_comes_back() -> None:
    model, x = Block(), rows()
    eager, run = copy.deepcopy(model), compiled(model, fusions={"only": list(FUSED)})
    assert_same(step(run, model, x), step(eager, eager, x))
    with fxfuse.disable("linear_gelu"):
        assert_same(step(run, model, x), step(eager, eager, x))
        with fxfuse.disable("linear_add"):
            assert_same(step(run, model, x), step(eager, eager, x))
    assert_same(step(run, model, x), step(eager, eager, x))
    assert [{f.name for f in r.fused} for r in fxfuse.reports()] == [set(FUSED), {"linear_add"}, set()]
    assert (fxfuse.plan_info().builds, frames()) == (3, 1)
    assert sorted((p.fused, p.calls) for p in fxfuse.plan_info().plans) == [(0, 1), (1, 1), (2, 2)]


def gelu_after_linear() -> fxfuse.Fusion:
    @fxfuse.register_forward_backward_fusion(name="mine", prepend=True, check_on_register=False)
    def mine(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    mine.rewrite(lambda x, w, b: F.gelu(F.linear(x, w, b)))
    return mine


def test_registering_and_unregistering_after_the_first_call() -> None:
    model, x = Block(), rows()
    eager, run = copy.deepcopy(model), compiled(model)
    want = step(eager, eager, x)
    assert_same(step(run, model, x), want)
    mine = gelu_after_linear()
    assert_same(step(run, model, x), want)
    assert fxfuse.last_report().count("mine") == 1
    mine.unregister()
    assert_same(step(run, model, x), want)
    assert (fxfuse.plan_info().builds, frames()) == (2, 1)
    assert sorted(p.calls for p in fxfuse.plan_info().plans) == [1, 2]


def test_changed_check_is_another_plan() -> None:
    model, x = Block(), rows()
    mine = gelu_after_linear()
    run = compiled(model, fusions={"only": ["mine"]})
    step(run, model, x)
    mine.check(lambda m: m.reject("not today"))
    step(run, model, x)
    assert [r.count("mine") for r in fxfuse.reports()] == [1, 0]
    assert "not today" in fxfuse.last_report().why_not("mine")
    assert frames() == 1


def test_refusal_is_explained_where_another_fusion_fired() -> None:
    gelu_after_linear().check(lambda m: m.reject("not today"))
    model = Block()
    step(compiled(model), model, rows())
    assert fxfuse.last_report().count("linear_gelu") == 1
    assert "not today" in fxfuse.last_report().why_not("mine")


def test_switch_during_dynamic_sizes_is_guarded_by_its_own_plan() -> None:
    model = Block()
    run = compiled(model, dynamic=True)
    step(run, model, rows(6, 16))
    for n in (6, 3, 9):
        with fxfuse.use_recipe("strict"):
            x = rows(n, 16)
            assert_same(step(run, model, x), step(model, model, x))
    assert (fxfuse.plan_info().builds, frames()) == (2, 1)


def test_late_plan_that_asks_about_a_size_does_not_run_on_other_sizes() -> None:
    model = Block()
    run = compiled(model, dynamic=True)
    step(run, model, rows(8, 16))

    @fxfuse.register_forward_fusion(name="only_fours", prepend=True, check_on_register=False)
    def only_fours(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(x, w, b) + r

    only_fours.rewrite(lambda x, w, r, b: F.linear(x, w, b) + r * (1 if x.shape[0] % 4 == 0 else 100))
    for n in (8, 4, 7):
        x = rows(n, 16)
        assert_same(step(run, model, x), step(model, model, x))


def test_plans_die_with_their_model() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    run(x).sum().backward()
    assert len(fxfuse.plan_info().plans) == 1
    del run, model
    torch._dynamo.reset()
    gc.collect()
    assert fxfuse.plan_info().plans == []


def test_counters() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    assert dataclasses.astuple(fxfuse.plan_info()) == (0, 0, [])
    for calls in range(1, 4):
        run(x)
        info = fxfuse.plan_info()
        assert (info.builds, info.hits, [p.calls for p in info.plans]) == (1, calls - 1, [calls])
    with torch.no_grad():
        run(x)
    info = fxfuse.plan_info()
    assert (info.builds, info.hits, sorted(p.grad_mode for p in info.plans)) == (2, 2, [False, True])
    assert all(p.seconds > 0 and p.fused == 2 for p in info.plans)


# ---------------------------------------------------------------- the key
def keys(**changes: Any) -> PlanKey:
    """A key with some parts changed."""
    base = PlanKey(
        graph="a",
        grad_mode=True,
        autocast=(),
        recipe=fxfuse.Recipe(),
        fusions=("f",),
        options=("eager",),
        numerics=("highest",),
        versions=("2.13",),
    )
    return dataclasses.replace(base, **changes)


CHANGES: dict[str, list[Any]] = {
    "graph": ["b"],
    "grad_mode": [False],
    "autocast": [(("cpu", True, "torch.bfloat16"),)],
    "recipe": [
        fxfuse.Recipe(numerics="strict"),
        fxfuse.Recipe(activation_memory="recompute"),
        fxfuse.Recipe(deterministic=True),
        fxfuse.Recipe(backward_override="high_precision"),
        fxfuse.Recipe(backward_override="dequantized"),
    ],
    "fusions": [(), ("f", "g"), ("g",)],
    "options": [("auto",)],
    "numerics": [("high",)],
    "versions": [("2.14",)],
}


def test_every_part_of_the_key_is_tried() -> None:
    assert set(CHANGES) == {f.name for f in dataclasses.fields(PlanKey)}


@pytest.mark.parametrize(("part", "value"), [(p, v) for p, values in CHANGES.items() for v in values], ids=str)
def test_another_part_is_another_key(part: str, value: Any) -> None:
    store = {keys(): "plan"}
    assert store.get(keys()) == "plan"
    assert store.get(keys(**{part: value})) is None


AMBIENT: dict[str, Callable[[], Any]] = {
    "grad_mode": lambda: torch.no_grad(),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "recipe": lambda: fxfuse.use_recipe("strict"),
    "fusions": lambda: fxfuse.disable("linear_gelu"),
}


@pytest.mark.parametrize("part", AMBIENT)
def test_surroundings_show_in_the_key_of_the_plan(part: str) -> None:
    model, x = Block(), rows(6, 16, grad=False)
    run = compiled(model)
    run(x)
    with AMBIENT[part]():
        run(x)
    first, second = (p.key for p in fxfuse.plan_info().plans)
    assert getattr(first, part) != getattr(second, part)


def test_matmul_precision_is_part_of_the_key() -> None:
    model, x = Block(), rows()
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            torch._dynamo.reset()
            compiled(model)(x)
            found.append(fxfuse.plan_info().plans[-1].key.numerics)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found[0] != found[1]


def test_report_carries_the_hash_of_its_plan() -> None:
    compiled(Block())(rows())
    assert fxfuse.last_report().graph_hash == fxfuse.plan_info().plans[0].graph
    assert_fused(fxfuse.last_report(), FUSED)


# ---------------------------------------------------------------- plans built late
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_late_plan_sees_the_sizes_that_the_first_plan_saw(dynamic: bool | None) -> None:
    model, x = Block(), rows()
    run = compiled(model, dynamic=dynamic)
    run(x)
    with fxfuse.use_recipe("strict"), fxfuse.disable("linear_add"):
        run(x)
    with fxfuse.disable("linear_add"):
        run(x)
    first, _, late = fxfuse.reports()
    assert fxfuse.plan_info().builds == 3
    assert "Sym(" not in late.graphs[0].before or dynamic
    assert late.graphs[0].before == first.graphs[0].before


def test_late_plan_on_a_strided_input() -> None:
    model, x = Block(), rows(6, 32).detach()[:, ::2]
    run = compiled(model)
    want = run(x)
    with fxfuse.use_recipe("strict"):
        torch.testing.assert_close(run(x), want)
    assert "Sym(" not in fxfuse.last_report().graphs[0].before


def test_plans_hold_no_input_alive() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    with torch.no_grad():
        run(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None
