"""What the failure tests share: an exception, the warnings of fxfuse, and a fusion that is tried before the built-in ones."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

import fxfuse


class Planted(Exception):
    """What the tests make fxfuse raise."""


@pytest.fixture(name="caught")
def fxfuse_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """fxfuse's warnings as they come."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", fxfuse.FxfuseWarning)
        yield found


def named(**options: Any) -> fxfuse.Fusion:
    """``flawed``: linear + GELU, tried first; without a rewrite yet."""

    @fxfuse.register_forward_backward_fusion(name="flawed", prepend=True, check_on_register=False, **options)
    def flawed(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    return flawed
