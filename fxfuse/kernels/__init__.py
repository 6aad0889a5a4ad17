"""Kernels of the grouped MLP: one contract, several paths.

Every path is a module with the functions of ``reference``, which are their definition in plain torch: ``up``, ``matmul``,
``dh``, ``wgrad``, ``route``, ``combine`` and ``bias_gradient``. They never synchronise with the host, use no atomics on floats,
accumulate in fp32, and give zero for rows of no expert and for the weights of idle experts.

Symbols: T tokens, K experts a token, S = T K routed rows sorted by expert, E experts, H hidden width, I intermediate width;
``ends`` (E,) int32 holds the row after each expert's last one.

Nothing here imports Triton before a kernel is launched.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

PATHS = {"portable": "fxfuse.kernels.portable"}
"""By name: plain Triton, for every GPU from sm_80 on."""
MAX_EXPERTS = 1024
"""Each tile finds its expert among all ``ends`` at once, in registers."""
REFUSAL = "fxfuse's own kernels are off: no GPU has run them yet; FXFUSE_KERNELS=1 in the environment allows them"


def enabled() -> bool:
    """Whether these kernels may run at all; where they may not, ``REFUSAL`` says why."""
    return os.environ.get("FXFUSE_KERNELS") == "1"


def path(name: str) -> ModuleType:
    """The module with the functions of a path; loads Triton."""
    return importlib.import_module(PATHS[name])
