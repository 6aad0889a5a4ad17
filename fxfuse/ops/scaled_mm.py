"""The product of two quantised matrices: its definition, and the vendor's (cuBLASLt, through torch).

Symbols: a (M, C) and b (N, C) are the operands, the sum runs over C. Vendor products add as the tensor cores do: on Hopper in
about 14 bits, with ``fast`` over the whole sum, else over 128 terms at a time, and these in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fp8_recipes
from .define import define, launch, library
from .quantize import E4M3, E5M2, Quantized, Scheme, dequantize

ALIGNMENT = 16
"""What a vendor's product wants its sizes to be multiples of."""
LINE, SQUARE = (1, 128), (128, 128)
VENDOR_BLOCKS = frozenset({(LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)})
"""Blocks of a and b that cuBLASLt multiplies (its manual, "128-element 1D and 128x128 2D Block Scaling For FP8 Data Types")."""
FOURTEEN_BITS = 2.0**-7
"""What adding in 14 bits may do to a whole sum, relative in norm: 3e-3 over 16384 terms on an H200 with ``fast``, else 1.4e-4."""


@define(
    "scaled_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, int[] a_block, int[] b_block, "
    "ScalarType dtype, bool fast) -> Tensor"
)
def _scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    a_block: Sequence[int],
    b_block: Sequence[int],
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    product = dequantize(Quantized(a, a_scale), a_block) @ dequantize(Quantized(b, b_scale), b_block).t()
    return (product if bias is None else product + bias.float()).to(dtype)


def scaled_mm(
    a: Quantized,
    b: Quantized,
    a_scheme: Scheme,
    b_scheme: Scheme,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """``a b^T + bias`` of a (M, C) and b (N, C), added up in fp32: (M, N) in ``dtype``.

    With ``fast`` a GPU may add up less exactly.
    """
    return torch.ops.fxfuse.scaled_mm(
        a.values, a.scale, b.values, b.scale, bias, list(a_scheme.block), list(b_scheme.block), dtype, fast
    )


# ------------------------------------------------------------------------------------------------ the vendor's


def _no_vendor_product(
    a: Tensor, b: Tensor, bias: Tensor | None, a_block: Sequence[int], b_block: Sequence[int], dtype: torch.dtype, **_: Any
) -> str | None:
    """Why the vendor's product cannot be used, or None."""
    if bias is not None and dtype is torch.float32:
        return "it adds no bias to an fp32 result"
    if not isinstance(b.shape[0], int) or b.shape[0] % ALIGNMENT:
        return f"the result's width is not a multiple of {ALIGNMENT}"
    if list(a_block) or list(b_block):
        return _no_blocks(a, b, tuple(a_block), tuple(b_block))
    if a.dtype == b.dtype == E5M2:
        return "it does not multiply e5m2 with e5m2"
    return None


def _no_blocks(a: Tensor, b: Tensor, a_block: tuple[int, ...], b_block: tuple[int, ...]) -> str | None:
    if (a_block, b_block) not in VENDOR_BLOCKS:
        return f"it does not multiply blocks of {_text(a_block)} with blocks of {_text(b_block)}"
    if not a.dtype == b.dtype == E4M3:
        return "with scales for blocks it takes e4m3 only"
    has = fp8_recipes.capability()
    if has is None or has[0] != 9:
        return "it has scales for blocks on Hopper GPUs only"
    built = torch.version.cuda
    if built is None or tuple(int(n) for n in built.split(".")[:2]) < (12, 9):
        return f"it has scales for blocks since CUDA 12.9, this torch was built with {built}"
    return None


def _text(block: Sequence[int]) -> str:
    return "x".join(map(str, block)) or "one scale"


@_scaled_mm.candidate("extern", _no_vendor_product, tolerance=FOURTEEN_BITS)
def _scaled_mm_extern(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    a_block: Sequence[int],
    b_block: Sequence[int],
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    left, right = (_filled(t, 1, ALIGNMENT).contiguous() for t in (a, b))  # zeros add nothing to the sum
    if not a_block:
        return torch.ops.aten._scaled_mm(left, right.t(), a_scale, b_scale, bias, None, dtype, fast)
    a_square, b_square = (tuple(block) == SQUARE for block in (a_block, b_block))
    rows, scales = _filled(left, 0, ALIGNMENT), (_laid_out(a_scale, a_square), _laid_out(b_scale, b_square))
    out = torch.ops.fxfuse.block_mm(rows, scales[0], right, scales[1], bias, a_square, b_square, dtype)
    return out if rows is left else out[: a.shape[0]]


def _filled(t: Tensor, dim: int, multiple: int) -> Tensor:
    """t (R, C) with zeros up to a multiple of rows (dim 0) or columns (dim 1); t itself where none are missing."""
    missing = -(-t.shape[dim] // multiple) * multiple - t.shape[dim]
    if isinstance(missing, int) and missing == 0:
        return t
    shape = list(t.shape)
    shape[dim] = missing
    plain = t.view(torch.uint8) if t.element_size() == 1 else t  # torch joins no matrices of 8-bit floats
    return torch.cat([plain, plain.new_zeros(shape)], dim).view(t.dtype)


def _laid_out(scale: Tensor, square: bool) -> Tensor:
    """Scales (R / rows, C / 128) as cuBLASLt wants them ("Scaling factors layouts").

    Of lines: (C / 128, R), R filled up as its matrix is. Of squares: (R / 128, C / 128), the latter a multiple of 4.
    """
    return _filled(scale, 1, 4).contiguous() if square else _filled(scale, 0, ALIGNMENT).t().contiguous()


def _block_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    a_square: bool,
    b_square: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The definition, of scales that are laid out; on a GPU it runs where the vendor's product raises."""
    (left, a_block), (right, b_block) = (
        (Quantized(t, scale[:, : -(-t.shape[1] // 128)]), SQUARE) if square else (Quantized(t, scale.t()), LINE)
        for t, scale, square in ((a, a_scale, a_square), (b, b_scale, b_square))
    )
    return _scaled_mm.reference(*left, *right, bias, a_block, b_block, dtype, False)


def _block_mm_cuda(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    a_square: bool,
    b_square: bool,
    dtype: torch.dtype,
) -> Tensor:
    blocks = (F.ScalingType.BlockWise128x128 if square else F.ScalingType.BlockWise1x128 for square in (a_square, b_square))
    a_kind, b_kind = blocks
    right = b.contiguous().t()
    return F.scaled_mm(a.contiguous(), right, _turned(a_scale), a_kind, _turned(b_scale), b_kind, bias=bias, output_dtype=dtype)


def _turned(scale: Tensor) -> Tensor:
    """The transposed view. Torch compares its strides even where a size is one: they are (1, rows)."""
    return scale.contiguous().as_strided((scale.shape[1], scale.shape[0]), (1, scale.shape[1]))


library.define(
    "block_mm(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor? bias, bool a_square, bool b_square, "
    "ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
library.impl("block_mm", _block_mm, "CompositeExplicitAutograd")
library.impl("block_mm", lambda a, _, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=rest[-1]), "Meta")
library.impl("block_mm", launch("block_mm", _block_mm_cuda, _block_mm), "CUDA")
