"""The Hopper kernels on their GPU: as near to fp64 as their dtype allows, whatever lies in memory, with the same bits every time.

    python3 -m pytest tests/test_gpu_hopper.py -m gpu -q -p no:cacheprovider -W default --noconftest -c /dev/null --rootdir=.

A kernel that waits forever cannot be interrupted: a watchdog ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "patterns"))
sys.path.append(str(Path(__file__).parent))

import reference_moe

from fxfuse.kernels import hopper_launch as launch
from fxfuse.kernels import plans, reference

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
ROUTINGS = ("balanced", "zipf", "one_idle", "one_busy", "some_outside", "nobody")
TOKENS, CHOSEN, EXPERTS = 515, 4, 8
SECONDS = float(os.environ.get("FXFUSE_WATCHDOG", "120"))
_began = [time.monotonic()]


def _watch() -> None:
    while True:
        time.sleep(1)
        if time.monotonic() - _began[0] > SECONDS:
            print(f"\nno progress for {SECONDS:.0f} s: {os.environ.get('PYTEST_CURRENT_TEST')}", file=sys.stderr, flush=True)
            os._exit(9)


@pytest.fixture(autouse=True, scope="module")
def watchdog() -> Iterator[None]:
    """The limit is one test's, compilation included."""
    triton = pytest.importorskip("triton")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    reason = launch.available(capability, triton.__version__)
    if reason is not None:
        pytest.skip(reason)
    threading.Thread(target=_watch, daemon=True).start()
    yield
    _began[0] = float("inf")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the launcher allocates holds NaN until a kernel writes it."""

    def poisoned(shape: Any, like: plans.Operand, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
        dtype = dtype or like.dtype
        return lambda: torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype, device=like.device)

    plans.forget()
    monkeypatch.setattr(launch, "fresh", poisoned)
    _began[0] = time.monotonic()
    yield
    plans.forget()


class Case:
    """Sorted rows of a routing; the rows of no expert hold NaN."""

    def __init__(self, routing: str, dtype: torch.dtype = BF16, experts: int = EXPERTS, tokens: int = TOKENS) -> None:
        torch.manual_seed(0)
        ids = reference_moe.ROUTINGS[routing](tokens, CHOSEN, experts).cuda()
        order, *_, self.ends = reference.route(ids, experts)
        self.gather, self.rows, self.used = order // CHOSEN, ids.numel(), int(self.ends[-1])
        self.tokens, self.experts, self.dtype = tokens, experts, dtype

    def matrix(self, columns: int) -> Tensor:
        t = torch.randn(self.rows, columns, device="cuda").to(self.dtype)
        t[self.used :] = float("nan")
        return t

    def weight(self, n: int, k: int, transposed: bool = False) -> Tensor:
        """(E, n, k), stored with n contiguous if ``transposed``."""
        shape = (self.experts, k, n) if transposed else (self.experts, n, k)
        t = (torch.randn(shape, device="cuda") * k**-0.5).to(self.dtype)
        return t.transpose(1, 2) if transposed else t

    def clean(self, t: Tensor) -> Tensor:
        """In fp64, nobody's rows zero."""
        inside = torch.arange(self.rows, device="cuda") < self.used
        return torch.where(inside.view(-1, *[1] * (t.dim() - 1)), t.double(), 0)


def check(run: Callable[[], Tensor | tuple[Tensor, ...]], true: Sequence[Tensor], tolerance: Sequence[float]) -> None:
    """Every output near to fp64 and zero where that is; a second run gives the same bits."""
    first, second = run(), run()
    torch.cuda.synchronize()
    first, second = (r if isinstance(r, tuple) else (r,) for r in (first, second))
    for got, again, exact, part in zip(first, second, true, tolerance, strict=True):
        assert got.shape == exact.shape
        assert torch.isfinite(got).all()
        assert torch.equal(got, again)
        scale = exact.square().mean().sqrt().item() if exact.numel() else 0.0
        assert bool(((got.double() - exact).abs() <= part * (exact.abs() + scale)).all())


# ------------------------------------------------------------------------------------------------ rows times weights

SIZES = [(2048, 768), (768, 2048), (2880, 2880), (40, 40), (136, 2880)]


