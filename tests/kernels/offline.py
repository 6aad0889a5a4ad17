"""Compile kernels for a GPU that is not here, and read what they need of it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
DIVISIBLE: list[list[Any]] = [["tt.divisibility", 16]]


@dataclasses.dataclass(frozen=True)
class Needs:
    """Of one thread: registers and bytes spilled to its stack. Of one block: bytes of shared memory."""

    registers: int
    stack: int
    shared: int


def compiled(
    kernel: Any,
    capability: int,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: frozenset[str] | set[str],
    warps: int,
    stages: int,
) -> Needs:
    """Of ``kernel`` for sm_<capability>: ``types`` of arguments that are not integers, ``constants`` of those known at compile
    time, ``aligned`` those that are a multiple of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): DIVISIBLE for n in aligned if n not in constants},
    )
    options = {"num_warps": warps, "num_stages": stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text
    return Needs(int(usage[1]), int(usage[2]), binary.metadata.shared)
