"""What a host function decides is kept: it depends on nothing but the metadata of its arguments.

A function of tensors is written as one that prepares and one that runs: the first sees shapes, strides, dtypes and the device,
chooses configurations and builds launches; the second allocates results and launches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

KEPT = 512
"""Plans of one function; the one that was not used for longest goes first."""
ALIGNMENT = 16
"""Bytes: what functions, Triton and TMA ask of an address is whether it is a multiple. New tensors' addresses are."""
_caches: list[Any] = []
Result = TypeVar("Result")
Plan = Callable[..., Any]


class Operand(NamedTuple):
    """All that a plan knows of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Pass(threading.local):
    """The call of a ``whole`` function that is under way in this thread."""

    known: Iterator[tuple[Any, Plan]] = iter(())
    """The plans that the rest of it takes, each with the cache that it is from."""
    noted: list[tuple[Any, Plan]] | None = None
    """Those that it took, where they were not known."""


_pass = _Pass()
_UNKNOWN: tuple[Any, Any] = (None, None)


def planned(prepare: Callable[..., Callable[..., Result]]) -> Callable[..., Result]:
    """``prepare(precision, *arguments)(*arguments)``, where what ``prepare`` returns is kept by what it was given.

    It is given an ``Operand`` in the place of each tensor, the other arguments as they are, and before them the ``precision`` of
    products of the first one. A plan outlives a change of the tables that it was made from: ``forget``.
    """
    kept = functools.lru_cache(maxsize=KEPT)(prepare)
    _caches.append(kept)

    @functools.wraps(prepare)
    def call(*args: Any) -> Result:
        cache, plan = next(_pass.known, _UNKNOWN)
        if cache is not kept:
            _pass.known = iter(())
            seen = [Operand(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else a for a in args]
            plan = kept(precision(args[0].dtype), *seen)
            if _pass.noted is not None:
                _pass.noted.append((kept, plan))
        return plan(*args)

    return call


class _Script:
    """The plans that a pass takes, in order, once there was one."""

    plans: tuple[tuple[Any, Plan], ...] | None = None


def whole(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function`` with one key for all planned functions that it calls: later calls take the first one's plans in order.

    Which it calls, and with what metadata, depends on its arguments' metadata and on torch's matmul precision, and on nothing
    else. Where an argument's address is misaligned, and may be copied for that, each planned function has its own key.
    """
    scripts = functools.lru_cache(maxsize=KEPT)(lambda *key: _Script())
    _caches.append(scripts)

    @functools.wraps(function)
    def call(*args: Any) -> Result:
        key: list[Any] = [torch.get_float32_matmul_precision()]
        addresses = 0
        for a in args:
            if isinstance(a, Tensor):
                key += (a.shape, a.stride(), a.dtype, a.device)
                addresses |= a.data_ptr()
            else:
                key.append(tuple(a) if isinstance(a, list) else a)
        script = scripts(*key) if addresses % ALIGNMENT == 0 else _Script()
        outer, plans = (_pass.known, _pass.noted), script.plans
        noted = None if plans is not None else []
        _pass.known, _pass.noted = iter(plans or ()), noted
        try:
            result = function(*args)
        finally:
            _pass.known, _pass.noted = outer
        if noted is not None:
            script.plans = tuple(noted)
        return result

    return call


def forget() -> None:
    """Drop all plans, after a change of a table or of Triton's settings."""
    for cache in _caches:
        cache.cache_clear()


def precision(dtype: torch.dtype) -> str:
    """How fp32 operands are multiplied: exactly, unless torch's matmul precision allows TF32."""
    return "tf32" if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
