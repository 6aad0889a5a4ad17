"""Fused operators around dense linears.

Shapes: x (..., K); w (N, K); b (N,) or None; outputs (..., N). All tensors of a call have one floating dtype, the result's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .activations import activation
from .define import define, nothing


def rows(x: Tensor) -> Tensor:
    """All leading dimensions as one, also where the last one is empty."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def linear_gradients(
    grad: Tensor, x: Tensor, w: Tensor, mask: Sequence[bool], bias_gradient: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of ``F.linear(x, w, b)`` for those of (x, w, b) in ``mask``."""
    flat = rows(grad)
    dx = (flat @ w).view(x.shape) if mask[0] else None
    dw = flat.t() @ rows(x) if mask[1] else None
    db = None
    if len(mask) > 2 and mask[2]:
        db = bias_gradient if bias_gradient is not None else flat.sum(0)
    return dx, dw, db


# ------------------------------------------------------------------------------------------------ linear + activation


@define("linear_act(Tensor x, Tensor w, Tensor? b, str act, bool save) -> (Tensor, Tensor)")
def _linear_act(x: Tensor, w: Tensor, b: Tensor | None, act: str, save: bool) -> tuple[Tensor, Tensor]:
    kind = activation(act)
    pre = F.linear(x, w, b)
    return kind.forward(pre), pre if save and not kind.keeps_output else nothing(x)


def _no_addmm_activation(x: Tensor, w: Tensor, b: Tensor | None, act: str, save: bool) -> str | None:
    """Why the vendor's GEMM with bias and activation in its epilogue cannot be used."""
    if act not in ("relu", "gelu_tanh"):
        return f"cuBLASLt has no {act} epilogue"
    if save and act != "relu":
        return "the pre-activation is needed, the epilogue does not give it"
    if b is None or x.dim() < 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "it takes a bias and 16- or 32-bit floats"
    return None


@_linear_act.candidate("extern", _no_addmm_activation)
def _linear_act_extern(x: Tensor, w: Tensor, b: Tensor | None, act: str, save: bool) -> tuple[Tensor, Tensor]:
    assert b is not None
    out = torch.ops.aten._addmm_activation(b, rows(x), w.t(), use_gelu=act == "gelu_tanh")
    return out.view(*x.shape[:-1], w.shape[0]), nothing(x)


@define("act_backward(Tensor grad, Tensor kept, str act, bool bias) -> (Tensor, Tensor)")
def _act_backward(grad: Tensor, kept: Tensor, act: str, bias: bool) -> tuple[Tensor, Tensor]:
    d = activation(act).backward(grad, kept)
    return d, rows(d).sum(0) if bias else nothing(grad)


class _LinearAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, act: str) -> Tensor:
        out, pre = torch.ops.fxfuse.linear_act(x, w, b, act, True)
        ctx.act, ctx.has_bias = act, b is not None
        ctx.save_for_backward(x, w, out if activation(act).keeps_output else pre)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        x, w, kept = ctx.saved_tensors
        mask = ctx.needs_input_grad[:3]
        d, db = torch.ops.fxfuse.act_backward(grad, kept, ctx.act, bool(ctx.has_bias and mask[2]))
        return (*linear_gradients(d, x, w, mask, db), None)


def linear_act(x: Tensor, w: Tensor, b: Tensor | None, act: str, save: bool | None = None) -> Any:
    """``act(x w^T + b)``.

    Args:
        x, w, b: (..., K), (N, K), (N,) or None.
        act: "silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh" or "quick_gelu".
        save: None for an ordinary differentiable call. True or False, for the forward of a fusion, gives
            ``(out, kept)``: what ``act_backward`` needs (the output or the pre-activation), or an empty tensor.

    Returns:
        (..., N), or the pair.

    Raises:
        ValueError: an unknown activation, or shapes that do not fit.
    """
    kind = activation(act)
    check_linear("linear_act", x, w, b)
    if save is None:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, b)):
            return _LinearAct.apply(x, w, b, act)
        return torch.ops.fxfuse.linear_act(x, w, b, act, False)[0]
    out, pre = torch.ops.fxfuse.linear_act(x, w, b, act, save)
    return out, (out if save and kind.keeps_output else pre)


