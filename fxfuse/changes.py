"""One number that changes whenever compiled models must look for their plan again: fusions came or went, a default changed."""

from __future__ import annotations

import threading

_lock = threading.Lock()


class _Version:
    number = 0


version = _Version()
"""Read ``version.number``."""


def touch() -> None:
    """Say that something has changed."""
    with _lock:
        version.number += 1
