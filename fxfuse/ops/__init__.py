"""Fused operators as ordinary differentiable functions, eager or compiled."""

from .dense import (
    act_backward,
    gated_backward,
    gated_backward_packed,
    glu,
    glu_mlp,
    glu_packed,
    linear_act,
    linear_add,
    linear_scale,
    matmul_add,
    matmul_scale,
)

__all__ = [
    "act_backward",
    "gated_backward",
    "gated_backward_packed",
    "glu",
    "glu_mlp",
    "glu_packed",
    "linear_act",
    "linear_add",
    "linear_scale",
    "matmul_add",
    "matmul_scale",
]
