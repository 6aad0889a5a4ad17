"""Rows times their expert's matrix, on Hopper, with bias, row scale or activation."""

from __future__ import annotations

from .hopper import (
    barriers,
    beside,
    fence_async_shared,
    gl,
    gluon,
    halves,
    hear,
    mailbox,
    put_after,
    tma,
    unzip,
)
from .hopper_activation import activated, gated
from .hopper_rows import mm_gather, mm_load, of_columns, of_rows, products, skip


@gluon.jit
def mm_use(
    cid: gl.constexpr, out, hg, hu, table, bias, bias_row, scale, E, K, N, across, abuf, bbuf, stage,
    full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
    ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SAVE: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr,
    GATHER: gl.constexpr,
):  # fmt: skip
    H: gl.constexpr = BN // 2
    tiles = gl.load(table) * across
    s = 0
    phase = 0
    j = 0
    jphase = 0
    t, e, row, last, end, n, j, jphase = hear(slot, told, heard, j, jphase)
    while t < tiles:
        row += 64 * cid
        depth = gl.where(e < E, K, 0)
        seen = gl.where(e < E, end, row)  # past the last expert nothing is read: what is there need not be finite
        if row < last:
            acc, s, phase = products(cid, depth, s, phase, abuf, bbuf, full, empty, S, BK, BN, TB, GATHER)
            p, q = halves(acc)
            left = n * H if MODE == 2 else n * BN
            right = n * H if MODE == 2 else n * BN + H
            line = bias + e.to(gl.int64) * bias_row
            if BIAS:
                p += of_columns(line, left, N, e < E, p)
            if MODE == 0:
                if SCALE:
                    p *= of_rows(scale, row, seen, p, 0.0)
                put_after(out, stage, cid, p, row, end, left)
                if BIAS:
                    q += of_columns(line, right, N, e < E, q)
                if SCALE:
                    q *= of_rows(scale, row, seen, q, 0.0)
                put_after(out, stage, cid, q, row, end, right)
            else:
                p = p.to(out.dtype)  # the activation is that of what is saved
                if SAVE:
                    put_after(hg, stage, cid, p, row, end, left)
                # p is done before q begins where it can be: both at once do not fit in the registers
                if MODE == 1:
                    p = activated(p.to(gl.float32), ACT, LIMIT, ALPHA)
                    if ACT == "sigmoid":
                        p = gl.where(e < E, p, 0.0)
                    put_after(out, stage, cid, p, row, end, left)
                elif MODE == 3:
                    g, u = unzip(p)
                    v = gated(g.to(gl.float32), u.to(gl.float32), ACT, LIMIT, ALPHA).to(out.dtype)
                if BIAS:
                    q += of_columns(line + N if MODE == 2 else line, right, N, e < E, q)
                q = q.to(out.dtype)
                if SAVE:
                    put_after(hu, stage, cid, q, row, end, right)
                if MODE == 1:
                    q = activated(q.to(gl.float32), ACT, LIMIT, ALPHA)
                    if ACT == "sigmoid":
                        q = gl.where(e < E, q, 0.0)
                    put_after(out, stage, cid, q, row, end, right)
                elif MODE == 2:
                    v = gated(p.to(gl.float32), q.to(gl.float32), ACT, LIMIT, ALPHA)
                    put_after(out, stage, cid, v, row, end, n * H)
                else:
                    g, u = unzip(q)
                    w = gated(g.to(gl.float32), u.to(gl.float32), ACT, LIMIT, ALPHA).to(out.dtype)
                    put_after(out, stage, cid, beside(v, w), row, end, n * H)
        else:
            s, phase = skip(depth, s, phase, full, empty, S, BK)
        t, e, row, last, end, n, j, jphase = hear(slot, told, heard, j, jphase)
    tma.store_wait(0)


@gluon.jit
def mm(
    a, x, pitch, gather, b, b2, out, hg, hu, table, bias, scale, bias_row, E, K, N, across,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
    ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, SAVE: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr,
    GATHER: gl.constexpr, PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Rows of a (S, K) times their expert's matrix, and what MODE says.

    a: boxes (64, BK). With GATHER its row r is line gather[r] of x (T, K), of which each begins ``pitch`` elements after the one
    before, and a only says how a box lies in shared memory. b: (E, N, K) in boxes (1, BN, BK), or (E, K, N) in boxes (1, BK, BN)
    if TB; in MODE 2 the gate's weight, b2 the up projection's, and the boxes are half as wide in N. out, hg, hu: ragged views in
    boxes (1, 1, 64, BN / 4). table: a list of ``hopper_tiles``. bias: (E, bias_row), in MODE 2 N gate columns and then N up
    columns. scale: (S,) fp32. N: columns of b. across: tiles side by side.
    MODE 0 stores the product, 1 its activation, 2 that of two sets of weight rows, 3 that of even and odd columns.
    Grid: one program an SM; 4 warps, to which the compiler adds those of the other partitions.
    """
    abuf = gl.allocate_shared_memory(a.dtype, [2 * S, 64, BK], a.layout)
    bbuf = gl.allocate_shared_memory(b.dtype, [S, 1, BK, BN] if TB else [S, 1, BN, BK], b.layout)
    stage = gl.allocate_shared_memory(out.dtype, [4, 1, 1, 64, BN // 4], out.layout)
    slot = mailbox()
    full = barriers(S, 129 if GATHER else 1)
    empty = barriers(S, 2)
    told = barriers(2, 1)
    heard = barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize([
        (mm_use, (0, out, hg, hu, table, bias, bias_row, scale, E, K, N, across, abuf, bbuf, stage,
                  full, empty, slot, told, heard, S, BK, BN, TB, MODE, ACT, LIMIT, ALPHA, SAVE, BIAS, SCALE, GATHER)),
        (mm_use, (1, out, hg, hu, table, bias, bias_row, scale, E, K, N, across, abuf, bbuf, stage,
                  full, empty, slot, told, heard, S, BK, BN, TB, MODE, ACT, LIMIT, ALPHA, SAVE, BIAS, SCALE, GATHER)),
        (mm_gather, (x, pitch, gather, b, b2, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
                     S, BK, BN, TB, MODE))
        if GATHER else
        (mm_load, (a, b, b2, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard, S, BK, BN, TB, MODE)),
    ], [4, 4 if GATHER else 1], [CONSUMER, PRODUCER])  # fmt: skip
