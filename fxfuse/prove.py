"""Prove that a guess is a match.

The pattern is traced with the guessed inputs' own metadata and its graph is evaluated in the model's value table: the root
must have the same class, and of the gradients each must be found or be wholly absent. Then the region on the model's side is
cut out and checked: nothing outside may need what the replacement does not offer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.fx import Node

from . import compat
from .derived import Derived, cut_backward, find_cotangent
from .fusion import Match
from .guess import Guess, evaluate_traced
from .pattern import Traced, same_shape_and_dtype, trace_forward
from .region import (
    CHEAP,
    Context,
    Refusal,
    Region,
    cycle,
    extra_places,
    is_backward,
    layout_source,
    mutation_between,
    slice_back,
    survivors,
    transposed,
    without_users,
)
from .source import source_line
from .spellings import LAYOUT_ONLY
from .values import EXPAND, PERMUTE, SLICE, VIEW, Table, is_tensor, value


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
    outputs = [table.class_of[root]] if isinstance(derived, Derived) else _prove_forward(context, guess)
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
        refused = cut_backward(context, guess, region, derived)
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


# ------------------------------------------------------------------------------------------------ forward


def _prove_forward(context: Context, guess: Guess) -> list[int] | Refusal:
    """The classes of the pattern's outputs; output 0 is the root's."""
    wanted = context.table.class_of[guess.root]
    flags = guess.differentiable
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


def _prove_derived(context: Context, guess: Guess) -> Derived | Exception | None:
    """The gradients of the root, found with the root itself.

    None where there are none or the pattern is not there; what differentiating the pattern raised, if it did.
    """
    if not any(guess.differentiable):
        return None
    region = _cut_forward(context, guess, [context.table.class_of[guess.root]])
    return None if isinstance(region, Refusal) else find_cotangent(context, guess, region)


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
