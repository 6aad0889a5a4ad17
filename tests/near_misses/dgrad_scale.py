"""Near misses of a constant folded into the input gradient."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import Family, linear_shapes

dgrad_scale = Family("dgrad_scale", ("",), linear_shapes, frozen=(1, 2), training_only=True)


@dgrad_scale.whole
def _(act, x, w, b):
    return F.linear(x, w, b) * 0.3


@dgrad_scale.broken
def constant_added(act, x, w, b):
    return F.linear(x, w, b) + 0.3


@dgrad_scale.broken
def function_for_scale(act, x, w, b):
    return F.linear(x, w, b).sin()


@dgrad_scale.broken
def scaled_gradient_used_outside(act, x, w, b):
    return (F.linear(x, w, b) + x.sum(-1, keepdim=True)) * 0.3
