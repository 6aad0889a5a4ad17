"""Checks of value numbering that are not about two values: each takes the modules, so that mutants can be put in their place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from program_writer import traced
from torch.fx import Graph

aten = torch.ops.aten
Check = Callable[[Any, Any], None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Collect a check of (values, spellings)."""
    CHECKS.append(function)
    return function


def plain_function(x: Any) -> Any:
    return x


OPAQUE: tuple[Any, ...] = (
    aten.rand_like.default,
    aten.native_dropout.default,
    aten._scaled_dot_product_flash_attention.default,
    torch.ops.prims.normal.default,
    aten.relu_.default,
    aten.add.out,
    aten._assert_async.msg,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.higher_order.cond,
    plain_function,
    type("NamedAsAnOperator", (), {"__name__": "add"})(),
)
PURE: tuple[Any, ...] = (
    aten.sin.default,
    aten.sort.default,
    torch.ops.prims.convert_element_type.default,
    aten._local_scalar_dense.default,
    operator.getitem,
    operator.floordiv,
    *(torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_ite, torch.sym_sum),
)


@check
def two_calls_of_an_opaque_operator_may_differ(_values: Any, spellings: Any) -> None:
    assert [t for t in OPAQUE if not spellings.is_opaque(t)] == []
    assert [t for t in PURE if spellings.is_opaque(t)] == []


