"""Fault injection: stages at which a test may make fxfuse raise (``fxfuse.testing.inject``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

STAGES = ("match", "lower", "compile", "launch", "backward")

_planted: dict[str, BaseException] = {}


def point(stage: str) -> None:
    """Raise what is planted at this stage, if anything is."""
    if _planted and stage in _planted:
        raise _planted[stage]


@contextlib.contextmanager
def inject(stage: str, error: BaseException | type[BaseException]) -> Iterator[None]:
    """Make fxfuse raise ``error`` whenever it reaches ``stage``."""
    if stage not in STAGES:
        raise ValueError(f"inject({stage!r}): the stages are {', '.join(STAGES)}")
    _planted[stage] = error if isinstance(error, BaseException) else error(f"planted at {stage}")
    try:
        yield
    finally:
        del _planted[stage]
