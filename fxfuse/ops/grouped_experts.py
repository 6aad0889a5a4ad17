"""The experts of a mixture-of-experts model, on rows that are sorted by expert already: linear, activation, linear.

Symbols: S routed rows, E experts, H hidden width, I intermediate width; ``ends`` (E,) int32 holds the row after each expert's
last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .activations import activation
from .define import define, materialized, nothing
from .grouped_mm import bias_gradient, grouped_mm, of_rows, used, weight_gradient, wide

# ------------------------------------------------------------------------------------------------ activation


def _halves(h: Tensor, u: Tensor | None, layout: str) -> tuple[Tensor, Tensor | None]:
    if layout == "concat":
        g, u = h.chunk(2, -1)
        return g, u
    return (h[..., ::2], h[..., 1::2]) if layout == "interleaved" else (h, u)


def activate(g: Tensor, u: Tensor | None, act: str, limit: float | None, alpha: float | None) -> Tensor:
    if limit is not None:
        g = g.clamp(max=limit)
        u = u.clamp(-limit, limit) if u is not None else None
    a = g * torch.sigmoid(alpha * g) if alpha is not None else activation(act).forward(g)
    if u is None:
        return a
    return a * (u + 1) if alpha is not None else a * u


def activate_backward(
    da: Tensor, g: Tensor, u: Tensor | None, act: str, limit: float | None, alpha: float | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients with respect to g and u."""
    inner, up = g, u
    if limit is not None:
        inner = g.clamp(max=limit)
        up = u.clamp(-limit, limit) if u is not None else None
    if alpha is not None:
        s = torch.sigmoid(alpha * inner)
        a = inner * s
        factor = None if up is None else up + 1
        dinner = (da if factor is None else da * factor) * (s + alpha * a * (1 - s))
    else:
        kind = activation(act)
        a = kind.forward(inner)
        dinner = kind.backward(da if up is None else da * up, a if kind.keeps_output else inner)
    dup = None if up is None else da * a
    if limit is not None:
        dinner = torch.where(g <= limit, dinner, 0)
        if u is not None and dup is not None:
            dup = torch.where((u >= -limit) & (u <= limit), dup, 0)
    return dinner, dup


# ------------------------------------------------------------------------------------------------ experts


