"""Plans: switching recipes and fusions between calls, what identifies a plan, and the hash that is the same everywhere."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, compiled, frames, rows, step
from torch import Tensor
from torch.fx import GraphModule

import fxfuse
from fxfuse.plan import PlanKey, structural_hash

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


# ---------------------------------------------------------------- the structural hash
GRAPHS = '''
import torch, torch.nn.functional as F

def base(x, w, b): return F.gelu(F.linear(x, w, b)) * 0.1 + x.sum()
def other_constant(x, w, b): return F.gelu(F.linear(x, w, b)) * 0.1000001 + x.sum()
def other_operator(x, w, b): return F.relu(F.linear(x, w, b)) * 0.1 + x.sum()
def other_keyword(x, w, b): return F.gelu(F.linear(x, w, b), approximate="tanh") * 0.1 + x.sum()
def integer_for_float(x, w, b): return F.gelu(F.linear(x, w, b)) * 1 + x.sum()
def float_for_integer(x, w, b): return F.gelu(F.linear(x, w, b)) * 1.0 + x.sum()
def swapped_operands(x, w, b): return x.sum() + F.gelu(F.linear(x, w, b)) * 0.1
def sliced(x, w, b): return F.gelu(F.linear(x, w, b))[1:] * 0.1 + x.sum()
def sliced_further(x, w, b): return F.gelu(F.linear(x, w, b))[2:] * 0.1 + x.sum()
def cast(x, w, b): return F.gelu(F.linear(x, w, b)).to(torch.bfloat16) + x.sum()
def cast_elsewhere(x, w, b): return F.gelu(F.linear(x, w, b)).to(torch.float16) + x.sum()
def branch(x, w, b): return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)) + w.sum() + b.sum()
def other_branch(x, w, b): return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 4, (x,)) + w.sum() + b.sum()
FUNCTIONS = {k: v for k, v in globals().items() if getattr(v, "__module__", 0) == __name__ and callable(v)}

def hashed(fn, *args, dynamic=False):
    from fxfuse.plan import structural_hash
    found = []
    def backend(gm, inputs):
        found.append(structural_hash(gm))
        return gm.forward
    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return found[0]

def inputs(n=6, dtype=torch.float32, grad=False):
    return [torch.ones(s, dtype=dtype, requires_grad=grad) for s in ((n, 16), (32, 16), (32,))]
'''


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions above as a module, importable here and in another process."""
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "hashed_graphs.py").write_text(GRAPHS)
    sys.path.insert(0, str(folder))
    try:
        import hashed_graphs

        yield hashed_graphs
    finally:
        sys.path.remove(str(folder))
        del sys.modules["hashed_graphs"]


def test_constants_operators_and_bodies_are_part_of_the_hash(graphs: Any) -> None:
    names = [n for n in graphs.FUNCTIONS if n not in ("hashed", "inputs")]
    found = {n: graphs.hashed(graphs.FUNCTIONS[n], *graphs.inputs()) for n in names}
    assert len(names) == 13 and len(set(found.values())) == len(names), found


def test_metadata_is_part_of_the_hash(graphs: Any) -> None:
    x, w, b = graphs.inputs()
    variants = {
        "base": [x, w, b],
        "other_size": [*graphs.inputs(7)],
        "trained": [*graphs.inputs(grad=True)],
        "partly_trained": [x, w.clone().requires_grad_(), b],
        "double": [*graphs.inputs(dtype=torch.float64)],
        "transposed": [x.t().contiguous().t(), w, b],
        "meta": [t.to("meta") for t in (x, w, b)],
    }
    found = {n: graphs.hashed(graphs.base, *args) for n, args in variants.items()}
    assert len(set(found.values())) == len(variants), found


def test_dynamic_sizes_hash_alike_whatever_they_are(graphs: Any) -> None:
    found = {graphs.hashed(graphs.base, *graphs.inputs(n), dynamic=True) for n in (6, 9, 40)}
    assert len(found) == 1
    assert graphs.hashed(graphs.base, *graphs.inputs(6)) not in found


def test_one_symbol_for_two_sizes_is_not_two_symbols(graphs: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()

    same = graphs.hashed(fn, torch.ones(6, 5), torch.ones(6, 5), dynamic=True)
    other = graphs.hashed(fn, torch.ones(6, 5), torch.ones(7, 8), dynamic=True)
    assert same != other


def test_names_and_lines_are_not_part_of_the_hash() -> None:
    def trace(fn: Callable[..., Tensor]) -> str:
        return structural_hash(torch.fx.symbolic_trace(fn))

    assert trace(lambda x: (x + 1).relu()) == trace(lambda some_other_name: (some_other_name + 1).relu())
    assert trace(lambda x: (x + 1).relu()) != trace(lambda x: (x + 1.0).relu())


def test_hash_is_the_same_in_another_process(graphs: Any) -> None:
    names = ["base", "branch"]
    code = (
        "import hashed_graphs as g\n"
        f"for n in {names!r}:\n"
        "    print(g.hashed(g.FUNCTIONS[n], *g.inputs()), g.hashed(g.FUNCTIONS[n], *g.inputs(), dynamic=True))\n"
    )
    here = [" ".join(graphs.hashed(graphs.FUNCTIONS[n], *graphs.inputs(), dynamic=d) for d in (False, True)) for n in names]
    path = os.pathsep.join([str(Path(graphs.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == here


def test_hash_does_not_touch_the_graph() -> None:
    gm: GraphModule = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
    before = gm.code
    assert structural_hash(gm) == structural_hash(copy.deepcopy(gm))
    assert gm.code == before


def test_report_carries_the_hash_of_its_plan() -> None:
    compiled(Block())(rows())
    assert fxfuse.last_report().graph_hash == fxfuse.plan_info().plans[0].graph
    assert_fused(fxfuse.last_report(), FUSED)
