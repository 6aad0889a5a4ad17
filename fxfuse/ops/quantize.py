"""Quantised matrices: values of few bits with fp32 scales.

Symbols: R rows, C columns. A scale here is what values are multiplied with to get
numbers back: ``x`` is about ``values * scale``. Formats: e4m3 up to 448, e5m2 up to 57344 (Micikevicius et al.,
arXiv:2209.05433), e2m1 up to 6 (OCP Microscaling Formats, version 1.0), which is kept as e4m3 values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import RecipeError
from ..fp8_recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedRecipe,
)
from .define import TAGS, library

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
EXPONENT_BITS = 0x7F800000
"""Of an fp32 number: what is left of it is a power of two."""


class Scheme(NamedTuple):
    """How one operand is quantised."""

    format: str
    """"e4m3", "e5m2" or "e2m1"."""
    block: tuple[int, ...]
    """Rows and columns that share a scale; empty for the whole matrix."""
    power_of_2: bool = False
    margin: int = 0
    delayed: bool = False
    """Whether the scale comes from earlier steps: ``fxfuse.amax``."""

    @property
    def symmetric(self) -> bool:
        """Whether the transposed matrix has the same values and the transposed scales."""
        return not self.block or self.block[0] == self.block[1]


class Quantized(NamedTuple):
    """A matrix (R, C) and its scales: 0-d, or one for each block, (ceil(R / rows), ceil(C / columns)) fp32."""

    values: Tensor
    scale: Tensor

    def t(self) -> Quantized:
        """The transposed matrix, of a symmetric scheme."""
        return Quantized(self.values.t(), self.scale.t())


def schemes(recipe: QuantizedRecipe) -> tuple[Scheme, Scheme, Scheme]:
    """Of activations, of weights, of gradients."""
    forward, backward = "e4m3", "e5m2" if getattr(recipe, "fp8_format", "E4M3") == "HYBRID" else "e4m3"
    if isinstance(recipe, Float8BlockScaling):
        dims = (recipe.x_block_scaling_dim, recipe.w_block_scaling_dim, recipe.grad_block_scaling_dim)
        x, w, g = [(1, 128) if dim == 1 else (128, 128) for dim in dims]
        pow2 = not recipe.use_f32_scales
        return Scheme(forward, x, pow2), Scheme(forward, w, pow2), Scheme(backward, g, pow2)
    if isinstance(recipe, MXFP8BlockScaling):
        one, other = Scheme(forward, (1, 32), True, recipe.margin), Scheme(backward, (1, 32), True, recipe.margin)
        return one, one, other
    if isinstance(recipe, NVFP4BlockScaling):
        line = Scheme("e2m1", (1, 16))
        return line, line if recipe.disable_2d_quantization else Scheme("e2m1", (16, 16)), line
    pow2, late = isinstance(recipe, Float8CurrentScaling) and recipe.use_power_2_scales, isinstance(recipe, DelayedScaling)
    one, other = Scheme(forward, (), pow2, delayed=late), Scheme(backward, (), pow2, delayed=late)
    return one, one, other


def _no_history(amax: Tensor, largest: float) -> Tensor:
    raise RecipeError("DelayedScaling keeps its history with a compiled model: use it through torch.compile(backend='fxfuse')")


library.define("delayed_multiplier(Tensor amax, float largest) -> Tensor")
library.impl("delayed_multiplier", _no_history, "CompositeExplicitAutograd")
library.impl("delayed_multiplier", lambda amax, largest: amax.new_empty(()), "Meta")


def quantize(x: Tensor, scheme: Scheme) -> Quantized:
    """Quantise x (R, C), fp32 or 16 bits.

    NaN stays NaN; an infinity becomes NaN in e4m3 and e2m1, and the block with it is not scaled. Empty and all-zero blocks have
    scale 1. Values beyond what a delayed scale allows for saturate.
    """
    if scheme.block and x.device.type == "cpu":  # Inductor's C++ asserts where blocks along rows and along columns meet
        return Quantized(*torch.ops.fxfuse.block_quantize(x, *scheme[:4]))
    return _quantize(x, scheme)


def _quantize(x: Tensor, scheme: Scheme) -> Quantized:
    wide = x.float()
    if not scheme.block:
        if scheme.delayed:
            multiplier = torch.ops.fxfuse.delayed_multiplier(amax(wide), LARGEST[scheme.format])
        else:
            multiplier = _multiplier(amax(wide), scheme)
        return Quantized(_rounded(wide, wide * multiplier, scheme), multiplier.reciprocal())
    blocks = _in_blocks(wide, scheme.block)
    largest = blocks.abs().amax((1, 3))
    inverse = _nvfp4_multiplier(largest) if scheme.format == "e2m1" else _multiplier(largest, scheme)
    # Rounded as blocks: in the loops of the reduction, so that a GPU computes lines in one kernel that reads x once.
    rounded = _rounded(blocks, blocks * inverse[:, None, :, None], scheme)
    return Quantized(rounded.flatten(2, 3).flatten(0, 1)[: x.shape[0], : x.shape[1]], inverse.reciprocal())


def _block_quantize(x: Tensor, format: str, block: Sequence[int], power_of_2: bool, margin: int) -> tuple[Tensor, Tensor]:
    values, scale = _quantize(x, Scheme(format, tuple(block), power_of_2, margin))
    return values, scale


library.define("block_quantize(Tensor x, str format, int[] block, bool power_of_2, int margin) -> (Tensor, Tensor)", tags=TAGS)
for _kind in ("CompositeExplicitAutograd", "Meta"):
    library.impl("block_quantize", _block_quantize, _kind)


def dequantize(q: Quantized, block: Sequence[int]) -> Tensor:
    """The numbers that a quantised matrix stands for: (R, C) fp32."""
    wide = q.values.float()
    if not block:
        return wide * q.scale
    blocks = _in_blocks(wide, block) * q.scale[:, None, :, None]
    return blocks.flatten(2, 3).flatten(0, 1)[: wide.shape[0], : wide.shape[1]]


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of a matrix, 0-d; zero where it has no rows or no columns."""
    wide = isinstance(x.shape[1], int) and x.shape[1] > 0  # the other size may be dynamic, and zero
    lines = x.abs().amax(1 if wide else 0)
    return torch.cat([lines, lines.new_zeros(1)]).amax()


