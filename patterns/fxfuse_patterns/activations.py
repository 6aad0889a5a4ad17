"""The activations that patterns are made for, as people write them, and the gradients of a linear."""

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


def linear_gradients(d: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``F.linear(x, w)`` for x and w, where they are needed; d is the gradient of the output."""
    flat = d.reshape(-1, d.shape[-1])
    dx = (flat @ w).view(x.shape) if need[0] else None
    dw = flat.t() @ x.reshape(-1, x.shape[-1]) if need[1] else None
    return dx, dw


def bias_gradient(d: Tensor, needed: bool) -> Tensor | None:
    """The sum over all leading dimensions, where it is needed."""
    return d.reshape(-1, d.shape[-1]).sum(0) if needed else None
