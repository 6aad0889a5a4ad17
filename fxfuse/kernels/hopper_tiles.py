"""Which tile of rows belongs to which expert: the list that the Hopper kernels take their work from.

Rows are in E + 1 groups: those of each expert, and those past the last expert's, which the kernels fill with zeros. A group of
n rows has ceil(n / 128) tiles. One record of eight int32 a tile: group, first tile of the group, tiles of the group, first row
and end row of the group, three unused. Record 0 holds the number of tiles and the counter that the tiles are claimed by:
zero at first, and each launch leaves it at zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 128
"""Rows of a tile: 64 for each of two consumers."""
FIELDS = 8


def limit(rows: int, experts: int) -> int:
    """Records that suffice, however the rows are distributed; the host does not know how they are."""
    return -(-rows // ROWS) + experts + 2


@triton.jit(do_not_specialize=["rows"])
def fill(ends, table, rows, E: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Write the list. Grid (E + 1,); GROUPS is a power of two, at least E + 1; ``rows`` is S."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends + group, mask=group < E, other=0)
    end = tl.where(group == E, rows, end)
    start = tl.load(ends + group - 1, mask=(group > 0) & (group <= E), other=0)
    count = tl.where(group <= E, tl.maximum(end - start + ROWS - 1, 0) // ROWS, 0)
    before = tl.cumsum(count, 0) - count
    me = tl.program_id(0)
    if me == 0:
        tl.store(table, tl.sum(count, 0))
        tl.store(table + 1, 0)
    mine = group == me
    first = tl.sum(tl.where(mine, before, 0), 0)
    tiles = tl.sum(tl.where(mine, count, 0), 0)
    from_row = tl.sum(tl.where(mine, start, 0), 0)
    to_row = tl.sum(tl.where(mine, end, 0), 0)
    for i in range(0, tiles, CHUNK):
        place = i + tl.arange(0, CHUNK)
        record = table + (1 + first + place) * 8
        here = place < tiles
        tl.store(record, me, mask=here)
        tl.store(record + 1, first, mask=here)
        tl.store(record + 2, tiles, mask=here)
        tl.store(record + 3, from_row, mask=here)
        tl.store(record + 4, to_row, mask=here)
