"""What the host side hands to Triton, without a GPU: every launch compiles for sm_90 from real arguments, and is not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from absent import Absent
from contract import BF16, F16, F32, LAYOUTS, Case
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from fxfuse.kernels import hopper_launch, path, prepared
from fxfuse.ops import grouped_kernels

PORTABLE = path("portable")


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches compile only; the kernels' names, one for each that was compiled."""
    found: list[str] = []
    run, absent = JITFunction.run, Absent()

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert all(isinstance(n, int) and 0 < n < 2**31 for n in grid)
        known = len(self.device_caches[absent.number][0])
        run(self, *args, grid=grid, warmup=True, **options)
        found.extend([self.__name__] * (len(self.device_caches[absent.number][0]) - known))

    absent.install(monkeypatch)
    monkeypatch.setattr(JITFunction, "run", warm)
    yield found


def launches(case: Case) -> dict[str, Callable[[], Any]]:
    """Every function of the path on this case."""
    x, gather = case.tokens(case.hidden)
    ends, kind = case.offsets(), case.kind()
    w = case.weight(case.wide, case.hidden)
    w_up = case.weight(case.inner, case.hidden) if case.layout == "separate" else None
    b = case.normal(case.experts, case.wide) if case.biases and case.layout != "separate" else None
    h, rows = case.sorted_rows(case.wide), case.sorted_rows(case.inner)
    p = torch.rand(case.rows) if case.weights else None
    u = rows if case.layout == "separate" else None
    ids = torch.zeros(case.rows // 2, 2, dtype=torch.int64)
    pairs = torch.zeros(2 * (case.rows // 2), dtype=torch.int64)
    down, weights = case.weight(case.hidden, case.inner), None if p is None else p[: 2 * len(ids)].view(-1, 2)
    return {
        "up_kernel": lambda: PORTABLE.up(x, gather, w, w_up, b, ends, *kind, case.save),
        "matmul_kernel": lambda: PORTABLE.matmul(rows, down, ends, transposed=True, bias=None, zero_tail=False),
        "dh_kernel": lambda: PORTABLE.dh(x, gather, down, p, h, u, ends, *kind),
        "wgrad_kernel": lambda: PORTABLE.wgrad(rows, x, None, gather, ends),
        "bias_kernel": lambda: PORTABLE.bias_gradient(x, ends, p, gather),
        "combine_kernel": lambda: PORTABLE.combine(rows, weights, None, ids, pairs, ends, x),
        "sorted_kernel": lambda: PORTABLE.sorted_pairs(pairs, weights, 2),
        "spread_kernel": lambda: PORTABLE.spread(x[: len(ids)], rows[: len(ids)], weights, pairs, 2),
        "router_kernel": lambda: PORTABLE.router_gradient(torch.zeros(3, len(pairs)).t(), ids, pairs, case.dtype),
        "router_bias_kernel": lambda: PORTABLE.router_gradient(
            torch.zeros(len(pairs), 3), ids, pairs, case.dtype, torch.zeros(case.experts, 40), torch.zeros(len(ids), 40), ends
        ),
        "place_kernel": lambda: PORTABLE.route(ids, case.experts),
        "count_kernel place_kernel": lambda: PORTABLE.route(ids.repeat(8, 1), case.experts),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "fp16", "fp32"])
def test_everything_there(dtype: torch.dtype, layout: str, compiled: list[str]) -> None:
    case = Case(dtype=dtype, layout=layout, hidden=64, inner=32, limit=7, alpha=1.702)
    for launch in launches(case).values():
        launch()


@pytest.mark.parametrize("stored", ["columns", "padded"])
def test_nothing_that_may_be_absent(stored: str) -> None:
    case = Case(dtype=BF16, stored=stored, gathers=False, biases=False, weights=False, save=False, hidden=40, inner=9)
    for launch in launches(case).values():
        launch()


@pytest.mark.parametrize(
    "name",
    [
        "up_kernel",
        "matmul_kernel",
        "dh_kernel",
        "wgrad_kernel",
        "bias_kernel",
        "place_kernel",
        "count_kernel place_kernel",
        "sorted_kernel",
        "spread_kernel",
        "router_kernel",
    ],
)
def test_another_number_of_rows_compiles_nothing(name: str, compiled: list[str]) -> None:
    def launch(rows: int) -> None:
        launches(Case(at=(rows, [rows // 3, rows]), dtype=BF16, hidden=112, inner=48))[name]()

    launch(150)
    first = list(compiled)
    assert sorted(first) == name.split()
    for rows in (160, 131, 256, 400):
        launch(rows)
    assert compiled == first


PASSES = {
    ("portable", "forward"): "count_kernel place_kernel up_kernel matmul_kernel combine_kernel",
    ("portable", "backward"): "sorted_kernel dh_kernel wgrad_kernel wgrad_kernel router_kernel matmul_kernel combine_kernel",
    ("hopper", "forward"): "count_kernel place_kernel fill mm mm combine_kernel",
    ("hopper", "forward, wide"): "count_kernel place_kernel fill spread_kernel mm mm combine_kernel",
    ("hopper", "backward"): "fill spread_kernel dh wgrad wgrad router_kernel mm combine_kernel",
}
"""By path and pass of a block without biases: what it launches."""


class Calls(TorchDispatchMode):
    """Notes torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "step"), PASSES)
def test_a_pass_launches_these_and_nothing_else(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "hopper" and hopper_launch.available((9, 0), triton.__version__):
        pytest.skip("no Gluon")
    launched: list[str] = []
    monkeypatch.setattr(prepared.Launch, "__call__", lambda self, *_: launched.append(self.kernel.__name__))
    monkeypatch.setattr(hopper_launch, "_processors", lambda _: 132)
    monkeypatch.setattr(grouped_kernels, "_functions", lambda *_: path(name))
    x, p, ids = (torch.zeros(400, n, dtype=d) for n, d in ((64, BF16), (2, BF16), (2, torch.int64)))
    inner = 2048 if step == "forward, wide" else 32
    weights = (torch.zeros(4, 2 * inner, 64, dtype=BF16), None, torch.zeros(4, 64, inner, dtype=BF16), None, None)
    kind, pairs = ("silu", "concat", None, None, False), torch.zeros(800, dtype=torch.int64)
    saved = (torch.zeros(800, 64, dtype=BF16), None, pairs, pairs, torch.zeros(4, dtype=torch.int32))
    with Calls() as calls:
        if step != "backward":
            grouped_kernels.mlp(x, ids, p, None, *weights, *kind, True, name)
        else:
            mask = [True, True, True, False, True, False, False]
            grouped_kernels.mlp_backward(x, x, ids, p, *weights, *saved, *kind, mask, name)
    assert launched == PASSES[name, step].split()
    assert not [op for op in calls.seen if not op.startswith("empty")]


def test_a_version_of_triton_that_is_supported() -> None:
    assert tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 4)
