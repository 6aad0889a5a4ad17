"""Rows in groups, each times its group's matrix: the second linear, and the gradient of the rows that go into a linear."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .fresh import fresh
from .launch import MANY, Config, Table, chosen, experts_block, row_tiles, rows_contiguous, widened
from .plans import Operand, planned
from .prepared import Launch
from .tiles import grouped_order, product, rows_of_tile

FEW = ((16, Config(16, 64, 128, 4, 4)), (32, Config(32, 128, 64, 4, 4)), (64, Config(64, 128, 64, 4, 4)))
CONFIGS: Table = {
    (9, 2): (*FEW, (MANY, Config(128, 256, 64, 8, 4))),
    (8, 2): (*FEW, (MANY, Config(128, 128, 64, 8, 3))),
    (8, 4): ((16, Config(16, 64, 32, 4, 3)), (64, Config(64, 64, 32, 4, 3)), (MANY, Config(128, 64, 32, 8, 3))),
}


@triton.jit(do_not_specialize=["S", "tiles_m"])
def matmul_kernel(
    a,
    w,
    bias,
    ends,
    out,
    S,
    N,
    K,
    E,
    tiles_m,
    stride_a,
    stride_e,
    stride_n,
    stride_k,
    stride_bias,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    ZERO_TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    m, n = grouped_order(tiles_m, tl.cdiv(N, TN), GROUP)
    expert, start, end = rows_of_tile(m, ends, S, E, EXPERTS, TM)
    if start >= end:
        return
    row = start.to(tl.int64) + tl.arange(0, TM)
    column = n * TN + tl.arange(0, TN)
    at = out + row[:, None] * N + column[None, :]
    mask = (row < end)[:, None] & (column < N)[None, :]
    if expert == E:
        if ZERO_TAIL:
            tl.store(at, tl.zeros((TM, TN), out.dtype.element_ty), mask=mask)
        return
    w += expert.to(tl.int64) * stride_e
    y, _ = product(
        a, tl.minimum(row, end - 1), stride_a, w, w, column, N, K, stride_n, stride_k, stride_n, stride_k,
        TM, TN, TK, INNER, WHOLE, False, PRECISION, WIDEN,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias + expert.to(tl.int64) * stride_bias + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=mask)


def matmul(
    a: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    zero_tail: bool = True,
    tiles: Tensor | None = None,
) -> Tensor:
    """As ``reference.matmul``."""
    a, bias = rows_contiguous(a), None if bias is None else rows_contiguous(bias)
    return _matmul(a, w, ends, transposed, bias, zero_tail)


@planned
def _matmul(
    precision: str, a: Operand, w: Operand, ends: Operand, transposed: bool, bias: Operand | None, zero_tail: bool
) -> Callable[..., Tensor]:
    n, k = (1, 2) if transposed else (2, 1)
    rows, experts, columns, inner = a.shape[0], w.shape[0], w.shape[n], w.shape[k]
    c = chosen(CONFIGS, a, rows, experts)
    tiles = row_tiles(rows, experts, c.m)
    launch = Launch(
        matmul_kernel, (tiles * triton.cdiv(columns, c.n),), a.device,
        (rows, columns, inner, experts, tiles, a.stride[0], w.stride[0], w.stride[n], w.stride[k],
         0 if bias is None else bias.stride[0]),
        TM=c.m, TN=c.n, TK=c.k, GROUP=c.group, EXPERTS=experts_block(experts),
        INNER=w.stride[k] == 1, WHOLE=inner % c.k == 0, BIAS=bias is not None, ZERO_TAIL=zero_tail,
        PRECISION=precision, WIDEN=widened(a.dtype), num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip

    new = fresh((rows, columns), a)

    def run(a: Tensor, w: Tensor, ends: Tensor, _: bool, bias: Tensor | None, *__: bool) -> Tensor:
        out = new()
        launch(a, w, bias, ends, out)
        return out

    return run
