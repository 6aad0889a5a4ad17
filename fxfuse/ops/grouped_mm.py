"""Grouped matrix multiplication: rows in groups, a matrix for each group.

Symbols: S rows sorted by group, E groups; ``ends`` (E,) int32 holds the row after each group's last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import kernels
from .arguments import Check
from .define import MATERIALIZED, launch, library

ALIGNMENT = 16
"""Bytes to which ``torch._grouped_mm`` wants every stride."""


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows of a (S, M) in groups, each times its matrix of b (E, M, N): (S, N); rows past ``ends[-1]`` are undefined.

    With b (S, N) and a (M, S) the sum runs over each group's rows: (E, M, N), zero for an empty group. bf16 operands with
    aligned strides go to ``torch._grouped_mm``; others on a GPU to our own kernels, and elsewhere (or in fp64) to a loop over
    the experts, which synchronises with the host.
    """
    if a.dtype is torch.bfloat16:
        sums = b.dim() == 2
        left, right = _aligned(a, -1 if sums else None), _aligned(b, -2 if sums else None)
        if left is not None and right is not None:
            return torch.ops.aten._grouped_mm(_as_it_lies(left), _as_it_lies(right), ends)
    return torch.ops.fxfuse.grouped_mm_loop(a, b, ends)


def _aligned(t: Tensor, grouped: int | None = None) -> Tensor | None:
    """``t`` with strides that ``torch._grouped_mm`` takes, copied if need be, or None where the width forbids it.

    ``grouped``: the dimension in which groups follow each other, if it is summed over; it must not be the contiguous one, as
    groups of any length begin at any address there.
    """
    if _has_aligned_strides(t) and (grouped is None or t.stride(grouped) != 1):
        return t
    t = t.transpose(-2, -1).contiguous().transpose(-2, -1) if grouped == -1 else t.contiguous()
    return t if _has_aligned_strides(t) else None


def _as_it_lies(t: Tensor) -> Tensor:
    """``t``, in a graph with the strides that it has there.

    Inductor lays out an operand that it has yet to compute as it likes: by rows, also where ``t`` is a transposed view, or as
    what it is computed from. Its lines would have the length of a group, which no alignment holds for, or of a width that is odd.
    """
    if not hasattr(t, "fake_mode"):
        return t
    return MATERIALIZED(t) if t.stride(-1) == 1 else MATERIALIZED(t.transpose(-2, -1)).transpose(-2, -1)


def _has_aligned_strides(t: Tensor) -> bool:
    """One matrix dimension contiguous, the other without overlap, all strides but the first a multiple of 16 bytes."""
    strides = t.stride()
    if not all(isinstance(s, int) for s in strides[-2:]) or 1 not in strides[-2:]:
        return False
    inner, outer = (t.shape[-1], strides[-2]) if strides[-1] == 1 else (t.shape[-2], strides[-1])
    aligned = all(s * t.element_size() % ALIGNMENT == 0 for s in (outer, *strides[:-2]))
    return aligned and (not isinstance(inner, int) or outer >= inner)


