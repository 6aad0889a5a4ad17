"""What fxfuse needs from this machine, and whether it is there: ``python -m fxfuse doctor``."""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata

__all__ = ["Check", "checks"]


TESTED = ((2, 11), (2, 14))
"""The first and the last torch release that the tests run with."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: str
    """``"ok"``, ``"note"`` (works, with less) or ``"blocker"``."""
    detail: str


def checks() -> list[Check]:
    """Everything that was looked at. A look that itself raises is a blocker, and the others still run."""
    found: list[Check] = []
    for look in _LOOKS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, and a failed pack's, which is a line of its own below
                found += look()
        except Exception as error:
            name = look.__name__.strip("_").replace("_", " ")
            found.append(Check(name, "blocker", f"{type(error).__name__}: {error}"))
    return found


def _python() -> Iterator[Check]:
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Check]:
    import torch

    release = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    tested = TESTED[0] <= release <= TESTED[1]
    yield Check("torch", "ok" if tested else "note", torch.__version__ + ("" if tested else ": fxfuse is not tested with it"))


def _triton() -> Iterator[Check]:
    import torch

    try:
        yield Check("triton", "ok", importlib.import_module("triton").__version__)
    except ImportError as error:
        gpu = torch.cuda.is_available()
        yield Check("triton", "blocker" if gpu else "note", f"{error}; {'this GPU needs it' if gpu else 'a CPU does without'}")


def _gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("gpu", "note", "none: regions run as Inductor's CPU code, fused kernels do not run here")
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        yield Check(f"gpu {i}", "ok", f"{torch.cuda.get_device_name(i)}, sm_{major}{minor}, CUDA {torch.version.cuda}")


def _driver() -> Iterator[Check]:
    from . import versions

    found = versions.driver()
    if found is not None:
        yield Check("driver", "ok", found)


def _compiler() -> Iterator[Check]:
    names = filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++"))
    path = next(filter(None, map(shutil.which, names)), None)
    advice = 'no C++ compiler: Inductor cannot compile for the CPU; options={"lower": "eager"} works'
    yield Check("c++ compiler", "ok" if path else "note", path or advice)


def _backend() -> Iterator[Check]:
    import torch

    importlib.import_module("fxfuse")
    present = "fxfuse" in torch.compiler.list_backends()
    missing = "torch.compile does not list 'fxfuse': install the package (pip install .) or import fxfuse first"
    yield Check("backend", "ok" if present else "blocker", "registered with torch.compile" if present else missing)


def _packs() -> Iterator[Check]:
    from . import registry

    registry.ensure_packs()
    loaded = registry.packs()
    for name, error in loaded.items():
        yield Check(f"pack {name}", "note" if error else "ok", error or "loaded")
    for point in metadata.entry_points(group=registry.ENTRY_POINT_GROUP):
        if point.name not in loaded:
            yield Check(f"pack {point.name}", "note", f"installed, loads when named: FXFUSE_PACKS={point.name}")


def _cache() -> Iterator[Check]:
    from . import folder, winners

    path = folder.path()
    if not os.path.lexists(path):
        yield Check("cache", "ok", f"{path} (not there yet)")
        return
    odd = folder.objection(path.lstat())
    if odd:
        yield Check("cache", "note", f"{path} {odd}: it is not used")
    elif not os.access(path, os.W_OK, effective_ids=True):
        yield Check("cache", "note", f"{path}, winners of measurements: {winners.count()}; nothing can be added")
    else:
        yield Check("cache", "ok", f"{path}, winners of measurements: {winners.count()}")


def _private_torch_names() -> Iterator[Check]:
    from . import compat

    for name, present in compat.probe().items():
        yield Check(f"torch api {name}", "ok" if present else "blocker", "present" if present else "missing in this torch")


_LOOKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _torch,
    _triton,
    _gpu,
    _driver,
    _compiler,
    _backend,
    _packs,
    _cache,
    _private_torch_names,
)
