"""Linear times a scale, with and without a residual: a constant, a 0-d tensor, or a factor per channel (layer scale).

In training the gradient of a tensor scale needs the unscaled output: it is an extra output, made only when it is used.
"""

from __future__ import annotations

import torch.nn.functional as F

import fxfuse

from .linears import refuse_residual

LINEAR = {"x": "m k", "w": "n k", "b": "n"}


def refuse_scale(m):
    """Why a tensor is not a scale of the whole output or of its channels, or None."""
    if m.s.dtype != m.x.dtype:
        return m.reject(f"the scale is {m.s.dtype}, the linear {m.x.dtype}")
    if m.s.dim() > 1 or (m.s.dim() == 1 and m.s.shape[0] != m.w.shape[0]):
        return m.reject(f"a scale of shape {tuple(m.s.shape)} is neither 0-d nor one factor per channel ({m.w.shape[0]},)")


@fxfuse.register_forward_fusion(example={**LINEAR, "r": "m n"}, check_on_register=False)
def linear_scale_add(x, w, s: float, r, b=None):
    return F.linear(x, w, b) * s + r


@linear_scale_add.check
def _(m):
    return refuse_residual(m)


@linear_scale_add.rewrite
def _(x, w, s, r, b):
    return fxfuse.ops.linear_scale(x, w, b, s, r)


@fxfuse.register_forward_fusion(example={**LINEAR, "s": "n", "r": "m n"}, extra=1, check_on_register=False)
def linear_scale_tensor_add(x, w, s, r, b=None):
    y = F.linear(x, w, b)
    return y * s + r, y


@linear_scale_tensor_add.check
def _(m):
    return refuse_scale(m) or refuse_residual(m)


@linear_scale_tensor_add.rewrite
def _(x, w, s, r, b, *, wanted):
    return fxfuse.ops.linear_scale(x, w, b, s, r, save=wanted[0])


@fxfuse.register_forward_fusion(example=LINEAR, check_on_register=False)
def linear_scale(x, w, s: float, b=None):
    return F.linear(x, w, b) * s


@linear_scale.rewrite
def _(x, w, s, b):
    return fxfuse.ops.linear_scale(x, w, b, s)


@fxfuse.register_forward_fusion(example={**LINEAR, "s": "n"}, extra=1, check_on_register=False)
def linear_scale_tensor(x, w, s, b=None):
    y = F.linear(x, w, b)
    return y * s, y


@linear_scale_tensor.check
def _(m):
    return refuse_scale(m)


@linear_scale_tensor.rewrite
def _(x, w, s, b, *, wanted):
    return fxfuse.ops.linear_scale(x, w, b, s, save=wanted[0])
