"""Deferred decompositions: operators that stay whole until fusions have been looked for, then expand as Inductor expands them.

With nothing fused the expanded graph is Inductor's own, node for node, but for a product's input that ``beta=0`` leaves out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from . import compat
from .pattern import Decompositions, TraceCache, refake, with_operands
from .values import value

aten = torch.ops.aten
DEFERRED_NAMES = (
    "gelu",
    "gelu_backward",
    "silu",
    "silu_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "sigmoid_backward",
    "tanh_backward",
    "threshold_backward",
    "mm",
    "bmm",
    "addmm",
)
"""Inductor decomposes some matmuls by their sizes (one row, one column): they too are matched whole."""
DEFERRED = frozenset(getattr(aten, name).default for name in DEFERRED_NAMES if hasattr(aten, name))
MATMULS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default})
TAGS = (
    "fxfuse_region",
    "partitioner_tag",
    "recompute",
    "ac_graph_id",
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "custom",
)


def capture_table(settings: Mapping[str, Any]) -> dict[Any, Callable[..., Any]]:
    """The decompositions to capture with: Inductor's under these settings, without the deferred ones."""
    table = {op: how for op, how in compat.decompositions(**settings).items() if op not in DEFERRED}
    return table | {op: _without_unused_input(op, table.get(op)) for op in (aten.addmm.default, aten.baddbmm.default)}


def _without_unused_input(op: Any, usual: Callable[..., Any] | None) -> Callable[..., Any]:
    """``beta=0`` means that the input is not looked at; Inductor multiplies it by zero, and NaN stays NaN (pytorch#196596)."""

    def decompose(self: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if isinstance(beta, (int, float)) and beta == 0:
            return op(self.new_zeros(self.shape), a, b, beta=1, alpha=alpha)
        return NotImplemented if usual is None else usual(self, a, b, beta=beta, alpha=alpha)

    return decompose


def expand_deferred(graph: Graph, traces: TraceCache) -> None:
    """Replace every deferred operator that was not fused, as Inductor would have."""
    table = compat.decompositions()
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in DEFERRED]:
        expand(graph, node, table, traces, "deferred")


def expand(graph: Graph, node: Node, table: Decompositions, traces: TraceCache, form: str) -> None:
    """Replace a call by its decomposition in ``table``; ``form`` names the table, for the cache of traces."""
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    holes = [i for i, a in enumerate(flat) if isinstance(a, Node)]
    operands = [flat[i] for i in holes]
    metas = [value(n) for n in operands]
    target = node.target
    assert callable(target)
    call = with_operands(target, flat, spec, holes)
    constants = tuple(repr(a) for i, a in enumerate(flat) if i not in holes)
    key = (form, str(node.target), constants, tuple(holes), str(spec))
    try:
        traced = _traced(call, key, metas, table, traces, forbid_guards=target in MATMULS)
    except compat.ShapeGuardError:
        return  # how it decomposes depends on a size that is not known: whole is right for every size
    if [n.target for n in traced.nodes if n.op == "call_function"] == [node.target]:
        return  # its decomposition declines
    _replace_by_graph(graph, node, traced, operands)


def _traced(
    call: Callable[..., Any], key: Any, metas: list[Any], table: Decompositions, traces: TraceCache, *, forbid_guards: bool
) -> Graph:
    def trace() -> Graph:
        traced = compat.trace(call, metas, table, forbid_guards=forbid_guards)
        traced.eliminate_dead_code()
        return traced

    cached = all(isinstance(m, torch.Tensor) for m in metas)  # the cache tells tensors apart, not symbols
    return traces.get(key, metas, trace) if cached else trace()


def _replace_by_graph(graph: Graph, node: Node, traced: Graph, operands: list[Node]) -> None:
    mode = compat.fake_mode_of([value(n) for n in operands])
    env: dict[Node, Any] = dict(zip([n for n in traced.nodes if n.op == "placeholder"], operands, strict=True))
    tags = {k: node.meta[k] for k in TAGS if k in node.meta}
    result: Any = None
    with graph.inserting_before(node):
        for step in traced.nodes:
            if step.op == "output":
                result = map_arg(step.args[0], env.__getitem__)
            elif step.op != "placeholder":
                copy = graph.node_copy(step, env.__getitem__)
                copy.meta = {**copy.meta, **tags, "val": refake(step.meta["val"], mode)}
                env[step] = copy
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
    for copy in reversed([n for step, n in env.items() if step.op != "placeholder"]):
        if not copy.users and not copy.is_impure():
            graph.erase_node(copy)
