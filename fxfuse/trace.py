"""Where a Report is logged: ``TORCH_LOGS="fxfuse"`` and ``"+fxfuse"``, and the artifacts of ``TORCH_TRACE``. The only emitter."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

from .compat import trace_artifact
from .display import NEAR, plain
from .report import Failure, GraphRecord, Missed, Report

# torch accepts the name of an importable module in TORCH_LOGS without registration, and no other name.
_log = logging.getLogger("fxfuse")


def emit(report: Report) -> None:
    """Log one line per graph (INFO) and per near miss (DEBUG), and hand tlparse the report and the code; lazily."""
    if _log.isEnabledFor(logging.INFO):
        for graph in report.graphs:
            _log.info("%s", graph_line(graph))
            for miss in graph.missed:
                _log.debug("%s", miss_line(miss))
        for failure in report.failures:
            _log.info("%s", failure_line(failure))
    trace_artifact("fxfuse_report", "json", report.to_json)
    trace_artifact("fxfuse_before", "string", lambda: "\n\n".join(g.before for g in report.graphs))
    trace_artifact("fxfuse_after", "string", lambda: "\n\n".join(g.after for g in report.graphs))


def graph_line(graph: GraphRecord) -> str:
    """``joint: fused linear_gelu x4; missed dgrad_add x2 (report.why_not('dgrad_add')); 181 nodes, 4.2 ms``."""
    parts = [f"fused {_counts(f.name for f in graph.fused)}" if graph.fused else "nothing fused"]
    if near := [m for m in graph.missed if m.progress >= NEAR]:
        best = max(near, key=lambda m: m.progress)
        parts.append(f"missed {_counts(m.name for m in near)} (report.why_not({plain(best.name)!r}))")
    parts.append(f"{graph.nodes} nodes, {1e3 * graph.seconds:.1f} ms")
    return f"{plain(graph.kind)}: {'; '.join(parts)}"


def miss_line(m: Missed) -> str:
    """``missed linear_gelu 3/4 at gelu_9 (layers.4.mlp): reason [net.py:31 ...]``."""
    layer = f" ({plain(m.layer)})" if m.layer else ""
    return f"missed {plain(m.name)} {m.matched}/{m.total} at {plain(m.node)}{layer}: {plain(m.reason)} [{plain(m.source)}]"


def failure_line(f: Failure) -> str:
    """``failed in launch, runs unfused: linear_gelu: error``."""
    return f"failed in {plain(f.stage)}, runs unfused: {plain(f.name) or 'whole graph'}: {plain(f.error)}"


def _counts(names: Iterable[str]) -> str:
    return ", ".join(f"{plain(name)} x{n}" for name, n in Counter(names).items())
