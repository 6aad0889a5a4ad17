"""Near misses of linear times a tensor of scales + residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from near_misses.family import Family

linear_scale_tensor_add = Family(
    "linear_scale_tensor_add", ("",), lambda s: [(*s.batch, s.k), (s.n, s.k), (s.n,), (s.n,), (*s.batch, s.n)]
)


@linear_scale_tensor_add.whole
def _(act, x, w, b, g, r):
    return F.linear(x, w, b) * g + r


@linear_scale_tensor_add.broken
def residual_scaled_too(act, x, w, b, g, r):
    return (F.linear(x, w, b) + r) * g


@linear_scale_tensor_add.broken
def residual_scaled_only(act, x, w, b, g, r):
    return F.linear(x, w, b) + r * g


@linear_scale_tensor_add.broken
def sum_has_alpha(act, x, w, b, g, r):
    return torch.add(r, F.linear(x, w, b) * g, alpha=3)


@linear_scale_tensor_add.broken(dtypes=(torch.float32,) * 4 + (torch.float64,))
def residual_promotes(act, x, w, b, g, r):
    return F.linear(x, w, b) * g + r


@linear_scale_tensor_add.broken(dtypes=(torch.float32,) * 3 + (torch.float64, torch.float64))
def scale_and_residual_promote(act, x, w, b, g, r):
    return F.linear(x, w, b) * g + r
