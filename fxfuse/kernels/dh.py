"""Back through the second linear and the activation in one pass: the gradient of h, of the router weights, and ``p a``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import differentiated
from .fresh import fresh
from .launch import MANY, Config, Table, chosen, experts_block, row_tiles, rows_contiguous, widened
from .plans import Operand, planned
from .prepared import Launch
from .tiles import grouped_order, in_halves, product, rows_of_tile
from .up import FORMS

CONFIGS: Table = {
    (8, 2): (
        (16, Config(16, 128, 64, 4, 4)),
        (32, Config(32, 64, 64, 4, 4)),
        (64, Config(64, 64, 64, 4, 4)),
        (MANY, Config(64, 128, 64, 4, 4)),
    ),
    (8, 4): ((16, Config(16, 32, 32, 4, 3)), (MANY, Config(64, 64, 32, 8, 3))),
}


@triton.jit
def _before(line, row, end, column, h, u, N, stride_h, TM: tl.constexpr, TN: tl.constexpr, FORM: tl.constexpr):
    """TN columns from ``column`` on of what the activation was computed from: gate and up, or the same twice."""
    if FORM == 1:
        wide = 2 * column + tl.arange(0, 2 * TN)
        wide_mask = (row < end)[:, None] & (wide < 2 * N)[None, :]
        pairs = tl.load(h + line[:, None] * stride_h + wide[None, :], mask=wide_mask, other=0.0)
        g, v = tl.split(tl.reshape(pairs, (TM, TN, 2)))
    else:
        place = column + tl.arange(0, TN)
        mask = (row < end)[:, None] & (place < N)[None, :]
        at = line[:, None] * stride_h + place[None, :]
        g = tl.load(h + at, mask=mask, other=0.0)
        v = g
        if FORM == 2:
            v = tl.load(u + at, mask=mask, other=0.0)
    return g, v


@triton.jit
def _gradients(
    g,
    v,
    da,
    weight,
    row,
    end,
    column,
    dh,
    du,
    scaled,
    N,
    stride_h,
    limit,
    alpha,
    TM: tl.constexpr,
    TN: tl.constexpr,
    FORM: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """TN columns from ``column`` on: writes all gradients; rows [TM] summed over ``da * a``."""
    place = column + tl.arange(0, TN)
    mask = (row < end)[:, None] & (place < N)[None, :]
    dtype = dh.dtype.element_ty
    a, dg, dv = differentiated(
        da, weight[:, None], g.to(tl.float32), v.to(tl.float32), limit, alpha, ACT, FORM != 0, LIMIT, ALPHA
    )
    if FORM == 1:
        wide = 2 * column + tl.arange(0, 2 * TN)
        wide_mask = (row < end)[:, None] & (wide < 2 * N)[None, :]
        both = tl.reshape(tl.join(dg.to(dtype), dv.to(dtype)), (TM, 2 * TN))
        tl.store(dh + row[:, None] * stride_h + wide[None, :], both, mask=wide_mask)
    else:
        at = row[:, None] * stride_h + place[None, :]
        tl.store(dh + at, dg.to(dtype), mask=mask)
        if FORM == 2:
            tl.store(du + at, dv.to(dtype), mask=mask)
    tl.store(scaled + row[:, None] * N + place[None, :], (a * weight[:, None]).to(dtype), mask=mask)
    return tl.sum(tl.where(mask, da * a, 0.0), 1)


@triton.jit(do_not_specialize=["S", "tiles_m"])
def dh_kernel(
    grad,
    gather,
    w,
    p,
    h,
    u,
    ends,
    dh,
    du,
    dp,
    scaled,
    S,
    N,
    K,
    E,
    tiles_m,
    limit,
    alpha,
    stride_grad,
    stride_e,
    stride_n,
    stride_k,
    stride_h,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTS: tl.constexpr,
    FORM: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    m, n = grouped_order(tiles_m, tl.cdiv(N, TN), GROUP)
    expert, start, end = rows_of_tile(m, ends, S, E, EXPERTS, TM)
    if start >= end:
        return
    dtype = dh.dtype.element_ty
    row = start.to(tl.int64) + tl.arange(0, TM)
    column = n * TN + tl.arange(0, TN)
    sums = dp + n.to(tl.int64) * S + row
    if expert == E:
        mask = (row < end)[:, None] & (column < N)[None, :]
        zero = tl.zeros((TM, TN), dtype)
        tl.store(scaled + row[:, None] * N + column[None, :], zero, mask=mask)
        tl.store(sums, tl.zeros((TM,), tl.float32), mask=row < end)
        if FORM == 1:
            wide = n * 2 * TN + tl.arange(0, 2 * TN)
            at = dh + row[:, None] * stride_h + wide[None, :]
            tl.store(at, tl.zeros((TM, 2 * TN), dtype), mask=(row < end)[:, None] & (wide < 2 * N)[None, :])
        else:
            at = row[:, None] * stride_h + column[None, :]
            tl.store(dh + at, zero, mask=mask)
            if FORM == 2:
                tl.store(du + at, zero, mask=mask)
        return
    line = tl.minimum(row, end - 1)
    source = line
    if GATHER:
        source = tl.load(gather + line).to(tl.int64)
    weight = tl.full((TM,), 1.0, tl.float32)
    if WEIGHTS:
        weight = tl.load(p + line)
    first = n * TN
    if AHEAD:  # what a small tile's epilogue reads is on its way under the product
        g, v = _before(line, row, end, first, h, u, N, stride_h, TM, TN, FORM)
    w += expert.to(tl.int64) * stride_e
    da, _ = product(
        grad, source, stride_grad, w, w, column, N, K, stride_n, stride_k, stride_n, stride_k,
        TM, TN, TK, INNER, WHOLE, False, PRECISION, WIDEN,
    )  # fmt: skip
    if AHEAD:
        found = _gradients(
            g, v, da, weight, row, end, first, dh, du, scaled, N, stride_h, limit, alpha, TM, TN, FORM, ACT, LIMIT, ALPHA
        )
    else:  # in halves: in one piece the epilogue's operands do not fit into registers beside the accumulator
        left, right = in_halves(da, TM, TN)
        found = tl.zeros((TM,), tl.float32)
        for half in tl.static_range(2):
            at = first + half * (TN // 2)
            g, v = _before(line, row, end, at, h, u, N, stride_h, TM, TN // 2, FORM)
            found += _gradients(
                g, v, left if half == 0 else right, weight, row, end, at, dh, du, scaled, N, stride_h, limit, alpha,
                TM, TN // 2, FORM, ACT, LIMIT, ALPHA,
            )  # fmt: skip
    tl.store(sums, found, mask=row < end)


def ahead(c: Config) -> bool:
    """Whether the registers hold what a tile's epilogue reads while its product is computed."""
    return c.m == 16


