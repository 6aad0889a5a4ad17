"""The grouped MLP of mixture-of-experts models as one joint fusion: route, up, activation, down, combine.

A fusion's name is ``grouped_mlp[<block>, <experts>]``: how rows are routed and combined, and what an expert computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fxfuse
from fxfuse.ops import Experts

from .activations import ACTIVATIONS

aten = torch.ops.aten
Compute = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], Tensor]
"""``(rows, ends, lines, masked) -> (S, H)``: ``lines(b)`` gives each row its expert's line of b (E, N), ``masked`` zeroes
the rows that belong to no expert (or does nothing)."""
Block = Callable[[Tensor, Tensor, Tensor, int, Compute], Tensor]
"""``(x, ids, p, number of experts, compute) -> (T, H)``."""


# ------------------------------------------------------------------------------------------------ routing and combine


def sorted_rows(x: Tensor, ids: Tensor, p: Tensor, experts: int, compute: Compute) -> Tensor:
    """Sort the pairs, count with histc, restore the order with the inverse permutation, sum over the K rows of a token."""
    tokens, k = ids.shape
    eid, order = torch.sort(ids.reshape(-1))
    ends = _count(eid, experts)
    y = compute(x[order // k], ends, lambda b: b[eid], lambda h: h)
    return _restore(y, p, order, (tokens, k, x.shape[-1])).to(x.dtype)


def masked_rows(x: Tensor, ids: Tensor, p: Tensor, experts: int, compute: Compute) -> Tensor:
    """``sorted_rows`` with the rows of ids past the last expert set to zero after each step."""
    tokens, k = ids.shape
    eid, order = torch.sort(ids.reshape(-1))
    ends = _count(eid, experts)
    outside = (eid >= experts).unsqueeze(-1)
    eid = eid.clamp(max=experts - 1)
    y = compute(x[order // k].masked_fill(outside, 0.0), ends, lambda b: b[eid], lambda h: h.masked_fill(outside, 0.0))
    return _restore(y, p, order, (tokens, k, x.shape[-1])).to(x.dtype)


def _count(eid: Tensor, experts: int) -> Tensor:
    counted = eid.float() if eid.device.type in ("cpu", "mps") else eid.int()
    return torch.cumsum(torch.histc(counted, bins=experts, min=0, max=experts - 1), dim=0, dtype=torch.int32)


def _restore(y: Tensor, p: Tensor, order: Tensor, shape: tuple[int, int, int]) -> Tensor:
    weighted = y * p.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[inverse].view(shape).sum(dim=1)


def scattered_rows(x: Tensor, ids: Tensor, p: Tensor, experts: int, compute: Compute) -> Tensor:
    """Count with a mask of (T, E), sort with argsort, add the weighted rows to their tokens with scatter_add (torchtitan)."""
    k = ids.shape[1]
    chosen = torch.zeros(x.shape[0], experts, dtype=torch.bool, device=x.device).scatter(-1, ids, True)
    ends = torch.cumsum(chosen.sum(0), 0, dtype=torch.int32)
    flat = ids.view(-1)
    order = torch.argsort(flat, stable=True)
    scores, tokens = p.view(-1)[order], order // k
    y = compute(x[tokens], ends, lambda b: b[flat[order]], lambda h: h).type_as(x)
    y = (y.to(torch.float32) * scores.reshape(-1, 1)).to(y.dtype)
    return torch.zeros_like(x).scatter_add(0, tokens.reshape(-1, 1).expand(-1, x.shape[1]), y)


BLOCKS: dict[str, tuple[Block, tuple[Any, ...]]] = {
    "sorted": (sorted_rows, (aten.histc.default,)),
    "masked": (masked_rows, (aten.histc.default, aten.ge.Scalar)),
    "scattered": (scattered_rows, (aten.scatter_add.default,)),
}
"""With the operators that a graph must have for it to be looked for."""


# ------------------------------------------------------------------------------------------------ what an expert computes


def _linear(
    rows: Tensor, w: Tensor, b: Tensor | None, ends: Tensor, lines: Callable[[Tensor], Tensor], masked: Callable[[Tensor], Tensor]
) -> Tensor:
    y = torch._grouped_mm(rows.to(w.dtype), w.transpose(-2, -1), offs=ends)
    return masked(y if b is None else y + lines(b))


def _example(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    sizes = {"x": (6, 32), "p": (6, 2), **shapes}
    return {"ids": torch.zeros(6, 2, dtype=torch.int64), **{n: torch.zeros(s, dtype=torch.bfloat16) for n, s in sizes.items()}}


def _check(m: fxfuse.Match) -> Any:
    if m.recipe.numerics == "strict":
        return m.reject("it rounds once where the model's casts round several times, and numerics is strict")
    return None


def _register(
    pattern: Callable[..., Tensor],
    block: str,
    name: str,
    shapes: dict[str, tuple[int, ...]],
    needs: tuple[Any, ...],
) -> Any:
    """Register a pattern of a block around experts."""
    fusion = fxfuse.register_forward_backward_fusion(
        name=f"grouped_mlp[{block}, {name}]",
        example=_example(**shapes),
        requires=(aten._grouped_mm.default, *BLOCKS[block][1], *needs),
        check_on_register=False,
    )(pattern)
    fusion.check(_check)
    return fusion


def register_packed(block: str, kind: str, act: Callable[[Tensor], Tensor], needs: tuple[Any, ...]) -> None:
    """Gate and up are the halves of one linear."""
    route = BLOCKS[block][0]

    def pattern(x, ids, p, w_gate_up, w_down, b_gate_up=None, b_down=None):
        def compute(rows, ends, lines, masked):
            gate, up = _linear(rows, w_gate_up, b_gate_up, ends, lines, masked).chunk(2, -1)
            return _linear(act(gate) * up, w_down, b_down, ends, lines, masked)

        return route(x, ids, p, w_down.shape[0], compute)

    shapes = {"w_gate_up": (4, 48, 32), "w_down": (4, 32, 24), "b_gate_up": (4, 48), "b_down": (4, 32)}
    fusion = _register(pattern, block, f"packed {kind}", shapes, needs)

    def experts(w_gate_up, w_down, b_gate_up, b_down):
        return Experts(w_gate_up, None, w_down, b_gate_up, b_down, kind, "concat", None, None)

    @fusion.forward
    def _(x, ids, p, w_gate_up, w_down, b_gate_up, b_down, *, save):
        return fxfuse.ops.grouped_mlp_forward(x, ids, p, experts(w_gate_up, w_down, b_gate_up, b_down), save=save)

    @fusion.backward
    def _(grad, x, ids, p, w_gate_up, w_down, b_gate_up, b_down, *saved, mask):
        need_x, _, need_p, need_gate, need_down, need_b_gate, need_b_down = mask
        needed = (need_x, need_p, need_gate, False, need_down, need_b_gate, need_b_down)
        weights = experts(w_gate_up, w_down, b_gate_up, b_down)
        dx, dp, dgate, _, ddown, db_gate, db_down = fxfuse.ops.grouped_mlp_backward(grad, x, ids, p, weights, saved, needed)
        return dx, None, dp, dgate, ddown, db_gate, db_down


def register_clamped(block: str) -> None:
    """Gate and up alternate, are clamped, and up counts from one (GPT-OSS)."""
    route = BLOCKS[block][0]

    def pattern(x, ids, p, w_gate_up, w_down, b_gate_up, b_down, limit: float, alpha: float):
        def compute(rows, ends, lines, masked):
            h = _linear(rows, w_gate_up, b_gate_up, ends, lines, masked)
            gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(min=-limit, max=limit)
            a = (up + 1) * (gate * torch.sigmoid(gate * alpha))
            return _linear(a, w_down, b_down, ends, lines, masked)

        return route(x, ids, p, w_down.shape[0], compute)

    shapes = {"w_gate_up": (4, 48, 32), "w_down": (4, 32, 24), "b_gate_up": (4, 48), "b_down": (4, 32)}
    fusion = _register(pattern, block, "clamped", shapes, (aten.sigmoid.default,))

    def experts(w_gate_up, w_down, b_gate_up, b_down, limit, alpha):
        return Experts(w_gate_up, None, w_down, b_gate_up, b_down, "silu", "interleaved", limit, alpha)

    @fusion.forward
    def _(x, ids, p, w_gate_up, w_down, b_gate_up, b_down, limit, alpha, *, save):
        weights = experts(w_gate_up, w_down, b_gate_up, b_down, limit, alpha)
        return fxfuse.ops.grouped_mlp_forward(x, ids, p, weights, save=save)

    @fusion.backward
    def _(grad, x, ids, p, w_gate_up, w_down, b_gate_up, b_down, limit, alpha, *saved, mask):
        need_x, _, need_p, need_gate, need_down, need_b_gate, need_b_down = mask
        needed = (need_x, need_p, need_gate, False, need_down, need_b_gate, need_b_down)
        weights = experts(w_gate_up, w_down, b_gate_up, b_down, limit, alpha)
        dx, dp, dgate, _, ddown, db_gate, db_down = fxfuse.ops.grouped_mlp_backward(grad, x, ids, p, weights, saved, needed)
        return dx, None, dp, dgate, ddown, db_gate, db_down


def register_separate(block: str, kind: str, act: Callable[[Tensor], Tensor], needs: tuple[Any, ...]) -> None:
    """Gate and up have a weight each."""
    route = BLOCKS[block][0]

    def pattern(x, ids, p, w_gate, w_up, w_down):
        def compute(rows, ends, lines, masked):
            gate = act(_linear(rows, w_gate, None, ends, lines, masked))
            up = _linear(rows, w_up, None, ends, lines, masked)
            return _linear(gate * up, w_down, None, ends, lines, masked)

        return route(x, ids, p, w_down.shape[0], compute)

    shapes = {"w_gate": (4, 24, 32), "w_up": (4, 24, 32), "w_down": (4, 32, 24)}
    fusion = _register(pattern, block, f"separate {kind}", shapes, needs)

    def experts(w_gate, w_up, w_down):
        return Experts(w_gate, w_up, w_down, None, None, kind, "separate", None, None)

    @fusion.forward
    def _(x, ids, p, w_gate, w_up, w_down, *, save):
        return fxfuse.ops.grouped_mlp_forward(x, ids, p, experts(w_gate, w_up, w_down), save=save)

    @fusion.backward
    def _(grad, x, ids, p, w_gate, w_up, w_down, *saved, mask):
        need_x, _, need_p, need_gate, need_up, need_down = mask
        needed = (need_x, need_p, need_gate, need_up, need_down, False, False)
        dx, dp, dgate, dup, ddown, *_ = fxfuse.ops.grouped_mlp_backward(
            grad, x, ids, p, experts(w_gate, w_up, w_down), saved, needed
        )
        return dx, None, dp, dgate, dup, ddown


def register_plain(block: str, kind: str, act: Callable[[Tensor], Tensor], needs: tuple[Any, ...]) -> None:
    """No gate."""
    route = BLOCKS[block][0]

    def pattern(x, ids, p, w_up, w_down, b_up=None, b_down=None):
        def compute(rows, ends, lines, masked):
            return _linear(act(_linear(rows, w_up, b_up, ends, lines, masked)), w_down, b_down, ends, lines, masked)

        return route(x, ids, p, w_down.shape[0], compute)

    shapes = {"w_up": (4, 24, 32), "w_down": (4, 32, 24), "b_up": (4, 24), "b_down": (4, 32)}
    fusion = _register(pattern, block, f"plain {kind}", shapes, needs)

    def experts(w_up, w_down, b_up, b_down):
        return Experts(w_up, None, w_down, b_up, b_down, kind, "plain", None, None)

    @fusion.forward
    def _(x, ids, p, w_up, w_down, b_up, b_down, *, save):
        return fxfuse.ops.grouped_mlp_forward(x, ids, p, experts(w_up, w_down, b_up, b_down), save=save)

    @fusion.backward
    def _(grad, x, ids, p, w_up, w_down, b_up, b_down, *saved, mask):
        need_x, _, need_p, need_up, need_down, need_b_up, need_b_down = mask
        needed = (need_x, need_p, need_up, False, need_down, need_b_up, need_b_down)
        weights = experts(w_up, w_down, b_up, b_down)
        dx, dp, dup, _, ddown, db_up, db_down = fxfuse.ops.grouped_mlp_backward(grad, x, ids, p, weights, saved, needed)
        return dx, None, dp, dup, ddown, db_up, db_down


GATES: dict[str, tuple[Any, ...]] = {"silu": (), "gelu": (aten.gelu.default,), "gelu_tanh": (aten.gelu.default,)}
"""Activations of gated experts, with the operators that a graph must have. Some block of every graph is looked for with
silu, so that another activation is a near miss."""
PLAIN: dict[str, tuple[Any, ...]] = {
    "relu2": (aten.relu.default, aten.pow.Tensor_Scalar),
    "silu": (aten.silu.default,),
    "gelu": (aten.gelu.default,),
    "gelu_tanh": (aten.gelu.default,),
}
for _block in BLOCKS:
    for _kind, _needs in GATES.items():
        register_packed(_block, _kind, ACTIVATIONS[_kind], _needs)
        register_separate(_block, _kind, ACTIVATIONS[_kind], _needs)
    for _kind, _needs in PLAIN.items():
        register_plain(_block, _kind, ACTIVATIONS[_kind], _needs)
for _block in ("sorted", "masked"):
    register_clamped(_block)
