"""The backward of a match: retraced with the right cotangent, the gradients that autograd derived are in the table."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from .guess import Guess, evaluate_traced
from .pattern import Traced, contributions, same_shape_and_dtype, trace_joint
from .region import Context, Dims, Refusal, Region, inverse, is_backward, slice_back
from .values import Table, is_tensor, value

MAX_COTANGENTS = 32
"""How many backward values are tried as the cotangent of one region."""


@dataclasses.dataclass(frozen=True)
class Derived:
    """A proof of a forward and of the backward that autograd derived from it, by one trace."""

    tangent: Node
    mask: tuple[bool, ...]
    traced: Traced
    classes: dict[Node, int]


def find_cotangent(context: Context, guess: Guess, region: Region) -> Derived | Exception | None:
    """The backward value that is the gradient of the root, by proof: retraced with it, the gradients are in the table."""
    table, wanted = context.table, context.table.class_of[guess.root]
    everything = guess.differentiable
    tried: set[int] = set()
    for node in _cotangent_candidates(context, region):
        c = table.class_of.get(node)
        if c is None or c in tried:
            continue
        tried.add(c)
        mask = everything
        while any(mask):
            try:
                traced = _traced_joint(context, guess, mask, node)
            except Exception as error:  # a wrong guess may not even run
                return error
            if len(traced.outputs) != 1:
                return None
            env = evaluate_traced(traced, table, guess.classes, c)
            if env[traced.outputs[0]] != wanted or not same_shape_and_dtype(value(traced.outputs[0]), value(guess.root)):
                if mask == everything:
                    return None  # the forward is another, whatever the cotangent
                break
            found = tuple(_is_present(context, traced, env, g, d) for g, d in zip(traced.grads, guess.layouts, strict=True))
            if found == mask:
                return Derived(node, mask, traced, env)
            if mask != everything:
                break
            mask = found
    return None


def cut_backward(context: Context, guess: Guess, region: Region, derived: Derived) -> Refusal | None:
    """Find the nodes of the gradients and everything of the backward before them."""
    tangent, traced, env = derived.tangent, derived.traced, derived.classes
    region.tangent, region.mask = tangent, derived.mask
    table, given = context.table, guess.given
    used: set[Node] = set()
    for gradient, dims in zip(traced.grads, guess.layouts, strict=True):
        row: list[Node] = []
        for term in contributions(gradient, traced.depends):
            node = _contribution(context, region, _in_layout(table, env[term], dims), used, given)
            if node is None:
                return Refusal("a gradient was already replaced", guess.root)
            used.add(node)
            row.append(node)
        region.gradients.append(row)
    tangent_class = table.class_of[tangent]

    def outside(node: Node) -> bool:
        return (
            node is tangent
            or table.class_of.get(node) == tangent_class
            or table.class_of.get(node) in given
            or node in region.forward
        )

    region.backward, boundary = slice_back(used, outside)
    stray = [n for n in boundary if is_tensor(n) and not outside(n)]
    return Refusal(f"its backward reaches {stray[0].name}", stray[0]) if stray else None


def _contribution(context: Context, region: Region, c: int, used: set[Node], given: set[int]) -> Node | None:
    """The node that holds one term of a gradient: unused, last of a chain of equal values, connected to this region."""
    table, tangent = context.table, region.tangent
    nodes = [
        n
        for n in table.members.get(c, ())
        if n not in used and n not in context.consumed and is_backward(n) and n.op == "call_function"
    ]
    nodes = [n for n in nodes if not any(table.class_of.get(u) == c for u in n.users)] or nodes
    if len(nodes) > 1:
        # One value computed twice in a row (a 1-D bias: view(sum(view(g))) is g itself): the later one is the gradient.
        def earlier(n: Node) -> bool:
            return any(m is not n and n in slice_back([m], lambda x: not is_backward(x) or x is tangent)[0] for m in nodes)

        nodes = [n for n in nodes if not earlier(n)] or nodes

        def elsewhere(n: Node) -> bool:
            _, boundary = slice_back([n], lambda x: x is tangent or not is_backward(x) or table.class_of.get(x) in given)
            return not any(b in region.forward for b in boundary)

        nodes.sort(key=elsewhere)
    return nodes[0] if nodes else None


def _is_present(context: Context, traced: Traced, env: dict[Node, int], gradient: Node | None, dims: Dims | None) -> bool:
    if gradient is None:
        return False
    table = context.table
    return all(
        any(is_backward(n) and n not in context.consumed for n in table.members.get(_in_layout(table, env[term], dims), ()))
        for term in contributions(gradient, traced.depends)
    )


def _in_layout(table: Table, c: int, dims: Dims | None) -> int:
    """A gradient as the graph holds it, whose input the pattern sees with its dimensions in the order ``dims``."""
    return c if dims is None else table.permute(c, inverse(dims))


def _traced_joint(context: Context, guess: Guess, mask: tuple[bool, ...], tangent: Node) -> Traced:
    fusion, metas = guess.fusion, guess.metas
    return context.traces.get(
        (fusion.id, "joint", mask, guess.scalars),
        [*metas, value(tangent)],
        lambda: trace_joint(
            lambda *t: fusion.call_pattern(t, guess.scalars), metas, mask, value(tangent), context.decompositions
        ),
    )


def _cotangent_candidates(context: Context, region: Region) -> list[Node]:
    """Backward values shaped like the root: first those that autograd's numbering points at, then the nearest ones."""
    shape = value(region.root)

    def fits(node: Node) -> bool:
        return is_backward(node) and is_tensor(node) and not node._erased and same_shape_and_dtype(value(node), shape)

    found: dict[Node, None] = {}
    for number in {n.meta.get("seq_nr") for n in region.forward if is_tensor(n)}:
        for user in context.backward_by_sequence.get(number, ()):
            if not user._erased:
                found.update(dict.fromkeys(a for a in user.all_input_nodes if fits(a)))
    pending = [u for n in region.forward for u in n.users if is_backward(u)]
    seen: set[Node] = set()
    while pending and len(seen) < 200 and len(found) < MAX_COTANGENTS:
        for node in pending.pop(0).all_input_nodes:
            if is_backward(node) and node not in seen:
                seen.add(node)
                pending.append(node)
                if fits(node):
                    found[node] = None
    return list(found)
