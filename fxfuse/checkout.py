"""Entry points of a checkout that is not installed.

An installed fxfuse is found through its metadata: ``torch.compile(backend="fxfuse")`` needs no import and the built-in
pack is listed. With only PYTHONPATH set there is no metadata, so ``import fxfuse`` offers the same entry points through
the standard extension point of ``importlib.metadata``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from .compat import announce_backend

ENTRY_POINTS = """\
[torch_dynamo_backends]
fxfuse = fxfuse.backend:backend

[fxfuse.patterns]
builtin = fxfuse_patterns
"""


class _Checkout(metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {"entry_points.txt": ENTRY_POINTS, "METADATA": "Name: fxfuse\nVersion: 0\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder(metadata.DistributionFinder):
    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: metadata.DistributionFinder.Context | None = None) -> Iterable[_Checkout]:
        if context is None or context.name in (None, "fxfuse"):
            yield _Checkout()


def register() -> None:
    """Make ``backend="fxfuse"`` work from here on. Twice is harmless."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        try:
            metadata.distribution("fxfuse")
        except metadata.PackageNotFoundError:
            sys.meta_path.append(_Finder())
    announce_backend("fxfuse", metadata.EntryPoint("fxfuse", "fxfuse.backend:backend", "torch_dynamo_backends"))
