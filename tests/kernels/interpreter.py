"""Triton's interpreter, switched on for this process; import this before any kernel.

Only for processes of their own: the switch is global, and a kernel that was once interpreted stays so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_patch_tensor: Any = interpreter._patch_lang_tensor


def _patch(tensor: Any, *scope: Any) -> None:
    """numpy 2.4 no longer converts an array with one element to an index: loops with bounds from memory need that."""
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


interpreter._patch_lang_tensor = _patch


@contextlib.contextmanager
def last_program_first() -> Iterator[None]:
    """Programs run one after the other: what one writes into another's rows shows when they run the other way round."""
    builder = interpreter.interpreter_builder
    place = builder.set_grid_idx

    def mirrored(x: int, y: int, z: int) -> None:
        place(*(n - 1 - i for n, i in zip(builder.grid_dim, (x, y, z), strict=True)))

    builder.set_grid_idx = mirrored
    try:
        yield
    finally:
        del builder.set_grid_idx
