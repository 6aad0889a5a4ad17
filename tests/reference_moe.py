"""Mixture-of-experts blocks in plain PyTorch, and inputs for them: what the grouped operators are compared with.

``per_token`` is the definition: one token and one expert at a time. ``per_expert`` is what a careful user writes, with one
rounding where the sums over a token's experts end; in 16 bits its error is the measure for the operator's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Args = Sequence[Tensor | None]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda t: F.relu(t).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "concat": {},
    "interleaved": {"layout": "interleaved"},
    "separate": {"separate": True},
    "ungated": {"gated": False},
}
ARGUMENTS = ("x", "w_gate_up", "w_down", "expert_ids", "router_weights", "w_up", "bias_gate_up", "bias_down")
"""The operator's tensors, in the order of ``Block.inputs``."""


def mlp(
    rows: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    w_up: Tensor | None,
    bias_gate_up: Tensor | None,
    bias_down: Tensor | None,
    *,
    activation: str = "silu",
    limit: float | None = None,
    alpha: float | None = None,
    gated: bool = True,
    layout: str = "concat",
) -> Tensor:
    """One expert's MLP of rows (N, H)."""
    h, up = F.linear(rows, w_gate_up, bias_gate_up), None
    if w_up is not None:
        gate, up = h, F.linear(rows, w_up)
    elif not gated:
        gate = h
    else:
        gate, up = h.chunk(2, -1) if layout == "concat" else (h[..., ::2], h[..., 1::2])
    if limit is not None:
        gate, up = gate.clamp(max=limit), None if up is None else up.clamp(-limit, limit)
    if alpha is not None:
        assert up is not None
        return F.linear(gate * torch.sigmoid(alpha * gate) * (up + 1), w_down, bias_down)
    a = ACTIVATIONS[activation](gate)
    return F.linear(a if up is None else a * up, w_down, bias_down)


def _experts(*weights: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    count = next(w.shape[0] for w in weights if w is not None)
    return list(zip(*[[None] * count if w is None else w.unbind(0) for w in weights], strict=True))


def per_token(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    *,
    w_up: Tensor | None = None,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    weights_first: bool = False,
    **options: Any,
) -> Tensor:
    """The block by its definition, in x's dtype throughout; at least one token."""
    experts = _experts(w_gate_up, w_down, w_up, bias_gate_up, bias_down)
    out = []
    for t, token in enumerate(x.unbind(0)):
        total = torch.zeros_like(token)
        for k, e in enumerate(expert_ids[t].tolist()):
            if not 0 <= e < len(experts):
                continue
            p = 1 if router_weights is None else router_weights[t, k]
            y = mlp(token * p if weights_first else token, *experts[e], **options)
            total = total + (y if weights_first else y * p)
        out.append(total)
    return torch.stack(out)


def per_expert(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    expert_ids: Tensor,
    router_weights: Tensor | None,
    *,
    w_up: Tensor | None = None,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    weights_first: bool = False,
    **options: Any,
) -> Tensor:
    """The block with one matrix product an expert; router weights of a wider dtype widen what they multiply."""
    places = x.unsqueeze(1).expand(*expert_ids.shape, -1)  # one gradient a place, so that they are summed only once
    found = torch.zeros_like(places) if router_weights is None else torch.zeros_like(places) * router_weights.unsqueeze(-1)
    for e, weights in enumerate(_experts(w_gate_up, w_down, w_up, bias_gate_up, bias_down)):
        at = torch.where(expert_ids == e)
        p = None if router_weights is None else router_weights[at].unsqueeze(-1)
        rows = places[at] if p is None or not weights_first else (places[at] * p).to(x.dtype)
        y = mlp(rows, *weights, **options)
        y = y if p is None or weights_first else y * p
        found = found.index_put(at, y.to(found.dtype))
    return found.sum(1).to(x.dtype)


def grouped_linear(x: Tensor, w: Tensor, offs: Tensor, b: Tensor | None = None) -> Tensor:
    """Each group's rows times its matrix; rows after the last group are zero."""
    out, start = [], 0
    for (w_e, b_e), end in zip(_experts(w, b), offs.tolist(), strict=True):
        out.append(F.linear(x[start:end], w_e, b_e))
        start = end
    return torch.cat([*out, x.new_zeros(x.shape[0] - start, w.shape[1])])


# ------------------------------------------------------------------------------------------------ inputs


def balanced(tokens: int, chosen: int, experts: int) -> Tensor:
    """Every expert as often as every other, in a random order."""
    pairs = tokens * chosen
    return (torch.arange(pairs) % experts)[torch.randperm(pairs)].view(tokens, chosen)


def zipf(tokens: int, chosen: int, experts: int) -> Tensor:
    """Distinct experts a token, the r-th most frequent with odds ``r^-1.2``."""
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts)))
    return (gumbel - 1.2 * torch.arange(1, experts + 1).log()).topk(chosen, dim=1).indices


