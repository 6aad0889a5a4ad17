"""Near misses of linear + activation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from near_misses.family import ACTIVATIONS, Family, Sizes, linear_shapes

linear_act = Family("linear_{act}", tuple(ACTIVATIONS), linear_shapes)


def matrix(s: Sizes) -> list[tuple[int, ...]]:
    return [(s.rows, s.k), (s.n, s.k), (s.n,)]


@linear_act.whole
def _(act, x, w, b):
    return act(F.linear(x, w, b))


@linear_act.broken
def another_activation(act, x, w, b):
    return act(F.linear(x, w, b))


@linear_act.broken(shapes=matrix)
def addmm_alpha(act, x, w, b):
    return act(torch.addmm(b, x, w.t(), alpha=2))


@linear_act.broken(shapes=matrix)
def addmm_beta(act, x, w, b):
    return act(torch.addmm(b, x, w.t(), beta=0.5))


@linear_act.broken
def bias_alpha(act, x, w, b):
    return act(torch.add(x @ w.t(), b, alpha=3))


@linear_act.broken
def bias_subtracted(act, x, w, b):
    return act(x @ w.t() - b)


@linear_act.broken
def bias_twice(act, x, w, b):
    return act(F.linear(x, w, b) + b)


@linear_act.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (s.rows, s.n)])
def bias_is_a_matrix(act, x, w, b):
    return act(x @ w.t() + b)


@linear_act.broken(shapes=lambda s: [(s.rows, s.k), (s.n, s.k), (1, s.n)])
def bias_has_one_row(act, x, w, b):
    return act(x @ w.t() + b)


@linear_act.broken(shapes=lambda s: [(*s.batch, s.k), (s.n, s.k), ()])
def bias_is_a_scalar(act, x, w, b):
    return act(x @ w.t() + b)


@linear_act.broken(shapes=lambda s: [(*s.batch, s.k), (s.n, s.k), (1,)])
def bias_has_one_element(act, x, w, b):
    return act(x @ w.t() + b)


@linear_act.broken(dtypes=(torch.float32, torch.float32, torch.float64))
def bias_promotes(act, x, w, b):
    return act(x @ w.t() + b)


@linear_act.broken(shapes=lambda s: [(s.n, s.k), (s.n, s.k), (s.n,)])
def bias_along_the_rows(act, x, w, b):
    return act((x @ w.t()).t() + b)


@linear_act.broken(shapes=lambda s: [(3, 4, s.k), (3, s.k, s.n), (s.n,)])
def weight_per_batch(act, x, w, b):
    return act(torch.bmm(x, w) + b)


@linear_act.broken
def product_of_two_terms(act, x, w, b):
    return act(F.linear(x, w, b) + F.linear(x.sin(), w))


@linear_act.broken
def linear_used_outside(act, x, w, b):
    pre = F.linear(x, w, b)
    return act(pre), pre.sin()


@linear_act.broken
def linear_returned_detached(act, x, w, b):
    pre = F.linear(x, w, b)
    return act(pre), pre.detach()


@linear_act.broken
def linear_selects(act, x, w, b):
    pre = F.linear(x, w, b)
    return torch.where(pre > 0.1, act(pre), pre)


# where the derivative is taken from the output, the forward alone is replaced and the hook stays where it was
@linear_act.broken(spared=("relu", "sigmoid", "tanh"), training_only=True)
def hook_in_between(act, x, w, b):
    pre = F.linear(x, w, b)
    pre.register_hook(lambda g: g * 3)
    return act(pre)


@linear_act.broken
def view_in_between(act, x, w, b):
    pre = F.linear(x, w, b)
    return act(pre.view(*pre.shape[:-1], 4, -1))


@linear_act.broken
def transpose_in_between(act, x, w, b):
    return act(F.linear(x, w, b).transpose(-1, -2))


@linear_act.broken
def slice_in_between(act, x, w, b):
    return act(F.linear(x, w, b)[..., :6])


@linear_act.broken
def scale_in_between(act, x, w, b):
    return act(F.linear(x, w, b) * 1.5)


@linear_act.broken
def negation_in_between(act, x, w, b):
    return act(-F.linear(x, w, b))


@linear_act.broken
def cast_in_between(act, x, w, b):
    return act(F.linear(x, w, b).double()).float()


@linear_act.broken
def mutation_in_between(act, x, w, b):
    return act(F.linear(x, w, b).mul_(2.5))


@linear_act.broken
def random_op_in_between(act, x, w, b):
    pre = F.linear(x, w, b)
    return act(pre + torch.rand_like(pre) * 0)


@linear_act.broken(training_only=True)
def checkpoint_boundary_in_between(act, x, w, b):
    pre = checkpoint(F.linear, x, w, b, use_reentrant=False)
    return checkpoint(act, pre, use_reentrant=False)


@linear_act.broken
def activation_before_the_linear(act, x, w, b):
    return F.linear(act(x), w, b)
