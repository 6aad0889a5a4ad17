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
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from . import changes, compat, recipe, registry, shadow, trace
from .capture import Traits, capture
from .errors import FusionCountError, FxfuseWarning, LoweringError, OptionError, RecipeError, warn_once
from .plan import Plan, PlanInfo, PlanKey, ambient, counters, structural_hash
from .report import Failure, Report
from .rewrite import check_expectation
from .settings import Settings
from .versions import numerics_flags, versions

_live: weakref.WeakSet[Dispatch] = weakref.WeakSet()
_codes: weakref.WeakValueDictionary[str, _Code] = weakref.WeakValueDictionary()
"""By structural hash without gradients."""
_reports: list[Report] = []
MAX_REPORTS = 64


class _Now(NamedTuple):
    """The plan that runs as long as nothing has been switched; ``plan`` is None when the long way must be taken."""

    plan: Plan | None
    active: recipe.Recipe | None
    disabled: frozenset[str] | None
    version: int
    chosen: recipe.Recipe | None


class _Code:
    """What the captures of one piece of code share: with gradients and without, as checkpointing runs it."""

    def __init__(self, name: str) -> None:
        self.hash = name
        self.recipe: recipe.Recipe | None = None
        """Of the latest call of any of them."""


NOTHING = _Now(None, None, None, -1, None)
PASSED_ON = (FusionCountError, OptionError, RecipeError, FxfuseWarning)
"""Raised on purpose (a warning where warnings are errors): not a failure to recover from."""


