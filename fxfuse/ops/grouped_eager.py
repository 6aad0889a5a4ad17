"""What the grouped operators run on a GPU when nobody compiles them: our kernels, where they may run.

Nothing is measured here. Tensor-core tiles of many rows pay off from ``ROWS`` rows an expert on; below, weights are all that is
read, and the kernels in plain Triton read them at the memory's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .define import FusedOp
from .grouped_kernels import PASSES, Results, hopper_refusal, refusal, routed, whole

ROWS = 16


def path_for(named: dict[str, Any]) -> str | None:
    """The path for these arguments of a grouped operator, or None for the reference."""
    if routed(named) >= ROWS * named["w_down"].shape[0] and hopper_refusal(**named) is None:
        return "hopper"
    return "portable" if refusal(**named) is None else None


def _register(op: FusedOp, function: Callable[..., Any], results: Results) -> None:
    names = [argument.name for argument in op.overload._schema.arguments]

    def call(*args: Any) -> Any:
        path = path_for(dict(zip(names, args, strict=True)))
        return op.reference(*args) if path is None else whole(function, results, args, path)

    op.eager.append(call)


for _pass in PASSES:
    _register(*_pass)
