"""A driver with an H100 that is not there: kernels are compiled for it, and what would be launched is written down."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

numbers = itertools.count(-9, -1)
"""Of devices: no real one has any of these, and each driver finds nothing compiled for its own."""
OPTIONAL = {(3, 5): (10, 13), (3, 6): (10, 13), (3, 7): (8, 11), (3, 8): (8, 11)}
"""By version of Triton, where in a launch its metadata and hooks are: what a launch without hooks need not hand over."""


class Absent:
    """Stands for Triton's driver."""

    launcher_cls = nvidia.driver.CudaLauncher

    def __init__(self) -> None:
        self.number, self.stream = next(numbers), 0
        self.launched: list[tuple[Any, ...]] = []
        """All arguments of Triton's C function, by launch."""
        handles = itertools.count(1)
        described = lambda *args: ("tensor map", args)  # noqa: E731
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, next(handles), 32, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 232448},
            fill_tma_descriptor=described,
            fill_tma_descriptor_tiled=described,
            build_signature_metadata=bytes,
            launch=self.launch,
        )

    def launch(self, *args: Any) -> None:
        self.launched.append(args)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int | None) -> int:
        return self.stream

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In the place of the driver; nothing is compiled for the host."""
        monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", self)
        for name in ("library_dirs", "compile_module_from_src", "make_kernel_signature", "annotate_arguments"):
            if hasattr(nvidia.driver, name):
                monkeypatch.setattr(nvidia.driver, name, lambda *_, **__: SimpleNamespace(launch=self.launch))
