"""Near misses of linear times a constant + residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from near_misses.family import Family

linear_scale_add = Family("linear_scale_add", ("",), lambda s: [(*s.batch, s.k), (s.n, s.k), (s.n,), (*s.batch, s.n)])


@linear_scale_add.whole
def _(act, x, w, b, r):
    return F.linear(x, w, b) * 0.3 + r


@linear_scale_add.broken
def residual_scaled_too(act, x, w, b, r):
    return (F.linear(x, w, b) + r) * 0.3


@linear_scale_add.broken
def residual_scaled_only(act, x, w, b, r):
    return F.linear(x, w, b) + r * 0.3


@linear_scale_add.broken
def sum_has_alpha(act, x, w, b, r):
    return torch.add(F.linear(x, w, b) * 0.3, r, alpha=3)


@linear_scale_add.broken
def residual_subtracted(act, x, w, b, r):
    return F.linear(x, w, b) * 0.3 - r


@linear_scale_add.broken
def scaled_used_outside(act, x, w, b, r):
    y = F.linear(x, w, b) * 0.3
    return y + r, y.sin()


@linear_scale_add.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.n,), (1, s.n)])
def residual_has_one_row(act, x, w, b, r):
    return F.linear(x, w, b) * 0.3 + r


@linear_scale_add.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.n,), (3, s.rows, s.n)])
def residual_raises_the_rank(act, x, w, b, r):
    return F.linear(x, w, b) * 0.3 + r


@linear_scale_add.broken(dtypes=(torch.float32,) * 3 + (torch.float64,))
def residual_promotes(act, x, w, b, r):
    return F.linear(x, w, b) * 0.3 + r
