"""Winners of measurements, remembered as data: in memory, and as JSON files in fxfuse's folder, one for each key.

A file only ever chooses among candidates that may run anyway. Whatever is wrong with one, it is as if it were not there; whatever
is wrong with the folder, memory alone remembers, and one warning says so.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from . import folder
from .errors import CacheError, warn_once

SCHEMA = 1
MAX_ENTRIES = 4096
"""More than these, and the oldest are removed."""
MAX_BYTES = 1 << 16
"""A longer file is none of ours."""
_NAMES = re.compile(r"[0-9a-f]{64}\.json")

Key = Mapping[str, Any]
"""Everything that a measurement depends on, as JSON has it: dicts, lists, strings, numbers."""


@dataclasses.dataclass(frozen=True)
class Winner:
    """The candidate that won, and the milliseconds of each that was timed, the winner's among them."""

    name: str
    milliseconds: Mapping[str, float]


_memory: dict[str, Winner] = {}
"""By the text of the key."""


def find(key: Key) -> Winner | None:
    """What was kept for exactly this key, by this process or another one."""
    text = _text(key)
    if text not in _memory:
        found = _on_disk(text)
        if found is None:
            return None
        _memory[text] = found
    return _memory[text]


def keep(key: Key, winner: Winner) -> None:
    """Remember a winner, in memory and where possible on disk."""
    text = _text(key)
    _memory[text] = winner
    try:
        data = _file({"key": key, "winner": winner.name, "milliseconds": dict(winner.milliseconds)})
        if len(data) <= MAX_BYTES:
            with folder.opened(create=True) as at:
                folder.write(at, _name(text), data)
                folder.prune(at, _NAMES, MAX_ENTRIES)
    except (CacheError, ValueError):  # the folder has warned; a time that is not a number is not kept
        pass
    except OSError as error:
        why = error.strerror or type(error).__name__
        warn_once(f"winners of measurements are not kept on disk: {why}; they are measured again", cause=f"cache:{error.errno}")


def forget() -> None:
    """Forget what is in memory; files stay."""
    _memory.clear()


def count() -> int:
    """How many winners are kept on disk.

    Raises:
        CacheError, OSError: as ``folder.opened``.
    """
    with folder.opened() as at:
        return len(folder.listed(at, _NAMES))


# ------------------------------------------------------------------------------------------------ one file


def _text(data: Any) -> str:
    """There is one spelling of the same data."""
    return json.dumps(data, sort_keys=True, allow_nan=False, indent=1)


def _name(key: str) -> str:
    return f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _file(payload: Any) -> bytes:
    checksum = hashlib.sha256(_text(payload).encode()).hexdigest()
    return _text({"schema": SCHEMA, "checksum": checksum, "payload": payload}).encode()


def _on_disk(key: str) -> Winner | None:
    try:
        with folder.opened() as at:
            data = folder.read(at, _name(key), MAX_BYTES + 1)
    except (CacheError, OSError):  # most often there is none yet; what else is wrong shows when one is written
        return None
    return None if data is None else _parsed(data, key)


def _parsed(data: bytes, key: str) -> Winner | None:
    """The winner in a file, or None where the file is not, byte for byte, what would be written for this key."""
    try:
        payload = json.loads(data)["payload"]
        if data != _file(payload) or set(payload) != {"key", "winner", "milliseconds"} or _text(payload["key"]) != key:
            return None
        name, times = payload["winner"], payload["milliseconds"]
        well_formed = name in times and all(type(t) is float and t >= 0 for t in times.values())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return Winner(name, times) if well_formed else None
