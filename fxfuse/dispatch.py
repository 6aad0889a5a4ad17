"""At run time: the active recipe and the set of fusions decide which plan of a captured graph runs.

Dynamo guards on neither, so a switch never recompiles a frame. The first plan is built inside Dynamo's backend call; later
ones under guards of their own, since by then Dynamo's are frozen.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import compat, recipe, registry, trace
from .capture import capture
from .errors import warn_once
from .ops.define import on_launch_failure
from .plan import Plan, PlanInfo, PlanKey, ambient, counters, numerics_flags, structural_hash, versions
from .report import Failure, Report
from .settings import Settings

_live: weakref.WeakSet[Dispatch] = weakref.WeakSet()
_reports: list[Report] = []
MAX_REPORTS = 64


class Dispatch:
    """Every plan of one captured graph."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> None:
        self.gm, self.example_inputs, self.settings = gm, list(example_inputs), settings
        self.context = compat.tracing_context()
        self.mode = compat.fake_mode_of(self.example_inputs)
        self.grad_mode = torch.is_grad_enabled()
        self.ambient = ambient()
        self.hash = structural_hash(gm)
        self.plans: dict[Any, Plan] = {}
        self.lock = threading.RLock()
        self._state: tuple[Any, ...] = ()
        self._current: Plan | None = None
        _live.add(self)
        self._select(late=False)

    def callable(self) -> Callable[..., Any]:
        """What Dynamo calls."""

        def fxfuse_dispatch(*args: Any) -> Any:
            state = self._state
            plan = self._current
            if state is None or plan is None or self._changed(state) or plan.guard is not None:
                plan = self._plan_for(args)
            plan.calls += 1
            return plan.run(*args)

        return fxfuse_dispatch

    # -------------------------------------------------------------------------------------- choosing

    def _changed(self, state: tuple[Any, ...]) -> bool:
        return (
            state[1] is not registry.disabled()
            or state[2] != registry.version()
            or (self.settings.recipe is None and state[0] is not recipe.current_recipe())
        )

    def _plan_for(self, args: Sequence[Any]) -> Plan:
        plan = self._select(late=True)
        if plan.guard is None or plan.guard(args):
            return plan
        return self._unfused_plan(plan.key.recipe)  # built for other sizes than these

    def _select(self, late: bool) -> Plan:
        with self.lock:
            active = self.settings.recipe or recipe.current_recipe()
            state = (active, registry.disabled(), registry.version())
            fusions = registry.active(self.settings.only, self.settings.without)
            name = (active, tuple(f.identity for f in fusions))
            if name not in self.plans:
                self.plans[name] = self._build(active, fusions, late)
            self._current, self._state = self.plans[name], state
            return self.plans[name]

    def _unfused_plan(self, active: recipe.Recipe) -> Plan:
        with self.lock:
            name = (active, None)
            if name not in self.plans:
                self.plans[name] = self._build(active, (), late=True)
            return self.plans[name]

    # -------------------------------------------------------------------------------------- building

    def _build(self, active: recipe.Recipe, fusions: Sequence[Any], late: bool) -> Plan:
        report = Report(recipe=repr(active), graph_hash=self.hash)
        started, known = time.perf_counter(), compat.shape_guards(self.mode)
        with self._surroundings(late):
            run = self._compile(active, fusions, report)
        guard = compat.new_guard_check(self.mode, known, self.example_inputs) if late else None
        key = PlanKey(
            self.hash,
            *self.ambient,
            active,
            tuple(f.identity for f in fusions),
            (self.settings.lower, self.settings.autotune, self.settings.strict, repr(sorted(self.settings.inductor.items(), key=str))),
            numerics_flags(),
            versions(),
        )
        counters.built()
        _remember(report)
        return Plan(key, run, time.perf_counter() - started, len(report.fused), guard)

    def _compile(self, active: recipe.Recipe, fusions: Sequence[Any], report: Report) -> Callable[..., Any]:
        try:
            run = capture(self.gm, self.example_inputs, self.settings, fusions, active, report)
        except Exception as error:
            if not fusions or self.settings.strict or compat.is_control_flow(error) or _is_ours(error):
                raise
            report.graphs.clear()
            run = capture(self.gm, self.example_inputs, self.settings, (), active, report)  # raises what the model raises
            self._fell_back("compile", error, report)
            return run
        return self._guarded(run, active, report) if report.fused and not self.settings.strict else run

    def _guarded(self, run: Callable[..., Any], active: recipe.Recipe, report: Report) -> Callable[..., Any]:
        """Run the unfused plan when the fused one raises; if that raises too, the error is the model's own."""
        failed = False

        def guarded(*args: Any) -> Any:
            nonlocal failed
            if not failed:
                try:
                    return run(*args)
                except Exception as error:
                    if compat.is_control_flow(error):
                        raise
                    result = self._unfused_plan(active).run(*args)
                    failed = True
                    self._fell_back("launch", error, report)
                    return result
            return self._unfused_plan(active).run(*args)

        return guarded

    def _fell_back(self, stage: str, error: Exception, report: Report) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        report.failures.append(Failure(stage, "", text))
        warn_once(f"graph {self.hash} runs unfused, {stage} failed: {text}; options={{'strict': True}} raises instead")

    @contextlib.contextmanager
    def _surroundings(self, late: bool):  # noqa: ANN202
        """A late plan is built in the modes that its graph was captured in."""
        if not late:
            yield
            return
        with contextlib.ExitStack() as stack:
            if self.context is not None:
                stack.enter_context(compat.late_tracing(self.context))
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            yield


def _is_ours(error: Exception) -> bool:
    from .errors import FusionCountError, OptionError, RecipeError

    return isinstance(error, (FusionCountError, OptionError, RecipeError))


def _launch_failed(op: str, error: str) -> None:
    if _reports:
        _reports[-1].failures.append(Failure("launch", op, error))


on_launch_failure.append(_launch_failed)


def _remember(report: Report) -> None:
    _reports.append(report)
    del _reports[:-MAX_REPORTS]
    trace.emit(report)


def last_report() -> Report:
    """The report of the last compile (the latest plan of the last captured graph)."""
    return _reports[-1] if _reports else Report()


def reports() -> list[Report]:
    """The reports of all compiles since the last reset, oldest first (at most 64)."""
    return list(_reports)


def plan_info() -> PlanInfo:
    """Counters and the live plans."""
    plans = [p for d in list(_live) for p in d.plans.values()]
    return PlanInfo(counters.builds, sum(p.hits for p in plans), plans)


def drop_plans() -> None:
    """Forget every plan and report."""
    for dispatch in list(_live):
        with dispatch.lock:
            dispatch.plans.clear()
            dispatch._current = None
    _reports.clear()
    counters.builds = 0
