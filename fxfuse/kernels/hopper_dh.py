"""Back through an expert's second linear and its activation, on Hopper, in one kernel."""

from __future__ import annotations

from .hopper import (
    barriers,
    fence_async_shared,
    gl,
    gluon,
    halves,
    hear,
    lay,
    mbarrier,
    send,
    step,
    tile_at,
    tma,
    unzip,
    zip_columns,
)
from .hopper_activation import activated_backward, gated_backward
from .hopper_rows import mm_load, of_rows, products, skip


@gluon.jit
def fetch(hg, hu, gbuf, ubuf, arrived, place, row, end, column, MODE: gl.constexpr, C: gl.constexpr):
    # A slice of what the activation was computed from.
    FAR: gl.constexpr = 1 << 30
    bar = arrived.index(place)
    mbarrier.expect(bar, 64 * C * 2 if MODE == 1 else 64 * C * 4)
    if MODE == 3:
        tma.async_copy_global_to_shared(hg, [FAR, end, FAR - end + row, 2 * column], bar, gbuf.index(place))
    else:
        tma.async_copy_global_to_shared(hg, [FAR, end, FAR - end + row, column], bar, gbuf.index(place))
        if MODE == 2:
            tma.async_copy_global_to_shared(hu, [FAR, end, FAR - end + row, column], bar, ubuf.index(place))


