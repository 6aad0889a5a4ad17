"""Near misses of linear + residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from near_misses.family import Family

linear_add = Family("linear_add", ("",), lambda s: [(*s.batch, s.k), (s.n, s.k), (s.n,), (*s.batch, s.n)])


@linear_add.whole
def _(act, x, w, b, r):
    return r + F.linear(x, w, b)


@linear_add.broken
def residual_alpha(act, x, w, b, r):
    return torch.add(F.linear(x, w, b), r, alpha=2)


@linear_add.broken
def linear_alpha(act, x, w, b, r):
    return torch.add(r, F.linear(x, w, b), alpha=2)


@linear_add.broken
def residual_subtracted(act, x, w, b, r):
    return F.linear(x, w, b) - r


@linear_add.broken
def subtracted_from_the_residual(act, x, w, b, r):
    return r - F.linear(x, w, b)


@linear_add.broken
def product_for_sum(act, x, w, b, r):
    return F.linear(x, w, b) * r


@linear_add.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.n,), (1, s.n)])
def residual_has_one_row(act, x, w, b, r):
    return F.linear(x, w, b) + r


@linear_add.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.n,), (s.rows, 1)])
def residual_has_one_column(act, x, w, b, r):
    return F.linear(x, w, b) + r


@linear_add.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.n,), (3, s.rows, s.n)])
def residual_raises_the_rank(act, x, w, b, r):
    return F.linear(x, w, b) + r


@linear_add.broken(shapes=lambda s: [(1, s.k), (s.n, s.k), (s.n,), (s.rows, s.n)])
def linear_is_the_broadcast_side(act, x, w, b, r):
    return F.linear(x, w, b) + r


@linear_add.broken(dtypes=(torch.float32,) * 3 + (torch.float64,))
def residual_promotes(act, x, w, b, r):
    return F.linear(x, w, b) + r


@linear_add.broken
def linear_used_outside(act, x, w, b, r):
    y = F.linear(x, w, b)
    return y + r, y.sin()


@linear_add.broken
def scale_in_between(act, x, w, b, r):
    return F.linear(x, w, b) * 1.5 + r


@linear_add.broken
def linear_changed_in_place(act, x, w, b, r):
    return F.linear(x, w, b).mul_(2.5) + r


@linear_add.broken
def view_in_between(act, x, w, b, r):
    return F.linear(x, w, b).view(-1, 4) + r.view(-1, 4)
