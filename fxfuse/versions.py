"""What lies below everything kept for later: torch, triton, fxfuse's own sources, the GPU and its driver, global switches."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import torch

DRIVER = Path("/proc/driver/nvidia/version")


@functools.cache
def source_hash() -> str:
    """A hash of fxfuse's own sources: what the passes do is part of every cache key."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def driver() -> str | None:
    """The version of NVIDIA's kernel driver, or None where there is none."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else text.strip()


@functools.cache
def gpu(index: int | None = None) -> str:
    """Name, compute capability, CUDA and driver of a GPU (default: the current one), or the empty string without any."""
    if not torch.cuda.is_available():
        return ""
    name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
    return f"{name} {capability} cuda {torch.version.cuda} driver {driver()}"


@functools.cache
def software() -> tuple[str, ...]:
    """torch, triton, fxfuse and the hash of its sources."""
    from importlib.metadata import PackageNotFoundError, version

    from . import __version__

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return torch.__version__, triton, __version__, source_hash()


def versions() -> tuple[str, ...]:
    """Everything below us whose change may change a plan."""
    return *software(), gpu()


def numerics_flags() -> tuple[Any, ...]:
    """Global switches that change what a matmul computes."""
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
    )
