"""Near misses of the gated product of two linears."""

from __future__ import annotations

import torch.nn.functional as F

from near_misses.family import GATES, Family

gated_mlp = Family("gated_mlp_{act}", GATES, lambda s: [(*s.batch, s.k), (s.n, s.k), (s.n, s.k), (s.n,), (s.n,)])


@gated_mlp.whole
def _(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def another_activation(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def another_input_for_up(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) * F.linear(x.sin(), w_up, b_up)


@gated_mlp.broken
def sum_for_product(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) + F.linear(x, w_up, b_up)


@gated_mlp.broken
def quotient_for_product(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) / (F.linear(x, w_up, b_up).square() + 1)


@gated_mlp.broken
def both_activated(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) * act(F.linear(x, w_up, b_up))


@gated_mlp.broken
def none_activated(act, x, w_gate, w_up, b_gate, b_up):
    return F.linear(x, w_gate, b_gate) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def offset_up(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) * (F.linear(x, w_up, b_up) + 1)


@gated_mlp.broken
def clamped_gate(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate).clamp(max=0.5)) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def scaled_gate(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate) * 1.5) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def scaled_activation(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate)) * 1.5 * F.linear(x, w_up, b_up)


@gated_mlp.broken
def gate_used_outside(act, x, w_gate, w_up, b_gate, b_up):
    gate = F.linear(x, w_gate, b_gate)
    return act(gate) * F.linear(x, w_up, b_up), gate.sin()


@gated_mlp.broken
def up_used_outside(act, x, w_gate, w_up, b_gate, b_up):
    up = F.linear(x, w_up, b_up)
    return act(F.linear(x, w_gate, b_gate)) * up, up.sin()


@gated_mlp.broken
def activated_gate_used_outside(act, x, w_gate, w_up, b_gate, b_up):
    gate = act(F.linear(x, w_gate, b_gate))
    return gate * F.linear(x, w_up, b_up), gate.sin()


@gated_mlp.broken(training_only=True)
def hook_on_the_gate(act, x, w_gate, w_up, b_gate, b_up):
    gate = F.linear(x, w_gate, b_gate)
    gate.register_hook(lambda g: g * 3)
    return act(gate) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def view_of_the_gate(act, x, w_gate, w_up, b_gate, b_up):
    gate, up = F.linear(x, w_gate, b_gate), F.linear(x, w_up, b_up)
    return act(gate.view(*gate.shape[:-1], 4, -1)) * up.view(*up.shape[:-1], 4, -1)


@gated_mlp.broken
def gate_changed_in_place(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate).mul_(2.5)) * F.linear(x, w_up, b_up)


@gated_mlp.broken
def gate_in_fp64(act, x, w_gate, w_up, b_gate, b_up):
    return act(F.linear(x, w_gate, b_gate).double()).float() * F.linear(x, w_up, b_up)
