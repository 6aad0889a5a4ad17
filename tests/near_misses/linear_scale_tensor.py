"""Near misses of linear times a tensor of scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from near_misses.family import Family

# the scale is frozen: its own gradient needs the unscaled linear
linear_scale_tensor = Family("linear_scale_tensor", ("",), lambda s: [(*s.batch, s.k), (s.n, s.k), (s.n,), (s.n,)], frozen=(3,))


@linear_scale_tensor.whole
def _(act, x, w, b, g):
    return F.linear(x, w, b) * g


@linear_scale_tensor.broken
def scale_divides(act, x, w, b, g):
    return F.linear(x, w, b) / (g.square() + 1)


@linear_scale_tensor.broken
def scale_added(act, x, w, b, g):
    return F.linear(x, w, b) + g


@linear_scale_tensor.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.n,), (s.rows, 1)])
def scale_per_row(act, x, w, b, g):
    return F.linear(x, w, b) * g


@linear_scale_tensor.broken(dtypes=(torch.float32,) * 3 + (torch.float64,))
def scale_promotes(act, x, w, b, g):
    return F.linear(x, w, b) * g


@linear_scale_tensor.broken(shapes=lambda s: [(s.n, s.k), (s.n, s.k), (s.n,), (s.n,)])
def scale_along_the_rows(act, x, w, b, g):
    return F.linear(x, w, b).t() * g
