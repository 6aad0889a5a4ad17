"""How a fused operator is defined: a schema, a reference in plain torch, and other lowerings.

An operator is functional and takes any strides. Its reference is its CPU and CUDA kernel, its fake kernel, its unfused
form, and what ``inline`` expands it to; kernels are candidates beside it (``choose``).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import faults
from ..errors import warn_once

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
library = torch.library.Library("fxfuse", "FRAGMENT")
"""Lives as long as the process: the definitions go with it."""


library.define("materialized(Tensor x) -> Tensor", tags=TAGS)
library.impl("materialized", lambda x: x.clone(), "CompositeExplicitAutograd")
MATERIALIZED = torch.ops.fxfuse.materialized.default
"""What Inductor computes once into a buffer: ``compat.lower_by_realizing``."""


def materialized(x: torch.Tensor) -> torch.Tensor:
    """A hint in the reference of an operator: on a GPU, compute ``x`` once into memory, do not inline it into its users."""
    return MATERIALIZED(x) if x.is_cuda and hasattr(x, "fake_mode") else x


def nothing(like: torch.Tensor) -> torch.Tensor:
    """What an operator returns in the place of a tensor that nobody asked for."""
    return like.new_empty(0)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Another way to compute an operator.

    ``refuses`` says why it cannot run on these arguments (or None); ``function`` takes the operator's arguments and is
    traced into the graph.
    """

    name: str
    refuses: Callable[..., str | None]
    function: Callable[..., Any]
    tolerance: float = 0.0
    """What its own arithmetic may take a result away from the reference's, relative in norm, besides roundings to its dtype."""


@dataclasses.dataclass(frozen=True)
class FusedOp:
    """One fused operator."""

    overload: Any
    reference: Callable[..., Any]
    candidates: list[Candidate] = dataclasses.field(default_factory=list)
    eager: list[Callable[..., Any]] = dataclasses.field(default_factory=list)
    """Runs on a GPU instead of the reference, if there is one, where the operator is called and not compiled."""

    def candidate(
        self, name: str, refuses: Callable[..., str | None], tolerance: float = 0.0
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: add a candidate."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            self.candidates.append(Candidate(name, refuses, function, tolerance))
            return function

        return add


OPS: dict[Any, FusedOp] = {}
"""Every fused operator by its overload."""


watcher: contextvars.ContextVar[Callable[[str, str], None] | None] = contextvars.ContextVar("fxfuse_watcher", default=None)
"""Told the operator's name and the error when a kernel fails to launch; it may raise. Set by the plan that runs."""
_failed: set[tuple[Any, ...]] = set()


def launch(name: str, kernel: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, and where it raises ``reference`` from then on for these arguments' shapes, with one warning."""

    def call(*args: Any) -> Any:
        if _failed and _signature(name, args) in _failed:
            return reference(*args)
        try:
            faults.point("launch")
            if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
                with _no_autocast(args):
                    return kernel(*args)
            return kernel(*args)
        except Exception as error:
            result = reference(*args)  # raises the same where the arguments are at fault
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            tell = watcher.get()
            if tell is not None:
                tell(name, text)
            _failed.add(_signature(name, args))
            warn_once(f"fxfuse::{name} failed to launch, its reference runs instead: {text}", cause=f"launch:{name}")
            return result

    return call


def _no_autocast(args: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The dtypes of an operator's arguments decide, in eager as in a compiled graph."""
    return torch.autocast(next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu"), enabled=False)


def _signature(name: str, args: Sequence[Any]) -> tuple[Any, ...]:
    return (name, *[a.shape if isinstance(a, torch.Tensor) else tuple(a) if isinstance(a, list) else a for a in args])


def forget_failed_launches() -> None:
    """Try every kernel again."""
    _failed.clear()


def define(schema: str) -> Callable[[Callable[..., Any]], FusedOp]:
    """Decorator: define ``fxfuse::<schema>`` by its reference function."""

    def make(reference: Callable[..., Any]) -> FusedOp:
        name = schema.split("(")[0]
        eager: list[Callable[..., Any]] = []
        if not hasattr(torch.ops.fxfuse, name):  # a reloaded module finds its operator defined
            library.define(schema, tags=TAGS)
            library.impl(name, reference, "CompositeExplicitAutograd")
            library.impl(name, launch(name, reference, reference), "CPU")
            library.impl(name, launch(name, lambda *args: (eager[0] if eager else reference)(*args), reference), "CUDA")
        op = FusedOp(getattr(torch.ops.fxfuse, name).default, reference, eager=eager)
        OPS[op.overload] = op
        return op

    return make
