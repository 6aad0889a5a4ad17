"""The Hopper kernels' source and their launcher on a model of the machine: addresses, tails, phases, and what is computed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import contract
import gluon_model

from fxfuse.kernels import hopper_launch as launch
from fxfuse.kernels import plans, reference

SOURCES = Path(launch.__file__).parent
BF16 = torch.bfloat16
ROWS: dict[str, list[int]] = {
    "balanced": [70, 70, 70, 70],
    "skewed": [1, 200, 0, 64, 129],
    "tail": [3, 0, 65, 0],
    "one": [0, 0, 257],
    "none": [0, 0, 0],
}
"""Rows of each expert; "tail" and "none" leave rows that belong to nobody."""


def tile_list(ends: list[int], rows: int) -> list[list[int]]:
    """What ``hopper_tiles.fill`` writes: the head, then a record a tile."""
    bounds = [0, *ends, rows]
    counts = [max(end - start + 127, 0) // 128 for start, end in itertools.pairwise(bounds)]
    found, first = [], 0
    for group, count in enumerate(counts):
        found += [[group, first, count, bounds[group], bounds[group + 1], -1, -1, -1]] * count
        first += count
    return [[first, 0, -1, -1, -1, -1, -1, -1], *found]


class Fill:
    def __getitem__(self, grid: tuple[int]) -> Any:
        def fill(ends: Tensor, table: Tensor, rows: int, experts: int, groups: int, height: int, chunk: int) -> None:
            assert grid == (experts + 1,) and groups > experts and height == 128
            records = torch.tensor(tile_list(ends.tolist(), rows), dtype=torch.int32)
            table[: len(records)] = records

        return fill


@pytest.fixture(scope="module")
def kernels() -> launch.Kernels:
    return gluon_model.kernels(SOURCES)


@pytest.fixture(params=[0, 1])
def machine(
    request: pytest.FixtureRequest, kernels: launch.Kernels, monkeypatch: pytest.MonkeyPatch
) -> Iterator[gluon_model.Machine]:
    pytest.importorskip("triton")
    with launching(kernels, request.param, monkeypatch) as machine:
        yield machine


@contextmanager
def launching(kernels: launch.Kernels, seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[gluon_model.Machine]:
    """The launcher's launches go to a machine of three processors; what it allocates is poisoned."""
    from fxfuse.kernels import hopper_tiles, prepared

    with gluon_model.running(seed) as machine:

        def poisoned(shape: Any, like: plans.Operand, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
            dtype = dtype or like.dtype
            return lambda: torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)

        def known(self: prepared.Launch, *tensors: Tensor | int | None) -> None:
            for t in tensors:
                if isinstance(t, Tensor):
                    machine.known(t)
            ordinary(self, *tensors)

        ordinary = prepared.Launch.__call__
        plans.forget()
        monkeypatch.setattr(launch, "_kernels", lambda: kernels)
        monkeypatch.setattr(prepared.Launch, "__call__", known)
        monkeypatch.setattr(launch, "_processors", lambda device: 3)
        monkeypatch.setattr(launch, "fresh", poisoned)
        monkeypatch.setattr(hopper_tiles, "fill", Fill())
        yield machine


class Case:
    """Sorted rows and weights; rows of nobody hold NaN."""

    def __init__(self, rows: str, extra: int = 0, dtype: torch.dtype = BF16) -> None:
        torch.manual_seed(0)
        counts = ROWS[rows]
        self.dtype = dtype
        self.ends = torch.tensor(counts).cumsum(0).to(torch.int32)
        self.used, self.experts = sum(counts), len(counts)
        self.rows = self.used + (70 if rows in ("tail", "none") else 0) + extra

    def matrix(self, columns: int, scale: float = 1.0) -> Tensor:
        t = (torch.randn(self.rows, columns) * scale).to(self.dtype)
        t[self.used :] = float("nan")
        return t

    def weight(self, n: int, k: int, transposed: bool = False) -> Tensor:
        """(E, n, k), stored with n contiguous if ``transposed``."""
        t = torch.randn(self.experts, *((k, n) if transposed else (n, k))).to(self.dtype) * k**-0.5
        return t.transpose(1, 2) if transposed else t

    def clean(self, t: Tensor) -> Tensor:
        """In fp64, nobody's rows zero: what the reference is given."""
        t = t.double()
        return torch.where((torch.arange(self.rows) < self.used).view(-1, *[1] * (t.dim() - 1)), t, 0)


