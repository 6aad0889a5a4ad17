"""Near misses of a gated product's backward."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import Family

gated_backward = Family(
    "gated_{act}_backward", ("silu", "gelu", "gelu_tanh"), lambda s: [(*s.batch, s.k), (s.n, s.k), (s.n, s.k)], training_only=True
)


@gated_backward.whole
def _(act, x, w_gate, w_up):
    return act(F.linear(x, w_gate)) * F.linear(x, w_up)


@gated_backward.broken
def another_activation(act, x, w_gate, w_up):
    return act(F.linear(x, w_gate)) * F.linear(x, w_up)


@gated_backward.broken
def sum_for_product(act, x, w_gate, w_up):
    return act(F.linear(x, w_gate)) + F.linear(x, w_up)


@gated_backward.broken
def none_activated(act, x, w_gate, w_up):
    return F.linear(x, w_gate) * F.linear(x, w_up)
