"""The only file that talks to AOTAutograd and Inductor: capture a Dynamo graph, rewrite it, lower it, compile it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from . import amax, choose, compat, deferred, faults
from .errors import LoweringError, RecipeError, warn_once
from .fusion import Fusion
from .ops.define import MATERIALIZED, watcher
from .recipe import Recipe, region_of, region_recipe, region_recipes
from .region import DONE, graphs_of, is_backward
from .report import Failure, Report
from .rewrite import rewrite
from .settings import OUR_PASS, Settings
from .spellings import is_mutating
from .values import value
from .versions import source_hash
from .window import Windows

Compiled = Callable[..., Any]


@dataclasses.dataclass
class Traits:
    """What the owner of a plan must know of it, and be told."""

    code: str = ""
    """Structural hash of the graph, the same with gradients and without."""
    opaque: bool = False
    """Operators of a replacement that are not torch's own may raise as they run."""
    mutates: bool = False
    """Inductor may write to the graph's inputs before the graph has ended: it cannot be run again from the start."""
    saved: int | None = None
    """Bytes that the forward keeps for the backward, inputs and parameters left out; dynamic sizes as they were captured."""
    broken: Callable[[], None] = lambda: None
    """Called when a fused backward raised as it ran: the plan must not run again."""


def capture(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    fusions: Sequence[Fusion | Windows],
    recipe: Recipe,
    report: Report,
    traits: Traits | None = None,
) -> Compiled:
    """Compile a graph that Dynamo captured.

    Args:
        gm: the Dynamo graph; it is left as it is.
        example_inputs: Dynamo's (fake) example inputs.
        settings: the checked options.
        fusions: what to look for, in order.
        recipe: part of the plan's key; its numerics decide what may be fused.
        report: appended to.
        traits: filled in with what the plan's owner must know.
    """
    traits = traits or Traits()
    patches = dict(settings.inductor)
    gm, recipes = copy.deepcopy(gm), [recipe, *region_recipes(*graphs_of(gm))]
    if any(r.numerics == "strict" for r in recipes):
        patches["emulate_precision_casts"] = True
    delayed, keeper = amax.wanted(recipes) if fusions else None, None
    if delayed is not None:
        if patches.get("triton.cudagraphs"):
            raise RecipeError(f"{delayed!r} does not work with CUDA graphs: they copy its history, and what a step adds is lost")
        keeper = amax.Keeper(gm, example_inputs, delayed, traits.code)
        example_inputs = [*example_inputs, keeper.fake]
    # Inductor's own random numbers exist in its kernels only.
    table = deferred.capture_table({**patches, "fallback_random": True} if settings.lower == "eager" else patches)

    def transform(graph: Graph) -> None:
        rewritten = rewrite(graph, fusions, table, recipe, strict=settings.strict)
        traits.mutates |= settings.lower != "eager" and any(is_mutating(n) for n in graph.nodes)
        record, failures = choose.lower(graph, rewritten, settings, recipe)
        report.graphs.append(record)
        report.failures += failures
        if keeper is not None:
            keeper.bind(graph)
        if settings.lower != "eager":  # torch runs deferred operators as they are
            deferred.expand_deferred(graph, rewritten.traces)
            if patches.get("emulate_precision_casts") and compat.drops_roundings():
                _keep_roundings(graph)
        _recompute(graph, recipe)
        compat.sort_graph(graph)
        graph.lint()
        for user_pass in settings.user_passes:
            user_pass(graph)

    compile_graph = functools.partial(_compile_graph, settings=settings, report=report, traits=traits)
    if settings.lower == "eager":
        compiled = compat.aot_eager(gm, example_inputs, transform, compile_graph, table)
    else:
        compat.lower_by_realizing(MATERIALIZED)
        patches[OUR_PASS] = compat.graph_pass(transform, _uuid(settings, fusions, recipe))
        compiled = compat.compile_fx(gm, example_inputs, compile_graph, patches, table)
    return compiled if keeper is None else keeper.run(compiled)


