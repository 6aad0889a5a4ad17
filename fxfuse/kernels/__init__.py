"""Kernels of the grouped MLP: one contract, several paths.

Every path is a module with the functions of ``reference``, which are their definition in plain torch: ``tile_list``,
``up``, ``matmul``, ``dh``, ``wgrad``, ``route``, ``combine``, ``bias_gradient``, ``sorted_pairs``, ``spread`` and
``router_gradient``. They never synchronise with the host, use no atomics on floats, accumulate in fp32, and give zero for rows of
no expert and for the weights of idle experts.

Symbols: T tokens, K experts a token, S = T K routed rows sorted by expert, E experts, H hidden width, I intermediate width;
``ends`` (E,) int32 holds the row after each expert's last one.

Nothing here imports Triton before a kernel is launched.
"""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType
from typing import NamedTuple

import torch


class Path(NamedTuple):
    """Where a path's functions are, and which products read rows that are to be gathered where they lie."""

    module: str
    gathers: bool
    """All do, a backward's too."""
    gathers_below: float
    """The first linear does, if it has fewer columns than this; for more it is faster to gather once."""

    def spreads(self, columns: int) -> bool:
        """Whether a forward gathers before a first linear of this many columns."""
        return columns >= self.gathers_below


PATHS = {
    "portable": Path("fxfuse.kernels.portable", True, math.inf),
    "hopper": Path("fxfuse.kernels.hopper_path", False, 4096),
}
"""By name: plain Triton, for every GPU from sm_80 on; Gluon, for sm_90."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CAPABILITY = (8, 0)
MAX_EXPERTS = 1024
"""Each tile finds its expert among all ``ends`` at once, in registers."""


def refusal(dtype: torch.dtype, device: torch.device, experts: int | torch.SymInt) -> str | None:
    """Why no path runs with operands of this dtype on this device, or None."""
    if dtype not in DTYPES:
        return f"the kernels compute with 16- and 32-bit floats, not with {dtype}"
    if not isinstance(experts, int) or experts > MAX_EXPERTS:
        return f"the kernels take up to {MAX_EXPERTS} experts"
    if device.type == "cuda" and capability(device) < CAPABILITY:
        return "the kernels need sm_80 or newer"
    return None


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def path(name: str) -> ModuleType:
    """The module with the functions of a path; loads Triton."""
    return importlib.import_module(PATHS[name].module)


def twins() -> ModuleType:
    """The module with the definitions of these functions in plain torch, for any device."""
    return importlib.import_module("fxfuse.kernels.reference")
