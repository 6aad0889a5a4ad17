"""The grouped MLP of mixture-of-experts models: routing, experts and combine as one operator.

Symbols: T tokens, K experts a token, S = T K routed rows, E experts, H hidden width, I intermediate width. The routed rows
are sorted by expert; ``ends`` (E,) int32 holds the row after each expert's last one. Expert ids outside [0, E) sort behind
``ends[-1]`` and contribute nothing, forward or backward.

The gradient of a router weight is ``<dO_t, y> = <dO_t W_down, a>``, so the down projection's output is not kept (Guo et al.,
SonicMoE, arXiv:2512.14080, section 3): for the backward only x, h and the order of the rows are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activations import ACTIVATIONS
from .arguments import Check
from .define import define, nothing
from .grouped_experts import KIND, WEIGHTS, Experts, activate
from .grouped_mm import bias_gradient, used, wide

MAX_TERMS = 32
"""Up to how many experts a token their sum is written out."""


class Routing(NamedTuple):
    """Where each routed row goes."""

    order: Tensor
    """(S,) int64: for each sorted row its place among the T K pairs."""
    inverse: Tensor
    """(S,) int64: for each pair its sorted row."""
    ends: Tensor
    """(E,) int32."""


def route(expert_ids: Tensor, experts: int, ends: Tensor | None = None) -> Routing:
    """Sort the (token, expert) pairs by expert, stably; no host sync, no atomics.

    With ``ends`` given, the rows' experts are what it says, whatever the ids.
    """
    flat = expert_ids.reshape(-1)
    if ends is not None:
        order = torch.sort(flat, stable=True)[1]
        return Routing(order, _inverse(order), ends)
    narrow = torch.int16 if experts < 2**15 else torch.int32
    keys = torch.where((flat < 0) | (flat >= experts), experts, flat).to(narrow)  # a narrow key sorts in fewer passes
    keys, order = torch.sort(keys, stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=keys.device, dtype=narrow), right=True, out_int32=True)
    return Routing(order, _inverse(order), ends)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))


# ------------------------------------------------------------------------------------------------ the whole block


@define(
    f"grouped_mlp(Tensor x, Tensor ids, Tensor? p, Tensor? ends, {WEIGHTS}, {KIND}, bool first, bool save)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _grouped_mlp(
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    ends: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    first: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _mlp(x, ids, p, ends, Experts(w_gate, w_up, w_down, b_gate, b_down, act, layout, limit, alpha), first, save)


def _mlp(
    x: Tensor, ids: Tensor, p: Tensor | None, ends: Tensor | None, experts: Experts, first: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    routing = route(ids, experts.w_down.shape[0], ends)
    rows = _routed_rows(x, p if first else None, routing.order, routing.order // ids.shape[1], experts.w_gate.dtype)
    h, u = experts.up(rows, routing.ends)
    y = experts.down(experts.activated(h, u), routing.ends)
    out = _combine(y, None if first else p, experts.b_down, ids, routing.inverse.view(ids.shape).t(), routing.ends).to(x.dtype)
    if not save:
        return out, nothing(h), nothing(h), nothing(routing.order), nothing(routing.order), nothing(routing.ends)
    counted = routing.ends if ends is None else nothing(ends)  # an operator may not return its argument
    return out, h, nothing(h) if u is None else u, routing.order, routing.inverse, counted


def _routed_rows(x: Tensor, p: Tensor | None, order: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    rows = x[tokens]
    return (rows if p is None else wide(rows) * wide(p.reshape(-1)[order]).unsqueeze(-1)).to(dtype)


def _combine(y: Tensor, p: Tensor | None, b: Tensor | None, ids: Tensor, places: Tensor, ends: Tensor) -> Tensor:
    """The weighted sum over each token's K rows of y, in fp32 and written once; ``places`` (K, T) holds the rows."""
    experts = None if b is None else ids.t().clamp(0, b.shape[0] - 1)
    weights = None if p is None else wide(p.t())

    def terms(k: Any) -> Tensor:
        rows = wide(y[places[k]])
        rows = rows if b is None or experts is None else rows + wide(b[experts[k]])
        rows = rows if weights is None else rows * weights[k].unsqueeze(-1)
        return torch.where(used(ends, places[k]), rows, 0)

    count = ids.shape[1]
    if isinstance(count, int) and 1 <= count <= MAX_TERMS:  # as a reduction, so few terms are several times slower under Inductor
        return functools.reduce(torch.add, [terms(k) for k in range(count)])
    return terms(slice(None)).sum(0)