def act_backward(grad: Tensor, kept: Tensor, act: str, bias: bool = False) -> tuple[Tensor, Tensor]:
    """The gradient before an activation and, if asked for, its sum over all leading dimensions (the bias gradient).

    Args:
        grad: (..., N), the gradient after the activation.
        kept: what ``linear_act(..., save=True)`` returned.
    """
    return torch.ops.fxfuse.act_backward(grad, kept, act, bias)


# ------------------------------------------------------------------------------------------------ gated halves


@define("glu(Tensor x, Tensor w_gate, Tensor w_up, Tensor? b_gate, Tensor? b_up, str act, bool save) -> (Tensor, Tensor, Tensor)")
def _glu(
    x: Tensor, w_gate: Tensor, w_up: Tensor, b_gate: Tensor | None, b_up: Tensor | None, act: str, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    g, u = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    out = activation(act).forward(g) * u
    return (out, g, u) if save else (out, nothing(x), nothing(x))


@define("glu_packed(Tensor x, Tensor w, Tensor? b, str act, bool save) -> (Tensor, Tensor)")
def _glu_packed(x: Tensor, w: Tensor, b: Tensor | None, act: str, save: bool) -> tuple[Tensor, Tensor]:
    h = F.linear(x, w, b)
    g, u = h.chunk(2, -1)
    return activation(act).forward(g) * u, h if save else nothing(x)


@define("gated_backward(Tensor grad, Tensor g, Tensor u, str act) -> (Tensor, Tensor)")
def _gated_backward(grad: Tensor, g: Tensor, u: Tensor, act: str) -> tuple[Tensor, Tensor]:
    kind = activation(act)
    a = kind.forward(g)
    return kind.backward(grad * u, a if kind.keeps_output else g), grad * a


@define("gated_backward_packed(Tensor grad, Tensor h, str act) -> Tensor")
def _gated_backward_packed(grad: Tensor, h: Tensor, act: str) -> Tensor:
    g, u = h.chunk(2, -1)
    kind = activation(act)
    a = kind.forward(g)
    return torch.cat([kind.backward(grad * u, a if kind.keeps_output else g), grad * a], -1)


def gated_backward_packed(grad: Tensor, h: Tensor, act: str) -> Tensor:
    """``gated_backward`` of both halves of h (..., 2 N): (..., 2 N)."""
    return torch.ops.fxfuse.gated_backward_packed(grad, h, act)


def glu(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    act: str,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    *,
    save: bool = False,
) -> Any:
    """``act(x w_gate^T + b_gate) * (x w_up^T + b_up)``; with ``save`` also both factors before the activation.

    Not differentiable by itself: the forward of a fusion. ``glu_mlp`` is the differentiable function.
    """
    out, g, u = torch.ops.fxfuse.glu(x, w_gate, w_up, b_gate, b_up, act, save)
    return (out, g, u) if save else out


def glu_packed(x: Tensor, w: Tensor, act: str, b: Tensor | None = None, *, save: bool = False) -> Any:
    """``glu`` with one weight (2 N, K), rows [gate; up]; with ``save`` also the linear's output (..., 2 N)."""
    out, h = torch.ops.fxfuse.glu_packed(x, w, b, act, save)
    return (out, h) if save else out


def gated_backward(grad: Tensor, g: Tensor, u: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """Gradients of ``act(g) * u`` with respect to g and u; all (..., N)."""
    return torch.ops.fxfuse.gated_backward(grad, g, u, act)


class _GluMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, act: str) -> Tensor:
        hidden, g, u = torch.ops.fxfuse.glu(x, w_gate, w_up, None, None, act, True)
        ctx.act = act
        ctx.save_for_backward(x, w_gate, w_up, w_down, g, u)
        return F.linear(hidden, w_down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grads
        x, w_gate, w_up, w_down, g, u = ctx.saved_tensors
        need_x, need_gate, need_up, need_down, _ = ctx.needs_input_grad
        d_down = rows(grad).t() @ rows(activation(ctx.act).forward(g) * u) if need_down else None
        if not (need_x or need_gate or need_up):
            return None, None, None, d_down, None
        dg, du = torch.ops.fxfuse.gated_backward((rows(grad) @ w_down).view(g.shape), g, u, ctx.act)
        dx_gate, d_gate, _ = linear_gradients(dg, x, w_gate, (need_x, need_gate))
        dx_up, d_up, _ = linear_gradients(du, x, w_up, (need_x, need_up))
        dx = dx_gate + dx_up if dx_gate is not None and dx_up is not None else None
        return dx, d_gate, d_up, d_down, None


def glu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, act: str) -> Tensor:
    """``(act(x w_gate^T) * (x w_up^T)) w_down^T`` (Shazeer, GLU Variants Improve Transformer, 2020).

    Args:
        x: (..., H).
        w_gate, w_up: (I, H).
        w_down: (H, I).

    Raises:
        ValueError: an unknown activation, or shapes that do not fit.
    """
    activation(act)
    check_linear("glu_mlp", x, w_gate, None, "w_gate")
    check_linear("glu_mlp", x, w_up, None, "w_up")
    if w_gate.shape != w_up.shape or w_down.dim() != 2 or w_down.shape[1] != w_gate.shape[0]:
        gate, up, down = (tuple(w.shape) for w in (w_gate, w_up, w_down))
        raise ValueError(f"glu_mlp: w_gate {gate} and w_up {up} must be equal (I, H), w_down {down} (H, I)")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, w_gate, w_up, w_down)):
        return _GluMlp.apply(x, w_gate, w_up, w_down, act)
    return F.linear(glu(x, w_gate, w_up, act), w_down)


