"""What the Hopper kernels share, and the only file that touches ``triton.experimental``: Gluon, descriptors, tiles, the ring.

Symbols as in ``ops.grouped_experts``: S rows sorted by expert, E experts, K the summed width, N the columns of the result.

One CTA on each SM, of three partitions. One warp loads boxes by TMA into a ring of stages and claims the next tile; two groups of
four warps each own 64 of a tile's 128 rows and all of its 256 columns, so that one's epilogue runs under the other's products.
A group of rows ends where it ends: 64 rows past the end cost a consumer no product, stores are clipped.

``hopper_mm``: rows times their expert's matrix, with bias, row scale or activation. ``hopper_dh``: the same with the activation's
backward. ``hopper_wgrad``: a product over each expert's rows. What they are launched with: ``hopper_launch``.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "async_copy",
    "back",
    "barriers",
    "beside",
    "claim",
    "descriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "halves",
    "hear",
    "lay",
    "layout",
    "mailbox",
    "mbarrier",
    "put_after",
    "send",
    "step",
    "tell",
    "tile_at",
    "tma",
    "unzip",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "zip_columns",
]

# ------------------------------------------------------------------------------------------------ descriptors


def layout(block: tuple[int, ...], itemsize: int = 2) -> Any:
    """The shared-memory layout that a box of this shape is copied to."""
    swizzle = min(128, block[-1] * itemsize)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * itemsize, rank=len(block))


class Memory:
    """What a descriptor needs of a tensor: nothing that would keep it alive."""

    def __init__(self, address: int, dtype: Any) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


@functools.lru_cache(maxsize=4096)
def descriptor(
    address: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    """A TMA descriptor; it depends on nothing but its arguments, so that a kept one is never stale."""
    memory = Memory(address, dtype)
    return TensorDescriptor(memory, list(shape), list(strides), list(block), layout(block, dtype.itemsize))


# ------------------------------------------------------------------------------------------------ tiles and stages


@gluon.jit
def tile_at(table, t, across):
    # The records are those of hopper_tiles. 64-row blocks go two to a tile; the first tile takes the odd one.
    record = table + (1 + t // across) * 8
    e = gl.load(record)
    first = gl.load(record + 1)
    count = gl.load(record + 2)
    start = gl.load(record + 3)
    end = gl.load(record + 4)
    r = t - first * across
    n = r // count
    i = r - n * count
    odd = (end - start + 63) // 64 % 2
    return e, start + 64 * gl.maximum(2 * i - odd, 0), start + 64 * (2 * i + 2 - odd), end, n


@gluon.jit
def claim(table, tiles):
    # A program's first tile is its own, and each tile is followed by one claim: there are as many claims as tiles. So nobody
    # claims after the one that finds tiles - 1, and that one leaves zero for the next launch, which begins when this has ended.
    counter = table + 1
    claimed = gl.atomic_add(counter, 1, sem="relaxed")
    gl.store(counter, 0, mask=claimed == tiles - 1)
    return claimed + gl.num_programs(0)


@gluon.jit
def step(s, phase, S: gl.constexpr):
    s += 1
    wraps = s == S
    return gl.where(wraps, 0, s), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def back(s, S: gl.constexpr):
    # Not carried along as `prev = s`: the 3.6 front end takes a name that starts as an alias of another carried name for
    # loop-invariant.
    return gl.where(s == 0, S - 1, s - 1)


@gluon.jit
def tell(slot, told, heard, j, phase, v0, v1, v2, v3, v4, v5, WARPS: gl.constexpr = 1):
    # The producer says what the next tile is: six integers, of which the first is its number.
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(heard.index(j), phase ^ 1)
    slot.index(8 * j).store(gl.full([1], v0, gl.int32, L))
    slot.index(8 * j + 1).store(gl.full([1], v1, gl.int32, L))
    slot.index(8 * j + 2).store(gl.full([1], v2, gl.int32, L))
    slot.index(8 * j + 3).store(gl.full([1], v3, gl.int32, L))
    slot.index(8 * j + 4).store(gl.full([1], v4, gl.int32, L))
    slot.index(8 * j + 5).store(gl.full([1], v5, gl.int32, L))
    mbarrier.arrive(told.index(j), count=1)
    return step(j, phase, 2)


@gluon.jit
def read(slot, i):
    return gl.max(slot.index(i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def hear(slot, told, heard, j, phase):
    mbarrier.wait(told.index(j), phase)
    v0 = read(slot, 8 * j)
    v1 = read(slot, 8 * j + 1)
    v2 = read(slot, 8 * j + 2)
    v3 = read(slot, 8 * j + 3)
    v4 = read(slot, 8 * j + 4)
    v5 = read(slot, 8 * j + 5)
    mbarrier.arrive(heard.index(j), count=1)
    j, phase = step(j, phase, 2)
    return v0, v1, v2, v3, v4, v5, j, phase


@gluon.jit
def mailbox():
    return gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(found.index(i), count=ARRIVALS)
    return found


# ------------------------------------------------------------------------------------------------ registers and stores


@gluon.jit
def halves(c):
    M: gl.constexpr = c.shape[0]
    N: gl.constexpr = c.shape[1]
    return gl.split(gl.permute(gl.reshape(c, (M, 2, N // 2)), (0, 2, 1)))


@gluon.jit
def beside(a, b):
    # The inverse of halves.
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), (M, 2 * N))


@gluon.jit
def unzip(c):
    M: gl.constexpr = c.shape[0]
    N: gl.constexpr = c.shape[1]
    return gl.split(gl.reshape(c, (M, N // 2, 2)))


@gluon.jit
def zip_columns(a, b):
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = a.shape[1]
    return gl.reshape(gl.join(a, b), (M, 2 * N))


@gluon.jit
def lay(d, buffer, v):
    # What `send` will send; a fence comes between.
    M: gl.constexpr = v.shape[0]
    N: gl.constexpr = v.shape[1]
    buffer.reshape([M, N]).store(v.to(d.dtype))


@gluon.jit
def send(d, buffer, row, end, column):
    # Rows from `row` on, clipped at `end`, through a ragged view (hopper_launch._ragged).
    FAR: gl.constexpr = 1 << 30
    tma.async_copy_shared_to_global(d, [FAR, end, FAR - end + row, column], buffer)


@gluon.jit
def put_after(d, stage, cid: gl.constexpr, v, row, end, column):
    # Through two buffers in turn, each once what was sent from it before has been read.
    W: gl.constexpr = d.block_type.shape[3]
    left, right = halves(v)
    tma.store_wait(1)
    lay(d, stage.index(2 * cid), left)
    fence_async_shared()
    send(d, stage.index(2 * cid), row, end, column)
    tma.store_wait(1)
    lay(d, stage.index(2 * cid + 1), right)
    fence_async_shared()
    send(d, stage.index(2 * cid + 1), row, end, column + W)
