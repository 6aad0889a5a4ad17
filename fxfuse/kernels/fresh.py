"""New tensors by the way that Inductor's code takes: through the dispatcher, making one costs the host twice as much or more."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .plans import Operand
from .tape import recorder


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(extent, 1) for extent in shape[i:]) for i in range(1, len(shape) + 1))


def fresh(
    shape: Sequence[int], like: Operand, dtype: torch.dtype | None = None, stride: Sequence[int] | None = None
) -> Callable[[], Tensor]:
    """Makes new tensors of unknown values on the device of ``like``, in its dtype and contiguous if nothing else is given."""
    from ..compat import empty_strided

    layout, dtype, device = (tuple(shape), dense(shape) if stride is None else tuple(stride)), dtype or like.dtype, like.device
    ordinary = functools.partial(torch.empty_strided, *layout, dtype=dtype, device=device)
    on_current = empty_strided(device)
    if on_current is None:
        return ordinary
    make = functools.partial(on_current, *layout, dtype)
    several = device.type == "cuda" and torch.cuda.device_count() > 1

    def new() -> Tensor:
        if several and torch.accelerator.current_device_index() != device.index:
            return ordinary()
        found = make()
        if (notes := recorder()) is not None:
            notes.made(make, found)
        return found

    return new
