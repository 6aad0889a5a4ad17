"""Near misses of a constant folded into the weight gradient."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import Family, linear_shapes

wgrad_scale = Family("wgrad_scale", ("",), linear_shapes, frozen=(0, 2), training_only=True)


@wgrad_scale.whole
def _(act, x, w, b):
    return F.linear(x, w, b) * 0.3


@wgrad_scale.broken
def constant_added(act, x, w, b):
    return F.linear(x, w, b) + 0.3


@wgrad_scale.broken
def function_for_scale(act, x, w, b):
    return F.linear(x, w, b).sin()