class Dispatch:
    """Every plan of one captured graph."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> None:
        self.gm, self.example_inputs, self.settings = gm, compat.fake_inputs(example_inputs), settings
        self.context = compat.tracing_context()
        self.mode = compat.fake_mode_of(self.example_inputs)
        self.grad_mode = torch.is_grad_enabled()
        self.ambient = ambient()
        self.hash = structural_hash(gm)
        code = structural_hash(gm, gradients=False)
        self.code = _codes.setdefault(code, _Code(code))
        self.plans: dict[Any, Plan] = {}
        self.lock = threading.Lock()  # of ``now``; builds take Dynamo's
        self.now = NOTHING
        self.known: dict[Any, _Now] = {}
        """What was chosen for each state of the switches, since fusions last came or went."""
        _live.add(self)
        self._select(late=False)

    def callable(self) -> Callable[..., Any]:
        """What Dynamo calls. The checks cost less than a microsecond: four reads and four comparisons."""
        active, disabled, version, code = recipe.active.get, registry.disabled.get, changes.version, self.code

        def fxfuse_dispatch(*args: Any) -> Any:
            now = self.now
            plan = now.plan
            if (
                plan is None
                or now.active is not active()
                or now.disabled is not disabled()
                or now.version != version.number
                or now.chosen is not code.recipe
            ):
                plan = self._plan_for(args)
            plan.calls += 1
            try:
                if plan.unverified:
                    self._verify(plan, args)
                return plan.run(*args)
            except Exception as error:
                return self._recover(plan, error, args)

        return fxfuse_dispatch

    # -------------------------------------------------------------------------------------- choosing

    def _plan_for(self, args: Sequence[Any]) -> Plan:
        with self.lock:
            known = self.known.get((recipe.active.get(), registry.disabled.get(), changes.version.number))
            if known is not None:
                self.now = known
        if known is not None and known.plan is not None:
            self._note(known.plan.key.recipe)
            return known.plan
        plan = self._select(late=True)
        if plan.broken or not (plan.guard is None or plan.guard(args)):  # guard: built for other sizes than these
            return self._unfused_plan(plan.key.recipe)
        return plan

    def _select(self, late: bool) -> Plan:
        asked = recipe.active.get(), registry.disabled.get(), changes.version.number
        chosen = self.settings.recipe or recipe.current_recipe()
        self._note(chosen)
        fusions = registry.active(self.settings.only, self.settings.without)
        plan = self._once((chosen, tuple(f.identity for f in fusions)), chosen, fusions, late)
        with self.lock:
            if self.now.version != asked[2]:
                self.known.clear()
            self.now = _Now(plan if plan.guard is None and not plan.broken else None, *asked, chosen)
            self.known[asked] = self.now
        return plan

    def _note(self, chosen: recipe.Recipe) -> None:
        """Warn where a forward is recomputed with another recipe than it was run with."""
        before, self.code.recipe = self.code.recipe, chosen
        if before is not None and before is not chosen and not recipe.carried.get() and compat.in_backward():
            warn_once(
                f"graph {self.hash} is recomputed in the backward with {chosen!r}, its forward ran with {before!r}: use_recipe "
                "had ended; pass context_fn=fxfuse.checkpoint_context to checkpoint, or pin options={'recipe': ...}",
                cause=f"recomputed:{self.hash}",
            )

    def _unfused_plan(self, chosen: recipe.Recipe) -> Plan:
        return self._once((chosen, None), chosen, (), late=True, told=False)

    def _once(self, name: Any, chosen: recipe.Recipe, fusions: Sequence[Any], late: bool, told: bool = True) -> Plan:
        """The plan of this name, built by the first thread that asks. A thread whose plan is there never waits for a build."""
        plan = self.plans.get(name)
        if plan is None:
            with compat.compiling():
                plan = self.plans.get(name)
                if plan is None:
                    plan = self.plans[name] = self._build(chosen, fusions, late, told)
        return plan

    def _recover(self, plan: Plan, error: Exception, args: Sequence[Any]) -> Any:
        """Run unfused where the fused plan raised; if that raises too, the error is the model's own."""
        fine = self.settings.strict or not plan.report.fused or isinstance(error, PASSED_ON)
        if fine or compat.is_control_flow(error):
            raise error
        if plan.traits.mutates and not plan.traits.opaque:
            raise error  # no operator of ours is in it
        if plan.traits.mutates:
            self._break(plan)
            _fell_back("launch", self.hash, error, plan.report)
            raise LoweringError(
                f"graph {self.hash} failed to launch and cannot be run again, it may have changed its inputs already: "
                f"{type(error).__name__}: {error}; it runs unfused from the next call on"
            ) from error
        result = self._unfused_plan(plan.key.recipe).run(*args)
        self._break(plan)
        _fell_back("launch", self.hash, error, plan.report)
        return result

    def _break(self, plan: Plan) -> None:
        """Never run a plan again."""
        with self.lock:
            plan.broken = True
            self.known.clear()
            self.now = NOTHING

    def _verify(self, plan: Plan, args: Sequence[Any]) -> None:
        """Compare the plan with its unfused form, and run that from now on where they differ."""
        plan.unverified = self.settings.verify == "always"
        unfused = self._unfused_plan(plan.key.recipe)
        wrong = shadow.difference(plan.run, unfused.run, args, self.grad_mode)
        if wrong is None:
            return
        names = ", ".join(sorted({f.name for f in plan.report.fused}))
        if self.settings.strict:
            raise LoweringError(f"graph {self.hash} with {names} differs from its unfused form: {wrong}")
        plan.run = unfused.run  # this call too
        self._break(plan)
        plan.report.failures.append(Failure("verify", names, wrong))
        warn_once(f"graph {self.hash} with {names} differs from its unfused form and runs unfused from now on: {wrong}")

    # -------------------------------------------------------------------------------------- building

    def _build(self, active: recipe.Recipe, fusions: Sequence[Any], late: bool, told: bool = True) -> Plan:
        report, traits = Report(recipe=repr(active), graph_hash=self.hash), Traits(self.code.hash)
        started, known = time.perf_counter(), compat.shape_guards(self.mode)
        with self._surroundings(late):
            run = self._compile(active, fusions, report, traits)
        if fusions and self.settings.expect is not None:
            check_expectation(report.graphs, self.settings.expect, report.failures)
        guard = compat.new_guard_check(self.mode, known, self.example_inputs) if late else None
        key = PlanKey(
            self.hash,
            *self.ambient,
            active,
            tuple(f.identity for f in fusions),
            (
                self.settings.lower,
                self.settings.autotune,
                self.settings.strict,
                repr(sorted(self.settings.inductor.items(), key=str)),
            ),
            numerics_flags(),
            versions(),
        )
        counters.built()
        if told:  # the unfused form of a plan is nobody's report
            _remember(report)
        unverified = self.settings.verify != "off" and bool(report.fused)
        mask = tuple(t.requires_grad for t in self.example_inputs if isinstance(t, torch.Tensor))
        return Plan(key, run, time.perf_counter() - started, report, guard, unverified, traits, mask)

    def _compile(self, active: recipe.Recipe, fusions: Sequence[Any], report: Report, traits: Traits) -> Callable[..., Any]:
        def broken() -> None:
            for plan in [p for p in self.plans.values() if p.report is report]:
                self._break(plan)

        traits.broken = broken
        try:
            return capture(self.gm, self.example_inputs, self.settings, fusions, active, report, traits)
        except Exception as error:
            fine = not fusions or self.settings.strict or isinstance(error, PASSED_ON)
            if fine or compat.is_control_flow(error):
                raise
            report.graphs.clear()
            run = capture(self.gm, self.example_inputs, self.settings, (), active, report)  # raises what the model raises
            _fell_back("compile", self.hash, error, report)
            return run

    @contextlib.contextmanager
    def _surroundings(self, late: bool):
        """A late plan is built in the modes that its graph was captured in."""
        if not late:
            yield
            return
        with contextlib.ExitStack() as stack:
            if self.context is not None:
                stack.enter_context(compat.late_tracing(self.context))
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            yield


def _fell_back(stage: str, graph: str, error: Exception, report: Report) -> None:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    report.failures.append(Failure(stage, "", text))
    warn_once(f"graph {graph} runs unfused, {stage} failed: {text}; options={{'strict': True}} raises instead")


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
    plans = [p for d in list(_live) for p in list(d.plans.values())]
    return PlanInfo(counters.builds, sum(p.hits for p in plans), plans)


def drop_plans() -> None:
    """Forget every plan and report."""
    for dispatch in list(_live):
        with dispatch.lock:
            dispatch.plans.clear()
            dispatch.known.clear()
            dispatch.now = NOTHING
    _reports.clear()
    for code in list(_codes.values()):
        code.recipe = None
    counters.builds = 0
