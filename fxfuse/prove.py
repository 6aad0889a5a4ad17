"""Prove that a guess is a match.

The pattern is traced with the guessed inputs' own metadata and its graph is evaluated in the model's value table: the root
must have the same class, and of the gradients each must be found or be wholly absent. Then the region on the model's side is
cut out and checked: nothing outside may need what the replacement does not offer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from . import compat
from .fusion import Fusion, Match
from .pattern import Traced, contributions, same_shape_and_dtype, trace_forward, trace_joint
from .region import (
    CHEAP,
    Context,
    Dims,
    Refusal,
    Region,
    cycle,
    extra_places,
    inverse,
    is_backward,
    layout_source,
    mutation_between,
    seen_values,
    slice_back,
    survivors,
    transposed,
    without_users,
)
from .source import source_line
from .spellings import LAYOUT_ONLY, evaluate
from .values import EXPAND, PERMUTE, SLICE, VIEW, Table, is_tensor, value

MAX_COTANGENTS = 32
"""How many backward values are tried as the cotangent of one region."""
Classes = list["int | None"]


@dataclasses.dataclass
class Guess:
    """A root and what may fill the holes there."""

    fusion: Fusion
    root: Node
    classes: Classes
    scalars: tuple[float, ...]
    inputs: list[Node | None] = dataclasses.field(default_factory=list)
    layouts: list[Dims | None] = dataclasses.field(default_factory=list)
    through_bases: bool = False
    """Bind a permuted input through what it is a permute of, even if it has a node of its own."""
    given: set[int] = dataclasses.field(default_factory=set)
    """The input classes, and those of the nodes that hold them in another layout."""

    @property
    def metas(self) -> list[Any]:
        """The fake values of the inputs, as the pattern sees them."""
        return seen_values(self.inputs, self.layouts)


def prove(context: Context, guess: Guess) -> Region | Refusal:
    """The region at ``guess.root``, or why there is none."""
    region = _prove(context, guess)
    if isinstance(region, Refusal) and any(
        c is not None and n is not None and dims is None and context.table.head(c) == PERMUTE
        for c, n, dims in zip(guess.classes, guess.inputs, guess.layouts, strict=False)
    ):  # an input that is there in both layouts: its gradient may be in either
        other = _prove(context, dataclasses.replace(guess, inputs=[], layouts=[], given=set(), through_bases=True))
        return region if isinstance(other, Refusal) else other
    return region


def _prove(context: Context, guess: Guess) -> Region | Refusal:
    table, fusion, root = context.table, guess.fusion, guess.root
    bound = _bind(context, guess)
    if bound is not None:
        return bound
    if table.class_of[root] in guess.given:
        return Refusal("it would only copy an input", root)
    derived = _prove_derived(context, guess) if fusion.side == "joint" and context.has_backward else None
    outputs = [table.class_of[root]] if isinstance(derived, _Derived) else _prove_forward(context, guess)
    if isinstance(outputs, Refusal):
        return outputs
    if isinstance(derived, Exception):
        raise derived
    refused = _ask(context, guess)
    if refused is not None:
        return refused
    region = _cut_forward(context, guess, outputs)
    if isinstance(region, Refusal):
        return region
    if derived is not None:
        refused = _cut_backward(context, guess, region, derived)
        if refused is not None:
            return refused
    return _check_liveness(context, guess, region, outputs) or region


# ------------------------------------------------------------------------------------------------ inputs


def _bind(context: Context, guess: Guess) -> Refusal | None:
    """Choose a node for each input class: the earliest one, so that it exists where the replacement will stand.

    A class without a node may be another node's with its dimensions reordered (a weight stored transposed).
    """
    table, backward_too = context.table, guess.fusion.side == "backward"

    def earliest(c: int) -> Node | None:
        nodes = [n for n in table.members.get(c, ()) if (backward_too or not is_backward(n)) and n < guess.root]
        return min(nodes) if nodes else None

    for hole, c in zip(guess.fusion.tensor_holes, guess.classes, strict=True):
        node, dims = None if c is None else earliest(c), None
        if c is not None and table.head(c) == PERMUTE:
            base = table.operand(c, 0)
            guess.given.add(base)
            if node is None or (guess.through_bases and earliest(base) is not None):
                node, dims = earliest(base), table.permuted_dims(c)
        if c is not None and node is None:
            return Refusal(f"input {hole.name} {_absence(table, c)}", guess.root)
        if c is not None:
            guess.given.add(c)
        guess.inputs.append(node)
        guess.layouts.append(dims)
    return None


def _absence(table: Table, c: int) -> str:
    if table.head(c) in (VIEW, PERMUTE, EXPAND, SLICE):
        return f"exists only in another layout: {table.head(c)}"
    return "is no longer computed: another fusion took its place"


def _differentiable(guess: Guess) -> list[bool]:
    return [m is not None and m.dtype.is_floating_point for m in guess.metas]


def evaluate_traced(traced: Traced, table: Table, classes: Sequence[int | None], tangent: int | None = None) -> dict[Node, int]:
    """The class of every node of a traced pattern in the model's table."""
    env: dict[Node, int] = {p: c for p, c in zip(traced.inputs, classes, strict=True) if p is not None and c is not None}
    if traced.tangent is not None and tangent is not None:
        env[traced.tangent] = tangent
    for node in traced.graph.nodes:
        if node.op == "call_function":
            env[node] = evaluate(table, node, env.__getitem__)
    return env