def one_idle(tokens: int, chosen: int, experts: int) -> Tensor:
    """Any expert but the second."""
    ids = torch.randint(experts - 1, (tokens, chosen))
    return torch.where(ids >= 1, ids + 1, ids)


def nobody(tokens: int, chosen: int, experts: int) -> Tensor:
    """No id is an expert's."""
    return torch.where(torch.rand(tokens, chosen) < 0.5, -1, experts)


def one_busy(tokens: int, chosen: int, experts: int) -> Tensor:
    """The middle expert takes everything."""
    return torch.full((tokens, chosen), experts // 2)


def some_outside(tokens: int, chosen: int, experts: int) -> Tensor:
    """Ids of experts that there are, and of some that there are not."""
    ids = torch.randint(-2, experts + 2, (tokens, chosen))
    far = torch.tensor([2**15, 2**16, 2**32, -(2**63), 2**63 - 1])  # in 16 or 32 bits some would be an expert's
    return torch.where(torch.rand(ids.shape) < 0.1, far[torch.randint(len(far), ids.shape)], ids)


ROUTINGS = {f.__name__: f for f in (balanced, zipf, one_idle, one_busy, some_outside, nobody)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One call of the operator: sizes, routing, which arguments there are, and options."""

    tokens: int = 5
    chosen: int = 2
    experts: int = 4
    width: int = 40
    inner: int = 9
    dtype: torch.dtype = torch.float64
    routing: str = "balanced"
    router: torch.dtype | None = None
    """The router weights' dtype, where it is not ``dtype``."""
    routed: bool = True
    """Whether there are router weights."""
    biases: bool = True
    """Where the layout has them: with ``w_up`` only the down projection does."""
    separate: bool = False
    """Gate and up have a weight each."""
    activation: str = "silu"
    limit: float | None = None
    alpha: float | None = None
    gated: bool = True
    layout: str = "concat"
    weights_first: bool = False
    coarse: bool = False
    """What goes into the first linear is on a grid on which its sums are exact in every dtype: no rounding moves a value
    over a threshold of the activation."""

    def inputs(self) -> list[Tensor | None]:
        """Random arguments in the order of ``ARGUMENTS``, drawn anew at each call; all floats train."""
        tokens, experts, width, inner = self.tokens, self.experts, self.width, self.inner
        rows = 2 * inner if self.gated and not self.separate else inner
        ids = ROUTINGS[self.routing](tokens, self.chosen, experts)
        p = torch.randint(1, 5, ids.shape) / 4 if self.coarse else torch.rand(ids.shape, dtype=torch.float64)
        return [
            self._before(tokens, width),
            self._before(experts, rows, width),
            self._normal(experts, width, inner),
            ids,
            p.to(self.router or self.dtype).requires_grad_() if self.routed else None,
            self._before(experts, inner, width) if self.separate else None,
            self._before(experts, rows) if self.biases and not self.separate else None,
            self._normal(experts, width) if self.biases else None,
        ]

    def _before(self, *shape: int) -> Tensor:
        """What goes into the first linear."""
        if not self.coarse:
            return self._normal(*shape)
        return (torch.randint(-1, 2, shape) / 4).to(self.dtype).requires_grad_()

    def _normal(self, *shape: int) -> Tensor:
        return (torch.randn(shape, dtype=torch.float64) * 0.5).to(self.dtype).requires_grad_()

    def of(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``function`` of the tensors alone, in the order of ``ARGUMENTS``."""
        names = ("activation", "limit", "alpha", "gated", "layout", "weights_first")
        options = {name: getattr(self, name) for name in names}
        return lambda *args: function(**dict(zip(ARGUMENTS, args, strict=True)), **options)