@gluon.jit
def dh_slice(
    cid: gl.constexpr, i: gl.constexpr, da, hg, hu, dg, du, scaled, p, row, end, seen, column, gbuf, ubuf, obuf, arrived,
    MODE: gl.constexpr, ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    # Columns i C.. of a tile; the slices alternate between two pairs of buffers. Returns the row sums of da * a.
    C: gl.constexpr = da.shape[1]
    place: gl.constexpr = 2 * cid + i % 2
    mbarrier.wait(arrived.index(place), i // 2)
    if MODE == 3:
        ZIPPED: gl.constexpr = zip_columns(da, da).type.layout
        g, u = unzip(gbuf.index(place).reshape([64, 2 * C]).load(ZIPPED))
        a, slope, upward = gated_backward(g.to(gl.float32), u.to(gl.float32), ACT, LIMIT, ALPHA)
    elif MODE == 2:
        g = gbuf.index(place).reshape([64, C]).load(da.type.layout)
        u = ubuf.index(place).reshape([64, C]).load(da.type.layout)
        a, slope, upward = gated_backward(g.to(gl.float32), u.to(gl.float32), ACT, LIMIT, ALPHA)
    else:
        g = gbuf.index(place).reshape([64, C]).load(da.type.layout)
        a, slope = activated_backward(g.to(gl.float32), ACT, LIMIT, ALPHA)
        if ACT == "sigmoid":
            a = gl.where(seen > row, a, 0.0)
    sums = gl.sum(da * a, 1)
    if P:
        weights = of_rows(p, row, seen, da, 0.0)
        a *= weights
        da *= weights
    tma.store_wait(0)
    if i == 1 or i == 2:
        fetch(hg, hu, gbuf, ubuf, arrived, 2 * cid + (i + 1) % 2, row, seen, column + C, MODE, C)
    if MODE == 3:
        lay(dg, gbuf.index(place), zip_columns((da * slope).to(dg.dtype), (da * upward).to(dg.dtype)))
    else:
        lay(dg, gbuf.index(place), da * slope)
        if MODE == 2:
            lay(du, ubuf.index(place), da * upward)
    lay(scaled, obuf.index(cid), a)
    fence_async_shared()
    send(dg, gbuf.index(place), row, end, 2 * column if MODE == 3 else column)
    if MODE == 2:
        send(du, ubuf.index(place), row, end, column)
    send(scaled, obuf.index(cid), row, end, column)
    return sums


@gluon.jit
def dh_use(
    cid: gl.constexpr, hg, hu, dg, du, scaled, table, p, partial, E, K, across, abuf, bbuf, gbuf, ubuf, obuf, arrived,
    full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
    ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    C: gl.constexpr = BN // 4
    tiles = gl.load(table) * across
    s = 0
    phase = 0
    j = 0
    jphase = 0
    t = gl.program_id(0)
    while t < tiles:
        e, row, last, end, n = tile_at(table, t, across, cid)
        t = hear(slot, told, heard, j, jphase)
        j, jphase = step(j, jphase, 2)
        depth = gl.where(e < E, K, 0)
        seen = gl.where(e < E, end, row)
        if row < last:
            column = n * BN
            tma.store_wait(0)
            fetch(hg, hu, gbuf, ubuf, arrived, 2 * cid, row, seen, column, MODE, C)
            fetch(hg, hu, gbuf, ubuf, arrived, 2 * cid + 1, row, seen, column + C, MODE, C)
            acc, s, phase = products(cid, depth, s, phase, abuf, bbuf, full, empty, S, BK, BN, TB)
            left, right = halves(acc)
            d0, d1 = halves(left)
            d2, d3 = halves(right)
            sums = dh_slice(cid, 0, d0, hg, hu, dg, du, scaled, p, row, end, seen, column, gbuf, ubuf, obuf, arrived,
                            MODE, ACT, LIMIT, ALPHA, P)  # fmt: skip
            sums += dh_slice(cid, 1, d1, hg, hu, dg, du, scaled, p, row, end, seen, column + C, gbuf, ubuf, obuf, arrived,
                             MODE, ACT, LIMIT, ALPHA, P)  # fmt: skip
            sums += dh_slice(cid, 2, d2, hg, hu, dg, du, scaled, p, row, end, seen, column + 2 * C, gbuf, ubuf, obuf, arrived,
                             MODE, ACT, LIMIT, ALPHA, P)  # fmt: skip
            sums += dh_slice(cid, 3, d3, hg, hu, dg, du, scaled, p, row, end, seen, column + 3 * C, gbuf, ubuf, obuf, arrived,
                             MODE, ACT, LIMIT, ALPHA, P)  # fmt: skip
            i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, d0.type.layout))
            gl.store(partial + i.to(gl.int64) * across + n, sums, mask=i < end)
        else:
            s, phase = skip(depth, s, phase, full, empty, S, BK)
    tma.store_wait(0)


@gluon.jit
def dh(
    a, b, hg, hu, dg, du, scaled, table, p, partial, E, K, across,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
    ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr, P: gl.constexpr,
    PRODUCER: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dA' = a (S, K) times its expert's matrix, in fp32, and from it the gradients before the activation.

    a, b as in ``mm``. hg, hu: ragged views of what the activation was computed from, dg, du: of its gradient, scaled: of p times
    the activation's output; boxes (1, 1, 64, BN / 4), in MODE 3 twice as wide for hg and dg. p: (S,) fp32. partial: (S, across)
    fp32, receives the row sums of dA' times the activation's output by tile of columns.
    """
    abuf = gl.allocate_shared_memory(a.dtype, [2 * S, 64, BK], a.layout)
    bbuf = gl.allocate_shared_memory(b.dtype, [S, 1, BK, BN] if TB else [S, 1, BN, BK], b.layout)
    gbuf = gl.allocate_shared_memory(hg.dtype, [4, 1, 1, 64, BN // 2 if MODE == 3 else BN // 4], hg.layout)
    ubuf = gl.allocate_shared_memory(hu.dtype, [4, 1, 1, 64, BN // 4], hu.layout) if MODE == 2 else gbuf
    obuf = gl.allocate_shared_memory(scaled.dtype, [2, 1, 1, 64, BN // 4], scaled.layout)
    slot = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    arrived = barriers(4, 1)
    full = barriers(S, 1)
    empty = barriers(S, 2)
    told = barriers(2, 1)
    heard = barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize([
        (dh_use, (0, hg, hu, dg, du, scaled, table, p, partial, E, K, across, abuf, bbuf, gbuf, ubuf, obuf, arrived,
                  full, empty, slot, told, heard, S, BK, BN, TB, MODE, ACT, LIMIT, ALPHA, P)),
        (dh_use, (1, hg, hu, dg, du, scaled, table, p, partial, E, K, across, abuf, bbuf, gbuf, ubuf, obuf, arrived,
                  full, empty, slot, told, heard, S, BK, BN, TB, MODE, ACT, LIMIT, ALPHA, P)),
        (mm_load, (a, b, b, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard, S, BK, BN, TB, 0)),
    ], [4, 1], [CONSUMER, PRODUCER])  # fmt: skip
