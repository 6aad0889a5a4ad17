"""Activations and their derivatives, each as eager PyTorch computes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Activation:
    """``forward(pre)`` and ``backward(grad, kept)``; kept is the output or the pre-activation."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    keeps_output: bool = False


def _relu2_backward(grad: Tensor, pre: Tensor) -> Tensor:
    positive = F.relu(pre)
    return aten.threshold_backward(grad * (positive * 2.0), positive, 0)


def quick_gelu(pre: Tensor) -> Tensor:
    """``x sigmoid(1.702 x)`` (Hendrycks and Gimpel, Gaussian Error Linear Units, 2016, section 2)."""
    return pre * torch.sigmoid(1.702 * pre)


def _quick_gelu_backward(grad: Tensor, pre: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * pre)
    return grad * s + aten.sigmoid_backward(grad * pre, s) * 1.702


def relu2(pre: Tensor) -> Tensor:
    """``relu(x)^2`` (So et al., Primer, 2021)."""
    return F.relu(pre) ** 2


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(F.gelu, lambda g, p: aten.gelu_backward(g, p)),
    "gelu_tanh": Activation(lambda p: F.gelu(p, approximate="tanh"), lambda g, p: aten.gelu_backward(g, p, approximate="tanh")),
    "silu": Activation(F.silu, lambda g, p: aten.silu_backward(g, p)),
    "relu": Activation(F.relu, lambda g, out: aten.threshold_backward(g, out, 0), keeps_output=True),
    "relu2": Activation(relu2, _relu2_backward),
    "sigmoid": Activation(torch.sigmoid, lambda g, out: aten.sigmoid_backward(g, out), keeps_output=True),
    "tanh": Activation(torch.tanh, lambda g, out: aten.tanh_backward(g, out), keeps_output=True),
    "quick_gelu": Activation(quick_gelu, _quick_gelu_backward),
}


def activation(name: Any) -> Activation:
    """The activation with this name.

    Raises:
        ValueError: there is none.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
