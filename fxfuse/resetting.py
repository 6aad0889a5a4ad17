"""``fxfuse.reset``: forget everything that a process has built up."""

from __future__ import annotations

from . import amax, compat, measure
from .dispatch import drop_plans
from .errors import forget_warnings
from .kernels import plans
from .ops.define import forget_failed_launches
from .pattern import TraceCache


def reset() -> None:
    """Drop every plan, trace, report, amax history and winner in memory, let every warning speak and every kernel be tried again.

    Registered fusions stay, and so do winners on disk.
    """
    drop_plans()
    amax.forget()
    measure.forget()
    TraceCache.clear()
    forget_warnings()
    forget_failed_launches()
    plans.forget()
    compat.reset_cudagraphs()
