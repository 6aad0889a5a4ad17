"""The activations that patterns are made for, as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


def written_gelu_tanh(y: Tensor) -> Tensor:
    """GELU's tanh form out of its parts, as in GPT-2 (``gelu_new`` in transformers)."""
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))


def written_gelu_tanh_in_fp32(y: Tensor) -> Tensor:
    """The same between casts, where there is something to gain."""
    return written_gelu_tanh(y.float()).to(y.dtype) if y.dtype.itemsize < 4 else written_gelu_tanh(y)


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
SIZES = {"m": 6, "k": 10, "n": 8}


class Spelling(NamedTuple):
    """One way to write an activation: a form of the fusions of its kind."""

    form: str
    """Suffix of the fusions' names."""
    function: Callable[[Tensor], Tensor]
    needs: tuple[Any, ...]
    """Operators that a graph with it holds."""
    dtype: torch.dtype | None = None
    """Of the inputs on which the form shows, if it does not on any."""

    def example(self, dims: Mapping[str, str]) -> dict[str, Any]:
        """Inputs of these dimensions on which the form shows."""
        if self.dtype is None:
            return dict(dims)
        return {name: torch.zeros([SIZES[d] for d in names.split()], dtype=self.dtype) for name, names in dims.items()}


def spellings(kind: str) -> tuple[Spelling, ...]:
    """torch's own first."""
    return (Spelling("", ACTIVATIONS[kind], NEEDS[kind]), *WRITTEN.get(kind, ()))


_PARTS = (aten.tanh.default, aten.pow.Tensor_Scalar)
WRITTEN = {
    "gelu_tanh": (
        Spelling("[written out]", written_gelu_tanh, _PARTS),
        Spelling("[written out in fp32]", written_gelu_tanh_in_fp32, _PARTS, torch.bfloat16),
    )
}
"""Activations that people write out of their parts."""