def assert_close(got: Tensor, true: Tensor, tolerance: float = 2**-7) -> None:
    assert got.shape == true.shape
    assert torch.isfinite(got).all()
    scale = true.abs().max().item() or 1.0
    assert (got.double() - true).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "k", "stored_transposed"), [(40, 200, False), (264, 72, True), (520, 320, False)])
def test_matmul(machine: gluon_model.Machine, rows: str, n: int, k: int, stored_transposed: bool) -> None:
    case = Case(rows)
    a, w = case.matrix(k), case.weight(n, k, stored_transposed)
    true = reference.matmul(case.clean(a), w.double(), case.ends, transposed=True)
    assert_close(launch.matmul(a, w, case.ends, transposed=True), true)


@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_of_either_order_with_bias_and_scale(machine: gluon_model.Machine, transposed: bool) -> None:
    case = Case("tail", dtype=torch.float16)
    a, w, bias = case.matrix(72), case.weight(136, 72), torch.randn(case.experts, 136)
    scale = torch.rand(case.rows)
    scale[case.used :] = float("nan")
    given = w if transposed else w.transpose(1, 2)
    got = launch.matmul(a, given, case.ends, transposed=transposed, bias=bias, scale=scale)
    true = reference.matmul(case.clean(a), given.double(), case.ends, transposed=transposed, bias=bias.double())
    assert_close(got, true * case.clean(scale).unsqueeze(1), 2**-9)


LAYOUTS = ["concat", "separate", "interleaved", "plain"]


def weights(case: Case, layout: str, inner: int, width: int, transposed: bool) -> tuple[Tensor, Tensor | None]:
    w = case.weight(2 * inner if layout in ("concat", "interleaved") else inner, width, transposed)
    return w, case.weight(inner, width, transposed) if layout == "separate" else None


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "inner", "transposed"), [("skewed", 136, False), ("tail", 40, True), ("one", 264, False)])
def test_up(machine: gluon_model.Machine, rows: str, inner: int, transposed: bool, layout: str, save: bool) -> None:
    case = Case(rows)
    x, (w, w_up) = case.matrix(136), weights(case, layout, inner, 136, transposed)
    options = ("silu", layout, None, None, save)
    a, h, u = launch.up(x, None, w, w_up, None, case.ends, *options)
    true = reference.up(case.clean(x), None, w.double(), None if w_up is None else w_up.double(), None, case.ends, *options)
    for got, exact in zip((a, h, u), true, strict=True):
        assert_close(got, exact) if exact.numel() else None
        assert got.shape == exact.shape


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["concat", "interleaved", "plain"])
def test_up_of_gathered_rows_with_bias_and_clamps(machine: gluon_model.Machine, layout: str, fused: bool) -> None:
    case = Case("skewed", extra=9)
    x = torch.randn(60, 72).to(BF16)
    gather = torch.randint(60, (case.rows,))
    w, _ = weights(case, layout, 136, 72, True)
    bias = torch.randn(case.experts, w.shape[1])
    options = ("sigmoid", layout, None, None, True) if layout == "plain" else ("silu", layout, 0.5, 1.702, True)
    rows = (x, gather) if fused else (x[gather], None)
    a, h, _ = launch.up(*rows, w, None, bias, case.ends, *options)
    true = reference.up(x.double(), gather, w.double(), None, bias.double(), case.ends, *options)
    assert_close(a, true[0])
    assert_close(h, true[1])


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("rows", "inner", "transposed"), [("skewed", 136, False), ("tail", 40, True), ("one", 264, True), ("none", 72, False)]
)
def test_dh(machine: gluon_model.Machine, rows: str, inner: int, transposed: bool, layout: str, routed: bool) -> None:
    case = Case(rows)
    grad, w_down = case.matrix(200), case.weight(200, inner, transposed)
    double = layout in ("concat", "interleaved")
    h, u = case.matrix(2 * inner if double else inner), case.matrix(inner) if layout == "separate" else None
    p = torch.rand(case.rows) if routed else None
    if p is not None:
        p[case.used :] = float("nan")
    options = ("sigmoid", layout, None, None) if layout == "plain" else ("silu", layout, 1.0, 1.702)
    got = launch.dh(grad, None, w_down, p, h, u, case.ends, *options)
    true = reference.dh(
        case.clean(grad), None, w_down.double(), None if p is None else case.clean(p), case.clean(h),
        None if u is None else case.clean(u), case.ends, *options,
    )  # fmt: skip
    for name, mine, exact in zip(("dh", "du", "dp", "a"), got, true, strict=True):
        mine, exact = (mine.sum(1), exact.sum(1)) if name == "dp" else (mine, exact)
        assert mine.shape == exact.shape, name
        assert_close(mine, exact, 2**-20 if name == "dp" else 2**-7) if exact.numel() else None


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "m"), [(40, 72), (136, 520), (200, 264)])
def test_wgrad(machine: gluon_model.Machine, rows: str, n: int, m: int) -> None:
    case = Case(rows)
    d, x = case.matrix(n), case.matrix(m)
    true = reference.wgrad(case.clean(d), case.clean(x), None, None, case.ends)
    assert_close(launch.wgrad(d, x, None, None, case.ends), true)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_wgrad_is_added_to_a_buffer(machine: gluon_model.Machine, dtype: torch.dtype) -> None:
    case = Case("skewed")
    d, x = case.matrix(136), case.matrix(328)
    before = torch.randn(case.experts, 136, 328).to(dtype)
    into = before.clone()
    true = before.double() + reference.wgrad(case.clean(d), case.clean(x), None, None, case.ends)
    assert launch.wgrad(d, x, None, None, case.ends, into=into) is into
    assert_close(into, true, 2**-7 if dtype is BF16 else 2**-20)


