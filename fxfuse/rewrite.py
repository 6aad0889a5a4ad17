"""The driver: for each fusion in order, try every place; splice what is proved, remember what was refused."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node

from . import compat, faults
from .errors import FusionCountError, warn_once
from .fusion import Fusion, runs_under
from .guess import Guess
from .match import MAX_BINDINGS, Finder, Mismatch, Skeleton, skeletons
from .naming import family, is_called
from .pattern import Decompositions, TraceCache
from .prove import prove
from .recipe import Recipe, region_recipes
from .region import DONE, Context, Refusal, Region, is_backward, operator_names
from .report import Failure, Fused, GraphRecord, Missed
from .source import layer_path, source_line
from .spellings import COPIES
from .splice import BrokenGraph, Spliced, splice
from .values import is_tensor
from .window import Windows

log = logging.getLogger(__name__)
TAKEN = "; the place went to "
"""Ends the reason of a refusal where another fusion fired."""


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What a rewriting did; ``traces`` may serve the expansion of the same graph."""

    record: GraphRecord
    failures: tuple[Failure, ...]
    traces: TraceCache


@dataclasses.dataclass
class _Run:
    context: Context
    kind: str
    strict: bool
    by_head: dict[str, list[Node]]
    order: dict[Node, int]
    fused: list[tuple[int, Fused]] = dataclasses.field(default_factory=list)
    """With the place of its root in the graph."""
    missed: dict[tuple[str, Node], Missed] = dataclasses.field(default_factory=dict)
    nearest: dict[str, tuple[Missed, Node]] = dataclasses.field(default_factory=dict)
    taken: dict[Node, tuple[str, int]] = dataclasses.field(default_factory=dict)
    """Which fusion replaced a node, and how many with it."""
    failures: list[Failure] = dataclasses.field(default_factory=list)
    _held: tuple[int, set[Any]] = dataclasses.field(default_factory=lambda: (-1, set()))

    def enter(self, context: Context) -> None:
        """Go on with what the graph has of another recipe."""
        self.context, self.by_head, self._held = context, _index(context), (-1, set())

    def holds(self, operators: Sequence[tuple[Any, ...]]) -> bool:
        """Whether the part of the graph that no fusion has taken has one of each of these alternatives."""
        if operators and self._held[0] != len(self.fused):
            self._held = len(self.fused), {n.target for n in self.context.graph.nodes if _is_free(self.context, n)}
        return all(not self._held[1].isdisjoint(alternatives) for alternatives in operators)


def rewrite(
    graph: Graph, fusions: Sequence[Fusion | Windows], decompositions: Decompositions, recipe: Recipe, *, strict: bool = False
) -> Rewritten:
    """Rewrite a functional aten graph in place.

    Args:
        graph: an inference graph, or a joint graph whose backward nodes carry the partitioner's tag.
        fusions: in the order in which they are tried.
        decompositions: the table that the graph was captured with.
        recipe: its numerics decide which spellings stand for each other.
        strict: raise where a fusion fails, instead of leaving the region alone.
    """
    started = time.perf_counter()
    _mark_backward(graph)
    kind, before, nodes = _kind(graph), _code(graph), len(graph.nodes)
    context = Context.of(graph, decompositions, recipe)
    run = _Run(context, kind, strict, _index(context), {n: i for i, n in enumerate(graph.nodes)})
    for chosen in [recipe, *_chosen_inside(graph, recipe)]:
        if chosen is not recipe:  # what one recipe's numerics take for equal, another's may not
            run.enter(Context.of(graph, decompositions, chosen, context))
        _try_fusions(run, [f for f in fusions if runs_under(f.recipes, chosen)])
    refused = _refused(run)
    if strict:
        _raise_refused(refused)
    missed = (*refused, *_nearest(run, refused))
    record = GraphRecord(
        kind,
        before,
        _code(graph) if run.fused else before,
        _in_graph_order(run.fused),
        missed,
        nodes,
        time.perf_counter() - started,
    )
    return Rewritten(record, tuple(run.failures), context.traces)


def _chosen_inside(graph: Graph, recipe: Recipe) -> list[Recipe]:
    """The other recipes that regions of the graph chose."""
    return [r for r in region_recipes(graph) if r is not recipe]


def _try_fusions(run: _Run, fusions: Sequence[Fusion | Windows]) -> None:
    fused, context = len(run.fused), run.context
    for fusion in fusions:
        if (fusion.side == "backward" and not context.has_backward) or not run.holds(fusion.requires):
            continue
        _try_fusion(run, fusion)
    if len(run.fused) > fused:
        compat.sort_graph(context.graph)
        context.graph.eliminate_dead_code()
        context.graph.lint()


