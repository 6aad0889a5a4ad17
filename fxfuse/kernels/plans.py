"""What a host function decides is kept: it depends on nothing but the metadata of its arguments.

A function of tensors is written as one that prepares and one that runs: the first sees shapes, strides, dtypes and the device,
chooses configurations and builds launches; the second allocates results and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

KEPT = 512
"""Plans of one function; the one that was not used for longest goes first."""
ALIGNMENT = 16
"""Bytes: what functions, Triton and TMA ask of an address is whether it is a multiple. New tensors' addresses are."""
_caches: list[Any] = []
Result = TypeVar("Result")


class Operand(NamedTuple):
    """All that a plan knows of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def bounded(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function``, whose last results are kept until ``forget``."""
    kept = functools.lru_cache(maxsize=KEPT)(function)
    _caches.append(kept)
    return kept


def planned(prepare: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    """``prepare(precision, *arguments)(*arguments)``, where what ``prepare`` returns is kept by what it was given.

    It is given an ``Operand`` in the place of each tensor, the other arguments as they are, and before them the ``precision`` of
    products of the first one. A plan outlives a change of the tables that it was made from: ``forget``.
    """
    kept = bounded(prepare)

    @functools.wraps(prepare)
    def call(*args: Any) -> Result:
        seen = [Operand(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else a for a in args]
        return kept(precision(args[0].dtype), *seen)(*args)

    return call


def forget() -> None:
    """Drop all plans, after a change of a table or of Triton's settings."""
    for cache in _caches:
        cache.cache_clear()


def precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: exactly, unless torch's matmul precision allows TF32."""
    return "tf32" if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
