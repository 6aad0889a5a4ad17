"""Near misses of linear times a constant."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import Family, linear_shapes

linear_scale = Family("linear_scale", ("",), linear_shapes)


@linear_scale.whole
def _(act, x, w, b):
    return F.linear(x, w, b) * 0.3


@linear_scale.broken
def constant_added(act, x, w, b):
    return F.linear(x, w, b) + 0.3


@linear_scale.broken
def constant_divided(act, x, w, b):
    return 0.3 / (F.linear(x, w, b).square() + 1)


@linear_scale.broken
def power(act, x, w, b):
    return F.linear(x, w, b) ** 3


@linear_scale.broken
def linear_used_outside(act, x, w, b):
    y = F.linear(x, w, b)
    return y * 0.3, y.sin()


@linear_scale.broken
def view_in_between(act, x, w, b):
    return F.linear(x, w, b).view(-1, 4) * 0.3


@linear_scale.broken
def linear_clamped(act, x, w, b):
    return F.linear(x, w, b).clamp(min=-0.2) * 0.3