@check
def what_writes_to_memory(_values: Any, spellings: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    writing = [graph.call_function(target, (x, x)) for target in (aten.add_.Tensor, aten.copy_.default, aten.add.out)]
    reading = [
        graph.call_function(target, (x,)) for target in (aten.rand_like.default, torch.ops.higher_order.cond, operator.neg)
    ]
    assert [n for n in (x, *writing, *reading) if spellings.is_mutating(n)] == writing


@check
def layout_operators_are_pure(_values: Any, spellings: Any) -> None:
    assert [t for t in spellings.LAYOUT_ONLY if spellings.is_opaque(t)] == []


@check
def what_cannot_be_run_here_is_numbered(_values: Any, spellings: Any) -> None:
    """Collectives and higher-order calls are their own classes, results without metadata are named by their arguments."""
    graph = Graph()
    x = graph.placeholder("x")
    attribute = graph.get_attr("weight")
    reduced = [graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")) for _ in range(2)]
    chosen = [graph.call_function(torch.ops.higher_order.cond, (x, attribute, attribute, [x])) for _ in range(2)]
    outcome = [graph.call_function(operator.getitem, (chosen[0], i)) for i in (0, 0, 1)]
    unknown = [graph.call_function(aten.view.default, (x, [4])) for _ in range(2)]
    graph.output((*outcome, *unknown))
    for node in (x, attribute, *reduced, *chosen, *outcome):
        node.meta["val"] = torch.empty(4)
    table = spellings.number_graph(graph)
    apart = [x, attribute, *reduced, *chosen, outcome[0], outcome[2], unknown[0]]
    assert len({table.class_of[n] for n in apart}) == len(apart)
    assert table.class_of[outcome[0]] == table.class_of[outcome[1]]
    assert table.class_of[unknown[0]] == table.class_of[unknown[1]]
    assert [table.head(table.class_of[n]) for n in (x, attribute, reduced[0])] == ["input", "input", "opaque"]
    assert not any(n.op == "output" for n in table.class_of)


@check
def keys_name_every_argument(_values: Any, spellings: Any) -> None:
    """The finder and the near misses read keys: an argument is a class, a size, a constant or a list of such."""

    def several(x: Any, w: Any) -> Any:
        product = aten.mm.default(x, w)
        return product, aten.cumsum.default(product, -1), aten.amax.default(product, [-1], True), aten.gelu.default(product)

    program, nodes = traced(several, torch.ones(2, 3), torch.ones(3, 4))
    table = spellings.number_graph(program.graph)
    x, w, n = 0, 1, table.class_of[nodes[0]]
    assert table.keys[n] == ("linear", ("n", x), ("n", table.linear_parts(n)[1]), ("k", None))
    assert table.keys[table.linear_parts(n)[1]] == ("permute", ("n", w), ("l", (("i", "1"), ("i", "0"))))
    assert [table.keys[table.class_of[m]] for m in nodes[1:]] == [
        ("aten.cumsum.default", ("n", n), ("i", "1"), ("k", None)),
        ("aten.amax.default", ("n", n), ("l", (("i", "1"),)), ("k", "bool True")),
        ("aten.gelu.default", ("n", n), ("k", "str none")),
    ]
    assert spellings.target_name(operator.floordiv) == "floordiv"
    assert spellings.target_name(aten.sin.default) == "aten.sin.default"


@check
def classes_without_a_node(_values: Any, spellings: Any) -> None:
    """A normal form may be of values that the graph does not hold: here the weight, back from its transposition."""
    program, (product,) = traced(lambda x, w: aten.mm.default(x, w), torch.ones(2, 3), torch.ones(3, 4))
    table = spellings.number_graph(program.graph)
    _, w, bias = table.linear_parts(table.class_of[product])
    assert bias is None
    assert table.members.get(w) is None
    assert (table.shape(w), table.dtypes[w], table.is_float(w)) == ((4, 3), torch.float32, True)


@check
def what_is_floating_point(_values: Any, spellings: Any) -> None:
    program, nodes = traced(
        lambda x: (aten.sin.default(x), aten.gt.Scalar(x, 0), aten.sort.default(x), aten.complex.default(x, x)), torch.ones(3)
    )
    table = spellings.number_graph(program.graph)
    assert [table.is_float(table.class_of[n]) for n in nodes] == [True, False, False, False]


@check
def a_node_moves_to_another_class(_values: Any, spellings: Any) -> None:
    program, (a, b) = traced(lambda x: (aten.sin.default(x), aten.cos.default(x)), torch.ones(3))
    table = spellings.number_graph(program.graph)
    table.assign(b, table.class_of[a])
    assert table.members[table.class_of[a]] == [a, b]
    table.drop(b)
    table.drop(b)
    assert table.members[table.class_of[a]] == [a]
    assert b not in table.class_of


@check
def a_graph_over_the_same_inputs_gets_the_same_classes(_values: Any, spellings: Any) -> None:
    """How a rewrite is proven: its trace is numbered in the model's table."""
    shapes = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)
    model, (out,) = traced(lambda x, w, b: aten.addmm.default(b, x, aten.t.default(w)), *shapes)
    other, (result,) = traced(lambda x, w, b: aten.add.Tensor(b, aten.mm.default(x, aten.permute.default(w, [1, 0]))), *shapes)
    table = spellings.number_graph(model.graph)
    ours, theirs = ([n for n in p.graph.nodes if n.op == "placeholder"] for p in (model, other))
    env = {t: table.class_of[o] for o, t in zip(ours, theirs, strict=True)}
    for node in other.graph.nodes:
        if node.op == "call_function":
            env[node] = spellings.evaluate(table, node, env.__getitem__)
    assert env[result] == table.class_of[out]
    assert not any(n in table.class_of for n in other.graph.nodes)


@check
def operands_of_a_key(values: Any, _spellings: Any) -> None:
    key = ("cat", ("l", (("n", 3), ("l", (("n", 4), ("i", "2"))))), ("k", None), ("n", 5))
    assert values.operands(key) == [3, 4, 5]
    assert values.operands(("input", ("u", 7))) == []


@check
def powers_of_two(values: Any, _spellings: Any) -> None:
    exact = [1.0, 2.0, -4.0, 0.5, 2.0**100, 2.0**-126, 2.0**126]
    assert [k for k in exact if not (values.is_power_of_two(k) and values.is_power_of_two(1 / k))] == []
    inexact = [0.0, 3.0, 0.1, -0.75, float("inf"), float("nan"), 2.0**127, 2.0**-127, 5e-324]
    assert [k for k in inexact if values.is_power_of_two(k)] == []


@check
def metadata_is_comparable_across_traces(values: Any, _spellings: Any) -> None:
    assert values.metadata(torch.empty(2, 3).t()) == (("3", "2"), ("1", "3"), torch.float32, "cpu")
    assert values.metadata(7) is None


@check
def sizes_and_tensors(values: Any, _spellings: Any) -> None:
    assert [values.is_size(x) for x in (3, True, 2.0, None)] == [True, False, False, False]
    assert values.sizes((2, 10)) == ("2", "10")
    graph = Graph()
    nodes = [graph.placeholder(name) for name in "abc"]
    nodes[0].meta["val"], nodes[1].meta["val"] = torch.ones(2), 3
    assert [values.is_tensor(x) for x in (*nodes, torch.ones(2), 3)] == [True, False, False, False, False]
