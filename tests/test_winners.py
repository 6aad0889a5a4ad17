"""Winners on disk: whatever happened to a file or to the folder, what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxfuse
from fxfuse import doctor, folder, winners
from fxfuse.winners import Winner

KEY = {
    "operator": "op",
    "arguments": [["x", ["torch.bfloat16", "cuda", [1024, "~2048"], [2048, 1]]]],
    "candidates": ["inline", "extern"],
}
OTHER = {**KEY, "operator": "another"}
WINNER = Winner("extern", {"inline": 0.25, "extern": 0.125})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not there yet."""
    with fxfuse.config.patch(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"


def path_of(key: winners.Key) -> Path:
    return folder.path() / winners._name(winners._text(key))


def kept(key: winners.Key = KEY, winner: Winner = WINNER) -> Path:
    """The file of a winner that only the disk remembers."""
    winners.keep(key, winner)
    winners.forget()
    return path_of(key)


# ------------------------------------------------------------------------------------------------ what is kept is found


def test_a_winner_outlives_the_memory(cache: Path) -> None:
    assert winners.find(KEY) is None
    kept()
    assert winners.find(KEY) == WINNER and winners.find(OTHER) is None
    assert winners.count() == 1
    path_of(KEY).unlink()
    assert winners.find(KEY) == WINNER  # from memory
    fxfuse.reset()
    assert winners.find(KEY) is None


def test_reset_forgets_the_memory_and_not_the_disk() -> None:
    winners.keep(KEY, WINNER)
    fxfuse.reset()
    assert not winners._memory and winners.find(KEY) == WINNER


def test_folder_and_file_are_ours_alone_and_can_be_read_by_a_person(cache: Path) -> None:
    file = kept()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and stat.S_IMODE(file.stat().st_mode) == 0o600
    data = json.loads(file.read_text())
    assert data["schema"] == winners.SCHEMA
    assert data["payload"] == {"key": KEY, "winner": "extern", "milliseconds": {"inline": 0.25, "extern": 0.125}}
    assert [f.name for f in cache.iterdir()] == [file.name]


def test_a_later_winner_replaces_an_earlier_one() -> None:
    kept()
    kept(winner=Winner("inline", {"inline": 0.1}))
    assert winners.find(KEY) == Winner("inline", {"inline": 0.1}) and winners.count() == 1


def test_times_that_are_no_numbers_stay_in_memory() -> None:
    winners.keep(KEY, Winner("inline", {"inline": float("nan")}))
    assert winners.find(KEY) is not None and not path_of(KEY).exists()


json_data = st.recursive(
    st.integers() | st.text() | st.booleans() | st.none(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)
times = st.dictionaries(st.text(), st.floats(min_value=0, allow_infinity=False), min_size=1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), json_data), times, st.data())
def test_round_trip(key: dict[str, Any], milliseconds: dict[str, float], data: st.DataObject) -> None:
    winner = Winner(data.draw(st.sampled_from(sorted(milliseconds))), milliseconds)
    kept(key, winner)
    assert winners.find(key) == winner


# ------------------------------------------------------------------------------------------------ damaged files


def signed(**changes: Any) -> bytes:
    """A file whose checksum is right."""
    return winners._file({"key": KEY, "winner": WINNER.name, "milliseconds": WINNER.milliseconds, **changes})


def is_measured_again(file: Path) -> None:
    """Nothing is found, nothing is said, and what is kept next is found."""
    winners.forget()
    assert winners.find(KEY) is None
    kept()
    assert winners.find(KEY) == WINNER


@pytest.mark.parametrize("length", range(0, len(signed()), 16))
def test_a_truncated_file_is_ignored(length: int) -> None:
    file = kept()
    file.write_bytes(file.read_bytes()[:length])
    is_measured_again(file)


@pytest.mark.parametrize("bit", [0, 2, 5, 7])
def test_no_byte_can_be_flipped(bit: int) -> None:
    data = kept().read_bytes()
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1 << bit
        assert winners._parsed(bytes(changed), winners._text(KEY)) is None, i
    assert winners._parsed(data, winners._text(KEY)) == WINNER


