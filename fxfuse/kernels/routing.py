"""The stable order of (token, expert) pairs by expert without a sort: each block counts, then places what it counted.

A block owns consecutive pairs. A pair's place is the number of pairs of smaller experts, plus those of its own expert in the
blocks before, plus those before it in its block. Ids outside [0, E) belong to a group E, after all others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import experts_block, on

BLOCKS = 128
"""At most so many: each of them reads the counts of all."""
WARPS = 8
CELLS = 8192
"""Of the table (pairs, experts) that a block handles at a time."""


@triton.jit
def _ids(ids, at, S, K, E, stride_t, stride_k):
    """Groups of the pairs ``at``; E for those of no expert."""
    found = tl.load(ids + (at // K).to(tl.int64) * stride_t + (at % K) * stride_k, mask=at < S, other=-1)
    return tl.where((found < 0) | (found >= E), E, found).to(tl.int32)


@triton.jit(do_not_specialize=["S", "span"])
def count_kernel(ids, counts, S, K, E, span, stride_t, stride_k, PAIRS: tl.constexpr, EXPERTS: tl.constexpr):
    """counts (blocks, EXPERTS): how many of the block's pairs each group has."""
    block = tl.program_id(0)
    groups = tl.arange(0, EXPERTS)
    found = tl.zeros((EXPERTS,), tl.int32)
    for first in tl.range(block * span, tl.minimum(block * span + span, S), PAIRS):
        at = first + tl.arange(0, PAIRS)
        mine = _ids(ids, at, S, K, E, stride_t, stride_k)
        same = (mine[:, None] == groups[None, :]) & (at < S)[:, None]
        found += tl.sum(same.to(tl.int32), 0)
    tl.store(counts + block * EXPERTS + groups, found)


@triton.jit(do_not_specialize=["S", "blocks", "span"])
def place_kernel(
    ids, counts, order, inverse, ends, S, K, E, blocks, span, stride_t, stride_k,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    groups = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for first in tl.range(0, blocks, ROWS):
        b = first + tl.arange(0, ROWS)
        some = tl.load(counts + b[:, None] * EXPERTS + groups[None, :], mask=(b < blocks)[:, None], other=0)
        total += tl.sum(some, 0)
        before += tl.sum(tl.where((b < block)[:, None], some, 0), 0)
    upto = tl.cumsum(total, 0)
    if block == 0:
        tl.store(ends + groups, upto, mask=groups < E)
    place = upto - total + before
    for first in tl.range(block * span, tl.minimum(block * span + span, S), PAIRS):
        at = first + tl.arange(0, PAIRS)
        mine = _ids(ids, at, S, K, E, stride_t, stride_k)
        same = ((mine[:, None] == groups[None, :]) & (at < S)[:, None]).to(tl.int32)
        upto_here = tl.cumsum(same, 0)
        found = tl.sum(same * (place[None, :] + upto_here - 1), 1)
        tl.store(order + found, at.to(tl.int64), mask=at < S)
        tl.store(inverse + at, found.to(tl.int64), mask=at < S)
        place += tl.sum(same, 0)


def constants(experts: int) -> dict[str, int]:
    """What both kernels are compiled for, by the number of experts."""
    groups = experts_block(experts)
    return {"PAIRS": max(16, min(128, CELLS // groups)), "EXPERTS": groups, "ROWS": max(1, CELLS // groups)}


def route(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.route``."""
    pairs, compiled = ids.numel(), constants(experts)
    at_a_time, rows = compiled["PAIRS"], compiled.pop("ROWS")
    span = at_a_time * max(1, triton.cdiv(pairs, at_a_time * BLOCKS))
    blocks = max(1, triton.cdiv(pairs, span))
    order, inverse = (torch.empty(pairs, dtype=torch.int64, device=ids.device) for _ in range(2))
    counts = torch.empty(blocks, compiled["EXPERTS"], dtype=torch.int32, device=ids.device)
    ends = torch.empty(experts, dtype=torch.int32, device=ids.device)
    with on(ids.device):
        sizes = (pairs, max(ids.shape[1], 1), experts)
        count_kernel[(blocks,)](ids, counts, *sizes, span, *ids.stride(), **compiled, num_warps=WARPS)
        place_kernel[(blocks,)](
            ids, counts, order, inverse, ends, *sizes, blocks, span, *ids.stride(), ROWS=rows, **compiled, num_warps=WARPS
        )
    return order, inverse, ends
