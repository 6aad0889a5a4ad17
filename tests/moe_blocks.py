"""Mixture-of-experts blocks in plain PyTorch, each spelled as one library spells it, and the sum that they all compute.

x (T, H), ids (T, K) int64, p (T, K) router weights; experts' weights (E, out, in). ``masked`` is what transformers 5.17
does, ``unmasked`` what 5.24 does, ``scattered`` what torchtitan does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS, WIDTH, INNER, EXPERTS, K = 20, 32, 24, 4, 2
Gated = Callable[[Tensor, Tensor], Tensor]
"""What an expert does between its linears: ``(gate, up) -> a``, all (S, I)."""
Routing = tuple[Tensor, ...]
"""What the second half of a block needs of the first besides the activation: the order of the rows first."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The usual one."""
    return F.silu(gate) * up


# ------------------------------------------------------------------------------------------------ transformers


def sort_by_expert(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted expert ids (S,), the permutation that sorts them (S,) and rows per expert (E,)."""
    sorted_ids, order = torch.sort(ids.reshape(-1))
    counted = sorted_ids.float() if ids.device.type == "cpu" else sorted_ids.int()
    return sorted_ids, order, torch.histc(counted, bins=EXPERTS, min=0, max=EXPERTS - 1)


def restore(y: Tensor, x: Tensor, p: Tensor, order: Tensor) -> Tensor:
    """Weigh the rows, put them back into the tokens' order and add up each token's."""
    weighted = y * p.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return weighted[inverse].view(x.size(0), p.size(-1), x.size(-1)).sum(dim=1).to(x.dtype)


def masked_up(x: Tensor, ids: Tensor, w_gate_up: Tensor) -> tuple[Tensor, Tensor, Routing]:
    """``masked`` up to the activation."""
    sorted_ids, order, counts = sort_by_expert(ids)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    outside = (sorted_ids >= EXPERTS).unsqueeze(-1)
    sorted_ids.clamp_(max=EXPERTS - 1)
    rows = x[order // ids.size(-1)]
    rows.masked_fill_(outside, 0.0)
    h = F.grouped_mm(rows.to(w_gate_up.dtype), w_gate_up.transpose(-2, -1), offs=ends).masked_fill(outside, 0.0)
    return *h.chunk(2, dim=-1), (order, ends, outside)


def masked_down(a: Tensor, x: Tensor, p: Tensor, w_down: Tensor, order: Tensor, ends: Tensor, outside: Tensor) -> Tensor:
    """``masked`` from the activation on."""
    y = F.grouped_mm(a.to(w_down.dtype), w_down.transpose(-2, -1), offs=ends).masked_fill(outside, 0.0)
    return restore(y, x, p, order)


def masked(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor, gated: Gated = swiglu) -> Tensor:
    """Rows of ids past the last expert are set to zero after every step."""
    gate, up, routing = masked_up(x, ids, w_gate_up)
    return masked_down(gated(gate, up), x, p, w_down, *routing)


def unmasked_up(x: Tensor, ids: Tensor, w_gate_up: Tensor) -> tuple[Tensor, Tensor, Routing]:
    """``unmasked`` up to the activation."""
    _, order, counts = sort_by_expert(ids)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    h = F.grouped_mm(x[order // ids.size(-1)].to(w_gate_up.dtype), w_gate_up.transpose(-2, -1), offs=ends)
    return *h.chunk(2, dim=-1), (order, ends)


def unmasked_down(a: Tensor, x: Tensor, p: Tensor, w_down: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """``unmasked`` from the activation on."""
    return restore(F.grouped_mm(a.to(w_down.dtype), w_down.transpose(-2, -1), offs=ends), x, p, order)


def unmasked(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor, gated: Gated = swiglu) -> Tensor:
    """Every id is some expert's."""
    gate, up, routing = unmasked_up(x, ids, w_gate_up)
    return unmasked_down(gated(gate, up), x, p, w_down, *routing)


# ------------------------------------------------------------------------------------------------ torchtitan


def count_by_mask(ids: Tensor) -> Tensor:
    """Rows per expert (E,)."""
    chosen = torch.zeros(ids.size(0), EXPERTS, dtype=torch.bool, device=ids.device)
    return chosen.scatter_(-1, ids, True).sum(0)


def scattered_up(x: Tensor, ids: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor, Routing]:
    """``scattered`` up to the activation."""
    ends = torch.cumsum(count_by_mask(ids), 0, dtype=torch.int32)
    order = torch.argsort(ids.view(-1), stable=True)
    rows = x[order // ids.size(1)].bfloat16()
    gate = torch._grouped_mm(rows, w_gate.bfloat16().transpose(-2, -1), offs=ends)
    return gate, torch._grouped_mm(rows, w_up.bfloat16().transpose(-2, -1), offs=ends), (order, ends)


def scattered_down(a: Tensor, x: Tensor, p: Tensor, w_down: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """``scattered`` from the activation on."""
    y = torch._grouped_mm(a, w_down.bfloat16().transpose(-2, -1), offs=ends).type_as(x)
    y = (y.to(torch.float32) * p.view(-1)[order].reshape(-1, 1)).to(y.dtype)
    return torch.zeros_like(x).scatter_add(0, (order // p.size(1)).reshape(-1, 1).expand(-1, x.size(1)), y)


def scattered(x: Tensor, ids: Tensor, p: Tensor, w_gate: Tensor, w_down: Tensor, w_up: Tensor, gated: Gated = swiglu) -> Tensor:
    """Gate and up have a weight each; the weighted rows are added to their tokens by index."""
    gate, up, routing = scattered_up(x, ids, w_gate, w_up)
    return scattered_down(gated(gate, up), x, p, w_down, *routing)


# ------------------------------------------------------------------------------------------------ the sum itself


def dense_packed(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """``masked`` and ``unmasked`` without routing: every expert sees every token."""
    gate, up = torch.einsum("th,enh->etn", x, w_gate_up).chunk(2, -1)
    return _dense(ids, p, gate, up, w_down)


def dense_separate(x: Tensor, ids: Tensor, p: Tensor, w_gate: Tensor, w_down: Tensor, w_up: Tensor) -> Tensor:
    """``scattered`` without routing."""
    gate, up = (torch.einsum("th,enh->etn", x, w) for w in (w_gate, w_up))
    return _dense(ids, p, gate, up, w_down)


def _dense(ids: Tensor, p: Tensor, gate: Tensor, up: Tensor, w_down: Tensor) -> Tensor:
    share = torch.zeros(ids.size(0), EXPERTS, dtype=p.dtype).scatter_add(1, ids, p)
    return torch.einsum("te,eti,ehi->th", share, swiglu(gate, up), w_down)
