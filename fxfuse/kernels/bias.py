"""The gradient of a bias: for each expert the sum of its rows."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .fresh import fresh
from .launch import rows_contiguous
from .plans import Operand, planned
from .prepared import Launch

ROWS, COLUMNS = 64, 64


@triton.jit(do_not_specialize=["S"])
def bias_kernel(
    d,
    weights,
    gather,
    ends,
    out,
    S,
    N,
    stride_d,
    TM: tl.constexpr,
    TN: tl.constexpr,
    WEIGHTS: tl.constexpr,
    GATHER: tl.constexpr,
):
    expert = tl.program_id(0)
    n = tl.program_id(1) * TN + tl.arange(0, TN)
    start = tl.minimum(tl.load(ends + expert - 1, mask=expert > 0, other=0), S)
    end = tl.minimum(tl.load(ends + expert), S)
    total = tl.zeros((TM, TN), tl.float32)
    for first in tl.range(start, end, TM):
        row = (first + tl.arange(0, TM)).to(tl.int64)
        inside = row < end
        line = row
        if GATHER:
            line = tl.load(gather + row, mask=inside, other=0).to(tl.int64)
        block = tl.load(d + line[:, None] * stride_d + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
        if WEIGHTS:
            total += block.to(tl.float32) * tl.load(weights + row, mask=inside, other=0.0)[:, None]
        else:
            total += block.to(tl.float32)
    at = out + expert.to(tl.int64) * N + n
    tl.store(at, tl.sum(total, 0).to(out.dtype.element_ty), mask=n < N)


def bias_gradient(d: Tensor, ends: Tensor, weights: Tensor | None = None, gather: Tensor | None = None) -> Tensor:
    """As ``reference.bias_gradient``."""
    return _bias_gradient(rows_contiguous(d), ends, weights, gather)


@planned
def _bias_gradient(
    precision: str, d: Operand, ends: Operand, weights: Operand | None, gather: Operand | None
) -> Callable[..., Tensor]:
    experts, columns, rows = ends.shape[0], d.shape[1], d.shape[0] if gather is None else gather.shape[0]
    launch = Launch(
        bias_kernel, (experts, triton.cdiv(columns, COLUMNS)), d.device, (rows, columns, d.stride[0]),
        TM=ROWS, TN=COLUMNS, WEIGHTS=weights is not None, GATHER=gather is not None, num_warps=4,
    )  # fmt: skip

    new = fresh((experts, columns), d)

    def run(d: Tensor, ends: Tensor, weights: Tensor | None, gather: Tensor | None) -> Tensor:
        out = new()
        launch(d, weights, gather, ends, out)
        return out

    return run
