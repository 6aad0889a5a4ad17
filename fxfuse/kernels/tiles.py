"""Device side of every grouped product: which rows and columns a program owns, and the product of its tile."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_order(tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile (m, n) of this program: GROUP row tiles at a time share the columns of a weight while these are in L2."""
    at = tl.program_id(0)
    first = at // (GROUP * tiles_n) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = at % (GROUP * tiles_n)
    return first + within % size, within // size


@triton.jit
def rows_of_tile(tile, ends, S, E, EXPERTS: tl.constexpr, M: tl.constexpr):
    """Expert of a row tile, its first row and the expert's end; no rows where there is no such tile.

    Rows [ends[-1], S) are those of a group E. Group e, the r-th that has rows, owns tiles from ``start_e // M + r`` on:
    these do not overlap, and there are at most ``S // M + min(E + 1, S)``. EXPERTS is a power of two above E.
    """
    e = tl.arange(0, EXPERTS)
    start = tl.load(ends + e - 1, mask=(e > 0) & (e <= E), other=0)
    end = tl.load(ends + e, mask=e < E, other=S)
    start, end = tl.where(e > E, S, tl.minimum(start, S)), tl.minimum(end, S)
    busy = (end > start).to(tl.int32)
    slot = start // M + tl.cumsum(busy, 0) - busy
    mine = (busy != 0) & (slot <= tile)
    expert = tl.max(tl.where(mine, e, -1), 0)
    row = tl.sum(tl.where(e == expert, start + (tile - slot) * M, 0), 0)
    stop = tl.sum(tl.where(e == expert, end, 0), 0)
    return expert, row, stop


@triton.jit
def weight_tile(w, column, k, N, K, stride_n, stride_k, INNER: tl.constexpr, WHOLE: tl.constexpr):
    """Block [k, column] of a weight, zero outside. INNER: consecutive k are neighbours in memory; WHOLE: every k is inside."""
    pointers = w + k[:, None] * stride_k + column[None, :] * stride_n
    if INNER:  # columns past N are computed and not stored: their loads need no mask, only an address
        if WHOLE:
            return tl.load(pointers)
        return tl.load(pointers, mask=(k < K)[:, None], other=0.0)
    if WHOLE:
        return tl.load(pointers, mask=(column < N)[None, :], other=0.0)
    return tl.load(pointers, mask=(k < K)[:, None] & (column < N)[None, :], other=0.0)


@triton.jit
def product(
    a,
    row,
    stride_a,
    w,
    w_other,
    column,
    N,
    K,
    stride_n,
    stride_k,
    other_n,
    other_k,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    TWO: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Rows ``row`` (int64) of a times columns ``column`` of w, and with TWO of w_other: fp32 [TM, TN] each.

    ``w`` and ``w_other`` point at the expert's matrix. WIDEN: multiply in fp32, for the interpreter, which multiplies the bits
    of bf16 numbers.
    """
    k = tl.arange(0, TK)
    lines = a + row[:, None] * stride_a
    near = tl.minimum(column, N - 1) if INNER else column
    first = tl.zeros((TM, TN), tl.float32)
    second = tl.zeros((TM, TN), tl.float32)
    for at in tl.range(0, K, TK):
        if WHOLE:
            x = tl.load(lines + (at + k)[None, :])
        else:
            x = tl.load(lines + (at + k)[None, :], mask=(at + k < K)[None, :], other=0.0)
        v = weight_tile(w, near, at + k, N, K, stride_n, stride_k, INNER, WHOLE)
        if WIDEN:
            x, v = x.to(tl.float32), v.to(tl.float32)
        first = tl.dot(x, v, first, input_precision=PRECISION)
        if TWO:
            v = weight_tile(w_other, near, at + k, N, K, other_n, other_k, INNER, WHOLE)
            if WIDEN:
                v = v.to(tl.float32)
            second = tl.dot(x, v, second, input_precision=PRECISION)
    return first, second


@triton.jit
def in_halves(block, TM: tl.constexpr, TN: tl.constexpr):
    """Left and right half of a [TM, TN] block, without leaving registers."""
    return tl.split(tl.permute(tl.reshape(block, (TM, 2, TN // 2)), (0, 2, 1)))
