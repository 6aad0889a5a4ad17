"""Value numbering, rule by rule: equal where a rule's conditions hold, different where one of them is broken."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from program_writer import traced
from torch.fx import Graph
from value_case import Case
from value_cases import CASES
from value_meaning import Run

from fxfuse import values
from fxfuse.spellings import LAYOUT_ONLY, evaluate, is_opaque, number_graph

aten = torch.ops.aten
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_classes_of(case: Case, strict: bool) -> None:
    table = number_graph(case.traced[0].graph, strict)
    assert list(case.failures(table)) == []


@every_case
def test_numbers_are_what_the_case_says(case: Case) -> None:
    """A case that expects two classes is of no use if nothing distinguishes them."""
    assert case.equal is (case.same or case.alike)


@pytest.mark.parametrize("case", [c for c in CASES if c.strict and c.traced_with is None and "write" not in c.rule], ids=str)
def test_one_strict_class_is_one_rounding(case: Case) -> None:
    """In bfloat16 these numbers round at every step, and sums of them are exact in float32, so no summation order shows."""
    program, nodes = case.traced
    seen = program.run([t.bfloat16() if t.is_floating_point() else t for t in case.inputs])
    if all(seen[n].dtype is torch.bfloat16 for n in nodes):
        run = Run(seen, exact=True)
        assert run.number[nodes[0]] == run.number[nodes[1]]


def test_numbering_again_gives_the_same_classes() -> None:
    for case in CASES:
        graph = case.traced[0].graph
        table = number_graph(graph)
        count = len(table.keys)
        for node in graph.nodes:
            if node.op == "call_function" and not is_opaque(node.target) and not table.mutated:
                assert evaluate(table, node, table.class_of.__getitem__) == table.class_of[node], case
        assert len(table.keys) == count, case


# ------------------------------------------------------------------------------------------------ what is never merged


def plain_function(x: Any) -> Any:
    return x


OPAQUE = {
    "random": aten.rand_like.default,
    "dropout": aten.native_dropout.default,
    "attention with dropout": aten._scaled_dot_product_flash_attention.default,
    "in place": aten.relu_.default,
    "out argument": aten.add.out,
    "assertion": aten._assert_async.msg,
    "collective": torch.ops._c10d_functional.all_reduce.default,
    "wait": torch.ops._c10d_functional.wait_tensor.default,
    "Python function": plain_function,
    "Python function named as an operator": type("Called", (), {"__name__": "add"})(),
    "higher order": torch.ops.higher_order.cond,
}
PURE = {
    "sine": aten.sin.default,
    "sort": aten.sort.default,
    "cast": torch.ops.prims.convert_element_type.default,
    "item": aten._local_scalar_dense.default,
    "getitem": operator.getitem,
    "size arithmetic": operator.floordiv,
    "larger size": torch.sym_max,
    "size as a float": torch.sym_float,
}


@pytest.mark.parametrize("target", OPAQUE.values(), ids=OPAQUE)
def test_two_calls_may_differ(target: Callable[..., Any]) -> None:
    assert is_opaque(target)


@pytest.mark.parametrize("target", PURE.values(), ids=PURE)
def test_two_calls_are_equal(target: Callable[..., Any]) -> None:
    assert not is_opaque(target)


def test_opaque_calls_are_their_own_classes() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")) for _ in range(2)]
    for node in (x, *calls):
        node.meta["val"] = torch.empty(4)
    table = number_graph(graph)
    assert len({table.class_of[n] for n in (x, *calls)}) == 3


def test_every_layout_operator_has_a_rule() -> None:
    """Else writing to one of its results would be noticed and reading it would not."""
    assert all(not is_opaque(target) for target in LAYOUT_ONLY)


# ------------------------------------------------------------------------------------------------ the table


def test_classes_without_a_node() -> None:
    """A normal form may be of values that the graph does not hold: here the weight, back from its transposition."""
    program, (product,) = traced(lambda x, w: aten.mm.default(x, w), torch.ones(2, 3), torch.ones(3, 4))
    table = number_graph(program.graph)
    _, w, bias = table.linear_parts(table.class_of[product])
    assert bias is None
    assert table.members.get(w) is None
    assert table.shape(w) == (4, 3)


def test_a_node_moves_to_another_class() -> None:
    program, (a, b) = traced(lambda x: (aten.sin.default(x), aten.cos.default(x)), torch.ones(3))
    table = number_graph(program.graph)
    table.assign(b, table.class_of[a])
    assert table.members[table.class_of[a]] == [a, b]
    table.drop(b)
    table.drop(b)
    assert table.members[table.class_of[a]] == [a]
    assert b not in table.class_of


def test_operands_of_a_key() -> None:
    key = ("cat", ("l", (("n", 3), ("l", (("n", 4), ("i", "2"))))), ("k", None), ("n", 5))
    assert values.operands(key) == [3, 4, 5]


def test_a_graph_over_the_same_inputs_gets_the_same_classes() -> None:
    """How a rewrite is proven: its trace is numbered in the model's table."""
    model, (out,) = traced(lambda x, w, b: aten.addmm.default(b, x, aten.t.default(w)), *map(torch.ones, [(2, 3), (4, 3), (4,)]))
    other, (result,) = traced(
        lambda x, w, b: aten.add.Tensor(b, aten.mm.default(x, aten.permute.default(w, [1, 0]))),
        *map(torch.ones, [(2, 3), (4, 3), (4,)]),
    )
    table = number_graph(model.graph)
    inputs = [[n for n in p.graph.nodes if n.op == "placeholder"] for p in (model, other)]
    env = {theirs: table.class_of[ours] for ours, theirs in zip(*inputs, strict=True)}
    for node in other.graph.nodes:
        if node.op == "call_function":
            env[node] = evaluate(table, node, env.__getitem__)
    assert env[result] == table.class_of[out]
    assert not any(n in table.class_of for n in other.graph.nodes)


@pytest.mark.parametrize("k", [1.0, 2.0, -4.0, 0.5, 2.0**100, 2.0**-126], ids=str)
def test_powers_of_two(k: float) -> None:
    assert values.is_power_of_two(k)
    assert values.is_power_of_two(1 / k)


@pytest.mark.parametrize("k", [0.0, 3.0, 0.1, float("inf"), float("nan"), 2.0**127, 2.0**-127, 5e-324], ids=str)
def test_not_powers_of_two(k: float) -> None:
    assert not values.is_power_of_two(k)


def test_metadata_is_comparable_across_traces() -> None:
    assert values.metadata(torch.empty(2, 3).t()) == (("3", "2"), ("1", "3"), torch.float32, "cpu")
    assert values.metadata(7) is None


@pytest.mark.parametrize(("x", "expected"), [(3, True), (True, False), (2.0, False), (None, False)])
def test_sizes_are_integers(x: Any, expected: bool) -> None:
    assert values.is_size(x) is expected
