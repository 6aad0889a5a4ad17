"""The mainloop of the Hopper kernels whose rows are those of A: loads, products, and what an epilogue reads by row or column."""

from __future__ import annotations

from .hopper import (
    async_copy,
    back,
    claim,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    step,
    tell,
    tile_at,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load_b(
    b, b2, e, n, k, bar, buffer, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    # The weights of a stage.
    H: gl.constexpr = BN // 2
    if MODE == 2:
        if TB:
            tma.async_copy_global_to_shared(b, [e, k, n * H], bar, buffer.slice(0, H, dim=2))
            tma.async_copy_global_to_shared(b2, [e, k, n * H], bar, buffer.slice(H, H, dim=2))
        else:
            tma.async_copy_global_to_shared(b, [e, n * H, k], bar, buffer.slice(0, H, dim=1))
            tma.async_copy_global_to_shared(b2, [e, n * H, k], bar, buffer.slice(H, H, dim=1))
    elif TB:
        tma.async_copy_global_to_shared(b, [e, k, n * BN], bar, buffer)
    else:
        tma.async_copy_global_to_shared(b, [e, n * BN, k], bar, buffer)


@gluon.jit
def mm_gather(
    x, pitch, gather, b, b2, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    # As mm_load, with lines of x that are copied one by one by four warps.
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    column = gl.arange(0, BK, layout=gl.SliceLayout(0, L))
    tiles = gl.load(table) * across
    s = 0
    phase = 0
    j = 0
    jphase = 0
    t = gl.program_id(0)
    e, row, last, end, n = tile_at(table, gl.where(t < tiles, t, 0), across)
    j, jphase = tell(slot, told, heard, j, jphase, t, e, row, last, end, n, 4)
    while t < tiles:
        t1 = claim(table, tiles)
        e1, row1, last1, end1, n1 = tile_at(table, gl.where(t1 < tiles, t1, 0), across)
        j, jphase = tell(slot, told, heard, j, jphase, t1, e1, row1, last1, end1, n1, 4)
        i = row + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
        upper = gl.load(gather + i, mask=i < end, other=0).to(gl.int64) * (pitch // 8 * 8)
        lower = gl.load(gather + i + 64, mask=i + 64 < end, other=0).to(gl.int64) * (pitch // 8 * 8)
        upper = x + upper[:, None] + column[None, :]
        lower = x + lower[:, None] + column[None, :]
        for k in range(0, gl.where(e < E, K, 0), BK):
            f = full.index(s)
            mbarrier.wait(empty.index(s), phase ^ 1)
            mbarrier.expect(f, BN * BK * 2)
            load_b(b, b2, e, n, k, f, bbuf.index(s), BK, BN, TB, MODE)
            inside = (column // 8 < (K - k) // 8)[None, :]
            async_copy.async_copy_global_to_shared(abuf.index(2 * s), upper + k, mask=inside)
            async_copy.async_copy_global_to_shared(abuf.index(2 * s + 1), lower + k, mask=inside)
            async_copy.mbarrier_arrive(f, increment_count=False)
            s, phase = step(s, phase, S)
        t = t1
        e = e1
        row = row1
        end = end1
        n = n1


@gluon.jit
def load_rows(
    a, b, b2, e, row, n, depth, s, phase, abuf, bbuf, full, empty,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    # The stages of a tile.
    for k in range(0, depth, BK):
        f = full.index(s)
        mbarrier.wait(empty.index(s), phase ^ 1)
        mbarrier.expect(f, (128 + BN) * BK * 2)
        tma.async_copy_global_to_shared(a, [row, k], f, abuf.index(2 * s))
        tma.async_copy_global_to_shared(a, [row + 64, k], f, abuf.index(2 * s + 1))
        load_b(b, b2, e, n, k, f, bbuf.index(s), BK, BN, TB, MODE)
        s, phase = step(s, phase, S)
    return s, phase


@gluon.jit
def mm_load(
    a, b, b2, table, E, K, across, abuf, bbuf, full, empty, slot, told, heard,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
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
        s, phase = load_rows(a, b, b2, e, row, n, depth, s, phase, abuf, bbuf, full, empty, S, BK, BN, TB, MODE)
        t = t1
        e = e1
        row = row1
        n = n1


@gluon.jit
def products(
    cid: gl.constexpr, depth, s, phase, abuf, bbuf, full, empty,
    S: gl.constexpr, BK: gl.constexpr, BN: gl.constexpr, TB: gl.constexpr, GATHER: gl.constexpr = False,
):  # fmt: skip
    # 64 rows times BN columns; a stage is given back when the product after it is under way.
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([64, BN], gl.float32, L)
    for k in range(0, depth, BK):
        mbarrier.wait(full.index(s), phase)
        b = bbuf.index(s).reshape([BK, BN]) if TB else bbuf.index(s).reshape([BN, BK]).permute((1, 0))
        if GATHER:
            fence_async_shared()
        acc = warpgroup_mma(abuf.index(2 * s + cid), b, acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(back(s, S)), count=1, pred=k > 0)
        s, phase = step(s, phase, S)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(back(s, S)), count=1, pred=depth > 0)
    return acc, s, phase


@gluon.jit
def skip(depth, s, phase, full, empty, S: gl.constexpr, BK: gl.constexpr):
    # This consumer's 64 rows lie past the group's end.
    for _k in range(0, depth, BK):
        mbarrier.wait(full.index(s), phase)
        mbarrier.arrive(empty.index(s), count=1)
        s, phase = step(s, phase, S)
    return s, phase


@gluon.jit
def of_columns(line, column, columns, live, like):
    # A piece of a row vector as wide as `like`, zero outside of it.
    SHAPE: gl.constexpr = like.shape
    i = column + gl.arange(0, SHAPE[1], layout=gl.SliceLayout(0, like.type.layout))
    return gl.load(line + i, mask=(i < columns) & live, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def of_rows(column, row, end, like, other: gl.constexpr):
    # A piece of a column vector as high as `like`.
    SHAPE: gl.constexpr = like.shape
    i = row + gl.arange(0, SHAPE[0], layout=gl.SliceLayout(1, like.type.layout))
    return gl.load(column + i, mask=i < end, other=other).to(gl.float32)[:, None]
