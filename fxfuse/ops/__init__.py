"""Fused operators as ordinary differentiable functions, eager or compiled."""

from . import grouped_eager, grouped_kernels  # noqa: F401  (what runs on a GPU registers itself)
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
from .grouped_experts import Experts, grouped_experts_backward, grouped_experts_forward
from .grouped_mlp import grouped_mlp, grouped_mlp_backward, grouped_mlp_forward
from .grouped_mm import grouped_linear
from .scaled_experts import ScaledExperts, scaled_experts_refusal
from .scaled_linear import scaled_linear, scaled_linear_backward, scaled_linear_forward, scaled_linear_refusal

__all__ = [
    "Experts",
    "ScaledExperts",
    "act_backward",
    "gated_backward",
    "gated_backward_packed",
    "glu",
    "glu_mlp",
    "glu_packed",
    "grouped_experts_backward",
    "grouped_experts_forward",
    "grouped_linear",
    "grouped_mlp",
    "grouped_mlp_backward",
    "grouped_mlp_forward",
    "linear_act",
    "linear_add",
    "linear_scale",
    "matmul_add",
    "matmul_scale",
    "scaled_experts_refusal",
    "scaled_linear",
    "scaled_linear_backward",
    "scaled_linear_forward",
    "scaled_linear_refusal",
]