def _in_graph_order(fused: Sequence[tuple[int, Fused]]) -> tuple[Fused, ...]:
    return tuple(f for _, f in sorted(fused, key=lambda placed: placed[0]))


def _kind(graph: Graph) -> str:
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    if any(is_backward(n) for n in graph.nodes):
        return "joint"
    return "backward" if any(str(n.target).startswith("tangents") for n in placeholders) else "inference"


def _mark_backward(graph: Graph) -> None:
    """Tag what depends on a tangent: the backward of a custom autograd function may come without the partitioner's tag."""
    if not any(is_backward(n) for n in graph.nodes):
        return
    for node in graph.nodes:
        if node.op == "call_function" and not is_backward(node) and any(is_backward(n) for n in node.all_input_nodes):
            node.meta["partitioner_tag"] = "is_backward"


def _code(graph: Graph) -> str:
    return graph.python_code("self", verbose=True).src


def _index(context: Context) -> dict[str, list[Node]]:
    """Candidate roots by the operator of their value, last first."""
    by_head: dict[str, list[Node]] = {}
    for node in reversed(context.graph.nodes):
        if node.op == "call_function" and is_tensor(node) and node.target not in COPIES:
            by_head.setdefault(context.table.head(context.table.class_of[node]), []).append(node)
    return by_head


def _try_fusion(run: _Run, fusion: Fusion | Windows) -> None:
    context = run.context
    if isinstance(fusion, Windows):
        _try_windows(run, fusion)
        return
    try:
        for skeleton in skeletons(fusion, context.decompositions, context.table.strict):
            for node in run.by_head.get(skeleton.head, ()):
                if _is_free(context, node) and is_backward(node) == (fusion.side == "backward"):
                    _try_root(run, fusion, node, skeleton)
            if not run.holds(fusion.requires):
                return  # what is left of the graph is not worth tracing another form
    except BrokenGraph:
        raise
    except Exception as error:
        _failed(run, fusion, error)


def _try_windows(run: _Run, windows: Windows) -> None:
    roots = [n for nodes in run.by_head.values() for n in nodes]
    try:
        for root, guess in windows.guesses(run.context, sorted(roots, reverse=True)):
            faults.point("match")
            refusal = _attempt(run, guess)
            if refusal is not None:
                run.missed[(windows.name, root)] = _refusal(run, windows.name, root, windows.cls.window, refusal)
    except BrokenGraph:
        raise
    except Exception as error:
        _failed(run, windows, error)


def _is_free(context: Context, node: Node) -> bool:
    return not node._erased and node not in context.consumed and DONE not in node.meta and context.is_for(node)


def _failed(run: _Run, fusion: Fusion | Windows, error: Exception) -> None:
    if run.strict:
        raise error
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    run.failures.append(Failure("match", fusion.name, text))
    log.debug("fusion %s failed", fusion.name, exc_info=error)
    warn_once(
        f"fusion {fusion.name!r} ({fusion.source}) failed while matching and was left out: {text}; "
        "options={'strict': True} raises instead",
        cause=f"match:{fusion.name}",
    )


def _try_root(run: _Run, fusion: Fusion, root: Node, skeleton: Skeleton) -> None:
    faults.point("match")
    context = run.context
    finder = Finder(skeleton, context.table)
    refusal: Refusal | None = None
    for binding in itertools.islice(finder.bindings(context.table.class_of[root]), MAX_BINDINGS):
        scalars = tuple(binding[("scalar", i)] for i in range(sum(h.scalar for h in fusion.holes)) if ("scalar", i) in binding)
        if len(scalars) != sum(h.scalar for h in fusion.holes):
            continue
        classes = [None if c is None else binding.get(c) for c in skeleton.holes]
        if any(c is None and s is not None for c, s in zip(classes, skeleton.holes, strict=True)):
            refusal = Refusal("an argument of the pattern does not reach its first output", root)
            continue
        outcome = _attempt(run, Guess(fusion, root, classes, scalars))
        if outcome is None:
            run.missed.pop((fusion.name, root), None)
            return
        if refusal is None or refusal.untried:  # the first guess is the best one
            refusal = outcome
    if refusal is not None:
        run.missed[(fusion.name, root)] = _refusal(run, fusion.name, root, skeleton.size, refusal)
    elif (fusion.name, root) not in run.missed:
        _remember_nearest(run, fusion, root, finder.mismatch())


def _attempt(run: _Run, guess: Guess) -> Refusal | None:
    region = prove(run.context, guess)
    if isinstance(region, Refusal):
        return region
    names = _names(region)
    spliced = splice(run.context, region, len(run.fused))
    if isinstance(spliced, Refusal):
        return spliced
    run.fused.append((run.order[region.root], _fused(run, region, names, spliced)))
    replaced = region.forward | region.backward
    run.taken.update(dict.fromkeys(replaced, (region.fusion.name, len(replaced))))
    return None


