"""What the patterns around a linear share: its gradients, and what may be added to it."""

from __future__ import annotations

from torch import Tensor

import fxfuse


def refuse_residual(m: fxfuse.Match):
    """Why ``m.r`` does not have the shape and dtype of ``F.linear(m.x, m.w)`` itself, or None.

    The sum's own shape and dtype say nothing: the linear may be the side that is broadcast or promoted.
    """
    shape = (*m.x.shape[:-1], m.w.shape[0])
    if tuple(m.r.shape) != shape or m.r.dtype != m.x.dtype:
        return m.reject(f"the residual is {tuple(m.r.shape)} {m.r.dtype}, the linear {shape} {m.x.dtype}")
    return None


def linear_gradients(d: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``F.linear(x, w)`` for x and w, where they are needed; d is the gradient of the output."""
    flat = rows(d)
    dx = (flat @ w).view(x.shape) if need[0] else None
    dw = flat.t() @ rows(x) if need[1] else None
    return dx, dw


def bias_gradient(d: Tensor, needed: bool) -> Tensor | None:
    """The sum over all leading dimensions, where it is needed."""
    return rows(d).sum(0) if needed else None


def rows(t: Tensor) -> Tensor:
    """All leading dimensions as one, also where the last one is empty."""
    return t.flatten(0, -2) if t.dim() > 1 else t.unsqueeze(0)
