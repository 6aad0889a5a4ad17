"""Host side of every launch: which configuration, of which tiles.

Kernels are not compiled anew for another number of rows: what depends on it is not specialised.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
from torch import Tensor

from .plans import Operand


@dataclasses.dataclass(frozen=True)
class Config:
    """One way to launch a kernel: its tile, warps and pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    """Row tiles that share the columns of a weight before the next columns come."""
    sweep: int = 1
    """Of a weight's gradient: tiles side by side that one program computes."""

    def fitting(self, element_bytes: int, products: int, limit: int) -> Config:
        """With as many stages as the operands of ``products`` products of a tile leave room for."""
        stage = (self.m + products * self.n) * self.k * element_bytes
        return dataclasses.replace(self, stages=max(1, min(self.stages, limit // stage)))


Table = dict[tuple[int, int], tuple[tuple[int, Config], ...]]
"""By (compute capability, element size), then (up to so many rows an expert, configuration), rising; the last is for all beyond.

A GPU takes the newest capability that is not newer than its own."""
MANY = 1 << 62
NEWEST = 9


def chosen(table: Table, like: Operand, rows: int, experts: int, products: int = 1) -> Config:
    """The configuration for these operands, by the mean number of rows an expert."""
    capability, shared = _machine(like.device)
    size, mean = like.dtype.itemsize, rows / max(experts, 1)
    lines = next(table[c, size] for c in range(capability, 0, -1) if (c, size) in table)
    return next(c for limit, c in lines if mean <= limit).fitting(size, products, shared)


@functools.lru_cache
def _machine(device: torch.device) -> tuple[int, int]:
    """Compute capability, and the bytes of shared memory that one block may use."""
    if device.type != "cuda":
        return NEWEST, MANY
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.shared_memory_per_block_optin


def widened(dtype: torch.dtype) -> bool:
    """Whether operands are converted before they are multiplied: Triton's interpreter multiplies the bits of bf16."""
    return dtype is torch.bfloat16 and triton.knobs.runtime.interpret


def rows_contiguous(t: Tensor) -> Tensor:
    """``t`` with neighbours along its last dimension, copied if need be."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def experts_block(experts: int) -> int:
    """A power of two above the number of experts: one more group holds the rows of no expert."""
    return triton.next_power_of_2(experts + 1)


def tile_list(ends: Tensor, rows: int) -> Tensor | None:
    """As ``reference.tile_list``: nothing, each tile finds its rows itself."""
    return None


def row_tiles(rows: int, experts: int, m: int) -> int:
    """An upper bound of the tiles that ``tiles.rows_of_tile`` numbers."""
    return rows // m + min(experts + 1, rows)
