"""Each token's weighted sum over the rows of its experts: read once, summed in fp32, written once."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .fresh import fresh
from .launch import rows_contiguous
from .plans import Operand, planned
from .prepared import Launch

COLUMNS = 1024


@triton.jit
def combine_kernel(
    y,
    p,
    bias,
    ids,
    inverse,
    ends,
    out,
    H,
    E,
    K,
    stride_y,
    stride_p_t,
    stride_p_k,
    stride_ids_t,
    stride_ids_k,
    stride_bias,
    TN: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TN + tl.arange(0, TN)
    used = tl.load(ends + E - 1)
    total = tl.zeros((TN,), tl.float32)
    for k in tl.range(0, K):
        place = tl.load(inverse + token * K + k).to(tl.int64)
        mask = (n < H) & (place < used)
        row = tl.load(y + place * stride_y + n, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            expert = tl.load(ids + token * stride_ids_t + k * stride_ids_k).to(tl.int64)
            expert = tl.minimum(tl.maximum(expert, 0), E - 1)
            row += tl.load(bias + expert * stride_bias + n, mask=mask, other=0.0).to(tl.float32)
        if WEIGHTS:
            weight = tl.load(p + token * stride_p_t + k * stride_p_k).to(tl.float32)
            row = tl.where(place < used, row * weight, 0.0)
        total += row
    tl.store(out + token * H + n, total.to(out.dtype.element_ty), mask=n < H)


def combine(
    y: Tensor, p: Tensor | None, b_down: Tensor | None, ids: Tensor, inverse: Tensor, ends: Tensor, like: Tensor
) -> Tensor:
    """As ``reference.combine``."""
    b_down = None if b_down is None else rows_contiguous(b_down)
    return _combine(rows_contiguous(y), p, b_down, ids, inverse.contiguous(), ends, like)


@planned
def _combine(
    precision: str,
    y: Operand,
    p: Operand | None,
    b_down: Operand | None,
    ids: Operand,
    inverse: Operand,
    ends: Operand,
    like: Operand,
) -> Callable[..., Tensor]:
    (tokens, chosen), width = ids.shape, y.shape[1]
    columns = min(COLUMNS, triton.next_power_of_2(width))
    launch = Launch(
        combine_kernel, (tokens, triton.cdiv(width, columns)), y.device,
        (width, ends.shape[0], chosen, y.stride[0], *((0, 0) if p is None else p.stride), *ids.stride,
         0 if b_down is None else b_down.stride[0]),
        TN=columns, WEIGHTS=p is not None, BIAS=b_down is not None, num_warps=4 if columns > 256 else 1,
    )  # fmt: skip

    new = fresh((tokens, width), like)

    def run(y: Tensor, p: Tensor | None, bias: Tensor | None, ids: Tensor, inverse: Tensor, ends: Tensor, like: Tensor) -> Tensor:
        out = new()
        launch(y, p, bias, ids, inverse, ends, out)
        return out

    return run
