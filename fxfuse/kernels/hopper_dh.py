"""Back through an expert's second linear and its activation, on Hopper, in one kernel."""

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
    lay,
    mailbox,
    mbarrier,
    send,
    step,
    tell,
    tile_at,
    tma,
    unzip,
    zip_columns,
)
from .hopper_activation import activated_backward, gated_backward
from .hopper_rows import load_rows, of_rows, products, skip


@gluon.jit
def dh_load(
    a, b, hg, hu, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    # As mm_load; behind the stages of a tile's product come four of what its activation was computed from, a slice of columns
    # each, where the weights would be.
    FAR: gl.constexpr = 1 << 30
    C: gl.constexpr = BN // 4
    tiles = gl.load(table) * across
    s = 0
    phase = 0
    j = 0
    jphase = 0
    t = gl.program_id(0)
    e, row, last, end, n = tile_at(table, gl.where(t < tiles, t, 0), across)
    j, jphase = tell(slot, told, heard, j, jphase, t, e, row, last, end, n)
    while t < tiles:
        t1 = claim(table, tiles)
        e1, row1, last1, end1, n1 = tile_at(table, gl.where(t1 < tiles, t1, 0), across)
        j, jphase = tell(slot, told, heard, j, jphase, t1, e1, row1, last1, end1, n1)
        depth = gl.where(e < E, K, 0)
        s, phase = load_rows(a, b, b, e, row, n, depth, s, phase, abuf, bbuf, full, empty, S, BK, BN, TB, 0)
        seen = gl.where(e < E, end, row)
        for i in range(4):
            column = n * BN + i * C
            f = full.index(s)
            mbarrier.wait(empty.index(s), phase ^ 1)
            mbarrier.expect(f, 128 * C * 2 if MODE == 1 else 256 * C * 2)
            for cid in gl.static_range(2):
                at = FAR - seen + row + 64 * cid
                if MODE == 3:
                    tma.async_copy_global_to_shared(hg, [FAR, seen, at, 2 * column], f, boxes(bbuf, s, hg, 2).index(cid))
                else:
                    tma.async_copy_global_to_shared(hg, [FAR, seen, at, column], f, boxes(bbuf, s, hg, 4).index(2 * cid))
                    if MODE == 2:
                        tma.async_copy_global_to_shared(hu, [FAR, seen, at, column], f, boxes(bbuf, s, hu, 4).index(2 * cid + 1))
            s, phase = step(s, phase, S)
        t = t1
        e = e1
        row = row1
        end = end1
        n = n1


@gluon.jit
def boxes(bbuf, s, d, COUNT: gl.constexpr):
    # The memory of a stage's weights as boxes of another descriptor.
    W: gl.constexpr = d.block_type.shape[3]
    return bbuf.index(s)._reinterpret(d.dtype, [COUNT, 1, 1, 64, W], d.layout)


@gluon.jit
def dh_slice(
    cid: gl.constexpr, da, dg, du, scaled, p, row, end, seen, column, s, phase, abuf, bbuf, full,
    BN: gl.constexpr, MODE: gl.constexpr, ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    # Some columns of a tile: the gradients take the place of what was read, p a that of the rows. Returns the row sums of da * a.
    C: gl.constexpr = da.shape[1]
    obuf = abuf.index(2 * s + cid)._reinterpret(scaled.dtype, [1, 1, 64, C], scaled.layout)
    mbarrier.wait(full.index(s), phase)
    if MODE == 3:
        ZIPPED: gl.constexpr = zip_columns(da, da).type.layout
        gbuf = boxes(bbuf, s, dg, 2).index(cid)
        g, u = unzip(gbuf.reshape([64, 2 * C]).load(ZIPPED))
        a, slope, upward = gated_backward(g.to(gl.float32), u.to(gl.float32), ACT, LIMIT, ALPHA)
    else:
        gbuf = boxes(bbuf, s, dg, 4).index(2 * cid)
        g = gbuf.reshape([64, C]).load(da.type.layout)
        if MODE == 2:
            ubuf = boxes(bbuf, s, du, 4).index(2 * cid + 1)
            u = ubuf.reshape([64, C]).load(da.type.layout)
            a, slope, upward = gated_backward(g.to(gl.float32), u.to(gl.float32), ACT, LIMIT, ALPHA)
        else:
            a, slope = activated_backward(g.to(gl.float32), ACT, LIMIT, ALPHA)
            if ACT == "sigmoid":
                a = gl.where(seen > row, a, 0.0)
    sums = gl.sum(da * a, 1)
    if P:
        weights = of_rows(p, row, seen, da, 0.0)
        a *= weights
        da *= weights
    if MODE == 3:
        lay(dg, gbuf, zip_columns((da * slope).to(dg.dtype), (da * upward).to(dg.dtype)))
    else:
        lay(dg, gbuf, da * slope)
        if MODE == 2:
            lay(du, ubuf, da * upward)
    lay(scaled, obuf, a)
    fence_async_shared()
    send(dg, gbuf, row, end, 2 * column if MODE == 3 else column)
    if MODE == 2:
        send(du, ubuf, row, end, column)
    send(scaled, obuf, row, end, column)
    return sums


@gluon.jit
def give_back(empty, s, S: gl.constexpr, SENDS: gl.constexpr, there=True):
    # The stage before s, once all but the last sends have been read; if it is one of theirs.
    tma.store_wait(SENDS)
    mbarrier.arrive(empty.index(back(s, S)), count=1, pred=there)


@gluon.jit
def dh_use(
    cid: gl.constexpr, dg, du, scaled, table, p, partial, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
    ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = BN // 4
    SENDS: gl.constexpr = 3 if MODE == 2 else 2
    tiles = gl.load(table) * across
    s = 0
    phase = 0
    j = 0
    jphase = 0
    t, e, row, last, end, n, j, jphase = hear(slot, told, heard, j, jphase)
    while t < tiles:
        row += 64 * cid
        depth = gl.where(e < E, K, 0)
        seen = gl.where(e < E, end, row)
        if row < last:
            column = n * BN
            acc, s, phase = products(cid, depth, s, phase, abuf, bbuf, full, empty, S, BK, BN, TB)
            part, rest = halves(acc)
            sums = gl.zeros([64], gl.float32, gl.SliceLayout(1, halves(part)[0].type.layout))
            # A loop, so that its code is there once: all four slices of both consumers are more than an SM keeps at hand.
            for half in range(2):
                left, right = halves(part)
                sums += dh_slice(cid, left, dg, du, scaled, p, row, end, seen, column, s, phase, abuf, bbuf, full,
                                 BN, MODE, ACT, LIMIT, ALPHA, P)  # fmt: skip
                give_back(empty, s, S, SENDS, half > 0)
                s, phase = step(s, phase, S)
                sums += dh_slice(cid, right, dg, du, scaled, p, row, end, seen, column + C, s, phase, abuf, bbuf, full,
                                 BN, MODE, ACT, LIMIT, ALPHA, P)  # fmt: skip
                give_back(empty, s, S, SENDS)
                s, phase = step(s, phase, S)
                part = rest
                column += 2 * C
            i = row + gl.arange(0, 64, layout=sums.type.layout)
            gl.store(partial + i.to(gl.int64) * across + n, sums, mask=i < end)
            give_back(empty, s, S, 0)
        else:
            s, phase = skip(depth + 4 * BK, s, phase, full, empty, S, BK)
        t, e, row, last, end, n, j, jphase = hear(slot, told, heard, j, jphase)


@gluon.jit
def dh(
    a, b, hg, hu, dg, du, scaled, table, p, partial, E, K, across,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
    ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, P: gl.constexpr,
    PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dA' = a (S, K) times its expert's matrix, in fp32, and from it the gradients before the activation.

    a, b as in ``mm``, BK 64. hg, hu: ragged views of what the activation was computed from, dg, du: of its gradient, scaled: of p
    times the activation's output; boxes (1, 1, 64, BN / 4), in MODE 3 twice as wide for hg and dg. p: (S,) fp32. partial:
    (S, across) fp32, receives the row sums of dA' times the activation's output by tile of columns.

    What the epilogue reads comes through the stages of the ring, and what it writes leaves from there: it is loaded under the
    products, and no memory is set aside for it.
    """
    abuf = gl.allocate_shared_memory(a.dtype, [2 * S, 64, BK], a.layout)
    bbuf = gl.allocate_shared_memory(b.dtype, [S, 1, BK, BN] if TB else [S, 1, BN, BK], b.layout)
    slot = mailbox()
    full = barriers(S, 1)
    empty = barriers(S, 2)
    told = barriers(2, 1)
    heard = barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize([
        (dh_use, (0, dg, du, scaled, table, p, partial, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
                  S, BK, BN, TB, MODE, ACT, LIMIT, ALPHA, P)),
        (dh_use, (1, dg, du, scaled, table, p, partial, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
                  S, BK, BN, TB, MODE, ACT, LIMIT, ALPHA, P)),
        (dh_load, (a, b, hg, hu, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard, S, BK, BN, TB, MODE)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