@pytest.mark.parametrize("stored_transposed", [False, True])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_matmul(routing: str, n: int, k: int, stored_transposed: bool) -> None:
    case = Case(routing)
    a, w = case.matrix(k), case.weight(n, k, stored_transposed)
    true = reference.matmul(case.clean(a), w.double(), case.ends, transposed=True)
    check(lambda: launch.matmul(a, w, case.ends, transposed=True), [true], [2**-7])


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_matmul_with_bias_and_scale(dtype: torch.dtype) -> None:
    case = Case("some_outside", dtype)
    a, w, bias = case.matrix(768), case.weight(2880, 768), torch.randn(EXPERTS, 2880, device="cuda").to(dtype)
    scale = torch.rand(case.rows, device="cuda")
    scale[case.used :] = float("nan")
    true = reference.matmul(case.clean(a), w.double(), case.ends, transposed=True, bias=bias.double())
    true = true * case.clean(scale).unsqueeze(1)
    check(lambda: launch.matmul(a, w, case.ends, transposed=True, bias=bias, scale=scale), [true], [2**-7])


KINDS = {
    "SwiGLU": ("concat", "silu", None, None),
    "GeGLU": ("concat", "gelu", None, None),
    "GeGLU tanh": ("separate", "gelu_tanh", None, None),
    "GPT-OSS": ("interleaved", "silu", 7.0, 1.702),
    "tight clamps": ("concat", "silu", 0.5, 1.702),
    "relu2": ("plain", "relu2", None, None),
    "sigmoid": ("plain", "sigmoid", None, None),
}


def layout_weights(case: Case, layout: str, inner: int, width: int, transposed: bool) -> tuple[Tensor, Tensor | None]:
    w = case.weight(2 * inner if layout in ("concat", "interleaved") else inner, width, transposed)
    return w, case.weight(inner, width, transposed) if layout == "separate" else None


QWEN3, OSS, SMALL = (768, 2048), (2880, 2880), (40, 40)
UPS = [
    ("SwiGLU", QWEN3, "saved"),
    ("SwiGLU", QWEN3, ""),
    ("SwiGLU", QWEN3, "saved gathers"),
    ("SwiGLU", QWEN3, "gathers"),
    ("SwiGLU", OSS, "saved transposed"),
    ("SwiGLU", SMALL, "saved"),
    ("SwiGLU", SMALL, "saved gathers"),
    ("GeGLU", QWEN3, "saved"),
    ("GeGLU tanh", QWEN3, "saved transposed"),
    ("GPT-OSS", OSS, "saved transposed"),
    ("GPT-OSS", OSS, "transposed"),
    ("GPT-OSS", SMALL, "saved gathers"),
    ("tight clamps", QWEN3, "saved"),
    ("relu2", QWEN3, "saved"),
    ("sigmoid", QWEN3, "saved"),
    ("sigmoid", SMALL, "transposed"),
]
"""Kind, inner and hidden width, options: each is a compilation, so that not all of them are crossed."""


@pytest.mark.parametrize(("kind", "sizes", "flags"), UPS)
@pytest.mark.parametrize("routing", ["zipf", "one_idle", "some_outside"])
def test_up(routing: str, kind: str, sizes: tuple[int, int], flags: str) -> None:
    (inner, width), save, transposed = sizes, "saved" in flags, "transposed" in flags
    case, (layout, *options) = Case(routing), KINDS[kind]
    x = torch.randn(case.tokens, width, device="cuda").to(BF16)
    w, w_up = layout_weights(case, layout, inner, width, transposed)
    bias = None if w_up is not None else torch.randn(EXPERTS, w.shape[1], device="cuda").to(BF16)
    options = (*options[:1], layout, *options[1:], save)
    doubles = [None if t is None else t.double() for t in (w, w_up, bias)]
    _, h, u = reference.up(x.double(), case.gather, *doubles, case.ends, *options[:-1], True)
    rounded = [None if t.numel() == 0 else t.to(BF16).double() for t in (h, u)]  # within the clamps' and the kinks' reach
    g, last = reference.halves(rounded[0], rounded[1], layout)
    a = case.clean(reference.activate(g, last, options[0], *options[2:4]))
    true = [a, h, u] if save else [a, h.new_empty(0), h.new_empty(0)]
    rows = (x, case.gather) if "gathers" in flags else (x[case.gather], None)
    check(lambda: launch.up(*rows, w, w_up, bias, case.ends, *options), true, [2**-5, 2**-7, 2**-7])


DHS = [
    ("SwiGLU", QWEN3, "routed"),
    ("SwiGLU", QWEN3, ""),
    ("SwiGLU", OSS, "routed transposed"),
    ("SwiGLU", SMALL, "routed"),
    ("GeGLU", QWEN3, "routed"),
    ("GeGLU tanh", QWEN3, "routed transposed"),
    ("GPT-OSS", OSS, "routed transposed"),
    ("GPT-OSS", SMALL, "transposed"),
    ("tight clamps", QWEN3, "routed"),
    ("relu2", QWEN3, "routed"),
    ("sigmoid", QWEN3, "routed"),
]