class Experts(NamedTuple):
    """The weights of all experts and what lies between their two linears."""

    w_gate: Tensor
    w_up: Tensor | None
    w_down: Tensor
    b_gate: Tensor | None
    b_down: Tensor | None
    act: str
    layout: str
    """Gate and up: "concat", rows [gate; up] of one weight; "interleaved", its alternating rows; "separate", two weights;
    "plain", no gate at all."""
    limit: float | None
    alpha: float | None

    @property
    def plain(self) -> bool:
        """Whether they are what the operators compute with."""
        return type(self) is Experts

    def product(self, rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        """Each row times its expert's w^T: rows (S, M), w (E, N, M) to (S, N)."""
        return grouped_mm(rows, w.transpose(1, 2), ends)

    def dgrad(self, d: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        """The gradient of the rows from that of ``product``: (S, N) to (S, M)."""
        return grouped_mm(d, w, ends)

    def wgrad(self, d: Tensor, rows: Tensor, ends: Tensor, w: Tensor) -> Tensor:
        """The gradient of w."""
        return weight_gradient(d, rows, ends, w)

    def up(self, rows: Tensor, ends: Tensor) -> tuple[Tensor, Tensor | None]:
        """Before the activation: (S, 2 I) and None, or (S, I) twice where gate and up have a weight each."""
        h = self.product(rows, self.w_gate, ends)
        if self.b_gate is not None:
            h = h + of_rows(self.b_gate, ends, h.shape[0])
        return h, None if self.w_up is None else self.product(rows, self.w_up, ends)

    def halves(self, h: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Gate and up as they are computed with."""
        g, up = _halves(h, u, self.layout)
        return wide(g), None if up is None else wide(up)

    def activated(self, h: Tensor, u: Tensor | None) -> Tensor:
        """(S, I)."""
        g, up = self.halves(h, u)
        return activate(g, up, self.act, self.limit, self.alpha).to(h.dtype)

    def down(self, a: Tensor, ends: Tensor) -> Tensor:
        """(S, H), without the bias."""
        return self.product(a, self.w_down, ends)

    def up_backward(
        self, da: Tensor, h: Tensor, u: Tensor | None, rows: Tensor, ends: Tensor, mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of (rows, w_gate, w_up, b_gate) from that of the activation's output, for those in ``mask``."""
        g, up = self.halves(h, u)
        dg, du = activate_backward(da, g, up, self.act, self.limit, self.alpha)
        dg = dg.to(h.dtype)
        du = None if du is None else du.to(h.dtype)
        if self.layout == "concat":
            assert du is not None  # a cat of expressions would compute each from scratch, with every load
            dg, du = torch.cat([materialized(dg), materialized(du)], -1), None
        elif self.layout == "interleaved":
            assert du is not None
            dg, du = torch.stack([dg, du], -1).flatten(-2), None
        drows = None
        if mask[0]:
            drows = self.dgrad(dg, self.w_gate, ends)
            if du is not None and self.w_up is not None:
                drows = drows + self.dgrad(du, self.w_up, ends)
        return (
            drows,
            self.wgrad(dg, rows, ends, self.w_gate) if mask[1] else None,
            self.wgrad(du, rows, ends, self.w_up) if mask[2] and du is not None and self.w_up is not None else None,
            bias_gradient(dg, ends) if mask[3] else None,
        )


# ------------------------------------------------------------------------------------------------ the experts alone

WEIGHTS = "Tensor w_gate, Tensor? w_up, Tensor w_down, Tensor? b_gate, Tensor? b_down"
KIND = "str act, str layout, float? limit, float? alpha"


@define(f"grouped_experts(Tensor rows, Tensor ends, {WEIGHTS}, {KIND}, bool save) -> (Tensor, Tensor, Tensor)")
def _grouped_experts(
    rows: Tensor,
    ends: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _experts(rows, ends, Experts(w_gate, w_up, w_down, b_gate, b_down, act, layout, limit, alpha), save)


def _experts(rows: Tensor, ends: Tensor, experts: Experts, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    h, u = experts.up(rows, ends)
    y = experts.down(experts.activated(h, u), ends)
    y = y if experts.b_down is None else y + of_rows(experts.b_down, ends, y.shape[0])
    y = torch.where(used(ends, torch.arange(y.shape[0], device=y.device)), y, 0)
    return (y, h, nothing(h) if u is None else u) if save else (y, nothing(h), nothing(h))


@define(
    f"grouped_experts_backward(Tensor grad, Tensor rows, Tensor ends, {WEIGHTS}, Tensor? h, Tensor? u, {KIND}, bool[] mask)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _grouped_experts_backward(
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    h: Tensor | None,
    u: Tensor | None,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    return _experts_backward(
        grad, rows, ends, Experts(w_gate, w_up, w_down, b_gate, b_down, act, layout, limit, alpha), h, u, mask
    )


def _experts_backward(
    grad: Tensor, rows: Tensor, ends: Tensor, experts: Experts, h: Tensor | None, u: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    need_rows, need_gate, need_up, need_down, need_b_gate, need_b_down = mask
    inside = used(ends, torch.arange(rows.shape[0], device=rows.device))
    if h is None:
        h, u = experts.up(rows, ends)
    found: list[Tensor | None] = [None] * 6
    if need_down:
        found[3] = experts.wgrad(grad, experts.activated(h, u), ends, experts.w_down)
    if need_b_down:
        found[5] = bias_gradient(grad, ends)
    inner = (need_rows, need_gate, need_up, need_b_gate)
    if any(inner):
        da = torch.where(inside, wide(experts.dgrad(grad, experts.w_down, ends)), 0)
        drows, found[1], found[2], found[4] = experts.up_backward(da, h, u, rows, ends, inner)
        found[0] = None if drows is None else torch.where(inside, drows, 0)
    return tuple(nothing(grad) if t is None else t for t in found)


def grouped_experts_forward(
    rows: Tensor, ends: Tensor, experts: Experts, *, save: bool, recompute: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward of a fusion of the experts without routing: rows (S, H) sorted by expert to (S, H), and what is saved.

    ``ends`` (E,) int32 holds the row after each expert's last one; rows past ``ends[-1]`` give zeros. With ``recompute``
    nothing is saved.
    """
    y, h, u = (
        torch.ops.fxfuse.grouped_experts(rows, ends, *experts, save) if experts.plain else _experts(rows, ends, experts, save)
    )
    if not save or recompute:
        return y, ()
    return y, (h,) if experts.w_up is None else (h, u)


def grouped_experts_backward(
    grad: Tensor, rows: Tensor, ends: Tensor, experts: Experts, saved: Sequence[Tensor], mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Gradients of (rows, w_gate, w_up, w_down, b_gate, b_down) for those in ``mask``; the others are empty tensors."""
    h, u = (*saved, None, None)[:2]
    if not experts.plain:
        return _experts_backward(grad, rows, ends, experts, h, u, mask)
    return torch.ops.fxfuse.grouped_experts_backward(grad, rows, ends, *experts[:5], h, u, *experts[5:], list(mask))
