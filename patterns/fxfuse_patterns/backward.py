"""Backward passes by themselves: what is left where no joint fusion fits (part of a region escapes, or a hook sits in it)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fxfuse

from .activations import ACTIVATIONS, NEEDS_BACKWARD

aten = torch.ops.aten

BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu2": lambda dy, kept: aten.threshold_backward(dy * (kept * 2.0), kept, 0),
    "gelu": lambda dy, kept: aten.gelu_backward(dy, kept),
    "gelu_tanh": lambda dy, kept: aten.gelu_backward(dy, kept, approximate="tanh"),
    "silu": lambda dy, kept: aten.silu_backward(dy, kept),
    "relu": lambda dy, kept: aten.threshold_backward(dy, kept, 0),
    "sigmoid": lambda dy, kept: aten.sigmoid_backward(dy, kept),
    "tanh": lambda dy, kept: aten.tanh_backward(dy, kept),
}
"""Gradient before the activation, from what autograd kept (for relu2: relu of the pre-activation).

relu2 contains relu's and goes first.
"""


def rows(t: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return t.reshape(-1, t.shape[-1])


# ------------------------------------------------------------------------------------------------ gated activation


def register_gated(kind: str, act: Callable[[Tensor], Tensor]) -> None:
    """Register ``gated_<kind>_backward``: both gradients of ``act(g) * u`` in one pass."""
    d_act = BACKWARD[kind]

    @fxfuse.register_backward_fusion(
        name=f"gated_{kind}_backward",
        example={"dy": "m n", "g": "m n", "u": "m n"},
        requires=NEEDS_BACKWARD[kind],
        check_on_register=False,
    )
    def gated_backward(dy, g, u):
        return d_act(dy * u, g), dy * act(g)

    @gated_backward.check
    def _(m):
        if not m.dy.shape == m.g.shape == m.u.shape:
            return m.reject(f"gradient {tuple(m.dy.shape)}, gate {tuple(m.g.shape)} and up {tuple(m.u.shape)} differ")

    @gated_backward.rewrite
    def _(dy, g, u):
        return fxfuse.ops.gated_backward(dy, g, u, kind)


for _kind in ("silu", "gelu", "gelu_tanh"):
    register_gated(_kind, ACTIVATIONS[_kind])


# ------------------------------------------------------------------------------------------------ activation + bias


def register_bias(kind: str, backward: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register ``<kind>_backward_bias``: the gradient before an activation and its column sum."""

    @fxfuse.register_backward_fusion(
        name=f"{kind}_backward_bias",
        example={"dy": "m n", "kept": "m n"},
        requires=NEEDS_BACKWARD[kind],
        check_on_register=False,
    )
    def backward_bias(dy, kept):
        d = backward(dy, kept)
        return d, rows(d).sum(0)

    @backward_bias.check
    def _(m):
        if m.dy.shape != m.kept.shape:
            return m.reject(f"gradient {tuple(m.dy.shape)} and kept value {tuple(m.kept.shape)} differ")

    @backward_bias.rewrite
    def _(dy, kept):
        if kind == "relu2":
            return fxfuse.ops.act_backward(dy * (kept * 2.0), kept, "relu", True)
        return fxfuse.ops.act_backward(dy, kept, kind, True)


for _kind, _backward in BACKWARD.items():
    register_bias(_kind, _backward)


# ------------------------------------------------------------------------------------------------ scale into dgrad, wgrad

WGRAD = {"dy": "b m n", "x": "b m k"}
"""Three dimensions: the views that make matrices of them are in the pattern, and the finder looks through absent ones."""


@fxfuse.register_backward_fusion(example={**WGRAD, "w": "n k"}, check_on_register=False)
def dgrad_wgrad_bias_scale(dy, w, x, s: float):
    g = dy * s
    return g @ w, rows(g).t() @ rows(x), rows(g).sum(0)


@dgrad_wgrad_bias_scale.rewrite
def _(dy, w, x, s):
    return (
        fxfuse.ops.matmul_scale(dy, w, s),
        fxfuse.ops.matmul_scale(rows(dy).t(), rows(x), s),
        (rows(dy) * s).sum(0),
    )


@fxfuse.register_backward_fusion(example={**WGRAD, "w": "n k"}, check_on_register=False)
def dgrad_wgrad_scale(dy, w, x, s: float):
    g = dy * s
    return g @ w, rows(g).t() @ rows(x)


@dgrad_wgrad_scale.rewrite
def _(dy, w, x, s):
    return fxfuse.ops.matmul_scale(dy, w, s), fxfuse.ops.matmul_scale(rows(dy).t(), rows(x), s)


@fxfuse.register_backward_fusion(example={"dy": "m n", "w": "n k"}, check_on_register=False)
def dgrad_scale(dy, w, s: float):
    return (dy * s) @ w


@dgrad_scale.rewrite
def _(dy, w, s):
    return fxfuse.ops.matmul_scale(dy, w, s)


@fxfuse.register_backward_fusion(example=WGRAD, check_on_register=False)
def wgrad_scale(dy, x, s: float):
    return rows(dy * s).t() @ rows(x)


@wgrad_scale.rewrite
def _(dy, x, s):
    return fxfuse.ops.matmul_scale(rows(dy).t(), rows(x), s)


# ------------------------------------------------------------------------------------------------ dgrad + accumulation


@fxfuse.register_backward_fusion(example={"dy": "m n", "w": "n k", "r": "m k"}, check_on_register=False)
def dgrad_add(dy, w, r):
    return dy @ w + r


@dgrad_add.check
def _(m):
    product = (*m.dy.shape[:-1], m.w.shape[1])
    if m.r.shape != product or m.r.dtype != m.dy.dtype:
        return m.reject(f"the other gradient is {tuple(m.r.shape)} {m.r.dtype}, this one {product} {m.dy.dtype}")


@dgrad_add.rewrite
def _(dy, w, r):
    return fxfuse.ops.matmul_add(dy, w, r)
