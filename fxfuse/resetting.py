"""``fxfuse.reset``: forget everything that a process has built up."""

from __future__ import annotations

from . import compat
from .dispatch import drop_plans
from .errors import forget_warnings
from .pattern import TraceCache


def reset() -> None:
    """Drop every plan, trace and report, and let every warning speak again. Registered fusions stay."""
    drop_plans()
    TraceCache.clear()
    forget_warnings()
    compat.reset_cudagraphs()
