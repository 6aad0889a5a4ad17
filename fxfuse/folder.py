"""The folder on disk that fxfuse keeps data in: ours alone, or not used.

Files are found through a descriptor of the folder that was checked, whatever is renamed meanwhile; links are not followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from . import config
from .errors import CacheError, warn_once

STALE_SECONDS = 3600
"""A temporary file that is older was left by a process that was killed."""
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")


def path() -> Path:
    """``fxfuse.config.cache_dir``, or ``fxfuse`` in the user's folder of caches. It need not be there.

    Raises:
        CacheError: nobody knows where the user's home is.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if config.cache_dir:
            return Path(config.cache_dir).expanduser()
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fxfuse"
    except RuntimeError as error:
        raise _refused(f"no folder to keep anything in: {error}") from error


def objection(info: os.stat_result) -> str | None:
    """Why a folder must not be used, or None."""
    odd = [
        *(["is not a folder"] if not stat.S_ISDIR(info.st_mode) else []),
        *(["belongs to another user"] if info.st_uid != os.geteuid() else []),
        *(["others may write to it"] if info.st_mode & 0o022 else []),
    ]
    return " and ".join(odd) or None


@contextlib.contextmanager
def opened(create: bool = False) -> Iterator[int]:
    """A descriptor of the folder.

    Raises:
        CacheError: it must not be used; a warning has said why.
        OSError: it cannot be used, or it is not there and ``create`` is False.
    """
    at = path()
    if create:
        with contextlib.suppress(FileExistsError):
            at.parent.mkdir(parents=True, exist_ok=True)
            at.mkdir(0o700)
    try:
        descriptor = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        raise _refused(f"the cache {at} is not a folder: it is not used") from None
    try:
        why = objection(os.fstat(descriptor))
        if why is not None:
            raise _refused(f"the cache {at} {why}: it is not used")
        yield descriptor
    finally:
        os.close(descriptor)


def _refused(message: str) -> CacheError:
    warn_once(f"{message}; FXFUSE_CACHE_DIR names another", cause=f"cache:{message}")
    return CacheError(message)


def read(at: int, name: str, limit: int) -> bytes | None:
    """Up to ``limit`` bytes of a regular file, or None where it is something else; a pipe is not waited for."""
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    try:
        return os.read(file, limit) if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)


def write(at: int, name: str, data: bytes) -> None:
    """Readers see the old file or the new one, never a part; of concurrent writers the last one stays."""
    temporary = f".{name}.{secrets.token_hex(8)}.tmp"
    try:
        made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
        with open(made, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(made)
        os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise


def listed(at: int, pattern: re.Pattern[str]) -> list[tuple[float, str]]:
    """Time of change and name of the regular files with such a name, the oldest first."""
    found = []
    with os.scandir(at) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
    return sorted(found)


def prune(at: int, pattern: re.Pattern[str], most: int) -> None:
    """Remove the oldest files with such a name, until ``most`` are left, and what killed processes left."""
    surplus = listed(at, pattern)[:-most]
    left = [file for file in listed(at, _TEMPORARY) if file[0] < time.time() - STALE_SECONDS]
    for _, name in surplus + left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=at)