# ------------------------------------------------------------------------------------------------ forward


def _prove_forward(context: Context, guess: Guess) -> list[int] | Refusal:
    """The classes of the pattern's outputs; output 0 is the root's."""
    wanted = context.table.class_of[guess.root]
    flags = _differentiable(guess)
    none = [False] * len(flags)
    difference = Refusal("the pattern does not run on these inputs", guess.root)
    for requires_grad in [none, flags] if any(flags) else [none]:
        try:
            traced = _traced_forward(context, guess, requires_grad)
        except Exception as error:  # a wrong guess may not even run
            reason = f"the pattern does not run on these inputs: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            return Refusal(reason, guess.root, untried=True)
        env = evaluate_traced(traced, context.table, guess.classes)
        if env[traced.outputs[0]] == wanted:
            if not same_shape_and_dtype(value(traced.outputs[0]), value(guess.root)):
                return Refusal("the output has another shape or dtype", guess.root)
            return [env[o] for o in traced.outputs]
        difference = Refusal(_difference(traced, env, context.table), guess.root)
    return difference


def _traced_forward(context: Context, guess: Guess, requires_grad: Sequence[bool]) -> Traced:
    fusion, metas = guess.fusion, guess.metas
    return context.traces.get(
        (fusion.id, "pattern", tuple(requires_grad), guess.scalars),
        metas,
        lambda: trace_forward(
            lambda *t: fusion.call_pattern(t, guess.scalars), metas, context.decompositions, requires_grad=requires_grad
        ),
    )


def _difference(traced: Traced, env: dict[Node, int], table: Table) -> str:
    for node in traced.graph.nodes:
        if node.op == "call_function" and is_tensor(node) and not table.members.get(env[node]) and node.target not in LAYOUT_ONLY:
            return f"forward differs at {node.name}"
    return "forward differs"


def _ask(context: Context, guess: Guess) -> Refusal | None:
    """The fusion's own check; it may not specialise sizes."""
    names = [h.name for h in guess.fusion.tensor_holes]
    scalars = dict(zip([h.name for h in guess.fusion.holes if h.scalar], guess.scalars, strict=True))
    holes = {**dict(zip(names, guess.metas, strict=True)), **scalars}
    match = Match(holes, value(guess.root), context.recipe, source_line(guess.root))
    mode = compat.fake_mode_of([value(guess.root)])
    try:
        with compat.no_new_guards(mode):
            reason = guess.fusion.allows(match)
    except compat.ShapeGuardError as error:
        reason = f"its check depends on a size that is not known when it is compiled: {error}"
    return Refusal(reason, guess.root) if reason else None


