"""Near misses of the gated product of the halves of one linear."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import GATES, Family

gated_mlp_packed = Family("gated_mlp_packed_{act}", GATES, lambda s: [(*s.batch, s.k), (2 * s.n, s.k), (2 * s.n,)])


@gated_mlp_packed.whole
def _(act, x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return act(gate) * up


@gated_mlp_packed.broken
def another_activation(act, x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return act(gate) * up


@gated_mlp_packed.broken
def halves_swapped(act, x, w, b):
    up, gate = F.linear(x, w, b).chunk(2, -1)
    return act(gate) * up


@gated_mlp_packed.broken
def halves_interleaved(act, x, w, b):
    h = F.linear(x, w, b)
    return act(h[..., ::2]) * h[..., 1::2]


@gated_mlp_packed.broken
def halves_overlap(act, x, w, b):
    h = F.linear(x, w, b)
    n = h.shape[-1] // 2
    return act(h[..., :n]) * h[..., n - 2 : -2]


@gated_mlp_packed.broken
def same_half_twice(act, x, w, b):
    gate, _ = F.linear(x, w, b).chunk(2, -1)
    return act(gate) * gate


@gated_mlp_packed.broken(shapes=lambda s: [(*s.batch, s.k), (3 * s.n, s.k), (3 * s.n,)])
def thirds(act, x, w, b):
    gate, up, _ = F.linear(x, w, b).chunk(3, -1)
    return act(gate) * up


@gated_mlp_packed.broken(shapes=lambda s: [(8, s.k), (2 * s.n, s.k), (2 * s.n,)])
def halves_of_the_rows(act, x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, 0)
    return act(gate) * up


@gated_mlp_packed.broken
def halves_of_two_linears(act, x, w, b):
    gate, _ = F.linear(x, w, b).chunk(2, -1)
    _, up = F.linear(x.sin(), w, b).chunk(2, -1)
    return act(gate) * up


@gated_mlp_packed.broken
def up_flipped(act, x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return act(gate) * up.flip(-1)


@gated_mlp_packed.broken
def linear_used_outside(act, x, w, b):
    h = F.linear(x, w, b)
    gate, up = h.chunk(2, -1)
    return act(gate) * up, h.sin()


@gated_mlp_packed.broken
def up_used_outside(act, x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return act(gate) * up, up.sin()


@gated_mlp_packed.broken
def scaled_between(act, x, w, b):
    gate, up = (F.linear(x, w, b) * 1.5).chunk(2, -1)
    return act(gate) * up


@gated_mlp_packed.broken
def sum_for_product(act, x, w, b):
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return act(gate) + up


@gated_mlp_packed.broken(training_only=True)
def hook_in_between(act, x, w, b):
    h = F.linear(x, w, b)
    h.register_hook(lambda g: g * 3)
    gate, up = h.chunk(2, -1)
    return act(gate) * up
