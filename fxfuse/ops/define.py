"""How a fused operator is defined: a schema, a reference in plain torch, and other lowerings.

An operator is functional and takes any strides. Its reference is its CPU and CUDA kernel, its fake kernel, its unfused
form, and what ``inline`` expands it to; kernels are candidates beside it (``choose``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import faults
from ..errors import warn_once

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_library = torch.library.Library("fxfuse", "FRAGMENT")  # lives as long as the process: the definitions go with it


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Another way to compute an operator.

    ``refuses`` says why it cannot run on these arguments (or None); ``function`` takes the operator's arguments and is
    traced into the graph.
    """

    name: str
    refuses: Callable[..., str | None]
    function: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class FusedOp:
    """One fused operator."""

    overload: Any
    reference: Callable[..., Any]
    candidates: list[Candidate] = dataclasses.field(default_factory=list)

    def candidate(self, name: str, refuses: Callable[..., str | None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: add a candidate."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.candidates.append(Candidate(name, refuses, function))
            return function

        return add


OPS: dict[Any, FusedOp] = {}
"""Every fused operator by its overload."""


on_launch_failure: list[Callable[[str, str], None]] = []
"""Called with the operator's name and the error when a kernel fails to launch."""
_failed: set[tuple[Any, ...]] = set()


def launch(name: str, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, and where it raises ``reference`` from then on for these shapes, with one warning."""

    def call(*args: Any) -> Any:
        shapes = tuple(a.shape if isinstance(a, torch.Tensor) else None for a in args) if _failed else ()
        if (name, shapes) in _failed:
            return reference(*args)
        try:
            faults.point("launch")
            return kernel(*args)
        except Exception as error:
            result = reference(*args)  # raises the same where the arguments are at fault
            _failed.add((name, tuple(a.shape if isinstance(a, torch.Tensor) else None for a in args)))
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            for told in on_launch_failure:
                told(name, text)
            warn_once(f"fxfuse::{name} failed to launch, its reference runs instead: {text}", cause=f"launch:{name}")
            return result

    return call


def define(schema: str) -> Callable[[Callable[..., Any]], FusedOp]:
    """Decorator: define ``fxfuse::<schema>`` by its reference function."""

    def make(reference: Callable[..., Any]) -> FusedOp:
        name = schema.split("(")[0]
        if not hasattr(torch.ops.fxfuse, name):  # a reloaded module finds its operator defined
            _library.define(schema, tags=TAGS)
            _library.impl(name, reference, "CompositeExplicitAutograd")
            for device in ("CPU", "CUDA"):
                _library.impl(name, launch(name, reference, reference), device)
        op = FusedOp(getattr(torch.ops.fxfuse, name).default, reference)
        OPS[op.overload] = op
        return op

    return make
