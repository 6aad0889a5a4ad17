"""The registered fusions, in order; packs; what is enabled."""

from __future__ import annotations

import contextlib
import contextvars
import difflib
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from .changes import touch
from .errors import PatternError, warn_once
from .naming import family, is_among, is_called

if TYPE_CHECKING:
    from .fusion import Fusion
    from .window import Windows

ENTRY_POINT_GROUP = "fxfuse.patterns"
BUILTIN_PACK = "builtin"
SIDES = ("joint", "backward", "forward")
"""The order in which fusions are tried."""

_lock = threading.RLock()
_fusions: list[Fusion | Windows] = []
disabled: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("fxfuse_disabled", default=frozenset())
"""Names that ``disable`` has switched off in this thread and task."""
_packs: dict[str, str] = {}
"""Pack name -> "" when loaded, else why it failed."""
_loading: contextvars.ContextVar[str] = contextvars.ContextVar("fxfuse_loading", default="")


def add(fusion: Fusion | Windows, prepend: bool) -> None:
    """Register a fusion.

    Raises:
        PatternError: another fusion has this name.
    """
    with _lock:
        existing = find(fusion.name)
        if existing is not None and _redefined_in_notebook(existing, fusion):
            remove(existing)
        elif existing is not None:
            raise PatternError(
                f"fusion {fusion.name!r} at {fusion.source} is already registered at {existing.source}; "
                "give it another name= or call .unregister() on the first"
            )
        _fusions.insert(0 if prepend else len(_fusions), fusion)
        touch()


def _redefined_in_notebook(existing: Fusion | Windows, fusion: Fusion | Windows) -> bool:
    """A notebook cell that is run again defines the same function again."""
    modules = {existing.pattern.__module__, fusion.pattern.__module__}
    return modules == {"__main__"} and ("ipykernel" in sys.modules or hasattr(sys, "ps1"))


def remove(fusion: Fusion | Windows) -> None:
    """Unregister a fusion; removing it again is harmless."""
    with _lock:
        if fusion in _fusions:
            _fusions.remove(fusion)
            touch()


def find(name: str) -> Fusion | Windows | None:
    """The fusion with this name."""
    return next((f for f in _fusions if f.name == name), None)


def list_fusions() -> list[Fusion | Windows]:
    """Every registered fusion in the order in which they are tried: joint, backward, forward."""
    ensure_packs()
    with _lock:
        return [f for side in SIDES for f in _fusions if f.side == side]


def active(only: Sequence[str] | None = None, without: Sequence[str] = ()) -> tuple[Fusion | Windows, ...]:
    """The fusions that may fire now."""
    off = disabled.get() | set(without)
    return tuple(f for f in list_fusions() if f.ready and not is_among(f.name, off) and (only is None or is_among(f.name, only)))


def is_known(name: str) -> bool:
    """Whether a fusion or a family has this name."""
    return any(is_called(f.name, name) for f in list_fusions())


def suggestion(name: str) -> str:
    """`` (did you mean ...?)`` for a misspelled fusion name."""
    names = [f.name for f in list_fusions()]
    close = difflib.get_close_matches(name, [*dict.fromkeys(map(family, names)), *names], n=1)
    return f"; did you mean {close[0]!r}?" if close else "; fxfuse.list_fusions() shows all"


@contextlib.contextmanager
def disable(*names: str) -> Iterator[None]:
    """Compiled calls inside run without these fusions: another plan, not another Dynamo compilation.

    Raises:
        PatternError: no fusion has this name.
    """
    for name in names:
        if not is_known(name):
            raise PatternError(f"disable({name!r}): no such fusion{suggestion(name)}")
    token = disabled.set(disabled.get() | set(names))
    try:
        yield
    finally:
        disabled.reset(token)


# ------------------------------------------------------------------------------------------------ packs


def loading_pack() -> str:
    """The pack whose import is in progress, or the empty string."""
    return _loading.get()


def packs() -> dict[str, str]:
    """Every pack that was asked for: the empty string, or why it failed to load."""
    return dict(_packs)


def load_pack(name: str) -> None:
    """Load a pattern pack by its entry-point name (group ``fxfuse.patterns``). Loading it again is harmless.

    Raises:
        PatternError: there is no such pack, or importing it failed; nothing of it stays registered.
    """
    with _lock:
        if _packs.get(name) == "":
            return
        points = {p.name: p for p in metadata.entry_points(group=ENTRY_POINT_GROUP)}
        if name not in points:
            raise PatternError(f"pack {name!r} is not installed; installed packs: {', '.join(sorted(points)) or 'none'}")
        before, token = list(_fusions), _loading.set(name)
        try:
            import_module(points[name].module)
            _packs[name] = ""
        except Exception as error:
            _fusions[:] = before
            for module in [m for m in sys.modules if m == points[name].module or m.startswith(points[name].module + ".")]:
                del sys.modules[module]  # so that a second attempt registers everything again
            _packs[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            raise PatternError(f"pack {name!r} ({points[name].value}) failed to import: {_packs[name]}") from error
        finally:
            _loading.reset(token)
            touch()


def ensure_packs() -> None:
    """Load the built-in pack and those named by ``FXFUSE_PACKS``, once; a failure is one warning."""
    from . import config

    wanted = [BUILTIN_PACK, *[p.strip() for p in (config.packs or "").split(",") if p.strip()]]
    for name in wanted:
        if name in _packs or name == loading_pack():
            continue
        try:
            load_pack(name)
        except PatternError as error:
            _packs[name] = str(error)
            warn_once(str(error))