def reference_grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``grouped_mm`` by a loop over the groups: any dtype, differentiable, rows past ``ends[-1]`` zero."""
    stops = ends.tolist()
    groups = list(zip([0, *stops], stops, strict=False))
    if b.dim() == 2:
        return torch.stack([a[:, start:stop] @ b[start:stop] for start, stop in groups])
    products = [a[start:stop] @ b[e] for e, (start, stop) in enumerate(groups)]
    return torch.cat([*products, a.new_zeros(a.shape[0] - stops[-1], b.shape[2])])


def _grouped_mm_loop_fake(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 3:
        return a.new_empty(a.shape[0], b.shape[2])
    return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])


def _grouped_sum_loop(d: Tensor, ends: Tensor) -> Tensor:
    stops = ends.tolist()
    return torch.stack([d[start:stop].sum(0) for start, stop in zip([0, *stops], stops, strict=False)])


def _takes(t: Tensor, ends: Tensor) -> bool:
    """Whether our own kernels may run instead of a loop."""
    return kernels.refusal(t.dtype, t.device, ends.shape[0]) is None


def _grouped_mm_kernel(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if b.dim() == 2:
        return kernels.path("portable").wgrad(a.t(), b, None, None, ends)
    return kernels.path("portable").matmul(a, b, ends, transposed=False, zero_tail=True)


_launched_mm = launch("grouped_mm_loop", _grouped_mm_kernel, reference_grouped_mm)
_launched_sum = launch("grouped_sum_loop", lambda d, ends: kernels.path("portable").bias_gradient(d, ends), _grouped_sum_loop)


def _grouped_mm_on_gpu(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return (_launched_mm if _takes(a, ends) else reference_grouped_mm)(a, b, ends)


def _grouped_sum_on_gpu(d: Tensor, ends: Tensor) -> Tensor:
    return (_launched_sum if _takes(d, ends) else _grouped_sum_loop)(d, ends)


library.define("grouped_sum_loop(Tensor d, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("grouped_sum_loop", _grouped_sum_loop, "CompositeExplicitAutograd")
library.impl("grouped_sum_loop", _grouped_sum_on_gpu, "CUDA")
library.impl("grouped_sum_loop", lambda d, ends: d.new_empty(ends.shape[0], d.shape[1]), "Meta")
library.define("grouped_mm_loop(Tensor a, Tensor b, Tensor ends) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("grouped_mm_loop", reference_grouped_mm, "CompositeExplicitAutograd")
library.impl("grouped_mm_loop", _grouped_mm_on_gpu, "CUDA")
library.impl("grouped_mm_loop", _grouped_mm_loop_fake, "Meta")


def weight_gradient(d: Tensor, x: Tensor, ends: Tensor, like: Tensor) -> Tensor:
    """d (S, N) and x (S, M) to (E, N, M), laid out in memory as the weight ``like`` is."""
    if like.stride(-1) == 1:
        return grouped_mm(d.t(), x, ends)
    return grouped_mm(x.t(), d, ends).transpose(1, 2)


def bias_gradient(d: Tensor, ends: Tensor) -> Tensor:
    """Column sums of d (S, N) by expert: (E, N)."""
    if d.dtype not in (torch.bfloat16, torch.float16):  # a product adds up row after row, less exactly than a sum
        return torch.ops.fxfuse.grouped_sum_loop(d, ends)
    return grouped_mm(d.t(), d.new_ones(d.shape[0], 8), ends)[:, :, 0].contiguous()


def wide(t: Tensor) -> Tensor:
    """In the dtype that sums and activations are computed in."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def used(ends: Tensor, rows: Tensor) -> Tensor:
    """Which sorted rows belong to an expert, as a column."""
    return (rows < ends[-1]).unsqueeze(-1)


def of_rows(table: Tensor, ends: Tensor, rows: int) -> Tensor:
    """For each sorted row its expert's line of ``table`` (E, N)."""
    places = torch.arange(rows, device=ends.device, dtype=ends.dtype)
    experts = torch.searchsorted(ends, places, right=True).clamp(max=table.shape[0] - 1)
    return table[experts]


# ------------------------------------------------------------------------------------------------ grouped linear


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, ends: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        y = grouped_mm(x, w.transpose(1, 2), ends)
        y = y if b is None else y + of_rows(b, ends, y.shape[0])
        return torch.where(used(ends, torch.arange(y.shape[0], device=y.device)), y, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w, ends = ctx.saved_tensors
        grad, needs = grads[0], ctx.needs_input_grad
        dx = None
        if needs[0]:
            dx = grouped_mm(grad, w, ends)
            dx = torch.where(used(ends, torch.arange(dx.shape[0], device=dx.device)), dx, 0)
        return (
            dx,
            weight_gradient(grad, x, ends, w) if needs[1] else None,
            None,
            bias_gradient(grad, ends) if needs[3] else None,
        )


def grouped_linear(x: Tensor, w: Tensor, offs: Tensor, b: Tensor | None = None) -> Tensor:
    """``x w_e^T + b_e`` with each row's own group e; differentiable. Rows at or past ``offs[-1]`` are zero.

    Args:
        x: (S, K), rows sorted by group.
        w: (E, N, K), any strides.
        offs: (E,) int32, the row after each group's last one. Not read on the host unless ``fxfuse.config.debug``.
        b: (E, N) or None.

    Returns:
        (S, N).

    Raises:
        ValueError: an argument's rank, size, dtype or device does not fit; it is named.
    """
    check = Check("grouped_linear")
    check.shape("x", x, (None, None))
    check.shape("w", w, (None, None, x.shape[1]))
    check.shape("offs", offs, (w.shape[0],))
    check.dtype("offs", offs, (torch.int32,))
    check.shape("b", b, tuple(w.shape[:2]))
    check.same("x", x, w=w, b=b)
    check.device("x", x, offs=offs)
    check.ends("offs", offs, x.shape[0])
    if w.shape[0] == 0:
        raise ValueError(f"grouped_linear: w is {tuple(w.shape)}; expected one group or more")
    return _GroupedLinear.apply(x, w, offs, b)