def dh(
    grad: Tensor,
    gather: Tensor | None,
    w_down: Tensor,
    p: Tensor | None,
    h: Tensor,
    u: Tensor | None,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    *,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``reference.dh``."""
    grad, h, u = rows_contiguous(grad), h.contiguous(), None if u is None else u.contiguous()
    return _dh(grad, gather, w_down, p, h, u, ends, act, layout, limit, alpha)


@planned
def _dh(
    precision: str,
    grad: Operand,
    gather: Operand | None,
    w_down: Operand,
    p: Operand | None,
    h: Operand,
    u: Operand | None,
    ends: Operand,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    form, (rows, width) = FORMS[layout], h.shape
    experts, inner, half = w_down.shape
    stride_e, stride_k, stride_n = w_down.stride
    c = chosen(CONFIGS, grad, rows, experts)
    tiles, tiles_n = row_tiles(rows, experts, c.m), triton.cdiv(half, c.n)
    launch = Launch(
        dh_kernel, (tiles * tiles_n,), grad.device,
        (rows, half, inner, experts, tiles, float(limit or 0), float(alpha or 0), grad.stride[0], stride_e, stride_n, stride_k,
         width),
        {5: half, 8: half} if layout == "concat" else {},
        TM=c.m, TN=c.n, TK=c.k, GROUP=c.group, EXPERTS=experts_block(experts),
        INNER=stride_k == 1, WHOLE=inner % c.k == 0, GATHER=gather is not None, WEIGHTS=p is not None, FORM=form,
        ACT=act, LIMIT=limit is not None, ALPHA=alpha is not None, AHEAD=ahead(c),
        PRECISION=precision, WIDEN=widened(grad.dtype), num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip

    new, new_dh = fresh((rows, half), grad), fresh((rows, width), h)
    new_du = fresh((0,), grad) if u is None else new
    new_sums = fresh((rows, tiles_n), h, torch.float32, stride=(1, rows))

    def run(
        grad: Tensor, gather: Tensor | None, w: Tensor, p: Tensor | None, h: Tensor, u: Tensor | None, ends: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, du, sums, scaled = new_dh(), new_du(), new_sums(), new()
        launch(grad, gather, w, p, h, h if u is None else u, ends, out, out if u is None else du, sums, scaled)
        return out, du, sums, scaled

    return run
