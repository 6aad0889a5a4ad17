"""A launch that was prepared hands over what Triton's own would, whatever came before it; checked without a GPU."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from absent import OPTIONAL, Absent
from contract import BF16, F16, F32, LAYOUTS, Case
from test_launches import launches
from torch import Tensor

from fxfuse.kernels import hopper_launch, path, plans, prepared

VERSION = prepared.VERSION
pytestmark = pytest.mark.skipif(VERSION not in OPTIONAL, reason=f"Triton {triton.__version__} launches in its own way")
PORTABLE = path("portable")
REFUSED = hopper_launch.available((9, 0), triton.__version__)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Absent:
    found = Absent()
    found.install(monkeypatch)
    return found


def handed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a launch, addresses for tensors, without what is for hooks."""
    first, last = OPTIONAL[VERSION]
    flat = [*args[:first], *args[last:-1], *(args[-1] if isinstance(args[-1], (list, tuple)) else args[-1:])]
    return tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in flat)


@pytest.fixture
def compared(absent: Absent, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Every launch is done by Triton too, and must hand over the same; for each, whether it was a prepared one."""
    found: list[bool] = []
    launch, own = prepared.Launch.__call__, prepared.Launch._ordinary

    def both(self: prepared.Launch, *tensors: Tensor | int | None) -> None:
        ordinary: list[None] = []
        with monkeypatch.context() as patch:
            patch.setattr(prepared.Launch, "_ordinary", lambda s, t: (ordinary.append(None), own(s, t))[1])
            launch(self, *tensors)
        mine = absent.launched[-1]
        own(self, tensors)
        assert handed(mine) == handed(absent.launched[-1])
        found.append(not ordinary)

    monkeypatch.setattr(prepared.Launch, "__call__", both)
    yield found
    assert found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_function_hands_over_what_triton_would(layout: str, compared: list[bool]) -> None:
    case = Case(dtype=BF16, layout=layout, hidden=64, inner=32, limit=7, alpha=1.702)
    for launch in launches(case).values():
        launch()
        compared.clear()
        launch()
        assert all(compared)


@pytest.mark.skipif(REFUSED is not None, reason=str(REFUSED))
@pytest.mark.parametrize("layout", ["concat", "separate", "interleaved"])
def test_the_hopper_path_hands_over_what_triton_would(
    layout: str, absent: Absent, compared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_launch, "_processors", lambda _: 132)
    case = Case(dtype=BF16, layout=layout, hidden=64, inner=32, biases=False)
    (x, gather), w, down, ends = case.tokens(64), case.weight(case.wide, 64), case.weight(64, 32), case.offsets()
    w_up = case.weight(32, 64) if layout == "separate" else None
    h, rows, dy, p = case.sorted_rows(case.wide), case.sorted_rows(32), case.sorted_rows(64), torch.rand(case.rows)
    u = rows if layout == "separate" else None
    calls = (
        lambda: hopper_launch.up(x, gather, w, w_up, None, ends, *case.kind(), True),
        lambda: hopper_launch.matmul(rows, down, ends, transposed=True),
        lambda: hopper_launch.dh(dy, None, down, p, h, u, ends, *case.kind()),
        lambda: hopper_launch.wgrad(dy, rows, None, None, ends),
    )
    for call in calls:
        call()
        compared.clear()
        call()
        assert all(compared)
        maps = [a for a in handed(absent.launched[-1]) if isinstance(a, tuple) and a[:1] == ("tensor map",)]
        assert len(maps) >= 3


def test_what_triton_specialises_on_gives_another_launch(compared: list[bool]) -> None:
    """Shapes that are one, multiples of 16 or neither, strides, misaligned addresses, dtypes, absent tensors: in any order."""
    ends = torch.zeros(3, dtype=torch.int32)

    def rows(columns: int, pitch: int, shift: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(5 * pitch + 8, dtype=dtype)[shift:][: 4 * pitch].view(4, pitch)[:, :columns]

    kinds = list(itertools.product((1, 16, 24), (32, 33), (1, 0, 8), (BF16, F32), (False, True)))
    for columns, pitch, shift, dtype, gathers in [*kinds, *reversed(kinds)]:  # misaligned first, and known already
        d = rows(columns, pitch, shift, dtype)
        gather = torch.zeros(4, dtype=torch.int64) if gathers else None
        compared.clear()
        for _ in range(2):
            PORTABLE.bias_gradient(d, ends, None, gather)
        assert compared[1] == (d.data_ptr() % 16 == 0)


def test_sizes_beyond_32_bits(compared: list[bool]) -> None:
    ends = torch.zeros(3, dtype=torch.int32)
    for pitch in (2**31 - 16, 2**31, 2**31 - 16):
        PORTABLE.bias_gradient(torch.zeros(16, dtype=BF16).as_strided((1, 16), (pitch, 1)), ends)


def test_precision_of_fp32_products_is_looked_up_at_every_call(absent: Absent) -> None:
    a, w, ends = torch.zeros(4, 16), torch.zeros(3, 16, 16), torch.zeros(3, dtype=torch.int32)
    before, functions = torch.get_float32_matmul_precision(), []
    try:
        for allowed in ("highest", "high", "highest", "high"):
            torch.set_float32_matmul_precision(allowed)
            PORTABLE.matmul(a, w, ends, transposed=True)
            functions.append(absent.launched[-1][4])
    finally:
        torch.set_float32_matmul_precision(before)
    assert functions == [functions[0], functions[1]] * 2 and functions[0] != functions[1]


def test_halves_of_a_tensor_are_handed_over_by_their_addresses(absent: Absent) -> None:
    case = Case(dtype=F16, layout="concat", hidden=64, inner=32)
    x, gather = case.tokens(64)
    w = case.weight(64, 64)
    for _ in range(2):
        _, h, _ = PORTABLE.up(x, gather, w, None, None, case.offsets(), *case.kind(), True)
    pointers = [a for a in handed(absent.launched[-1]) if isinstance(a, int)]
    assert {w.data_ptr(), w[:, 32:].data_ptr(), h.data_ptr(), h[:, 32:].data_ptr()} <= set(pointers)


@pytest.fixture
def twice(absent: Absent) -> Callable[[], tuple[Any, ...]]:
    """A launch that was prepared already."""
    d, ends = torch.zeros(4, 16), torch.zeros(3, dtype=torch.int32)

    def call() -> tuple[Any, ...]:
        PORTABLE.bias_gradient(d, ends)
        return absent.launched[-1]

    call()
    return call


def own_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Filled with the launches that are Triton's own from now on."""
    found: list[Any] = []
    own = prepared.Launch._ordinary
    monkeypatch.setattr(prepared.Launch, "_ordinary", lambda self, tensors: (found.append(self), own(self, tensors))[1])
    return found


def test_the_current_stream_is_asked_for_at_every_launch(absent: Absent, twice: Callable[[], tuple[Any, ...]]) -> None:
    for absent.stream in (7, 0, 5):
        assert twice()[3] == absent.stream


def test_launch_hooks_see_every_launch(twice: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own, hook = own_launches(monkeypatch), triton.knobs.runtime.launch_enter_hook
    twice()
    assert not own
    hook.add(watch := lambda metadata: None)
    try:
        twice()
    finally:
        hook.remove(watch)
    assert len(own) == 1


class Slow(Tensor):
    """Whoever asks for its address lets other threads go on."""

    def data_ptr(self) -> int:
        time.sleep(1e-4)
        return super().data_ptr()


def test_launches_of_several_threads(absent: Absent, twice: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each hands over its own tensors."""
    own = own_launches(monkeypatch)
    pairs = [(torch.zeros(4, 16).as_subclass(Slow), torch.zeros(3, dtype=torch.int32).as_subclass(Slow)) for _ in range(4)]
    threads = [threading.Thread(target=lambda p=p: [PORTABLE.bias_gradient(*p) for _ in range(5)]) for p in pairs]
    absent.launched.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(absent.launched) == 20 and not own
    addresses = [{t.data_ptr() for t in pair} for pair in pairs]
    for launched in absent.launched:
        pointers = {a for a in handed(launched) if isinstance(a, int)}
        assert any(mine <= pointers for mine in addresses)


def test_another_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a device that is not the current one are used there."""
    second, current, found = torch.device("cuda", 1), [0], []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    launch = prepared.Launch(None, (1,), second, ())
    launch.direct = lambda tensors, device: bool(found.append(current[0])) or True
    for current[0] in (0, 1):
        before = current[0]
        launch()
        assert found.pop() == 1 and current[0] == before


def test_an_unknown_triton_launches_for_itself(twice: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "VERSION", (4, 0))
    plans.forget()
    own = own_launches(monkeypatch)
    twice()
    twice()
    assert len(own) == 2


def test_plans_are_bounded_and_can_be_dropped(twice: Callable[[], Any]) -> None:
    ends = torch.zeros(3, dtype=torch.int32)
    (kept,) = [c for c in plans._caches if c.__wrapped__.__qualname__ == "_bias_gradient"]
    for rows in range(plans.KEPT + 10):
        PORTABLE.bias_gradient(torch.zeros(rows, 0), ends)
    assert kept.cache_info().currsize == plans.KEPT
    plans.forget()
    assert kept.cache_info().currsize == 0
