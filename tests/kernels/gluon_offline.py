"""Compile the launches of the Hopper kernels for sm_90 with no GPU: what a launcher passes is what is compiled."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from fxfuse.kernels import hopper_launch, hopper_tiles, plans

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclasses.dataclass(frozen=True)
class Needs:
    """Of one thread: the most registers that a partition uses, and bytes of stack. Of one block: bytes of shared memory, and of
    code."""

    registers: int
    stack: int
    shared: int
    code: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """A call of a kernel, as Triton would see it."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compiled(self) -> Any:
        backend = make_backend(TARGET)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, options = bind(*self.args, **self.options, debug=False, instrumentation_mode="")
        parsed, signature, constants, attributes = self.kernel._pack_args(backend, options, bound, specialization, options)
        source = GluonASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=TARGET, options=parsed.__dict__)


class Recorder:
    """Stands for a kernel."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append(Launch(self.kernel, grid, args, options))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """What would have been launched meanwhile, without the tile lists."""
    launches: list[Launch] = []
    plans.forget()
    real = hopper_launch._kernels()
    kernels = real._replace(**{name: Recorder(getattr(real, name), launches) for name in ("mm", "dh", "wgrad")})
    with (
        patch.object(hopper_launch, "_kernels", lambda: kernels),
        patch.object(hopper_launch, "_processors", lambda device: 132),
        patch.object(hopper_tiles, "fill", Recorder(hopper_tiles.fill, [])),
    ):
        yield launches
    plans.forget()


def needs(binary: Any) -> Needs:
    """Of a whole kernel.

    Raises:
        AssertionError: the producer uses registers beyond what it keeps when they are redistributed.
    """
    found = re.search(r"STACK:(\d+)", _shown("-res-usage", binary))
    assert found is not None
    parts = re.split(r"(USETMAXREG[^;]*)", _shown("-sass", binary))
    for kept, instructions in zip(parts[1::2], parts[2::2], strict=True):
        if "ATOMG" in instructions:  # it claims the tiles
            assert _registers(instructions) <= int(kept.split()[-1], 16)
    code = max(int(address, 16) for address in re.findall(r"/\*([0-9a-f]{4,})\*/", "".join(parts)))
    return Needs(max(map(_registers, parts)), int(found[1]), binary.metadata.shared, code)


def _registers(instructions: str) -> int:
    return max((1 + int(r) for r in re.findall(r"\bR(\d+)\b", instructions)), default=0)


def _shown(what: str, binary: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout
