"""What goes between the (token, expert) pairs and their sorted rows, a number each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fresh import fresh
from .launch import MANY, rows_contiguous
from .plans import Operand, planned
from .prepared import Launch

PAIRS, WARPS, COLUMNS = 256, 4, 1024
"""Of a program."""
LINES = ((1024, 512, 2), (MANY, 2048, 4))
"""Up to so many tokens, columns and warps of a program that spreads a line: few tokens need many programs."""


@triton.jit(do_not_specialize=["S"])
def sorted_kernel(
    order, p, tokens, weights, S, K, stride_order, stride_p_t, stride_p_k, PAIRS: tl.constexpr, WEIGHTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    pair = tl.load(order + row * stride_order, mask=row < S, other=0)
    token = pair // K
    tl.store(tokens + row, token, mask=row < S)
    if WEIGHTS:
        weight = tl.load(p + token * stride_p_t + pair % K * stride_p_k, mask=row < S, other=0.0)
        tl.store(weights + row, weight.to(tl.float32), mask=row < S)


def sorted_pairs(order: Tensor, p: Tensor | None, chosen: int) -> tuple[Tensor, Tensor | None]:
    """As ``reference.sorted_pairs``."""
    return _sorted_pairs(order, p, chosen)


@planned
def _sorted_pairs(precision: str, order: Operand, p: Operand | None, chosen: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
    (rows,) = order.shape
    launch = Launch(
        sorted_kernel, (triton.cdiv(rows, PAIRS),), order.device,
        (rows, chosen, *order.stride, *((0, 0) if p is None else p.stride)),
        PAIRS=PAIRS, WEIGHTS=p is not None, num_warps=WARPS,
    )  # fmt: skip
    new_tokens, new_weights = fresh((rows,), order, torch.int64), fresh((rows,), order, torch.float32)

    def run(order: Tensor, p: Tensor | None, _: int) -> tuple[Tensor, Tensor | None]:
        tokens, weights = new_tokens(), None if p is None else new_weights()
        launch(order, p, tokens, weights)
        return tokens, weights

    return run


@triton.jit
def spread_kernel(
    grad, x, p, inverse, grads, rows, weights, N, M, K,
    stride_grad, stride_x, stride_p_t, stride_p_k, stride_inverse, TN: tl.constexpr, ROWS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """One token's lines, read once and written K times."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TN + tl.arange(0, TN)
    line = tl.load(grad + token * stride_grad + n, mask=n < N, other=0.0)
    if ROWS:
        other = tl.load(x + token * stride_x + n, mask=n < M, other=0.0)
    for k in tl.range(0, K):
        row = tl.load(inverse + (token * K + k) * stride_inverse)
        tl.store(grads + row * N + n, line, mask=n < N)
        if ROWS:
            tl.store(rows + row * M + n, other, mask=n < M)
        if WEIGHTS:
            weight = tl.load(p + token * stride_p_t + k * stride_p_k)
            tl.store(weights + row, weight.to(tl.float32), mask=tl.program_id(1) == 0)


def spread(
    grad: Tensor, x: Tensor | None, p: Tensor | None, inverse: Tensor, chosen: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As ``reference.spread``."""
    return _spread(rows_contiguous(grad), None if x is None else rows_contiguous(x), p, inverse, chosen)


@planned
def _spread(
    precision: str, grad: Operand, x: Operand | None, p: Operand | None, inverse: Operand, chosen: int
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    (tokens, width), (rows,) = grad.shape, inverse.shape
    other, pitch = (width, 0) if x is None else (x.shape[1], x.stride[0])
    widest = max(width, other, 1)
    columns, warps = next((c, w) for limit, c, w in LINES if tokens <= limit)
    columns = min(columns, triton.next_power_of_2(widest))
    launch = Launch(
        spread_kernel, (tokens, triton.cdiv(widest, columns)), grad.device,
        (width, other, chosen, grad.stride[0], pitch, *((0, 0) if p is None else p.stride), *inverse.stride),
        TN=columns, ROWS=x is not None, WEIGHTS=p is not None, num_warps=warps,
    )  # fmt: skip
    new_grads, new_weights = fresh((rows, width), grad), fresh((rows,), grad, torch.float32)
    new_rows = None if x is None else fresh((rows, other), x)

    def run(
        grad: Tensor, x: Tensor | None, p: Tensor | None, inverse: Tensor, _: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        found = new_grads(), None if new_rows is None else new_rows(), None if p is None else new_weights()
        launch(grad, x, p, inverse, *found)
        return found

    return run


@triton.jit(do_not_specialize=["S", "stride_part"])
def router_kernel(dp, inverse, out, S, parts, stride_dp, stride_part, stride_inverse, PAIRS: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    row = tl.load(inverse + pair * stride_inverse, mask=pair < S, other=0)
    total = tl.zeros((PAIRS,), tl.float32)
    for part in tl.range(0, parts):
        total += tl.load(dp + row * stride_dp + part * stride_part, mask=pair < S, other=0.0)
    tl.store(out + pair, total.to(out.dtype.element_ty), mask=pair < S)


@triton.jit(do_not_specialize=["stride_part"])
def router_bias_kernel(
    dp, inverse, out, grad, bias, ids, ends, H, E, K, parts,
    stride_dp, stride_part, stride_inverse, stride_grad, stride_bias, stride_ids_t, stride_ids_k, TN: tl.constexpr,
):  # fmt: skip
    """One pair: its parts, and its token's gradient times its expert's bias."""
    pair = tl.program_id(0).to(tl.int64)
    token = pair // K
    row = tl.load(inverse + pair * stride_inverse)
    expert = tl.load(ids + token * stride_ids_t + pair % K * stride_ids_k).to(tl.int64)
    expert = tl.minimum(tl.maximum(expert, 0), E - 1)
    mine = row < tl.load(ends + E - 1)
    sums = tl.zeros((TN,), tl.float32)
    for first in tl.range(0, H, TN):
        n = first + tl.arange(0, TN)
        mask = (n < H) & mine
        line = tl.load(grad + token * stride_grad + n, mask=mask, other=0.0).to(tl.float32)
        sums += line * tl.load(bias + expert * stride_bias + n, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(sums, 0)
    for part in tl.range(0, parts):
        total += tl.load(dp + row * stride_dp + part * stride_part)
    tl.store(out + pair, total.to(out.dtype.element_ty))


def router_gradient(
    dp: Tensor,
    ids: Tensor,
    inverse: Tensor,
    dtype: torch.dtype,
    b_down: Tensor | None = None,
    grad: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """As ``reference.router_gradient``."""
    if b_down is None:
        return _router_gradient(dp, ids, inverse, dtype)
    assert grad is not None
    return _router_gradient_with_bias(dp, ids, inverse, dtype, rows_contiguous(b_down), rows_contiguous(grad), ends)


@planned
def _router_gradient_with_bias(
    precision: str,
    dp: Operand,
    ids: Operand,
    inverse: Operand,
    dtype: torch.dtype,
    b_down: Operand,
    grad: Operand,
    ends: Operand,
) -> Callable[..., Tensor]:
    (experts, hidden), (rows, parts) = b_down.shape, dp.shape
    sizes = (hidden, experts, max(ids.shape[1], 1), parts)
    launch = Launch(
        router_bias_kernel, (rows,), dp.device,
        (*sizes, *dp.stride, *inverse.stride, grad.stride[0], b_down.stride[0], *ids.stride),
        TN=min(COLUMNS, triton.next_power_of_2(max(hidden, 1))), num_warps=WARPS,
    )  # fmt: skip
    new = fresh(ids.shape, dp, dtype)

    def run(dp: Tensor, ids: Tensor, inverse: Tensor, _: torch.dtype, b_down: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
        out = new()
        launch(dp, inverse, out, grad, b_down, ids, ends)
        return out

    return run


@planned
def _router_gradient(precision: str, dp: Operand, ids: Operand, inverse: Operand, dtype: torch.dtype) -> Callable[..., Tensor]:
    rows, parts = dp.shape
    launch = Launch(
        router_kernel, (triton.cdiv(rows, PAIRS),), dp.device, (rows, parts, *dp.stride, *inverse.stride),
        PAIRS=PAIRS, num_warps=WARPS,
    )  # fmt: skip
    new = fresh(ids.shape, dp, dtype)

    def run(dp: Tensor, ids: Tensor, inverse: Tensor, _: torch.dtype) -> Tensor:
        out = new()
        launch(dp, inverse, out)
        return out

    return run
