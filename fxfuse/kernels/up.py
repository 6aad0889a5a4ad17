"""The first linear of the experts with its activation: rows gathered from the tokens, gate and up in one pass over them."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .activations import activated
from .fresh import fresh
from .launch import MANY, Config, Table, chosen, experts_block, row_tiles, rows_contiguous, widened
from .plans import Operand, planned
from .prepared import Launch
from .tiles import grouped_order, in_halves, product, rows_of_tile

FEW = ((16, Config(16, 64, 128, 4, 3)), (32, Config(32, 64, 64, 4, 4)), (64, Config(64, 64, 64, 4, 4)))
CONFIGS: Table = {
    (9, 2): (*FEW, (MANY, Config(128, 128, 64, 8, 4))),
    (8, 2): (*FEW, (MANY, Config(128, 64, 64, 8, 4))),
    (8, 4): ((16, Config(16, 32, 32, 4, 3)), (MANY, Config(64, 64, 32, 8, 3))),
}
"""The tile's columns are those of a; gate and up take as many each."""
PLAIN, PAIRS, HALVES = 0, 1, 2
"""One linear; alternating rows of one; two, each with a pointer of its own."""
FORMS = {"plain": PLAIN, "interleaved": PAIRS, "concat": HALVES, "separate": HALVES}


