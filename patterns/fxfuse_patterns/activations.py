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
