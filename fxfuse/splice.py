"""Put a replacement in a region's place: inline it, reroute outputs and gradients.

Everything that may refuse happens before the graph is touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from . import compat
from .pattern import refake, same_shape_and_dtype
from .recipe import in_force
from .region import DONE, Context, Dims, Refusal, Region, inverse, is_backward
from .replacement import Replacement, check, leaves_the_graph, trace
from .spellings import CAST, number
from .values import is_tensor, operand, size, value

aten = torch.ops.aten
KEPT_META = ("partitioner_tag", "ac_graph_id", "stack_trace", "seq_nr", "custom", "nn_module_stack", "fwd_nn_module_stack")
PASSES_GRADIENT = frozenset(
    {aten.add.Tensor, CAST, aten.view.default, aten.permute.default, aten.clone.default, aten.unsqueeze.default, aten.squeeze.dim}
)
"""Linear operators through which one contribution to a gradient reaches the sum with the others."""


class BrokenGraph(Exception):
    """A splice raised halfway: this graph must not be used, the plan is built again without fusions."""


@dataclasses.dataclass(frozen=True)
class Spliced:
    """What a splice did."""

    inserted: tuple[Node, ...]
    saved: tuple[Node, ...]


@dataclasses.dataclass(frozen=True)
class _Total:
    """How the contributions to one gradient become one: it stands where ``keeper`` was, the others are taken out."""

    keeper: Node
    keeper_chain: tuple[Node, ...]
    others: tuple[tuple[Node, tuple[Node, ...]], ...]


def splice(context: Context, region: Region, tag: int) -> Spliced | Refusal:
    """Replace a region; ``tag`` marks the inserted nodes."""
    try:
        with in_force(context.recipe):  # hooks may ask for ``current_recipe()``
            replacement = trace(context, region)
    except compat.ShapeGuardError as error:
        return Refusal(f"the replacement adds a shape guard: {error}", region.root)
    refused = check(region, replacement)
    if refused is not None:
        return refused
    totals = [_plan_total(row) for row in region.gradients if row]
    if any(t is None for t in totals):
        return Refusal("the contributions to a gradient are not simply added up", region.root)
    try:
        return _Splicer(context, region, replacement, tag).run([t for t in totals if t is not None])
    except Exception as error:
        raise BrokenGraph(f"fusion {region.fusion.name!r}: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------------ gradients


def _plan_total(contributions: Sequence[Node]) -> _Total | None:
    """Let the contribution that is added last carry the total, so that no partial sum with another user changes."""
    if len(contributions) == 1:
        return _Total(contributions[0], (), ())
    chains = {c: _chain(c) for c in contributions}
    common = set.intersection(*[set(chain) for chain in chains.values()])
    if not common:
        return None
    meeting = min(common)
    before = {c: tuple(chain[: chain.index(meeting)]) for c, chain in chains.items()}
    keeper = min(contributions, key=lambda c: len(before[c]))
    return _Total(keeper, before[keeper], tuple((c, before[c]) for c in contributions if c is not keeper))


def _chain(node: Node) -> list[Node]:
    """The single-user path of linear operators that a contribution goes."""
    chain: list[Node] = []
    while len(node.users) == 1:
        node = next(iter(node.users))
        if node.op != "call_function" or node.target not in PASSES_GRADIENT:
            break
        chain.append(node)
    return chain


def _is_accumulation(node: Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 or node.args[0] is node.args[1]:
        return False
    return is_backward(node) and all(is_tensor(a) and same_shape_and_dtype(value(a), value(node)) for a in node.args)


# ------------------------------------------------------------------------------------------------ the surgery


class _Splicer:
    """Carries the pieces of one splice."""

    def __init__(self, context: Context, region: Region, replacement: Replacement, tag: int) -> None:
        self.context, self.graph, self.table = context, context.graph, context.table
        self.region, self.replacement, self.tag = region, replacement, tag
        self.mode = compat.fake_mode_of([value(region.root)])
        self.inserted: list[Node] = []

    def run(self, totals: Sequence[_Total]) -> Spliced:
        forward, backward = self._forward_meta(), None
        place = self._place()
        inputs = [
            n if n is None or dims is None else self._permuted(n, dims, place, forward)
            for n, dims in zip(self.region.inputs, self.region.layouts, strict=True)
        ]
        env = dict(zip(self.replacement.forward.inputs, inputs, strict=True))
        self._inline(self.replacement.forward_nodes, env, place, forward)
        self._reroute_outputs([env.get(o) for o in self.replacement.outputs], forward)
        saved = tuple(env[s] for s in self.replacement.saved if s is not None)
        if self.region.trained:
            backward = self._backward_meta(forward)
            self._splice_backward(env, inputs, saved, backward, totals)
        self._clean()
        return Spliced(tuple(self.inserted), tuple(s for s in saved if s is not None))

    def _forward_meta(self) -> dict[str, Any]:
        meta = {k: self.region.root.meta[k] for k in KEPT_META if k in self.region.root.meta}
        policies = [n.meta["recompute"] for n in self.region.forward if n.meta.get("recompute") is not None]
        if policies:  # what any member must save stays saved
            meta["recompute"] = CheckpointPolicy.MUST_SAVE if CheckpointPolicy.MUST_SAVE in policies else policies[0]
        return meta

    def _backward_meta(self, forward: Mapping[str, Any]) -> dict[str, Any]:
        tangent = self.region.tangent
        assert tangent is not None
        meta = {k: tangent.meta[k] for k in ("stack_trace",) if k in tangent.meta}
        meta.update({k: forward[k] for k in ("seq_nr", "nn_module_stack", "stack_trace") if k in forward})
        return {**meta, "partitioner_tag": "is_backward"}

    def _place(self) -> Node:
        """After every input, before the first output; the final sort mends the rest."""
        first = min(self.region.roots)
        last = max((n for n in self.region.inputs if n is not None), default=first)
        return last.next if last > first or last is first else first

    def _inline(self, nodes: Iterable[Node], env: dict[Any, Any], before: Node, meta: Mapping[str, Any]) -> None:
        with self.graph.inserting_before(before):
            for node in nodes:
                copy = self.graph.node_copy(node, env.__getitem__)
                copy.meta = {**meta, "val": refake(node.meta["val"], self.mode), DONE: self.tag}
                env[node] = copy
                number(self.table, copy)
                self.inserted.append(copy)

    def _reroute_outputs(self, outputs: Sequence[Any], meta: Mapping[str, Any]) -> None:
        region, gone = self.region, self.region.gone
        for k, (out, nodes) in enumerate(zip(outputs, region.outputs, strict=False)):
            if k in region.transposed:
                out = self._transposed(out, nodes, meta)
            for node in nodes:
                node.replace_all_uses_with(out, delete_user_cb=lambda u: u not in region.forward or u not in gone)
            self.table.assign(out, self.table.class_of[nodes[0]])
        for node, (k, shape) in region.extras.items():
            out = outputs[k] if shape is None else self._view(outputs[k], node, shape, meta)
            self.table.assign(out, self.table.class_of[node])
            node.replace_all_uses_with(out, delete_user_cb=lambda u: u not in gone)

    def _view(self, source: Node, like: Node, shape: Any, meta: Mapping[str, Any]) -> Node:
        arguments = [self._size_argument(s) for s in shape]
        with self.graph.inserting_after(source):
            view = self.graph.call_function(aten.view.default, (source, arguments))
        view.meta = {**meta, "val": value(like), DONE: self.tag}
        self.inserted.append(view)
        return view

    def _permuted(self, source: Node, dims: Dims, before: Node, meta: Mapping[str, Any]) -> Node:
        with self.graph.inserting_before(before):
            node = self.graph.call_function(aten.permute.default, (source, list(dims)))
        node.meta = {**meta, "val": value(source).permute(dims), DONE: self.tag}
        number(self.table, node)
        self.inserted.append(node)
        return node

    def _transposed(self, source: Node, like: Sequence[Node], meta: Mapping[str, Any]) -> Node:
        """A matrix transposed, laid out as ``like`` is where somebody may depend on that."""
        node = self._permuted(source, (1, 0), source.next, meta)
        if all(map(leaves_the_graph, like)):
            return node
        with self.graph.inserting_after(node):
            copy = self.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copy.meta = {**meta, "val": value(like[0]), DONE: self.tag}
        self.inserted.append(copy)
        return copy

    def _size_argument(self, s: Any) -> Any:
        """A size as an argument of a node: a number, or the node that computes the symbol."""
        if isinstance(s, int):
            return s
        wanted = size(s)
        for node in self.graph.nodes:
            if isinstance(value(node), torch.SymInt) and size(value(node)) == wanted:
                return node
        return s

    def _splice_backward(
        self,
        forward_env: dict[Any, Any],
        inputs: Sequence[Node | None],
        saved: Sequence[Any],
        meta: Mapping[str, Any],
        totals: Sequence[_Total],
    ) -> None:
        region, replacement = self.region, self.replacement
        back = replacement.backward
        assert back is not None and region.tangent is not None
        if back is replacement.forward:
            env: dict[Any, Any] = {**forward_env, back.tangent: region.tangent}
        else:
            env = dict(zip(back.inputs, [*inputs, *saved, region.tangent], strict=True))
        self._inline(replacement.backward_nodes, env, min(n for row in region.gradients for n in row), meta)
        for gradient, total, dims in zip(replacement.gradients, totals, region.gradient_layouts, strict=True):
            new = env[gradient]
            if dims is not None:
                new = self._permuted(new, inverse(dims), new.next, meta)
            self._reroute_gradient(new, total, meta)

    def _reroute_gradient(self, gradient: Node, total: _Total, meta: Mapping[str, Any]) -> None:
        sum_class: int | None = None if total.others else self.table.class_of[total.keeper]
        for contribution, chain in total.others:
            user = next(iter(contribution.users))
            if _is_accumulation(user):
                first, second = operand(user, 0), operand(user, 1)
                other = first if second is contribution else second
                if user not in chain and not total.keeper_chain:
                    sum_class = self.table.class_of[user]
                user.replace_all_uses_with(other)
                self._erase(user)
            else:
                user.replace_input_with(contribution, self._zeros(contribution, user, meta))
            for node in chain:
                self._forget_class(node)
        for node in total.keeper_chain:
            self._forget_class(node)
        total.keeper.replace_all_uses_with(gradient)
        if sum_class is not None:
            self.table.assign(gradient, sum_class)

    def _forget_class(self, node: Node) -> None:
        if not node._erased:
            self.table.assign(node, self.table.unique("stale", node))

    def _zeros(self, like: Node, before: Node, meta: Mapping[str, Any]) -> Node:
        v = value(like)
        with self.graph.inserting_before(before):
            shape = [self._size_argument(s) for s in v.shape]
            zeros = self.graph.call_function(aten.full.default, (shape, 0), {"dtype": v.dtype, "device": v.device})
        zeros.meta = {**meta, "val": v, DONE: self.tag}
        number(self.table, zeros)
        self.inserted.append(zeros)
        return zeros

    def _erase(self, node: Node) -> None:
        self.table.drop(node)
        self.graph.erase_node(node)

    def _clean(self) -> None:
        """Erase what nothing uses any more."""
        region = self.region
        nodes = region.forward | region.backward
        self.context.consumed |= nodes & region.gone
        for node in sorted((n for n in nodes if not n._erased), reverse=True):
            if not node.users:
                self._erase(node)