def _keep_roundings(graph: Graph) -> None:
    """Have what is rounded pass through memory: Inductor would go on with what it was before, where users widen it again."""
    cast = torch.ops.prims.convert_element_type.default
    for node in list(graph.find_nodes(op="call_function", target=cast)):
        wide, narrow = value(node.args[0]).dtype, value(node).dtype
        if wide.is_floating_point and narrow.is_floating_point and narrow.itemsize < wide.itemsize:
            with graph.inserting_after(node):
                kept = graph.create_node("call_function", MATERIALIZED, (node,))
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)


def _recompute(graph: Graph, recipe: Recipe) -> None:
    """Keep in the backward what a fused backward computes again: the partitioner would rather keep eight bits than sixteen."""
    for node in graph.nodes:
        if DONE in node.meta and is_backward(node):
            key = region_of(node)
            if (recipe if key is None else region_recipe(key)).activation_memory == "recompute":
                node.meta["partitioner_tag"] = "must_be_in_backward"


def _uuid(settings: Settings, fusions: Sequence[Fusion | Windows], recipe: Recipe) -> Any:
    """What Inductor's cache keys know of our pass; None (no caching) when a user's pass has no identity."""
    users = [p.uuid() if hasattr(p, "uuid") else None for p in settings.user_passes]
    if any(u is None for u in users):
        return None
    identities = [f.identity for f in fusions]
    return repr((source_hash(), identities, recipe, settings.lower, settings.autotune, sorted(deferred.DEFERRED_NAMES), users))


def _compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    settings: Settings,
    report: Report,
    traits: Traits,
    **kwargs: Any,
) -> Compiled:
    """Compile one forward or backward graph; a backward that fails later than its forward must still run."""
    backward = bool(kwargs.get("is_backward"))
    if not backward and any(g.kind == "joint" for g in report.graphs):
        kept = compat.saved_for_backward(gm)
        traits.saved = None if kept is None else sum(compat.size_hint(t.numel()) * t.element_size() for t in kept)
    if not _has_fused(gm):
        return _compiled(gm, example_inputs, settings, kwargs)
    opaque = _has_opaque(gm)
    traits.opaque |= opaque
    unfused = copy.deepcopy(gm) if backward else gm
    try:
        faults.point("backward" if backward else "compile")
        run = _compiled(gm, example_inputs, settings, kwargs)
    except Exception as error:
        if not backward or settings.strict or compat.is_control_flow(error):
            raise
        _record(report, "backward", error)
        warn_once(
            f"compiling the fused backward failed, torch runs it instead: {_text(error)}; options={{'strict': True}} raises"
        )
        return compat.boxed(unfused.forward)
    return _watched(run, settings, report, traits.broken if backward else None) if opaque else run


def _watched(run: Compiled, settings: Settings, report: Report, broken: Callable[[], None] | None) -> Compiled:
    """``run`` of a graph with opaque operators: what goes wrong in it is recorded with the plan that it belongs to."""

    def launch_failed(op: str, text: str) -> None:
        if settings.strict:
            raise LoweringError(f"fxfuse::{op} failed to launch: {text}")
        report.failures.append(Failure("launch", op, text))

    def call(args: list[Any]) -> Any:
        token = watcher.set(launch_failed)
        try:
            return run(args)
        except Exception as error:
            if broken is not None and not settings.strict and not compat.is_control_flow(error):
                _record(report, "launch", error)
                warn_once(f"a fused backward raised and its graph runs unfused from the next call on: {_text(error)}")
                broken()
            raise
        finally:
            watcher.reset(token)

    return compat.as_boxed(call)


def _record(report: Report, stage: str, error: Exception) -> None:
    report.failures.append(Failure(stage, "", _text(error)))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _compiled(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, kwargs: dict[str, Any]) -> Compiled:
    if settings.lower == "eager":
        return compat.boxed(gm.forward)
    return compat.compile_fx_inner(gm, example_inputs, **kwargs)


def _has_opaque(gm: GraphModule) -> bool:
    """Whether an operator of a replacement is neither torch's own nor layout: it may raise when it runs."""
    targets = {n.target for n in gm.graph.nodes if DONE in n.meta and isinstance(n.target, torch._ops.OpOverload)}
    return any(t.namespace not in ("aten", "prims") for t in targets)


def _has_fused(gm: GraphModule) -> bool:
    return any(DONE in node.meta for node in gm.graph.nodes)