@pytest.mark.parametrize(("kind", "sizes", "flags"), DHS)
@pytest.mark.parametrize("routing", ["zipf", "one_busy", "some_outside", "nobody"])
def test_dh(routing: str, kind: str, sizes: tuple[int, int], flags: str) -> None:
    (inner, width), routed, transposed = sizes, "routed" in flags, "transposed" in flags
    case, (layout, act, limit, alpha) = Case(routing), KINDS[kind]
    grad = torch.randn(case.tokens, width, device="cuda").to(BF16)
    w = case.weight(inner, width, not transposed).transpose(1, 2)  # (E, H, I)
    h = case.matrix(2 * inner if layout in ("concat", "interleaved") else inner)
    u = case.matrix(inner) if layout == "separate" else None
    p = torch.rand(case.rows, device="cuda") if routed else None
    options = (case.ends, act, layout, limit, alpha)
    clean = [None if t is None else case.clean(t) for t in (p, h, u)]

    def summed(d: Tensor, du: Tensor, dp: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        return d, du, dp.sum(1), a

    true = summed(*reference.dh(grad.double(), case.gather, w.double(), *clean, *options))
    check(lambda: summed(*launch.dh(grad, case.gather, w, p, h, u, *options)), true, [2**-7, 2**-7, 2**-10, 2**-7])


# ------------------------------------------------------------------------------------------------ gradient of the weights


@pytest.mark.parametrize(("n", "m"), [(1536, 2048), (2048, 768), (2880, 2880), (40, 40)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_wgrad(routing: str, n: int, m: int) -> None:
    case = Case(routing)
    d, x = case.matrix(n), torch.randn(case.tokens, m, device="cuda").to(BF16)
    true = reference.wgrad(case.clean(d), x.double(), None, case.gather, case.ends)
    check(lambda: launch.wgrad(d, x, None, case.gather, case.ends), [true], [2**-7])


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_wgrad_is_added_to_a_buffer(dtype: torch.dtype) -> None:
    case = Case("one_idle")
    d, x = case.matrix(1536), case.matrix(2048)
    before = torch.randn(EXPERTS, 1536, 2048, device="cuda").to(dtype)
    true = before.double() + reference.wgrad(case.clean(d), case.clean(x), None, None, case.ends)
    check(lambda: launch.wgrad(d, x, None, None, case.ends, into=before.clone()), [true], [2**-7 if dtype is BF16 else 2**-14])


# ------------------------------------------------------------------------------------------------ half-empty last tiles


@pytest.mark.parametrize("stored_transposed", [False, True])
@pytest.mark.parametrize("rest", [8, 64, 72, 128, 136])
def test_last_tiles_of_every_width(rest: int, stored_transposed: bool) -> None:
    """Near to fp64, and the same bits as where zeros fill the last tile."""
    case, n, full = Case("some_outside", tokens=130), 256 + rest, 512

    def filled(t: Tensor, dim: int) -> Tensor:
        shape = [full if i == dim else extent for i, extent in enumerate(t.shape)]
        found = t.new_zeros(shape)
        found.narrow(dim, 0, n).copy_(t)
        return found.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 3 and t.stride(2) != 1 else found

    a, w, w_down = case.matrix(200), case.weight(n, 200, stored_transposed), case.weight(200, n, stored_transposed)
    true = reference.matmul(case.clean(a), w.double(), case.ends, transposed=True)
    check(lambda: launch.matmul(a, w, case.ends, transposed=True), [true], [2**-7])
    y, wide = (launch.matmul(a, t, case.ends, transposed=True) for t in (w, filled(w, 1)))
    assert torch.equal(y, wide[:, :n])

    options = ("relu2", "plain", None, None, True)
    true = reference.up(case.clean(a), None, w.double(), None, None, case.ends, *options)
    check(lambda: launch.up(a, None, w, None, None, case.ends, *options), true, [2**-5, 2**-7, 0])
    up, wide = (launch.up(a, None, t, None, None, case.ends, *options)[1] for t in (w, filled(w, 1)))
    assert torch.equal(up, wide[:, :n])

    h = case.matrix(n)
    true = reference.dh(case.clean(a), None, w_down.double(), None, case.clean(h), None, case.ends, *options[:-1])
    run = lambda w, h: launch.dh(a, None, w, None, h, None, case.ends, *options[:-1])  # noqa: E731
    check(lambda: (lambda d, _, dp, s: (d, dp.sum(1), s))(*run(w_down, h)), [true[0], true[2].sum(1), true[3]], [2**-7] * 3)
    for got, wide in zip(run(w_down, h)[::3], run(filled(w_down, 2), filled(h, 1))[::3], strict=True):
        assert torch.equal(got, wide[:, :n])

    true = reference.wgrad(case.clean(a), case.clean(h), None, None, case.ends)
    check(lambda: launch.wgrad(a, h, None, None, case.ends), [true], [2**-7])
    dw, wide = (launch.wgrad(a, t, None, None, case.ends) for t in (h, filled(h, 1)))
    assert torch.equal(dw, wide[:, :, :n])


# ------------------------------------------------------------------------------------------------ how they are launched


def test_no_rows_at_all() -> None:
    ends = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda")
    a, w = torch.empty(0, 768, device="cuda", dtype=BF16), torch.randn(EXPERTS, 768, 768, device="cuda").to(BF16)
    assert launch.matmul(a, w, ends, transposed=True).shape == (0, 768)
    assert launch.up(a, None, w, None, None, ends, "relu2", "plain", None, None, True)[1].shape == (0, 768)
    assert launch.dh(a, None, w, None, a, None, ends, "relu2", "plain", None, None)[2].shape[0] == 0
    assert launch.wgrad(a, a, None, None, ends).eq(0).all()


def test_launches_do_not_wait_for_the_gpu() -> None:
    case = Case("zipf")
    a, w = case.matrix(768), case.weight(2048, 768)
    launch.matmul(a, w, case.ends, transposed=True)
    launch.wgrad(a, a, None, None, case.ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch.matmul(a, w, case.ends, transposed=True)
        launch.wgrad(a, a, None, None, case.ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_follows_the_routing() -> None:
    case, other = Case("balanced"), Case("one_busy")
    a, w, ends = torch.randn(case.rows, 768, device="cuda").to(BF16), case.weight(2048, 768), case.ends.clone()
    run = lambda: (launch.matmul(a, w, ends, transposed=True), launch.wgrad(a, a, None, None, ends))  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dw = run()
    for now in (other.ends, case.ends):
        ends.copy_(now)
        graph.replay()
        torch.cuda.synchronize()
        expected = run()
        assert torch.equal(y, expected[0]) and torch.equal(dw, expected[1])


def test_launches_back_to_back_share_nothing() -> None:
    case = Case("zipf")
    a, w = case.matrix(768), case.weight(2048, 768)
    expected = launch.matmul(a, w, case.ends, transposed=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            found.append(launch.matmul(a, w, case.ends, transposed=True))
    torch.cuda.synchronize()
    assert all(torch.equal(f, expected) for f in found)


@pytest.mark.parametrize("routing", ["zipf", "one_busy", "nobody"])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_products_take_turns_with_one_list(routing: str, tokens: int) -> None:
    """Of fewer tiles than processors and of more; each launch leaves the counter at zero."""
    case = Case(routing, tokens=tokens)
    x, h, w, w_down = case.matrix(768), case.matrix(4096), case.weight(4096, 768), case.weight(768, 2048)
    lines, kind = torch.randn(tokens, 768, device="cuda").to(BF16), ("silu", "concat", None, None)
    products: list[Callable[..., Any]] = [
        lambda **tiles: launch.up(x, None, w, None, None, case.ends, *kind, True, **tiles)[:2],
        lambda **tiles: launch.up(lines, case.gather, w, None, None, case.ends, *kind, True, **tiles)[:2],
        lambda **tiles: launch.matmul(x, w, case.ends, transposed=True, **tiles),
        lambda **tiles: launch.dh(x, None, w_down, None, h, None, case.ends, *kind, **tiles)[::3],
        lambda **tiles: launch.wgrad(h, x, None, None, case.ends, **tiles),
    ]
    expected = [product() for product in products]
    tiles, heads, found = launch.tile_list(case.ends, case.rows), [], []
    for product in products * 3:  # nobody waits in between
        found.append(product(tiles=tiles))
        heads.append(tiles[0, :2].clone())
    torch.cuda.synchronize()
    for head, got, own in zip(heads, found, expected * 3, strict=True):
        assert head[0] > 0 and head[1] == 0
        for mine, other in zip(*((r,) if isinstance(r, Tensor) else r for r in (got, own)), strict=True):
            assert torch.equal(mine, other)


def test_weight_of_more_than_2_31_elements() -> None:
    experts, n, k = 130, 4096, 4096
    w = torch.zeros(experts, n, k, device="cuda", dtype=BF16)
    w[-1].normal_().mul_(k**-0.5)
    a = torch.randn(200, k, device="cuda").to(BF16)
    ends = torch.zeros(experts, dtype=torch.int32, device="cuda")
    ends[-1] = 200
    true = a.double() @ w[-1].double().t()
    check(lambda: launch.matmul(a, w, ends, transposed=True), [true], [2**-7])
    dw = launch.wgrad(true.to(BF16), a, None, None, ends)
    torch.testing.assert_close(dw[-1].double(), true.to(BF16).double().t() @ a.double(), rtol=2**-7, atol=2**-2)
    assert dw[:-1].eq(0).all()
