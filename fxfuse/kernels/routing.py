"""The stable order of (token, expert) pairs by expert without a sort: each block counts, then places what it counted.

A block owns consecutive pairs. A pair's place is the number of pairs of smaller experts, plus those of its own expert in the
blocks before, plus those before it in its block. Ids outside [0, E) belong to no expert: their pairs come after all others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fresh import fresh
from .plans import Operand, planned
from .prepared import Launch

BLOCKS = 128
"""At most so many: each of them reads the counts of all."""
ALONE = 4
"""So many steps of one block take less time than a second kernel."""
PAIRS, WARPS = 128, 4
"""Of a step: a thread a pair."""
CELLS = 8192
"""Of the table (blocks, experts) that a block reads at a time."""
NOBODY = tl.constexpr(1 << 30)


@triton.jit
def _experts(ids, at, S, E):
    """Experts of the pairs ``at``; NOBODY for those that have none, or that are past the last pair."""
    found = tl.load(ids + at, mask=at < S, other=-1)
    return tl.where((found < 0) | (found >= E), NOBODY, found).to(tl.int32)


@triton.jit
def _counted(ids, first, last, S, E, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """[EXPERTS]: how many of the pairs from ``first`` to before ``last`` each expert has."""
    found = tl.zeros((EXPERTS,), tl.int32)
    for at in tl.range(first, last, PAIRS):
        mine = _experts(ids, at + tl.arange(0, PAIRS), S, E)
        found += tl.histogram(mine, EXPERTS, mine != NOBODY)
    return found


@triton.jit(do_not_specialize=["S", "span"])
def count_kernel(ids, counts, S, E, span, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """counts (blocks, EXPERTS): how many of the block's pairs each expert has. ``span`` is a multiple of PAIRS."""
    block = tl.program_id(0)
    last = tl.minimum(block * span + span, S)
    found = _counted(ids, block * span, last, S, E, PAIRS, EXPERTS)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["S", "blocks", "span"])
def place_kernel(
    ids, counts, order, tokens, inverse, ends, S, E, K, blocks, span,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Without COUNTED there is one block, which counts first."""
    block = tl.program_id(0)
    groups = tl.arange(0, EXPERTS)
    if COUNTED:
        counted = tl.zeros((ROWS, EXPERTS), tl.int32)
        earlier = tl.zeros((ROWS, EXPERTS), tl.int32)
        for first in tl.range(0, blocks, ROWS):
            b = first + tl.arange(0, ROWS)
            some = tl.load(counts + b[:, None] * EXPERTS + groups[None, :], mask=(b < blocks)[:, None], other=0)
            counted += some
            earlier += tl.where((b < block)[:, None], some, 0)
        total = tl.sum(counted, 0)
        before = tl.sum(earlier, 0)
    else:
        total = _counted(ids, 0, S, S, E, PAIRS, EXPERTS)
        before = tl.zeros((EXPERTS,), tl.int32)
    upto = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + groups, upto, mask=groups < E)
    place = upto - total + before  # of the next pair of each expert
    outside = tl.sum(total) + block * span - tl.sum(before)  # and of none
    for first in tl.range(block * span, tl.minimum(block * span + span, S), PAIRS):
        at = first + tl.arange(0, PAIRS)
        mine = _experts(ids, at, S, E)
        like_me = (mine[:, None] == mine[None, :]) & (at[:, None] < at[None, :])
        base = tl.gather(place, tl.minimum(mine, EXPERTS - 1), 0)
        found = tl.where(mine == NOBODY, outside, base) + tl.sum(like_me.to(tl.int32), 0)
        tl.store(order + found, at.to(tl.int64), mask=at < S)
        tl.store(tokens + found, (at // K).to(tl.int64), mask=at < S)
        tl.store(inverse + at, found.to(tl.int64), mask=at < S)
        here = tl.histogram(mine, EXPERTS, mine != NOBODY)
        place += here
        outside += PAIRS - tl.sum(here)


def constants(experts: int) -> dict[str, int]:
    """What both kernels are compiled for, by the number of experts."""
    groups = triton.next_power_of_2(max(experts, 32))
    return {"PAIRS": PAIRS, "EXPERTS": groups, "ROWS": max(1, min(BLOCKS, CELLS // groups))}


def route(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``reference.route``."""
    return _route(ids.contiguous(), experts)


@planned
def _route(precision: str, ids: Operand, experts: int) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    (tokens, chosen), compiled = ids.shape, constants(experts)
    pairs = tokens * chosen
    rows, counted = compiled.pop("ROWS"), pairs > ALONE * PAIRS
    span = PAIRS * (triton.cdiv(pairs, PAIRS * BLOCKS) if counted else ALONE)
    blocks = max(1, triton.cdiv(pairs, span))
    count = Launch(count_kernel, (blocks,), ids.device, (pairs, experts, span), **compiled, num_warps=WARPS)
    place = Launch(
        place_kernel, (blocks,), ids.device, (pairs, experts, chosen, blocks, span),
        **compiled, ROWS=rows, COUNTED=counted, num_warps=WARPS,
    )  # fmt: skip

    new_rows, new_ends = fresh((pairs,), ids, torch.int64), fresh((experts,), ids, torch.int32)
    new_counts = fresh((blocks, compiled["EXPERTS"]), ids, torch.int32)

    def run(ids: Tensor, _: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        order, tokens, inverse, ends, counts = new_rows(), new_rows(), new_rows(), new_ends(), None
        if counted:
            counts = new_counts()
            count(ids, counts)
        place(ids, counts, order, tokens, inverse, ends)
        return order, tokens, inverse, ends

    return run
