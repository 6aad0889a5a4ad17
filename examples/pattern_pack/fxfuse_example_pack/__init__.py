"""A pattern pack is a module that registers fusions when it is imported. Copy this folder to start your own."""

import torch.nn.functional as F

import fxfuse


@fxfuse.register_forward_fusion
def linear_softplus(x, w, b=None):
    """softplus(x @ w.T + b), with or without the bias."""
    return F.softplus(F.linear(x, w, b))


@linear_softplus.rewrite
def _(x, w, b=None):
    h = F.linear(x, w, b)
    return h.clamp_min(0) + h.abs().neg().exp().log1p()  # never overflows
