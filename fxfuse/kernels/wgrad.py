"""The gradient of the weights: for each expert a product that sums over its rows."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .launch import MANY, Config, Table, chosen, rows_contiguous, widened
from .plans import Operand, planned
from .prepared import Launch

CONFIGS: Table = {
    (9, 2): ((32, Config(128, 128, 32, 8, 3)), (MANY, Config(128, 256, 64, 8, 3))),
    (8, 2): ((32, Config(128, 128, 32, 8, 3)), (MANY, Config(128, 128, 64, 8, 3))),
    (8, 4): ((MANY, Config(128, 64, 32, 8, 3)),),
}


@triton.jit(do_not_specialize=["S"])
def wgrad_kernel(
    d,
    x,
    gather_d,
    gather_x,
    ends,
    out,
    S,
    N,
    M,
    stride_d,
    stride_x,
    TN: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
    GATHER_D: tl.constexpr,
    GATHER_X: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tiles_n, tiles_m = tl.cdiv(N, TN), tl.cdiv(M, TM)
    at = tl.program_id(0)
    expert, within = at // (tiles_n * tiles_m), at % (tiles_n * tiles_m)
    n = within % tiles_n * TN + tl.arange(0, TN)
    m = within // tiles_n * TM + tl.arange(0, TM)
    start = tl.minimum(tl.load(ends + expert - 1, mask=expert > 0, other=0), S)
    end = tl.minimum(tl.load(ends + expert), S)
    total = tl.zeros((TN, TM), tl.float32)
    for first in tl.range(start, end, TK):
        row = (first + tl.arange(0, TK)).to(tl.int64)
        inside = row < end
        row_d, row_x = row, row
        if GATHER_D:
            row_d = tl.load(gather_d + row, mask=inside, other=0).to(tl.int64)
        if GATHER_X:
            row_x = tl.load(gather_x + row, mask=inside, other=0).to(tl.int64)
        left = tl.load(d + row_d[:, None] * stride_d + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
        right = tl.load(x + row_x[:, None] * stride_x + m[None, :], mask=inside[:, None] & (m < M)[None, :], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    out += expert.to(tl.int64) * N * M
    at = out + n.to(tl.int64)[:, None] * M + m[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


def wgrad(d: Tensor, x: Tensor, gather_d: Tensor | None, gather_x: Tensor | None, ends: Tensor) -> Tensor:
    """As ``reference.wgrad``."""
    return _wgrad(rows_contiguous(d), rows_contiguous(x), gather_d, gather_x, ends)


@planned
def _wgrad(
    precision: str, d: Operand, x: Operand, gather_d: Operand | None, gather_x: Operand | None, ends: Operand
) -> Callable[..., Tensor]:
    experts, n, m = ends.shape[0], d.shape[1], x.shape[1]
    rows = d.shape[0] if gather_d is None else gather_d.shape[0]
    c = chosen(CONFIGS, d, rows, experts)
    launch = Launch(
        wgrad_kernel, (experts * triton.cdiv(n, c.m) * triton.cdiv(m, c.n),), d.device,
        (rows, n, m, d.stride[0], x.stride[0]),
        TN=c.m, TM=c.n, TK=c.k, GATHER_D=gather_d is not None, GATHER_X=gather_x is not None,
        PRECISION=precision, WIDEN=widened(d.dtype), num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip

    def run(d: Tensor, x: Tensor, gather_d: Tensor | None, gather_x: Tensor | None, ends: Tensor) -> Tensor:
        out = d.new_empty(experts, n, m)
        launch(d, x, gather_d, gather_x, ends, out)
        return out

    return run
