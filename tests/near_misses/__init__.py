"""Programs that come near to a built-in fusion and that it must not take; a family of fusions a module."""

from __future__ import annotations

from near_misses.activation_backward_bias import activation_backward_bias
from near_misses.dgrad_add import dgrad_add
from near_misses.dgrad_scale import dgrad_scale
from near_misses.family import Family, NearMiss, Sizes, generate
from near_misses.gated_backward import gated_backward
from near_misses.gated_mlp import gated_mlp
from near_misses.gated_mlp_packed import gated_mlp_packed
from near_misses.linear_act import linear_act
from near_misses.linear_add import linear_add
from near_misses.linear_scale import linear_scale
from near_misses.linear_scale_add import linear_scale_add
from near_misses.linear_scale_tensor import linear_scale_tensor
from near_misses.linear_scale_tensor_add import linear_scale_tensor_add
from near_misses.wgrad_scale import wgrad_scale

__all__ = ["FAMILIES", "Family", "NearMiss", "Sizes", "generate"]

FAMILIES = (
    linear_act,
    gated_mlp,
    gated_mlp_packed,
    linear_add,
    linear_scale,
    linear_scale_add,
    linear_scale_tensor,
    linear_scale_tensor_add,
    dgrad_add,
    dgrad_scale,
    wgrad_scale,
    activation_backward_bias,
    gated_backward,
)