def _cut_forward(context: Context, guess: Guess, outputs: list[int]) -> Region | Refusal:
    """The forward region: everything between the outputs and the inputs."""
    table, fusion, root, given = context.table, guess.fusion, guess.root, guess.given
    backward_fusion = fusion.side == "backward"
    required = len(outputs) - fusion.extra
    nodes: list[list[Node]] = [[root]]
    turned: set[int] = set()

    def holding(c: int | None) -> list[Node]:
        members = table.members.get(c, ()) if c is not None else ()
        return [n for n in members if n not in context.consumed and n.op == "call_function" and is_backward(n) == backward_fusion]

    for k in range(1, required):
        held = holding(outputs[k])
        if not held and (held := holding(transposed(outputs[k], table))):
            turned.add(k)
        if not held:
            return Refusal(f"output {k} is not computed by the model", root)
        if outputs[k] in outputs[:k]:
            return Refusal(f"output {k} is the same value as an earlier one here", root)
        nodes.append(held)

    def outside(node: Node) -> bool:
        return table.class_of.get(node) in given or (backward_fusion and not is_backward(node))

    roots = [n for held in nodes for n in held]
    inside, boundary = slice_back(roots, outside)
    stray = [n for n in boundary if is_tensor(n) and not outside(n)]
    if stray:
        return Refusal(f"it reaches {stray[0].name}, which is not an input", stray[0])
    region = Region(fusion, root, guess.inputs, guess.scalars, nodes, inside, set())
    region.layouts, region.transposed = guess.layouts, frozenset(turned)
    regions = {n.meta.get("ac_graph_id") for n in inside if is_tensor(n) and not layout_source(n, given, table)}
    if len(regions) > 1:
        return Refusal("it crosses activation-checkpoint regions", root)
    foreign = next((n for n in inside if is_tensor(n) and not layout_source(n, given, table) and not context.is_for(n)), None)
    if foreign is not None:
        return Refusal("it crosses the border of a recipe_region", foreign)
    mutation = mutation_between(inside, root)
    if mutation is not None:
        return Refusal(f"a mutation lies in between: {mutation.name}", mutation)
    looped = cycle(guess.inputs, roots, inside) if len(roots) > 1 else None
    return Refusal("an input depends on an output", looped) if looped is not None else region


# ------------------------------------------------------------------------------------------------ backward


@dataclasses.dataclass(frozen=True)
class _Derived:
    """A proof of a forward and of the backward that autograd derived from it, by one trace."""

    tangent: Node
    mask: tuple[bool, ...]
    traced: Traced
    classes: dict[Node, int]


def _prove_derived(context: Context, guess: Guess) -> _Derived | Exception | None:
    """The gradients of the root, found with the root itself.

    None where there are none or the pattern is not there; what differentiating the pattern raised, if it did.
    """
    if not any(_differentiable(guess)):
        return None
    region = _cut_forward(context, guess, [context.table.class_of[guess.root]])
    return None if isinstance(region, Refusal) else _find_cotangent(context, guess, region)


def _cut_backward(context: Context, guess: Guess, region: Region, derived: _Derived) -> Refusal | None:
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


def _find_cotangent(context: Context, guess: Guess, region: Region) -> _Derived | Exception | None:
    """The backward value that is the gradient of the root, by proof: retraced with it, the gradients are in the table."""
    table, wanted = context.table, context.table.class_of[guess.root]
    everything = tuple(_differentiable(guess))
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
                return _Derived(node, mask, traced, env)
            if mask != everything:
                break
            mask = found
    return None


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


# ------------------------------------------------------------------------------------------------ liveness


def _check_liveness(context: Context, guess: Guess, region: Region, outputs: list[int]) -> Refusal | None:
    """With outputs, extras and gradients rerouted, nothing of the region may still be needed."""
    table, given = context.table, guess.given
    everything = region.forward | region.backward
    rerouted = set(region.roots) | {n for row in region.gradients for n in row}
    required = set(outputs[: len(region.outputs)])
    layouts = {
        n
        for n in region.forward
        if n.target in LAYOUT_ONLY
        and n not in region.roots
        and (layout_source(n, given, table) or layout_source(n, required, table))
    }
    offered = extra_places(region, outputs, table) if guess.fusion.extra else {}
    region.gone = without_users(everything, rerouted | set(offered), layouts)
    region.extras = offered
    left = survivors(region, given, layouts, table)
    bad = [n for n in left if not (offered and n.target in CHEAP)]
    if bad:
        return _escape(max(bad), region)

    def needed(n: Node) -> bool:
        return any(u not in everything or u in left or (u in layouts and u not in region.gone) for u in n.users)

    region.extras = {n: place for n, place in offered.items() if needed(n)}
    return None


def _escape(node: Node, region: Region) -> Refusal:
    users = [u for u in node.users if u not in region.gone]
    user = next((u for u in users if is_backward(u)), users[0])
    if is_backward(user) and not is_backward(node):
        return Refusal(f"backward not proven: {node.name} is used by {user.name}", user)
    return Refusal(f"interior value used outside: {node.name} is used by {user.name}", user)
