"""What each kernel computes, in plain torch: any device, any float dtype, fp64 too. They read ``ends`` on the host.

16-bit floats are computed with in fp32 and rounded where a kernel rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops.grouped_experts import activate, activate_backward
from ..ops.grouped_mm import used, wide

_nothing: tuple[int, ...] = (0,)


def groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert with its rows."""
    start = 0
    for e, end in enumerate(ends.tolist()):
        yield e, slice(start, end)
        start = end


def used_rows(ends: Tensor) -> int:
    """How many rows belong to an expert."""
    return int(ends[-1])


def tile_list(ends: Tensor, rows: int) -> Tensor | None:
    """What a path's products take their work from, for S rows; None where they need nothing.

    It belongs to one pass on one stream: products take turns with it.
    """
    return None


def up(
    x: Tensor,
    gather: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    b_gate: Tensor | None,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
    *,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first linear and the activation.

    Args:
        x: (T, H) with ``gather``, else (S, H).
        gather: (S,) int64, each sorted row's line of x, or None.
        w_gate: (E, 2 I, H), rows [gate; up] ("concat") or alternating ("interleaved"); (E, I, H) where the layout is
            "separate" or "plain". Any strides.
        w_up: (E, I, H) for "separate", else None.
        b_gate: (E, 2 I) or (E, I), in the order of w_gate's rows, or None.
        ends: (E,) int32.
        act, limit, alpha: as in ``grouped_mlp``.
        save: whether h and u are wanted.
        tiles: what ``tile_list`` gave, here as in every product; without it a path that needs it makes its own.

    Returns:
        a (S, I), the activation of h as rounded to x's dtype; h (S, 2 I) or (S, I); u (S, I). Without ``save`` the last two
        are empty, u also where gate and up share a weight.
    """
    h = _linear(x, gather, w_gate, ends, b_gate)
    u = None if w_up is None else _linear(x, gather, w_up, ends, None)
    g, up_half = halves(wide(h), None if u is None else wide(u), layout)
    a = activate(g, up_half, act, limit, alpha).to(x.dtype)
    a[used_rows(ends) :] = 0
    if not save:
        return a, x.new_empty(_nothing), x.new_empty(_nothing)
    return a, h, x.new_empty(_nothing) if u is None else u


def halves(h: Tensor, u: Tensor | None, layout: str) -> tuple[Tensor, Tensor | None]:
    """Gate and up, as views."""
    if layout == "concat":
        g, u = h.chunk(2, -1)
        return g, u
    return (h[..., ::2], h[..., 1::2]) if layout == "interleaved" else (h, u)


def _linear(x: Tensor, gather: Tensor | None, w: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
    rows = x if gather is None else x[gather]
    return matmul(rows, w, ends, transposed=True, bias=bias)


def matmul(
    a: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    zero_tail: bool = True,
    tiles: Tensor | None = None,
) -> Tensor:
    """Each expert's rows of a (S, K) times its weight: ``a w_e^T`` with w (E, N, K) if transposed, else ``a w_e`` with (E, K, N).

    Returns:
        (S, N) in a's dtype, plus ``bias`` (E, N). Without ``zero_tail`` the rows of no expert are undefined.
    """
    out = a.new_zeros(a.shape[0], w.shape[1] if transposed else w.shape[2])
    for e, rows in groups(ends):
        y = wide(a[rows]) @ wide(w[e].t() if transposed else w[e])
        out[rows] = (y if bias is None else y + wide(bias[e])).to(out.dtype)
    return out


def dh(
    grad: Tensor,
    gather: Tensor | None,
    w_down: Tensor,
    p: Tensor | None,
    h: Tensor,
    u: Tensor | None,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    *,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Back through the second linear and the activation.

    With ``dA' = grad W_down`` in fp32 (never rounded), a = act(h) and dA = p dA'.

    Args:
        grad: (T, H) with ``gather`` (S,) int64, else (S, H).
        w_down: (E, H, I), any strides.
        p: (S,) fp32, the router weight of each sorted row, or None for ones.
        h, u: as ``up`` saved them.

    Returns:
        dh in h's shape and du (S, I) (empty without u): gradients of h and u; dp (S, parts), fp32 for 16-bit floats,
        with the sums ``rowsum(dA' a)``; a_scaled (S, I): ``p a``, rounded once.
    """
    rows = grad if gather is None else grad[gather]
    inner = w_down.shape[2]
    da = wide(rows).new_zeros(rows.shape[0], inner)
    for e, at in groups(ends):
        da[at] = wide(rows[at]) @ wide(w_down[e])
    kept = used_rows(ends)
    inside = (torch.arange(rows.shape[0], device=rows.device) < kept).unsqueeze(-1)
    g, up_half = halves(wide(h), None if u is None else wide(u), layout)
    g, up_half = torch.where(inside, g, 0), None if up_half is None else torch.where(inside, up_half, 0)
    a = torch.where(inside, activate(g, up_half, act, limit, alpha), 0)
    dp = (da * a).sum(-1, keepdim=True)
    weight = None if p is None else torch.where(inside, p.unsqueeze(-1), 0)
    dg, du = activate_backward(da if weight is None else da * weight, g, up_half, act, limit, alpha)
    dg, du = torch.where(inside, dg, 0).to(h.dtype), None if du is None else torch.where(inside, du, 0).to(h.dtype)
    if layout == "concat" and du is not None:
        dg, du = torch.cat([dg, du], -1), None
    elif layout == "interleaved" and du is not None:
        dg, du = torch.stack([dg, du], -1).flatten(-2), None
    a_scaled = (a if weight is None else a * weight).to(grad.dtype)
    return dg, grad.new_empty(_nothing) if du is None else du, dp, a_scaled


def wgrad(
    d: Tensor,
    x: Tensor,
    gather_d: Tensor | None,
    gather_x: Tensor | None,
    ends: Tensor,
    *,
    tiles: Tensor | None = None,
) -> Tensor:
    """Per expert ``d^T x`` over its rows: d (S, N) and x (S, M), or lines of them by ``gather_*`` (S,), to (E, N, M)."""
    d, x = d if gather_d is None else d[gather_d], x if gather_x is None else x[gather_x]
    return torch.stack([(wide(d[rows]).t() @ wide(x[rows])).to(d.dtype) for _, rows in groups(ends)])


def bias_gradient(d: Tensor, ends: Tensor, weights: Tensor | None = None, gather: Tensor | None = None) -> Tensor:
    """Per expert the sum of its rows of d (S, N), each times its weight (S,): (E, N) in d's dtype. ``gather``: lines of d."""
    d = d if gather is None else d[gather]
    rows = wide(d) if weights is None else wide(d) * weights.unsqueeze(-1)
    return torch.stack([rows[at].sum(0).to(d.dtype) for _, at in groups(ends)])


def route(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort the pairs of ids (T, K) by expert, stably; ids outside [0, E) come last.

    Returns:
        order (S,) int64, each sorted row's place among the pairs; tokens (S,) int64, its token; inverse (S,) int64, each pair's
        sorted row; ends (E,) int32.
    """
    flat = ids.reshape(-1)
    keys, order = torch.sort(torch.where((flat < 0) | (flat >= experts), experts, flat), stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=ids.device, dtype=keys.dtype), right=True, out_int32=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return order, sorted_pairs(order, None, ids.shape[1])[0], inverse, ends


def sorted_pairs(order: Tensor, p: Tensor | None, chosen: int) -> tuple[Tensor, Tensor | None]:
    """For each sorted row (S,) its token, int64, and its router weight out of p (T, K), in fp32."""
    # Quotient and places in another spelling than in ``grouped_mlp``: see there.
    return torch.div(order, chosen, rounding_mode="trunc"), None if p is None else wide(p.reshape(-1)[order])


def spread(
    grad: Tensor, x: Tensor | None, p: Tensor | None, inverse: Tensor, chosen: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Each token's line of grad (T, N), of x (T, M) and of p (T, K) to its K sorted rows.

    Args:
        inverse: (S,) int64, each pair's sorted row: a permutation.
        chosen: K.

    Returns:
        (S, N); (S, M) or None; the router weights (S,), in fp32, or None. Pair t K + k is in row ``inverse[t K + k]``.
    """

    def placed(pairs: Tensor) -> Tensor:
        return torch.empty_like(pairs).index_copy_(0, inverse, pairs)

    rows = None if x is None else placed(x.repeat_interleave(chosen, 0))
    return placed(grad.repeat_interleave(chosen, 0)), rows, None if p is None else placed(wide(p.reshape(-1)))


def router_gradient(
    dp: Tensor,
    ids: Tensor,
    inverse: Tensor,
    dtype: torch.dtype,
    b_down: Tensor | None = None,
    grad: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """(T, K) as ids is: for each pair the sum of its sorted row of dp (S, parts), in fp32 and in order, rounded once.

    With b_down (E, H) its expert's line times the token's gradient (T, H) is added, where the pair is an expert's.
    """
    found = dp.sum(1)[inverse].view(ids.shape)
    if b_down is not None:
        assert grad is not None and ends is not None
        lines = wide(b_down[ids.clamp(0, b_down.shape[0] - 1)])
        found = found + torch.where(used(ends, inverse.view(ids.shape)), wide(grad).unsqueeze(1) * lines, 0).sum(-1)
    return found.to(dtype)


def combine(
    y: Tensor, p: Tensor | None, b_down: Tensor | None, ids: Tensor, inverse: Tensor, ends: Tensor, like: Tensor
) -> Tensor:
    """Each token's weighted sum over its K rows of y (S, H), in fp32, rounded once to the dtype of ``like``.

    Args:
        p: (T, K) router weights, or None for ones.
        b_down: (E, H), added to each row of y before its weight, or None.
        ids: (T, K).
        inverse: (S,) int64, each pair's sorted row; rows of no expert count nothing, whatever y holds there.

    Returns:
        (T, H).
    """
    total = wide(y).new_zeros(ids.shape[0], y.shape[1])
    places = inverse.view(ids.shape)
    for k in range(ids.shape[1]):
        rows = wide(y[places[:, k]])
        if b_down is not None:
            rows = rows + wide(b_down[ids[:, k].clamp(0, b_down.shape[0] - 1)])
        if p is not None:
            rows = rows * wide(p[:, k]).unsqueeze(-1)
        total += torch.where((places[:, k] < ends[-1]).unsqueeze(-1), rows, 0)
    return total.to(like.dtype)