@pytest.mark.parametrize("width", [64, 320, 392])
def test_last_tiles_of_every_width(machine: gluon_model.Machine, width: int) -> None:
    test_matmul(machine, "tail", width, 72, width % 64 == 0)
    test_up(machine, "tail", width, width % 64 == 0, "interleaved", True)
    test_dh(machine, "tail", width, width % 64 == 0, "interleaved", True)
    test_wgrad(machine, "tail", 72, width)


# ------------------------------------------------------------------------------------------------ one list of tiles


@pytest.mark.parametrize(("rows", "count"), [("none", 1), ("tail", 3), ("skewed", 6)])
def test_products_take_turns_with_one_list(machine: gluon_model.Machine, rows: str, count: int) -> None:
    """Of fewer tiles than the three processors, of as many, of more: each launch leaves the counter at zero."""
    case = Case(rows)
    x, gather = torch.randn(30, 72).to(BF16), torch.randint(30, (case.rows,))
    grad, h, w, w_down = case.matrix(72), case.matrix(80), case.weight(80, 72), case.weight(72, 40)
    kind = ("silu", "concat", None, None)
    products: list[Callable[..., Any]] = [
        lambda **tiles: launch.up(x[gather], None, w, None, None, case.ends, *kind, True, **tiles)[:2],
        lambda **tiles: launch.up(x, gather, w, None, None, case.ends, *kind, True, **tiles)[:2],
        lambda **tiles: launch.matmul(grad, w, case.ends, transposed=True, **tiles),
        lambda **tiles: launch.dh(grad, None, w_down, None, h, None, case.ends, *kind, **tiles),
        lambda **tiles: launch.wgrad(grad, h, None, None, case.ends, **tiles),
    ]
    tiles = launch.tile_list(case.ends, case.rows)
    for product in products * 2:
        shared, own = product(tiles=tiles), product()
        assert tiles[0, :2].tolist() == [count, 0]
        for mine, other in zip(*((r,) if isinstance(r, Tensor) else r for r in (shared, own)), strict=True):
            assert torch.isfinite(mine).all() and torch.equal(mine, other)


def test_nothing_is_claimed_of_a_list_without_tiles(machine: gluon_model.Machine) -> None:
    case = Case("balanced")
    tiles = launch.tile_list(case.ends, case.rows)
    tiles[0, 0] = 0
    y = launch.matmul(case.matrix(72), case.weight(40, 72), case.ends, transposed=True, tiles=tiles)
    assert y.isnan().all() and tiles[0, :2].tolist() == [0, 0]


# ------------------------------------------------------------------------------------------------ what every path promises