def _names(region: Region) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Node and operator names, read before the nodes are erased."""
    gradient_nodes = {n for row in region.gradients for n in row}
    replaced = sorted(n for n in region.forward | region.backward if n in region.gone or n in gradient_nodes or n in region.roots)
    forward = [n for n in replaced if not is_backward(n)]
    backward = [n for n in replaced if is_backward(n)]
    directions = tuple(d for d, nodes in (("forward", forward), ("backward", backward)) if nodes)
    return tuple(n.name for n in replaced), operator_names(forward) + operator_names(backward), directions


def _fused(run: _Run, region: Region, names: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], spliced: Spliced) -> Fused:
    nodes, operators, directions = names
    root = region.root
    return Fused(
        region.fusion.name,
        run.kind,
        directions,
        operators,
        source_line(root),
        layer_path(root),
        tuple(n.name for n in spliced.saved),
        "custom",
        nodes,
        tuple(n.name for n in spliced.inserted),
    )


# ------------------------------------------------------------------------------------------------ near misses


def _refusal(run: _Run, name: str, root: Node, size: int, refusal: Refusal) -> Missed:
    """Every value was found and still the place is left alone: always reported."""
    source, reason = source_line(refusal.node) or source_line(root), refusal.reason
    if DONE in refusal.node.meta:
        reason = f"part of it was fused before{TAKEN}{run.fused[refusal.node.meta[DONE]][1].name}"
    return Missed(name, size, size, reason, refusal.node.name, source, layer_path(root), run.kind)


def _remember_nearest(run: _Run, fusion: Fusion, root: Node, mismatch: Mismatch) -> None:
    members = run.context.table.members.get(mismatch.model_class, ()) if mismatch.model_class is not None else ()
    node = next((n for n in members if not n._erased), root)
    missed = Missed(
        fusion.name, mismatch.matched, mismatch.total, mismatch.reason, root.name, source_line(node), layer_path(root), run.kind
    )
    known = run.nearest.get(family(fusion.name))
    if known is None or missed.progress > known[0].progress:
        run.nearest[family(fusion.name)] = (missed, root)


def _refused(run: _Run) -> list[Missed]:
    """Every place where a whole pattern was found and left alone."""
    return [_with_taker(run, m, root) for (name, root), m in run.missed.items() if not _taken_by_kin(run, name, root)]


def _nearest(run: _Run, refused: Sequence[Missed]) -> list[Missed]:
    """The nearest miss of each fusion that came to nothing."""
    fired = {family(f.name) for _, f in run.fused} | {family(m.name) for m in refused}
    return [m for name, (m, root) in run.nearest.items() if name not in fired and _is_news(run, m, root)]


def _taken_by_kin(run: _Run, name: str, root: Node) -> bool:
    """Whether another form of the same family took the place."""
    return root in run.taken and family(run.taken[root][0]) == family(name)


def _is_news(run: _Run, missed: Missed, root: Node) -> bool:
    """Whether the place is still there, or went to a fusion of less than what was found of this one."""
    return root not in run.taken if _is_free(run.context, root) else root in run.taken and run.taken[root][1] < missed.matched


def _with_taker(run: _Run, missed: Missed, root: Node) -> Missed:
    """Say so when another fusion took the place afterwards."""
    taker = run.taken.get(root)
    return missed if taker is None else dataclasses.replace(missed, reason=f"{missed.reason}{TAKEN}{taker[0]}")


def _raise_refused(missed: Sequence[Missed]) -> None:
    refused = [m for m in missed if TAKEN not in m.reason]
    if refused:
        lines = [f"  {m.name}: {m.reason} at {m.source or m.node}" for m in refused]
        raise FusionCountError(f"fusion {refused[0].name!r} was refused: {refused[0].reason}; all refusals:\n" + "\n".join(lines))


def check_expectation(records: Sequence[GraphRecord], expected: Mapping[str, int], failures: Sequence[Failure]) -> None:
    """Raise FusionCountError where a fusion did not fire as often as expected."""
    for name, count in expected.items():
        fired = sum(is_called(f.name, name) for r in records for f in r.fused)
        if fired != count:
            reasons = [f"  {m.name}: {m.reason} at {m.source}" for r in records for m in r.missed if is_called(m.name, name)]
            reasons += [f"  {f.name}: {f.error}" for f in failures if is_called(f.name, name)]
            raise FusionCountError(
                f"fusion {name!r} fired {fired} times, expected {count}"
                + ("; refused:\n" + "\n".join(reasons) if reasons else "")
            )