@define(
    f"grouped_mlp_backward(Tensor grad, Tensor x, Tensor ids, Tensor? p, {WEIGHTS}, Tensor? h, Tensor? u, Tensor order, "
    f"Tensor inverse, Tensor ends, {KIND}, bool first, bool[] mask)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def _grouped_mlp_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    h: Tensor | None,
    u: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    first: bool,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    experts = Experts(w_gate, w_up, w_down, b_gate, b_down, act, layout, limit, alpha)
    return _mlp_backward(grad, x, ids, p, experts, h, u, (order, inverse, ends), first, mask)


def _mlp_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    experts: Experts,
    h: Tensor | None,
    u: Tensor | None,
    routing: tuple[Tensor, Tensor, Tensor],
    first: bool,
    mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    need_x, need_p, need_gate, need_up, need_down, need_b_gate, need_b_down = mask
    (order, inverse, ends), b_down, w_down, dtype = routing, experts.b_down, experts.w_down, experts.w_gate.dtype
    # Quotient and places in another spelling than the forward's: as common subexpressions the forward's gathered rows (S, H)
    # and masks would be kept for the backward.
    tokens = torch.div(order, ids.shape[1], rounding_mode="trunc")
    rows = _routed_rows(x, p if first else None, order, tokens, dtype)
    if h is None:
        h, u = experts.up(rows, ends)
    weight = None if p is None else wide(p.reshape(-1)[order]).unsqueeze(-1)
    after = None if first else weight
    dy, a = grad[tokens].to(dtype), None  # not yet times the router weight, whose own gradient needs it so
    found: list[Tensor | None] = [None] * 7
    if need_down or (need_p and not first):
        g, up = experts.halves(h, u)
        a = activate(g, up, experts.act, experts.limit, experts.alpha)
    if need_b_down:
        found[6] = bias_gradient(dy if after is None else (wide(dy) * after).to(dy.dtype), ends)
    if need_down:
        assert a is not None
        found[4] = experts.wgrad(dy, (a if after is None else a * after).to(h.dtype), ends, w_down)
    if need_x or need_gate or need_up or need_b_gate or need_p:
        inside = used(ends, torch.arange(order.shape[0], device=order.device))
        da = torch.where(inside, wide(experts.dgrad(dy, w_down, ends)), 0)
        if need_p and not first:
            assert a is not None and p is not None
            dp = (da * torch.where(inside, a, 0)).sum(-1)
            found[1] = dp[inverse].view(ids.shape)
            if b_down is not None:
                lines = wide(b_down[ids.clamp(0, b_down.shape[0] - 1)])
                products = torch.where(used(ends, inverse.view(ids.shape)), wide(grad).unsqueeze(1) * lines, 0)
                found[1] = found[1] + products.sum(-1)
            found[1] = found[1].to(p.dtype)
        da = da if after is None else da * after
        need_rows = need_x or (need_p and first)
        inner = (need_rows, need_gate, need_up, need_b_gate)
        if any(inner):
            drows, found[2], found[3], found[5] = experts.up_backward(da, h, u, rows, ends, inner)
            if drows is not None:
                if first and need_p:
                    assert p is not None
                    products = torch.where(inside, wide(drows) * wide(x[tokens]), 0)
                    found[1] = products.sum(-1)[inverse].view(ids.shape).to(p.dtype)
                if need_x:
                    back = inverse.view(ids.shape).transpose(0, 1).contiguous()
                    found[0] = _combine(drows, p if first else None, None, ids, back, ends).to(x.dtype)
    return tuple(nothing(grad) if t is None else t for t in found)


def grouped_mlp_forward(
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    experts: Experts,
    *,
    ends: Tensor | None = None,
    weights_first: bool = False,
    save: bool,
    recompute: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward of a fusion: ``grouped_mlp`` and, with ``save``, what its backward needs.

    That is the linear's output h (S, 2 I), or gate and up (S, I) where they have a weight each, and the rows' order, its
    inverse and ``ends`` (unless it was given: (E,) int32, the sorted row after each expert's last one). With ``recompute``
    the linears' outputs are left out: the backward computes them again.
    """
    compute = functools.partial(torch.ops.fxfuse.grouped_mlp, x, ids, p, ends)
    found = compute(*experts, weights_first, save) if experts.plain else _mlp(x, ids, p, ends, experts, weights_first, save)
    out, h, u, order, inverse, counted = found
    if not save:
        return out, ()
    linear = () if recompute else (h,) if experts.w_up is None else (h, u)
    return out, (*linear, order, inverse, *([counted] if ends is None else []))


def grouped_mlp_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    experts: Experts,
    saved: Sequence[Tensor],
    mask: Sequence[bool],
    *,
    ends: Tensor | None = None,
    weights_first: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of (x, p, w_gate, w_up, w_down, b_gate, b_down) for those in ``mask``; the others are empty tensors."""
    *linear, order, inverse, counted = saved if ends is None else (*saved, ends)
    h, u = (*linear, None, None)[:2]
    if not experts.plain:
        return _mlp_backward(grad, x, ids, p, experts, h, u, (order, inverse, counted), weights_first, mask)
    return torch.ops.fxfuse.grouped_mlp_backward(
        grad, x, ids, p, *experts[:5], h, u, order, inverse, counted, *experts[5:], weights_first, list(mask)
    )


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, p: Tensor | None, *rest: Any) -> Tensor:
        out, h, u, *routing = torch.ops.fxfuse.grouped_mlp(x, ids, p, None, *rest, True)
        ctx.rest = rest[5:]
        ctx.save_for_backward(x, ids, p, *rest[:5], h, None if rest[1] is None else u, *routing)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needs = ctx.needs_input_grad
        mask = [needs[0], *needs[2:8]]
        found = torch.ops.fxfuse.grouped_mlp_backward(grads[0], *ctx.saved_tensors, *ctx.rest, mask)
        given = [g if m else None for g, m in zip(found, mask, strict=True)]
        return (given[0], None, *given[1:], *[None] * len(ctx.rest))


def grouped_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    *,
    activation: str = "silu",
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    gated: bool = True,
    layout: str = "concat",
    w_up: Tensor | None = None,
    weights_first: bool = False,
) -> Tensor:
    """Each token through its K experts, ``sum_k p_k (act(x W_gate^T) * (x W_up^T)) W_down^T``; differentiable.

    Args:
        x: (T, H).
        w_gate_up: (E, 2 I, H), rows [gate; up] ("concat") or alternating ("interleaved"); with ``w_up`` or without a gate
            (E, I, H). Any strides.
        w_down: (E, H, I).
        expert_ids: (T, K) integers; ids outside [0, E) contribute nothing.
        router_weights: (T, K) floats, or None for a plain sum.
        activation: as in ``linear_act``.
        bias_gate_up, bias_down: (E, 2 I) in the rows' order, (E, H).
        limit: clamps the gate from above and up on both sides, before the activation.
        alpha: the gated activation is ``g sigmoid(alpha g) (u + 1)`` instead (GPT-OSS); ``activation`` is not used then.
        gated: False for ``act(x W^T) W_down^T``.
        layout: "concat" or "interleaved".
        w_up: (E, I, H), where gate and up have a weight each.
        weights_first: multiply a token by its router weight before its experts, not after.

    Returns:
        (T, H) in x's dtype; the sum over experts is in fp32 for 16-bit floats.

    Raises:
        ValueError: an argument's rank, size, dtype or device does not fit; it is named.
    """
    kind = "plain" if not gated else "separate" if w_up is not None else layout
    _check(x, w_gate_up, w_up, w_down, expert_ids, router_weights, bias_gate_up, bias_down, kind, alpha, layout)
    kinds = _activation_name(activation), kind, limit, alpha, weights_first
    weights = (w_gate_up, w_up, w_down, bias_gate_up, bias_down)
    trains = any(t is not None and t.requires_grad for t in (x, router_weights, *weights))
    if torch.is_grad_enabled() and trains:
        return _GroupedMlp.apply(x, expert_ids, router_weights, *weights, *kinds)
    return torch.ops.fxfuse.grouped_mlp(x, expert_ids, router_weights, None, *weights, *kinds, False)[0]


def _activation_name(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"grouped_mlp: activation {name!r} is unknown; there are {', '.join(ACTIVATIONS)}")
    return name


def _check(
    x: Tensor,
    w_gate_up: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    kind: str,
    alpha: float | None,
    layout: str,
) -> None:
    check = Check("grouped_mlp")
    if layout not in ("concat", "interleaved"):
        raise ValueError(f"grouped_mlp: layout is {layout!r}; expected 'concat' or 'interleaved'")
    if kind == "plain" and (w_up is not None or alpha is not None):
        raise ValueError("grouped_mlp: gated=False takes neither w_up nor alpha")
    check.shape("x", x, (None, None))
    check.shape("w_down", w_down, (None, x.shape[1], None))
    experts, width, inner = w_down.shape
    if experts == 0:
        raise ValueError(f"grouped_mlp: w_down is {tuple(w_down.shape)}; expected one expert or more")
    rows = inner if kind in ("plain", "separate") else 2 * inner
    check.shape("w_gate_up", w_gate_up, (experts, rows, width))
    check.shape("w_up", w_up, (experts, inner, width))
    check.shape("expert_ids", expert_ids, (x.shape[0], None))
    check.dtype("expert_ids", expert_ids, (torch.int64, torch.int32))
    check.shape("router_weights", router_weights, tuple(expert_ids.shape))
    check.shape("bias_gate_up", bias_gate_up, (experts, rows))
    check.shape("bias_down", bias_down, (experts, width))
    if kind == "separate" and bias_gate_up is not None:
        raise ValueError("grouped_mlp: bias_gate_up goes with one weight for gate and up, not with w_up")
    check.same("x", x, w_gate_up=w_gate_up, w_up=w_up, w_down=w_down, bias_gate_up=bias_gate_up, bias_down=bias_down)
    check.device("x", x, expert_ids=expert_ids, router_weights=router_weights)
    check.floating("router_weights", router_weights)
    check.ids("expert_ids", expert_ids, experts)
