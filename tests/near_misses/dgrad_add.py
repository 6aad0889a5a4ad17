"""Near misses of an input gradient added to what another use left."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import Family, linear_shapes

dgrad_add = Family("dgrad_add", ("",), linear_shapes, training_only=True)


@dgrad_add.whole
def _(act, x, w, b):
    return F.linear(x, w, b), x.sin()


@dgrad_add.broken
def single_use(act, x, w, b):
    return F.linear(x.sin(), w, b)


@dgrad_add.broken
def hook_before_the_sum(act, x, w, b):
    y = x * 1
    y.register_hook(lambda g: g * 3)
    return F.linear(y, w, b), x.sin()


@dgrad_add.broken
def op_before_the_sum(act, x, w, b):
    return F.linear(x.cos(), w, b), x.sin()


@dgrad_add.broken
def other_gradient_detached(act, x, w, b):
    return F.linear(x, w, b), x.detach().sin()