DAMAGE = {
    "appended": lambda d: d + b"\n",
    "spaced": lambda d: json.dumps(json.loads(d)).encode(),
    "another encoding": lambda d: d.decode().encode("utf-16"),
    "not text": lambda d: bytes(range(256)) * 4,
    "zeros": lambda d: bytes(len(d)),
    "older schema": lambda d: d.replace(b'"schema": 1', b'"schema": 0'),
    "true for a schema": lambda d: d.replace(b'"schema": 1', b'"schema": true'),
    "no checksum": lambda d: winners._text({"schema": 1, "payload": json.loads(d)["payload"]}).encode(),
    "checksum of another": lambda d: d.replace(
        json.loads(d)["checksum"].encode(), json.loads(winners._file({}))["checksum"].encode()
    ),
    "a list": lambda d: b"[]",
    "a number": lambda d: b"1",
    "null": lambda d: b"null",
    "empty payload": lambda d: winners._file({}),
    "payload of a list": lambda d: winners._file([]),
    "payload of text": lambda d: winners._file("payload"),
    "deep": lambda d: b"[" * 60000,
    "deep payload": lambda d: b'{"payload":' + b"[" * 30000 + b"]" * 30000 + b"}",
    "long": lambda d: d + b" " * winners.MAX_BYTES,
    "another key": lambda d: signed(key=OTHER),
    "key of another type": lambda d: signed(key=[]),
    "a field more": lambda d: signed(code="import os"),
    "winner is a number": lambda d: signed(winner=1),
    "winner is a list": lambda d: signed(winner=["extern"]),
    "winner has no time": lambda d: signed(winner="triton"),
    "times are text": lambda d: signed(milliseconds="extern"),
    "times are a list": lambda d: signed(milliseconds=["extern"]),
    "a time is text": lambda d: signed(milliseconds={"inline": "0.1", "extern": 0.1}),
    "a time is an integer": lambda d: signed(milliseconds={"inline": 1, "extern": 0.1}),
    "a time is negative": lambda d: signed(milliseconds={"inline": -1.0, "extern": 0.1}),
    "a time is infinite": lambda d: signed(milliseconds={"inline": 1.5, "extern": 0.1}).replace(b"1.5", b"1e999"),
    "a time is NaN": lambda d: signed(milliseconds={"inline": 1.5, "extern": 0.1}).replace(b"1.5", b"NaN"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_foreign_file_is_ignored(how: str) -> None:
    file = kept()
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    is_measured_again(file)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | json_data.map(lambda d: json.dumps(d).encode()) | json_data.map(winners._file))
def test_whatever_lies_there_is_ignored(data: bytes) -> None:
    assert winners._parsed(data, winners._text(KEY)) is None


def linked(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def link_to_nothing(file: Path) -> None:
    file.unlink()
    file.symlink_to("/nowhere/at/all")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("put", [linked, link_to_nothing, pipe])
def test_what_is_no_regular_file_is_ignored_and_replaced(put: Callable[[Path], None]) -> None:
    file = kept()
    put(file)
    is_measured_again(file)
    assert stat.S_ISREG(file.lstat().st_mode)


def test_a_folder_in_the_place_of_a_file_is_let_be() -> None:
    file = kept()
    file.unlink()
    (file / "inside").mkdir(parents=True)
    assert winners.find(KEY) is None
    with pytest.warns(fxfuse.FxfuseWarning, match="not kept on disk: Is a directory; they are measured again"):
        winners.keep(KEY, WINNER)
    assert winners.find(KEY) == WINNER and (file / "inside").is_dir()


# ------------------------------------------------------------------------------------------------ folders that do not serve


def refused(match: str) -> None:
    """One warning in all, memory works, nothing is read."""
    with pytest.warns(fxfuse.FxfuseWarning, match=match):
        assert winners.find(KEY) is None
    winners.keep(KEY, WINNER)
    winners.keep(OTHER, WINNER)
    assert winners.find(KEY) == WINNER
    winners.forget()
    assert winners.find(KEY) is None


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(cache: Path, mode: int) -> None:
    kept()
    cache.chmod(mode)
    refused("others may write to it: it is not used; FXFUSE_CACHE_DIR names another")
    assert len(list(cache.iterdir())) == 1


def test_the_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    refused("belongs to another user")


def test_a_link_to_a_folder_is_not_used(cache: Path, tmp_path: Path) -> None:
    kept()
    cache.rename(tmp_path / "elsewhere")
    cache.symlink_to(tmp_path / "elsewhere")
    refused("is not a folder")


def test_a_file_is_no_folder(cache: Path) -> None:
    cache.write_text("mine")
    refused("is not a folder")
    assert cache.read_text() == "mine"


def test_nobody_knows_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with fxfuse.config.patch(cache_dir=None):
        refused("Could not determine home directory")


def disk_says(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_full_disk_warns_once_and_leaves_nothing_half(cache: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk_says(monkeypatch, number)
    with pytest.warns(fxfuse.FxfuseWarning, match=f"not kept on disk: {os.strerror(number)}") as caught:
        winners.keep(KEY, WINNER)
        winners.keep(OTHER, WINNER)
    assert len(caught) == 1
    assert winners.find(KEY) == winners.find(OTHER) == WINNER
    assert list(cache.iterdir()) == []


def test_each_cause_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(fxfuse.FxfuseWarning) as caught:
        for number in (errno.ENOSPC, errno.EIO, errno.ENOSPC, errno.EIO):
            disk_says(monkeypatch, number)
            winners.keep(KEY, WINNER)
    assert len(caught) == 2


def test_a_folder_that_cannot_be_made_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with fxfuse.config.patch(cache_dir=str(tmp_path / "file" / "cache")):
        refused("is not a folder")
    with fxfuse.config.patch(cache_dir="/proc/fxfuse/cache"):
        assert winners.find(KEY) is None
        with pytest.warns(fxfuse.FxfuseWarning, match="not kept on disk") as caught:
            winners.keep(KEY, WINNER)
            winners.keep(OTHER, WINNER)
        assert len(caught) == 1 and winners.find(KEY) == WINNER


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission_to_write(cache: Path) -> None:
    kept()
    cache.chmod(0o500)
    assert winners.find(KEY) == WINNER
    with pytest.warns(fxfuse.FxfuseWarning, match="Permission denied"):
        winners.keep(OTHER, WINNER)
    assert "nothing can be added" in next(doctor._cache()).detail
    cache.chmod(0o700)


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with fxfuse.config.patch(cache_dir=None):
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert folder.path() == Path("/x/fxfuse")
        monkeypatch.setenv("HOME", "/home/me")
        for useless in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", useless)
            assert folder.path() == Path("/home/me/.cache/fxfuse")
    with fxfuse.config.patch(cache_dir="~/here"):
        assert folder.path() == Path("/home/me/here")


def test_the_environment_names_the_folder() -> None:
    code = "from fxfuse import folder; print(folder.path())"
    environment = {**os.environ, "FXFUSE_CACHE_DIR": "/named/here"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "/named/here"


def test_doctor_counts_winners(cache: Path) -> None:
    kept()
    kept(OTHER)
    (cache / "note.txt").write_text("not one of them")
    found = next(doctor._cache())
    assert (found.state, found.detail) == ("ok", f"{cache}, winners of measurements: 2")
    cache.chmod(0o777)
    assert next(doctor._cache()).detail == f"{cache} others may write to it: it is not used"


# ------------------------------------------------------------------------------------------------ many entries, many writers


def test_the_oldest_entries_go(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "MAX_ENTRIES", 8)
    keys = [{"number": n} for n in range(20)]
    for n, key in enumerate(keys):
        os.utime(kept(key), (n, n))
        assert winners.count() <= 8
    assert [winners.find(key) is not None for key in keys] == [False] * 12 + [True] * 8


def test_what_is_not_ours_stays_and_what_was_left_behind_goes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "MAX_ENTRIES", 1)
    old, fresh = (f"{path_of(key).name}.{'0' * 16}.tmp" for key in (KEY, OTHER))
    kept()
    for name in ("note.json", f".{old}", f".{fresh}", "a" * 64):
        (cache / name).write_text("")
        if name != f".{fresh}":
            os.utime(cache / name, (1, 1))
    kept({"number": 1})
    os.utime(path_of({"number": 1}), (time.time() + 5,) * 2)
    kept({"number": 1})
    assert {f.name for f in cache.iterdir()} == {"note.json", f".{fresh}", "a" * 64, path_of({"number": 1}).name}


def test_a_file_that_another_process_removed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "MAX_ENTRIES", 1)
    listed = folder.listed
    monkeypatch.setattr(folder, "listed", lambda *a: [(0.0, f"{'0' * 64}.json"), *listed(*a)])
    kept()
    assert winners.find(KEY) == WINNER


WRITER = """
import sys
from fxfuse import winners
for n in range(150):
    name = sys.argv[1]
    winners.keep({"number": n % 3}, winners.Winner(name, {name: float(n), "padding " * 200: 0.5}))
"""


def test_two_processes_write_while_a_third_reads(cache: Path) -> None:
    environment = {**os.environ, "FXFUSE_CACHE_DIR": str(cache)}
    writers = [subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, name], env=environment) for name in ("a", "bb")]
    keys = [{"number": n} for n in range(3)]
    seen, reads = set(), 0
    while any(w.poll() is None for w in writers):
        for key in keys:
            winners.forget()
            found = winners.find(key)
            assert found is not None or not path_of(key).exists() or winners.find(key) is not None  # it came just now
            if found is not None:
                seen.add(found.name)
                reads += 1
    assert [w.returncode for w in writers] == [0, 0]
    assert reads and seen <= {"a", "bb"} and winners.count() == 3
    assert all(f.name.endswith(".json") for f in cache.iterdir())


def test_nothing_here_runs_code() -> None:
    for module in (winners, folder):
        text = Path(module.__file__).read_text()
        assert not [word for word in ("pickle", "marshal", "eval(", "exec(", "import_module", "torch.load") if word in text]


def test_finding_nothing_is_silent() -> None:
    with warnings.catch_warnings(record=True) as caught:
        assert winners.find(KEY) is None
    assert not caught