def _in_blocks(x: Tensor, block: Sequence[int]) -> Tensor:
    """(R, C) as (R / rows, rows, C / columns, columns), filled up with zeros."""
    rows, columns = block
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    padded = x if rows == 1 and isinstance(right, int) and right == 0 else F.pad(x, (0, right, 0, down))
    return padded.unflatten(1, (padded.shape[1] // columns, columns)).unflatten(0, (padded.shape[0] // rows, rows))


def _multiplier(largest: Tensor, scheme: Scheme) -> Tensor:
    """What values are multiplied with so that ``largest`` becomes the format's largest number."""
    usable = (largest > 0) & (largest < math.inf)
    found = (LARGEST[scheme.format] / torch.where(usable, largest, LARGEST[scheme.format])).clamp(max=2.0**126)
    found = found if scheme.margin == 0 else found * 2.0**-scheme.margin
    if scheme.power_of_2:
        found = (found.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return found


def _nvfp4_multiplier(largest: Tensor) -> Tensor:
    """With e4m3 scales for the blocks, themselves scaled by one fp32 number a matrix."""
    whole = _multiplier(amax(largest), Scheme("e4m3", ())) * LARGEST["e2m1"]
    usable = (largest > 0) & (largest < math.inf)
    scale = torch.where(usable, largest, 0) / LARGEST["e2m1"] * whole
    stored = scale.clamp(2.0**-9, LARGEST["e4m3"]).to(E4M3).float() / whole  # 2^-9: e4m3's least number above zero
    return torch.where(usable, stored, 1.0).reciprocal()


def _rounded(x: Tensor, scaled: Tensor, scheme: Scheme) -> Tensor:
    """``scaled`` in the scheme's format; an infinity in x stays one in e5m2 and is NaN in the formats that have none."""
    largest = LARGEST[scheme.format]
    scaled = scaled.clamp(-largest, largest)
    if scheme.format == "e2m1":
        scaled = _to_e2m1(scaled)
    if scheme.format == "e5m2":
        return torch.where(x.isfinite(), scaled, x).to(E5M2)
    return torch.where(x.isfinite(), scaled, math.nan).to(E4M3)


def _to_e2m1(x: Tensor) -> Tensor:
    """Round what lies within 6 to 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round() * step