CONTRACTS = [
    contract.Case(ends=name, inner=72, dtype=BF16, layout=layout)
    for name, layout in zip(contract.ENDS, LAYOUTS * 3, strict=False)
]
CONTRACTS += [
    contract.Case(
        at=(171, [40, 40, 150]), inner=136, dtype=torch.float16, layout=layout, stored=stored, gathers=gathers, save=gathers
    )
    for layout, stored, gathers in itertools.product(LAYOUTS, contract.STORED, (True, False))
]


@pytest.mark.parametrize("case", CONTRACTS, ids=repr)
def test_contract_of_the_paths(case: contract.Case, kernels: launch.Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    path: Any = launch
    with launching(kernels, 0, monkeypatch):
        contract.check_up(path, case)
        contract.check_matmul(path, case, transposed=case.gathers)
        contract.check_dh(path, case)
        contract.check_wgrad(path, case)


# ------------------------------------------------------------------------------------------------ errors that the model finds

MUTANTS = {
    "a stage is given back while its product is under way": ("hopper_rows.py", "empty.index(back(s, S))", "empty.index(s)"),
    "a staging buffer is written while it is stored": ("hopper.py", "    tma.store_wait(1)\n    lay(", "    lay("),
    "the odd block of 64 rows": ("hopper.py", "gl.maximum(2 * i - odd, 0)", "2 * i"),
    "no clipping at the end of an expert": (
        "hopper.py",
        "[FAR, end, FAR - end + row, column]",
        "[FAR, end + 64, FAR - end - 64 + row, column]",
    ),
    "no fence before a store": ("hopper.py", "    fence_async_shared()\n", ""),
    "bytes of a stage": ("hopper_rows.py", "(128 + BN) * BK", "(64 + BN) * BK"),
    "phase of the mailbox": ("hopper.py", "heard.index(j), phase ^ 1", "heard.index(j), phase"),
    "the up half of a weight": ("hopper_rows.py", ".slice(H, H, dim=1)", ".slice(0, H, dim=1)"),
    "h is read past the last expert": ("hopper_dh.py", "seen = gl.where(e < E, end, row)", "seen = end"),
    "whose rows of h": ("hopper_dh.py", "row + 64 * cid\n", "row\n"),
    "h is read before it is there": ("hopper_dh.py", "    mbarrier.wait(full.index(s), phase)\n", ""),
    "a stage is filled while gradients leave from it": ("hopper_dh.py", "    tma.store_wait(SENDS)\n", ""),
    "stages of h that rows past the end do not take": ("hopper_dh.py", "skip(depth + 4 * BK", "skip(depth"),
    "no wait between stores of a gradient": ("hopper_wgrad.py", "tma.store_wait(1)", "tma.store_wait(2)"),
    "a stage is given back before the first product of an expert": ("hopper_wgrad.py", "pred=k > start", "pred=k > 0"),
    "no fence after copies by threads": ("hopper_rows.py", "            fence_async_shared()\n", "            pass\n"),
    "copies by threads that nobody waits for": ("hopper_mm.py", "129 if GATHER else 1", "1"),
    "rows of the next tile": ("hopper_wgrad.py", "        start = start1\n", ""),
    "the counter is left where it is": ("hopper.py", "claimed == tiles - 1", "claimed == tiles"),
    "the counter begins anew too early": ("hopper.py", "claimed == tiles - 1", "claimed == tiles - 2"),
}


def shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether something is wrong with the kernels in a folder: numbers, a deadlock, a lost fence."""
    for seed in range(6):
        with launching(gluon_model.kernels(folder), seed, monkeypatch) as machine:
            try:
                test_up(machine, "skewed", 136, False, "concat", True)
                test_dh(machine, "tail", 72, True, "concat", True)
                test_wgrad(machine, "skewed", 136, 520)
                test_up_of_gathered_rows_with_bias_and_clamps(machine, "concat", True)
                test_products_take_turns_with_one_list(machine, "skewed", 6)
            except Exception:
                return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS)
def test_an_error_in_the_kernels_shows(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    name, old, new = MUTANTS[mutant]
    for file in SOURCES.glob("hopper*.py"):
        text = file.read_text()
        assert file.name != name or old in text
        (tmp_path / file.name).write_text(text.replace(old, new) if file.name == name else text)
    assert shows(tmp_path, monkeypatch)


def test_without_an_error_none_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert not shows(SOURCES, monkeypatch)
