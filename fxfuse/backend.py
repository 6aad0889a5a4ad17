"""Dynamo's door: one object for the whole process, so that Dynamo's backend guard never sees two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from . import compat, settings
from .dispatch import Dispatch, drop_plans


class Backend:
    """What ``torch.compile(backend="fxfuse")`` calls for every captured graph."""

    __name__ = "fxfuse"

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """A callable that runs the graph.

        Raises:
            OptionError: an unknown mode or option, or a value of the wrong type.
        """
        return Dispatch(gm, example_inputs, settings.read(mode, options)).callable()

    def reset(self) -> None:
        """Called by ``torch._dynamo.reset``: drop plans and recorded CUDA graphs."""
        drop_plans()
        compat.reset_cudagraphs()


backend = Backend()
