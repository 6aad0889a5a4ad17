"""Names of fusions: ``family`` or ``family[form]``. The family's name stands for all of its forms."""

from __future__ import annotations

from collections.abc import Collection


def family(name: str) -> str:
    """The part of a fusion's name before the bracket."""
    return name.partition("[")[0]


def is_called(name: str, asked: str) -> bool:
    """Whether ``asked`` is a fusion's name or its family's."""
    return asked in (name, family(name))


def is_among(name: str, asked: Collection[str]) -> bool:
    """Whether a fusion's name or its family's is among ``asked``."""
    return name in asked or family(name) in asked
