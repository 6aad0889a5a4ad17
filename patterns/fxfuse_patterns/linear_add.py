"""Linear plus residual, in either order. The residual has the output's own shape: anything that broadcasts is not one."""

from __future__ import annotations

import torch.nn.functional as F

import fxfuse


@fxfuse.register_forward_fusion(example={"x": "m k", "w": "n k", "r": "m n", "b": "n"}, check_on_register=False)
def linear_add(x, w, r, b=None):
    return F.linear(x, w, b) + r


@linear_add.check
def _(m):
    linear = (*m.x.shape[:-1], m.w.shape[0])
    if m.r.shape != linear or m.r.dtype != m.x.dtype:
        return m.reject(f"the residual is {tuple(m.r.shape)} {m.r.dtype}, the linear {linear} {m.x.dtype}")


@linear_add.rewrite
def _(x, w, r, b):
    return fxfuse.ops.linear_add(x, w, b, r)
