"""Linear plus residual, in either order. The residual has the output's own shape: anything that broadcasts is not one."""

from __future__ import annotations

import fxfuse
import torch.nn.functional as F


@fxfuse.register_forward_fusion(example={"x": "m k", "w": "n k", "r": "m n", "b": "n"}, check_on_register=False)
def linear_add(x, w, r, b=None):
    return F.linear(x, w, b) + r


@linear_add.check
def _(m):
    if m.r.shape != m.out.shape or m.r.dtype != m.out.dtype:
        return m.reject(f"the residual is {tuple(m.r.shape)} {m.r.dtype}, the linear {tuple(m.out.shape)} {m.out.dtype}")


@linear_add.rewrite
def _(x, w, r, b):
    return fxfuse.ops.linear_add(x, w, b, r)
