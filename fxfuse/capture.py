"""The only file that talks to AOTAutograd and Inductor: capture a Dynamo graph, rewrite it, lower it, compile it."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.fx import Graph, GraphModule

from . import choose, compat, deferred, faults
from .errors import warn_once
from .fusion import Fusion
from .recipe import Recipe
from .region import DONE
from .report import Failure, Report
from .rewrite import check_expectation, rewrite
from .settings import OUR_PASS, Settings
from .window import Windows

Compiled = Callable[..., Any]


@functools.cache
def source_hash() -> str:
    """A hash of fxfuse's own sources: what the passes do is part of every cache key."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def capture(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    fusions: Sequence[Fusion | Windows],
    recipe: Recipe,
    report: Report,
) -> Compiled:
    """Compile a graph that Dynamo captured.

    Args:
        gm: the Dynamo graph; it is left as it is.
        example_inputs: Dynamo's (fake) example inputs.
        settings: the checked options.
        fusions: what to look for, in order.
        recipe: part of the plan's key; its numerics decide what may be fused.
        report: appended to.
    """
    patches = dict(settings.inductor)
    if recipe.numerics == "strict":
        patches["emulate_precision_casts"] = True
    # Inductor's own random numbers exist in its kernels only.
    table = deferred.capture_table({**patches, "fallback_random": True} if settings.lower == "eager" else patches)

    def transform(graph: Graph) -> None:
        rewritten = rewrite(graph, fusions, table, recipe, strict=settings.strict)
        record, failures = choose.lower(graph, rewritten, settings, recipe)
        report.graphs.append(record)
        report.failures += failures
        if settings.lower != "eager":  # torch runs deferred operators as they are
            deferred.expand_deferred(graph, rewritten.traces)
        compat.sort_graph(graph)
        graph.lint()
        for user_pass in settings.user_passes:
            user_pass(graph)

    compile_graph = functools.partial(_compile_graph, settings=settings, report=report)
    if settings.lower == "eager":
        compiled = compat.aot_eager(copy.deepcopy(gm), example_inputs, transform, compile_graph, table)
    else:
        patches[OUR_PASS] = compat.graph_pass(transform, _uuid(settings, fusions, recipe))
        compiled = compat.compile_fx(copy.deepcopy(gm), example_inputs, compile_graph, patches, table)
    if settings.expect is not None:
        check_expectation(report.graphs, dict(settings.expect), report.failures)
    return compiled


def _uuid(settings: Settings, fusions: Sequence[Fusion | Windows], recipe: Recipe) -> Any:
    """What Inductor's cache keys know of our pass; None (no caching) when a user's pass has no identity."""
    users = [p.uuid() if hasattr(p, "uuid") else None for p in settings.user_passes]
    if any(u is None for u in users):
        return None
    identities = [f.identity for f in fusions]
    return repr((source_hash(), identities, recipe, settings.lower, settings.autotune, sorted(deferred.DEFERRED_NAMES), users))


def _compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], *, settings: Settings, report: Report, **kwargs: Any
) -> Compiled:
    """Compile one forward or backward graph; a backward that fails later than its forward must still run."""
    backward = bool(kwargs.get("is_backward"))
    if not backward or not _has_fused(gm):
        faults.point("backward" if backward else "compile")
        return _compiled(gm, example_inputs, settings, kwargs)
    unfused = copy.deepcopy(gm)
    try:
        faults.point("backward")
        return _compiled(gm, example_inputs, settings, kwargs)
    except Exception as error:
        if settings.strict or compat.is_control_flow(error):
            raise
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        report.failures.append(Failure("backward", "", text))
        warn_once(f"compiling the fused backward failed, torch runs it instead: {text}; options={{'strict': True}} raises")
        return compat.boxed(unfused.forward)


def _compiled(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, kwargs: dict[str, Any]) -> Compiled:
    if settings.lower == "eager":
        return compat.boxed(gm.forward)
    return compat.compile_fx_inner(gm, example_inputs, **kwargs)


def _has_fused(gm: GraphModule) -> bool:
    return any(DONE in node.meta for node in gm.graph.nodes)