@triton.jit
def _epilogue(
    g,
    v,
    row,
    end,
    first,
    bias,
    bias_up,
    a,
    h,
    u,
    N,
    stride_h,
    limit,
    alpha,
    TM: tl.constexpr,
    TN: tl.constexpr,
    FORM: tl.constexpr,
    BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
):
    """TN columns of a from ``first`` on, from the products g and v."""
    dtype = a.dtype.element_ty
    WIDTH: tl.constexpr = 2 * TN if FORM == 1 else TN
    wide = (2 * first if FORM == 1 else first) + tl.arange(0, WIDTH)
    inside = wide < (2 * N if FORM == 1 else N)
    if BIAS:
        g += tl.load(bias + wide, mask=inside, other=0.0).to(tl.float32)[None, :]
        if FORM == 2:
            v += tl.load(bias_up + wide, mask=inside, other=0.0).to(tl.float32)[None, :]
    gate = g.to(dtype)
    up = v.to(dtype)
    if SAVE:
        at = row[:, None] * stride_h + wide[None, :]
        mask = (row < end)[:, None] & inside[None, :]
        tl.store(h + at, gate, mask=mask)
        if FORM == 2:
            tl.store(u + at, up, mask=mask)
    if FORM == 1:
        gate, up = tl.split(tl.reshape(gate, (TM, TN, 2)))
    y = activated(gate.to(tl.float32), up.to(tl.float32), limit, alpha, ACT, FORM != 0, LIMIT, ALPHA)
    column = first + tl.arange(0, TN)
    mask = (row < end)[:, None] & (column < N)[None, :]
    tl.store(a + row[:, None] * N + column[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["S", "tiles_m"])
def up_kernel(
    x,
    gather,
    w,
    w_up,
    bias,
    bias_up,
    ends,
    a,
    h,
    u,
    S,
    N,
    K,
    E,
    tiles_m,
    limit,
    alpha,
    stride_x,
    stride_e,
    stride_n,
    stride_k,
    up_e,
    up_n,
    up_k,
    stride_bias,
    stride_h,
    TM: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    INNER: tl.constexpr,
    WHOLE: tl.constexpr,
    GATHER: tl.constexpr,
    FORM: tl.constexpr,
    BIAS: tl.constexpr,
    SAVE: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    m, n = grouped_order(tiles_m, tl.cdiv(N, TN), GROUP)
    expert, start, end = rows_of_tile(m, ends, S, E, EXPERTS, TM)
    if start >= end:
        return
    dtype = a.dtype.element_ty
    row = start.to(tl.int64) + tl.arange(0, TM)
    first = n * TN
    WIDTH: tl.constexpr = 2 * TN if FORM == 1 else TN  # of what one product gives
    columns = 2 * N if FORM == 1 else N
    wide = n * WIDTH + tl.arange(0, WIDTH)
    if expert == E:
        column = first + tl.arange(0, TN)
        mask = (row < end)[:, None] & (column < N)[None, :]
        tl.store(a + row[:, None] * N + column[None, :], tl.zeros((TM, TN), dtype), mask=mask)
        if SAVE:
            at = row[:, None] * stride_h + wide[None, :]
            mask = (row < end)[:, None] & (wide < columns)[None, :]
            tl.store(h + at, tl.zeros((TM, WIDTH), dtype), mask=mask)
            if FORM == 2:
                tl.store(u + at, tl.zeros((TM, WIDTH), dtype), mask=mask)
        return
    line = tl.minimum(row, end - 1)
    if GATHER:
        line = tl.load(gather + line).to(tl.int64)
    at = expert.to(tl.int64)
    if BIAS:
        bias += at * stride_bias
        bias_up += at * stride_bias
    g, v = product(
        x, line, stride_x, w + at * stride_e, w_up + at * up_e, wide, columns, K, stride_n, stride_k, up_n, up_k,
        TM, WIDTH, TK, INNER, WHOLE, FORM == 2, PRECISION, WIDEN,
    )  # fmt: skip
    if SLICES == 1:
        _epilogue(
            g, v, row, end, first, bias, bias_up, a, h, u, N, stride_h, limit, alpha,
            TM, TN, FORM, BIAS, SAVE, ACT, LIMIT, ALPHA,
        )  # fmt: skip
    else:  # in one piece the epilogue's operands do not fit into registers beside the accumulators
        g_left, g_right = in_halves(g, TM, WIDTH)
        v_left, v_right = in_halves(v, TM, WIDTH)
        _epilogue(
            g_left, v_left, row, end, first, bias, bias_up, a, h, u, N, stride_h, limit, alpha,
            TM, TN // 2, FORM, BIAS, SAVE, ACT, LIMIT, ALPHA,
        )  # fmt: skip
        _epilogue(
            g_right, v_right, row, end, first + TN // 2, bias, bias_up, a, h, u, N, stride_h, limit, alpha,
            TM, TN // 2, FORM, BIAS, SAVE, ACT, LIMIT, ALPHA,
        )  # fmt: skip


def slices(columns: int) -> int:
    """Into how many pieces the epilogue of a tile is cut."""
    return 2 if columns >= 128 else 1


def up(
    x: Tensor,
    gather: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    b_gate: Tensor | None,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
    *,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.up``."""
    x, b_gate = rows_contiguous(x), None if b_gate is None else rows_contiguous(b_gate)
    if w_up is not None and (w_gate.stride(2) == 1) != (w_up.stride(2) == 1):
        w_up = w_up.contiguous() if w_gate.stride(2) == 1 else w_up.transpose(1, 2).contiguous().transpose(1, 2)
    return _up(x, gather, w_gate, w_up, b_gate, ends, act, layout, limit, alpha, save)


@planned
def _up(
    precision: str,
    x: Operand,
    gather: Operand | None,
    w_gate: Operand,
    w_up: Operand | None,
    b_gate: Operand | None,
    ends: Operand,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    form, rows = FORMS[layout], x.shape[0] if gather is None else gather.shape[0]
    experts, width, inner = w_gate.shape
    half = width // 2 if layout in ("concat", "interleaved") else width
    other = w_gate if w_up is None else w_up
    c = chosen(CONFIGS, x, rows, experts, 2 if form != PLAIN else 1)
    tiles = row_tiles(rows, experts, c.m)
    launch = Launch(
        up_kernel, (tiles * triton.cdiv(half, c.n),), x.device,
        (rows, half, inner, experts, tiles, float(limit or 0), float(alpha or 0), x.stride[0], *w_gate.stride, *other.stride,
         0 if b_gate is None else b_gate.stride[0], width),
        {3: half * w_gate.stride[1], 5: half, 9: half if save else 0} if layout == "concat" else {},
        TM=c.m, TN=c.n, TK=c.k, GROUP=c.group, EXPERTS=experts_block(experts),
        INNER=w_gate.stride[2] == 1, WHOLE=inner % c.k == 0, GATHER=gather is not None, FORM=form,
        BIAS=b_gate is not None, SAVE=save, ACT=act, LIMIT=limit is not None, ALPHA=alpha is not None, SLICES=slices(c.n),
        PRECISION=precision, WIDEN=widened(x.dtype), num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip

    new, new_nothing = fresh((rows, half), x), fresh((0,), x)
    new_h = fresh((rows, width), x) if save else new_nothing
    new_u = new if save and w_up is not None else new_nothing

    def run(
        x: Tensor, gather: Tensor | None, gate: Tensor, up: Tensor | None, bias: Tensor | None, ends: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        a, h, u = new(), new_h(), new_u()
        launch(x, gather, gate, gate if up is None else up, bias, bias, ends, a, h, h if layout == "concat" else u)
        return a, h, u

    return run
