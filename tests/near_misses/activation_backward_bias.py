"""Near misses of an activation's backward with the bias gradient."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import ACTIVATIONS, Family, linear_shapes

activation_backward_bias = Family(
    "{act}_backward_bias", [a for a in ACTIVATIONS if a != "quick_gelu"], linear_shapes, training_only=True
)


@activation_backward_bias.whole
def _(act, x, w, b):
    return act(F.linear(x, w, b))


@activation_backward_bias.broken
def another_activation(act, x, w, b):
    return act(F.linear(x, w, b))


@activation_backward_bias.broken
def bias_frozen(act, x, w, b):
    return act(F.linear(x, w, b.detach()))


@activation_backward_bias.broken
def hook_in_between(act, x, w, b):
    pre = F.linear(x, w, b)
    pre.register_hook(lambda g: g * 3)
    return act(pre)


@activation_backward_bias.broken(shapes=lambda s: [(3, 4, s.k), (s.n, s.k), (4, s.n)])
def bias_per_position(act, x, w, b):
    return act(F.linear(x, w) + b)


@activation_backward_bias.broken
def bias_after_the_activation(act, x, w, b):
    return act(F.linear(x, w)) + b