def check_linear(op: str, x: Tensor, w: Tensor, b: Tensor | None, name: str = "w") -> None:
    """Raise ValueError where shapes do not fit."""
    if w.dim() != 2 or x.dim() < 1 or x.shape[-1] != w.shape[1]:
        raise ValueError(f"{op}: x is {tuple(x.shape)} and {name} {tuple(w.shape)}; expected (..., K) and (N, K)")
    if b is not None and (b.dim() != 1 or b.shape[0] != w.shape[0]):
        raise ValueError(f"{op}: b is {tuple(b.shape)}; expected ({w.shape[0]},)")


# ------------------------------------------------------------------------------------------------ linear + add, scale


@define("linear_add(Tensor x, Tensor w, Tensor? b, Tensor r) -> Tensor")
def _linear_add(x: Tensor, w: Tensor, b: Tensor | None, r: Tensor) -> Tensor:
    return F.linear(x, w, b) + r


@define("linear_scale(Tensor x, Tensor w, Tensor? b, float k, Tensor? s, Tensor? r, bool save) -> (Tensor, Tensor)")
def _linear_scale(
    x: Tensor, w: Tensor, b: Tensor | None, k: float, s: Tensor | None, r: Tensor | None, save: bool
) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    out = y * k if s is None else y * s
    return out if r is None else out + r, y if save else nothing(x)


@define("matmul_add(Tensor a, Tensor b, Tensor r) -> Tensor")
def _matmul_add(a: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return a @ b + r


@define("matmul_scale(Tensor a, Tensor b, float k) -> Tensor")
def _matmul_scale(a: Tensor, b: Tensor, k: float) -> Tensor:
    return (a * k) @ b


def linear_add(x: Tensor, w: Tensor, b: Tensor | None, r: Tensor) -> Tensor:
    """``x w^T + b + r`` with r (..., N). The forward of a fusion: not differentiable by itself."""
    return torch.ops.fxfuse.linear_add(x, w, b, r)


def linear_scale(
    x: Tensor, w: Tensor, b: Tensor | None, scale: float | Tensor, r: Tensor | None = None, *, save: bool | None = None
) -> Any:
    """``(x w^T + b) scale + r`` with scale a number, 0-d or (N,). The forward of a fusion: not differentiable by itself.

    With ``save`` True or False the result is ``(out, unscaled linear or an empty tensor)``.
    """
    tensor = scale if isinstance(scale, Tensor) else None
    number = 1.0 if isinstance(scale, Tensor) else float(scale)
    out, unscaled = torch.ops.fxfuse.linear_scale(x, w, b, number, tensor, r, bool(save))
    return out if save is None else (out, unscaled)


def matmul_add(a: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """``a b + r`` with a (..., K), b (K, N), r (..., N)."""
    return torch.ops.fxfuse.matmul_add(a, b, r)


def matmul_scale(a: Tensor, b: Tensor, k: float) -> Tensor:
    """``(k a) b`` with a (..., K), b (K, N)."""
    return torch.ops.fxfuse.matmul_scale(a, b, k)
