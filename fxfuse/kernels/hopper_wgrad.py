"""Gradients of the experts' weights on Hopper: a product over each expert's rows."""

from __future__ import annotations

from .hopper import (
    back,
    barriers,
    claim,
    fence_async_shared,
    gl,
    gluon,
    halves,
    hear,
    mailbox,
    mbarrier,
    step,
    tell,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def part(ends, t, tiles, down, across):
    # The expert of a tile, its rows, and which part of its gradient the tile is; the first tile for one that there is not.
    t = gl.where(t < tiles, t, 0)
    e = t // (down * across)
    r = t - e * (down * across)
    m = r // down
    return e, gl.load(ends + e - 1, mask=e > 0, other=0), gl.load(ends + e), r - m * down, m


@gluon.jit
def wgrad_load(
    d, x, ends, table, tiles, down, across, abuf, bbuf, full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    FAR: gl.constexpr = 1 << 30
    s = 0
    phase = 0
    j = 0
    jphase = 0
    t = gl.program_id(0)
    e, start, end, n, m = part(ends, t, tiles, down, across)
    j, jphase = tell(slot, told, heard, j, jphase, t, e, start, end, n, m)
    while t < tiles:
        t1 = claim(table, tiles)
        e1, start1, end1, n1, m1 = part(ends, t1, tiles, down, across)
        j, jphase = tell(slot, told, heard, j, jphase, t1, e1, start1, end1, n1, m1)
        for k in range(start, end, BK):
            f = full.index(s)
            mbarrier.wait(empty.index(s), phase ^ 1)
            mbarrier.expect(f, (128 + BN) * BK * 2)
            tma.async_copy_global_to_shared(d, [FAR, end, FAR - end + k, n * 128], f, abuf.index(2 * s))
            tma.async_copy_global_to_shared(d, [FAR, end, FAR - end + k, n * 128 + 64], f, abuf.index(2 * s + 1))
            tma.async_copy_global_to_shared(x, [FAR, end, FAR - end + k, m * BN], f, bbuf.index(s))
            s, phase = step(s, phase, S)
        t = t1
        start = start1
        end = end1
        n = n1
        m = m1


@gluon.jit
def emit(out, buffer, bar, parity, v, e, row, column, BYTES: gl.constexpr, ADD: gl.constexpr):
    # Two buffers take turns.
    tma.store_wait(1)
    W: gl.constexpr = v.shape[1]
    if ADD:
        mbarrier.expect(bar, BYTES)
        tma.async_copy_global_to_shared(out, [e, row, column], bar, buffer)
        mbarrier.wait(bar, parity)
        v += buffer.reshape([64, W]).load(v.type.layout).to(gl.float32)
    buffer.reshape([64, W]).store(v.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [e, row, column], buffer)


@gluon.jit
def wgrad_use(
    cid: gl.constexpr, out, tiles, abuf, bbuf, stage, arrived, full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    s = 0
    phase = 0
    j = 0
    jphase = 0
    parity = 0
    t, e, start, end, n, m, j, jphase = hear(slot, told, heard, j, jphase)
    while t < tiles:
        acc = gl.zeros([64, BN], gl.float32, L)
        for k in range(start, end, BK):
            mbarrier.wait(full.index(s), phase)
            a = abuf.index(2 * s + cid).reshape([BK, 64]).permute((1, 0))
            acc = warpgroup_mma(a, bbuf.index(s).reshape([BK, BN]), acc, use_acc=k > start, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(back(s, S)), count=1, pred=k > start)
            s, phase = step(s, phase, S)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(back(s, S)), count=1, pred=end > start)
        row = n * 128 + cid * 64
        column = m * BN
        left, right = halves(acc)
        if out.block_type.shape[2] == BN // 2:
            emit(out, stage.index(2 * cid), arrived.index(4 * cid), parity, left, e, row, column, 64 * BN, ADD)
            emit(out, stage.index(2 * cid + 1), arrived.index(4 * cid + 1), parity, right, e, row, column + BN // 2, 64 * BN, ADD)
        else:
            C: gl.constexpr = BN // 4
            v, w = halves(left)
            emit(out, stage.index(2 * cid), arrived.index(4 * cid), parity, v, e, row, column, 64 * BN, ADD)
            emit(out, stage.index(2 * cid + 1), arrived.index(4 * cid + 1), parity, w, e, row, column + C, 64 * BN, ADD)
            v, w = halves(right)
            emit(out, stage.index(2 * cid), arrived.index(4 * cid + 2), parity, v, e, row, column + 2 * C, 64 * BN, ADD)
            emit(out, stage.index(2 * cid + 1), arrived.index(4 * cid + 3), parity, w, e, row, column + 3 * C, 64 * BN, ADD)
        parity ^= 1
        t, e, start, end, n, m, j, jphase = hear(slot, told, heard, j, jphase)
    tma.store_wait(0)


@gluon.jit
def wgrad(
    d, x, out, ends, table, tiles, down, across,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, ADD: gl.constexpr,
    PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """out_e = d_e^T x_e over each expert's rows, added to what is there if ADD; zero for an expert without rows.

    d (S, N), x (S, M): ragged views in boxes (1, 1, BK, 64) and (1, 1, BK, BN). out: (E, N, M) in boxes (1, 64, BN / 2), or half
    as wide if it is fp32. table: as in ``mm``, for its counter alone. tiles = E down across, down = ceil(N / 128),
    across = ceil(M / BN).
    """
    abuf = gl.allocate_shared_memory(d.dtype, [2 * S, 1, 1, BK, 64], d.layout)
    bbuf = gl.allocate_shared_memory(x.dtype, [S, 1, 1, BK, BN], x.layout)
    stage = gl.allocate_shared_memory(out.dtype, [4, 1, 64, out.block_type.shape[2]], out.layout)
    slot = mailbox()
    arrived = barriers(8, 1)
    full = barriers(S, 1)
    empty = barriers(S, 2)
    told = barriers(2, 1)
    heard = barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize([
        (wgrad_use, (0, out, tiles, abuf, bbuf, stage, arrived, full, empty, slot, told, heard,
                     S, BK, BN, ADD)),
        (wgrad_use, (1, out, tiles, abuf, bbuf, stage, arrived, full, empty, slot, told, heard,
                     S, BK, BN, ADD)),
        (wgrad_load, (d, x, ends, table, tiles, down, across, abuf, bbuf, full, empty, slot, told, heard, S, BK, BN)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
