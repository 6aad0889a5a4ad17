"""The gradient of the weights: for each expert a product that sums over its rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fresh import fresh
from .launch import MANY, Config, Table, chosen, rows_contiguous, widened
from .plans import Operand, planned
from .prepared import Launch

CONFIGS: Table = {
    (8, 2): (
        (16, Config(64, 128, 16, 4, 5, sweep=8)),
        (64, Config(128, 128, 32, 8, 5, sweep=4)),
        (MANY, Config(128, 128, 32, 8, 7)),
    ),
    (8, 4): ((MANY, Config(128, 64, 32, 8, 3)),),
}
FOLD = 512
"""Rows whose products are added up alone, in fp32: rounding errors grow with the number of terms of a running sum."""


@triton.jit
def _added(
    total,
    first,
    end,
    n,
    m,
    d,
    x,
    gather_d,
    gather_x,
    N,
    M,
    stride_d,
    stride_x,
    TK: tl.constexpr,
    GATHER_D: tl.constexpr,
    GATHER_X: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """``total`` plus the product over up to TK rows from ``first`` on."""
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
    return tl.dot(tl.trans(left), right, total, input_precision=PRECISION)


@triton.jit
def _store(out, total, n, m, N, M):
    at = out + n.to(tl.int64)[:, None] * M + m[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


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
    SWEEP: tl.constexpr,
    FOLD: tl.constexpr,
    GATHER_D: tl.constexpr,
    GATHER_X: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """SWEEP tiles of columns of one expert's gradient, side by side.

    With few rows the time goes into the stores: in one loop over tiles and rows the next tile's operands are on their way while
    a tile is stored. With many rows that loop costs registers and gains nothing.
    """
    tiles_n, sweeps = tl.cdiv(N, TN), tl.cdiv(M, TM * SWEEP)
    at = tl.program_id(0)
    expert, within = at // (tiles_n * sweeps), at % (tiles_n * sweeps)
    n = within % tiles_n * TN + tl.arange(0, TN)
    column = within // tiles_n * SWEEP * TM
    start = tl.minimum(tl.load(ends + expert - 1, mask=expert > 0, other=0), S)
    end = tl.minimum(tl.load(ends + expert), S)
    out += expert.to(tl.int64) * N * M
    total = tl.zeros((TN, TM), tl.float32)
    if FOLD > 0:
        tl.static_assert(SWEEP == 1)
        m = column + tl.arange(0, TM)
        for block in tl.range(start, end, FOLD):
            part = tl.zeros((TN, TM), tl.float32)
            for first in tl.range(block, tl.minimum(block + FOLD, end), TK):
                part = _added(
                    part, first, end, n, m, d, x, gather_d, gather_x, N, M, stride_d, stride_x,
                    TK, GATHER_D, GATHER_X, PRECISION, WIDEN,
                )  # fmt: skip
            total += part
        _store(out, total, n, m, N, M)
    elif SWEEP == 1:
        m = column + tl.arange(0, TM)
        for first in tl.range(start, end, TK):
            total = _added(
                total, first, end, n, m, d, x, gather_d, gather_x, N, M, stride_d, stride_x,
                TK, GATHER_D, GATHER_X, PRECISION, WIDEN,
            )  # fmt: skip
        _store(out, total, n, m, N, M)
    else:
        steps = tl.maximum(tl.cdiv(end - start, TK), 1)
        for i in tl.range(0, steps * SWEEP):
            k = i % steps
            m = column + i // steps * TM + tl.arange(0, TM)
            total = _added(
                total, start + k * TK, end, n, m, d, x, gather_d, gather_x, N, M, stride_d, stride_x,
                TK, GATHER_D, GATHER_X, PRECISION, WIDEN,
            )  # fmt: skip
            if k == steps - 1:
                _store(out, total, n, m, N, M)
                total = tl.zeros((TN, TM), tl.float32)


def wgrad(
    d: Tensor,
    x: Tensor,
    gather_d: Tensor | None,
    gather_x: Tensor | None,
    ends: Tensor,
    *,
    tiles: Tensor | None = None,
) -> Tensor:
    """As ``reference.wgrad``."""
    return _wgrad(rows_contiguous(d), rows_contiguous(x), gather_d, gather_x, ends)


@planned
def _wgrad(
    precision: str, d: Operand, x: Operand, gather_d: Operand | None, gather_x: Operand | None, ends: Operand
) -> Callable[..., Tensor]:
    experts, n, m = ends.shape[0], d.shape[1], x.shape[1]
    rows = d.shape[0] if gather_d is None else gather_d.shape[0]
    c = chosen(CONFIGS, d, rows, experts)
    tiles_m = triton.cdiv(m, c.n)
    sweeps = triton.cdiv(tiles_m, c.sweep)
    launch = Launch(
        wgrad_kernel, (experts * triton.cdiv(n, c.m) * sweeps,), d.device,
        (rows, n, m, d.stride[0], x.stride[0]),
        TN=c.m, TM=c.n, TK=c.k, FOLD=FOLD if d.dtype is torch.float32 else 0, SWEEP=triton.cdiv(tiles_m, max(sweeps, 1)),
        GATHER_D=gather_d is not None, GATHER_X=gather_x is not None,
        PRECISION=precision, WIDEN=widened(d.dtype), num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip

    new = fresh((experts, n, m), d)

    def run(d: Tensor, x: Tensor, gather_d: Tensor | None, gather_x: Tensor | None, ends: Tensor) -> Tensor:
        out = new()
        launch(d, x, gather_d, gather_x, ends, out)
        return out

    return run
