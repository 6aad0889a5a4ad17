"""Which lowering each fused operator gets.

Every operator can be inlined: expanded to its reference, which Inductor compiles. An operator may offer other candidates; one
is taken where it is legal and measured faster. On a CPU the choice is ``inline``, so that a fused CPU run costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, Node

from . import compat, deferred, faults
from .errors import LoweringError, warn_once
from .ops.define import OPS, Candidate, FusedOp
from .recipe import Recipe
from .report import Failure, Fused, GraphRecord
from .rewrite import Rewritten
from .settings import Settings
from .spellings import arguments
from .values import is_tensor, value

INLINE = "inline"
EAGER = "reference"


def lower(graph: Graph, rewritten: Rewritten, settings: Settings, recipe: Recipe) -> tuple[GraphRecord, list[Failure]]:
    """Lower every fused operator of a rewritten graph; the record says which way."""
    failures = list(rewritten.failures)
    chosen: dict[str, str] = {}
    told: dict[str, str] = {}
    expansions: dict[Any, Any] = {}
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in OPS]:
        if settings.lower == "eager":
            chosen[node.name] = EAGER
            continue
        candidate, how = _chosen(node, OPS[node.target], settings, recipe, failures)
        chosen[node.name] = candidate.name
        if how:
            told[node.name] = f"{node.target.overloadpacket.__name__}: {how}"
        expansions[node] = candidate.function
    stock = compat.decompositions() if expansions else {}
    for node, function in expansions.items():
        deferred.expand(graph, node, {**stock, node.target: function}, rewritten.traces, chosen[node.name])
    record = rewritten.record
    fused = tuple(_with_kernel(f, chosen, told) for f in record.fused)
    return dataclasses.replace(record, fused=fused), failures


def _with_kernel(fused: Fused, chosen: dict[str, str], told: dict[str, str]) -> Fused:
    """A region's kernel: of its operators' lowerings the most specific; ``custom`` where the operators are a user's."""
    names = {chosen[n] for n in fused.after if n in chosen}
    special = sorted(names - {INLINE, EAGER}) or sorted(names)
    choices = tuple(told[n] for n in fused.after if n in told)
    return dataclasses.replace(fused, kernel=special[0], choices=choices) if special else fused


def _chosen(node: Node, op: FusedOp, settings: Settings, recipe: Recipe, failures: list[Failure]) -> tuple[Candidate, str]:
    """A candidate, and how it was chosen: empty where there was no choice."""
    inline = Candidate(INLINE, lambda **_: None, op.reference)
    try:
        faults.point("lower")
        usable, refused = _legal(node, op, settings)
        candidate, how = _fastest(node, [inline, *usable], settings, recipe) if usable else (inline, INLINE if refused else "")
        return candidate, "; ".join([how, *refused] if how else [])
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        if settings.strict:
            raise LoweringError(f"{op.overload}: choosing a lowering failed: {text}") from error
        failures.append(Failure("lower", str(op.overload), text))
        warn_once(f"choosing a lowering of {op.overload} failed, it is inlined: {text}; options={{'strict': True}} raises")
        return inline, f"{INLINE}; choosing failed: {text}"


def _legal(node: Node, op: FusedOp, settings: Settings) -> tuple[list[Candidate], list[str]]:
    """Which candidates may run, and why the others may not."""
    if settings.autotune == "off" or not _on_gpu(node):
        return [], []
    named = {name: value(a) if isinstance(a, Node) else a for name, a in arguments(node)}
    reasons = {c: c.refuses(**named) for c in op.candidates}
    usable = [c for c, reason in reasons.items() if reason is None]
    return usable, [f"not {c.name}: {reason}" for c, reason in reasons.items() if reason is not None]


def _on_gpu(node: Node) -> bool:
    return any(is_tensor(n) and value(n).device.type == "cuda" for n in node.all_input_nodes)


def _fastest(node: Node, candidates: Sequence[Candidate], settings: Settings, recipe: Recipe) -> tuple[Candidate, str]:
    from .measure import fastest

    return fastest(node, candidates, settings, recipe)
