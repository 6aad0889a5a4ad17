"""The gated half of an MLP, ``act(gate) * up``: two linears, or one whose output is halved. With and without biases."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fxfuse

from .activations import ACTIVATIONS, NEEDS, Spelling, spellings
from .linears import bias_gradient, linear_gradients

KINDS = ("silu", "gelu", "gelu_tanh", "relu")


def register_separate(kind: str, spelling: Spelling) -> None:
    """Register ``gated_mlp_<kind>``: gate and up have a weight each."""

    @fxfuse.register_forward_backward_fusion(
        name=f"gated_mlp_{kind}{spelling.form}",
        example=spelling.example({"x": "m k", "w_gate": "n k", "w_up": "n k", "b_gate": "n", "b_up": "n"}),
        requires=spelling.needs,
        check_on_register=False,
    )
    def gated_mlp(x, w_gate, w_up, b_gate=None, b_up=None):
        return spelling.function(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)

    @gated_mlp.check
    def _(m):
        if m.w_gate.shape != m.w_up.shape:
            return m.reject(f"gate {tuple(m.w_gate.shape)} and up {tuple(m.w_up.shape)} differ")

    @gated_mlp.forward
    def _(x, w_gate, w_up, b_gate, b_up, *, save):
        if not save:
            return fxfuse.ops.glu(x, w_gate, w_up, kind, b_gate, b_up), ()
        out, g, u = fxfuse.ops.glu(x, w_gate, w_up, kind, b_gate, b_up, save=True)
        return out, (g, u)

    @gated_mlp.backward
    def _(grad, x, w_gate, w_up, b_gate, b_up, g, u, *, mask):
        dg, du = fxfuse.ops.gated_backward(grad, g, u, kind)
        dx_gate, d_gate = linear_gradients(dg, x, w_gate, (mask[0], mask[1]))
        dx_up, d_up = linear_gradients(du, x, w_up, (mask[0], mask[2]))
        dx = dx_gate + dx_up if dx_gate is not None and dx_up is not None else None
        return dx, d_gate, d_up, bias_gradient(dg, mask[3]), bias_gradient(du, mask[4])


def register_packed(kind: str, spelling: Spelling) -> None:
    """Register ``gated_mlp_packed_<kind>``: one weight with rows [gate; up]."""

    @fxfuse.register_forward_backward_fusion(
        name=f"gated_mlp_packed_{kind}{spelling.form}",
        example=spelling.example({"x": "m k", "w": "n k", "b": "n"}),
        requires=spelling.needs,
        check_on_register=False,
    )
    def gated_mlp_packed(x, w, b=None):
        gate, up = F.linear(x, w, b).chunk(2, -1)
        return spelling.function(gate) * up

    @gated_mlp_packed.check
    def _(m):
        if m.w.shape[0] % 2:
            return m.reject(f"the weight's {m.w.shape[0]} rows have no halves")

    @gated_mlp_packed.forward
    def _(x, w, b, *, save):
        if not save:
            return fxfuse.ops.glu_packed(x, w, kind, b), ()
        out, h = fxfuse.ops.glu_packed(x, w, kind, b, save=True)
        return out, (h,)

    @gated_mlp_packed.backward
    def _(grad, x, w, b, h, *, mask):
        dh = fxfuse.ops.gated_backward_packed(grad, h, kind)
        return (*linear_gradients(dh, x, w, mask[:2]), bias_gradient(dh, mask[2]))


def register_batched(kind: str, act: Callable[[Tensor], Tensor]) -> None:
    """Register ``gated_mlp_batched_<kind>``: one weight for each matrix of a batch, columns [gate, up] (Llama-4's experts)."""

    @fxfuse.register_forward_backward_fusion(
        name=f"gated_mlp_batched_{kind}",
        example={"x": "e m k", "w": "e k n"},
        requires=(torch.ops.aten.bmm.default, *NEEDS[kind]),
        check_on_register=False,
    )
    def gated_mlp_batched(x, w):
        gate, up = torch.bmm(x, w).chunk(2, -1)
        return act(gate) * up

    @gated_mlp_batched.check
    def _(m):
        if m.w.shape[2] % 2:
            return m.reject(f"the weight's {m.w.shape[2]} columns have no halves")

    @gated_mlp_batched.forward
    def _(x, w, *, save):
        h = torch.bmm(x, w)
        gate, up = h.chunk(2, -1)
        return act(gate) * up, (h,) if save else ()

    @gated_mlp_batched.backward
    def _(grad, x, w, h, *, mask):
        dh = fxfuse.ops.gated_backward_packed(grad, h, kind)
        dx = torch.bmm(dh, w.transpose(1, 2)) if mask[0] else None
        return dx, torch.bmm(x.transpose(1, 2), dh) if mask[1] else None


for _kind in KINDS:
    register_batched(_kind, ACTIVATIONS[_kind])
    for _spelling in spellings(_kind):
        register_separate(_kind, _spelling)
        register_packed(_kind, _spelling)
