"""The activations that patterns are made for, as people write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda y: F.relu(y) ** 2,
    "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""Those that contain another one go first."""

aten = torch.ops.aten
SILU = (aten.silu.default, aten.sigmoid.default)
"""Either spelling."""
NEEDS = {
    "relu2": (aten.relu.default,),
    "quick_gelu": (aten.sigmoid.default,),
    "gelu": (aten.gelu.default,),
    "gelu_tanh": (aten.gelu.default,),
    "silu": (SILU,),
    "relu": (aten.relu.default,),
    "sigmoid": (aten.sigmoid.default,),
    "tanh": (aten.tanh.default,),
}
"""Operators that a graph with an activation holds."""
NEEDS_BACKWARD = {
    "relu2": (aten.threshold_backward.default,),
    "gelu": (aten.gelu_backward.default,),
    "gelu_tanh": (aten.gelu_backward.default,),
    "silu": ((aten.silu_backward.default, aten.sigmoid_backward.default),),
    "relu": (aten.threshold_backward.default,),
    "sigmoid": (aten.sigmoid_backward.default,),
    "tanh": (aten.tanh_backward.default,),
}
"""And one with its derivative."""
