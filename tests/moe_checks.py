"""What the grouped operators' tests check their results with, and the blocks that they have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import compare
import pytest
import torch
from reference_moe import ARGUMENTS, BF16, F16, F32, F64, LAYOUTS, Args, Block, per_expert, per_token
from torch import Tensor

from fxfuse.ops import grouped_mlp

EXACT = 1e-13
"""Of fp64, relative in norm."""
SLACK = {F32: 1e-7, F16: 1e-4, BF16: 1e-3}
"""Less than one unit in the last place."""

ALIGNED = {"width": 64, "inner": 32}
"""Widths with which bf16 operands go to ``torch._grouped_mm``."""
ODD = {"width": 40, "inner": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "limit": {"limit": 0.3},
    "alpha": {"alpha": 1.702},
    "limit_alpha": {"limit": 0.3, "alpha": 1.702},
    "weights_first": {"weights_first": True},
    "no_router": {"routed": False},
    "no_router_first": {"routed": False, "weights_first": True},
    "no_biases": {"biases": False},
}
VARIED = {f"{a}-{b}": {**LAYOUTS[a], **VARIANTS[b]} for a in LAYOUTS for b in VARIANTS if (a, "alpha" in b) != ("ungated", True)}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
varied = pytest.mark.parametrize("fields", [*VARIED.values(), *LAYOUTS.values()], ids=[*VARIED, *LAYOUTS])
orders = pytest.mark.parametrize("first", [False, True], ids=["weights_after", "weights_first"])
both = pytest.mark.parametrize(("dtype", "width"), [(F64, ODD), (BF16, ALIGNED)], ids=["fp64", "bf16"])


def fixed_cotangent(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss whose cotangent differs from place to place and is exact in every dtype."""
    return sum((o * ((torch.arange(o.numel()) * 7 % 17 - 8) / 8).to(o.dtype).reshape(o.shape)).sum() for o in outputs)


def run(function: Callable[..., Tensor], args: Args, loss: compare.Loss = fixed_cotangent) -> compare.Run:
    """Output and gradients for that cotangent."""
    return compare.run(function, args, loss=loss)


def assert_equals_definition(
    function: Callable[..., Tensor], definition: Callable[..., Tensor], args: Args, loss: compare.Loss = fixed_cotangent
) -> None:
    """The output and every gradient; one that the definition does not need is zero."""
    got, want = run(function, args, loss), run(definition, args, loss)
    zeros = [torch.zeros_like(t) if t.requires_grad else None for t in args if t is not None]
    grads = [z if g is None else g for z, g in zip(zeros, want.grads, strict=True)]
    compare.assert_same(got, dataclasses.replace(want, grads=tuple(grads)), EXACT)


def assert_near_fp64(
    function: Callable[..., Tensor], reference: Callable[..., Tensor], draws: Sequence[Args], loss: compare.Loss = fixed_cotangent
) -> None:
    """At most 1.5 times as far from fp64 as plain PyTorch in the same dtype, in the output and every gradient of all draws."""
    got = joined([run(function, args, loss) for args in draws])
    eager = joined([run(reference, args, loss) for args in draws])
    truth = joined([run(reference, compare.in_fp64(args), loss) for args in draws])
    assert [g.dtype for g in (*got.outputs, *got.grads) if g is not None] == [
        g.dtype for g in (*eager.outputs, *eager.grads) if g is not None
    ]
    assert [g is None for g in got.grads] == [g is None for g in truth.grads]
    compare.assert_as_near_to_fp64(got, eager, truth, slack=SLACK[got.outputs[0].dtype])


def joined(runs: Sequence[compare.Run]) -> compare.Run:
    """Several runs as one: the relative error of one number says nothing."""

    def join(values: Sequence[Tensor | None]) -> Tensor | None:
        there = [v.flatten() for v in values if v is not None]
        return torch.cat(there) if there else None

    outputs, grads = ([join(v) for v in zip(*[getattr(r, kind) for r in runs], strict=True)] for kind in ("outputs", "grads"))
    return compare.Run(tuple(o for o in outputs if o is not None), tuple(grads), ())


def check(dtype: torch.dtype = F64, **fields: Any) -> None:
    """The block with these fields against its definition."""
    check_calls(Block(dtype=dtype, **fields))


def check_calls(
    block: Block, of: Callable[..., Callable[..., Tensor]] | None = None, draws: int = 1, **loss: compare.Loss
) -> None:
    """The same, where ``of`` makes a function of the tensors out of the operator or its reference."""
    of = of or block.of
    if block.dtype is F64:
        assert_equals_definition(of(grouped_mlp), of(per_token), block.inputs(), **loss)
    else:
        draws = max(draws, 64 // (block.tokens * block.chosen))
        assert_near_fp64(of(grouped_mlp), of(per_expert), [block.inputs() for _ in range(draws)], **loss)


def named(args: Args) -> dict[str, Tensor | None]:
    """The arguments by name, absent ones too."""
    return dict(zip(ARGUMENTS, args, strict=True))


def present(args: Args) -> list[str]:
    """The names of the arguments that are there, in the order of a run's gradients."""
    return [name for name, a in named(args).items() if a is not None]
