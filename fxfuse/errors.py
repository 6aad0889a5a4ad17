"""Every exception and warning class of fxfuse.

The first line of each message stands alone: what, where (fusion, the user's file and line), why, what to do.
"""

from __future__ import annotations

import warnings

__all__ = [
    "CacheError",
    "FusionCountError",
    "FxfuseError",
    "FxfuseWarning",
    "LoweringError",
    "OptionError",
    "PatternError",
    "RecipeError",
    "warn_once",
]


class FxfuseError(RuntimeError):
    """Base of every error that fxfuse raises on purpose."""


class PatternError(FxfuseError):
    """A fusion cannot be registered: it does not trace, its rewrite is wrong, its name is taken."""


class OptionError(FxfuseError):
    """An unknown option, or a value of the wrong type or range."""


class RecipeError(FxfuseError):
    """A recipe field is invalid, or this machine cannot run the recipe."""


class LoweringError(FxfuseError):
    """A fused region could not be turned into something that runs (raised only under ``strict``)."""


class CacheError(FxfuseError):
    """A cache folder or a saved report cannot be used safely."""


class FusionCountError(FxfuseError):
    """``expect`` or ``strict`` was not met; the message carries the reasons."""


class FxfuseWarning(UserWarning):
    """Something inside fxfuse did not work out and the unfused form runs instead. Once per cause."""


_warned: set[str] = set()


def warn_once(message: str, *, cause: str | None = None) -> None:
    """Emit ``message`` as a FxfuseWarning, the first time this ``cause`` (default: the message) is seen."""
    key = cause or message
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, FxfuseWarning, stacklevel=2)


def forget_warnings() -> None:
    """Let every cause warn again (``fxfuse.reset()``)."""
    _warned.clear()
