"""``fxfuse.explain``: what would be fused, without compiling or running a fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import registry, settings
from .capture import capture
from .plan import structural_hash
from .recipe import current_recipe
from .report import Report
from .rewrite import check_expectation


def explain(model: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """A function of the model's arguments that returns the Report of compiling it.

    Graphs are captured and rewritten, not compiled; the model itself runs eagerly, so that code behind a graph break is
    seen too. Works without a GPU and without a C++ compiler.

    Args:
        model: a module or function.
        options: as ``options=`` of torch.compile.

    Raises:
        OptionError: an unknown option.
    """
    chosen = settings.read(None, {**options, "lower": "eager"})

    def run(*args: Any, **kwargs: Any) -> Report:
        report = Report()

        def plan_only(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            recipe = chosen.recipe or current_recipe()
            fusions = registry.active(chosen.only, chosen.without)
            report.recipe, report.graph_hash = repr(recipe), structural_hash(gm)
            capture(gm, example_inputs, chosen, fusions, recipe, report)
            if chosen.expect is not None:
                check_expectation(report.graphs, chosen.expect, report.failures)
            return gm.forward

        torch.compiler.reset()
        torch.compile(model, backend=plan_only)(*args, **kwargs)
        return report

    return run
