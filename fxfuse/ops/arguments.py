"""Checks of an operator's arguments: each error names the operator, the argument, what it is and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Check(NamedTuple):
    """The checks of one call of ``operator``. An absent argument (None) passes them all."""

    operator: str

    def _refuse(self, name: str, is_: Any, expected: Any) -> ValueError:
        return ValueError(f"{self.operator}: {name} is {is_}; expected {expected}")

    def shape(self, name: str, t: Tensor | None, expected: Sequence[Any]) -> None:
        """Rank and sizes; None stands for any size."""
        if t is None:
            return
        fits = t.dim() == len(expected) and all(e is None or s == e for s, e in zip(t.shape, expected, strict=True))
        if not fits:
            sizes = ["any" if e is None else str(e) for e in expected]
            raise self._refuse(name, tuple(t.shape), f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})")

    def dtype(self, name: str, t: Tensor, expected: Sequence[torch.dtype]) -> None:
        """One of some dtypes."""
        if t.dtype not in expected:
            raise self._refuse(name, t.dtype, " or ".join(str(d) for d in expected))

    def floating(self, name: str, t: Tensor | None) -> None:
        """Any real floating dtype."""
        if t is not None and not t.dtype.is_floating_point:
            raise self._refuse(name, t.dtype, "a floating-point tensor")

    def device(self, like: str, t: Tensor, **others: Tensor | None) -> None:
        """The device of ``t``."""
        for name, other in others.items():
            if other is not None and other.device != t.device:
                raise self._refuse(name, f"on {other.device}", f"{t.device}, where {like} is")

    def same(self, like: str, t: Tensor, **others: Tensor | None) -> None:
        """The dtype, a real floating one, and the device of ``t``."""
        self.floating(like, t)
        self.device(like, t, **others)
        for name, other in others.items():
            if other is not None and other.dtype != t.dtype:
                raise self._refuse(name, other.dtype, f"{t.dtype}, the dtype of {like}")

    def ids(self, name: str, t: Tensor, count: int) -> None:
        """Under ``fxfuse.config.debug``: ids in [0, count), or ``count`` or more for nobody. Reads values on the host."""
        if _reads_values() and bool((t < 0).any()):
            raise self._refuse(name, f"{int(t.min())} at its least", f"ids in [0, {count})")

    def ends(self, name: str, t: Tensor, rows: Any) -> None:
        """Under ``fxfuse.config.debug``: ascending, within [0, rows]. Reads values on the host."""
        if not _reads_values() or t.numel() == 0:
            return
        values = t.tolist()
        if sorted(values) != values or values[0] < 0 or values[-1] > rows:
            raise self._refuse(name, values, f"ascending row numbers in [0, {rows}]")


def _reads_values() -> bool:
    from .. import config

    return config.debug and not torch.compiler.is_compiling()
