"""Prepared launches on a GPU: they are taken, and what they compute is what Triton's own launch computes, bit for bit.

python3 -m pytest tests/test_gpu_launches.py -m gpu -q -p no:cacheprovider -W default --noconftest -c /dev/null --rootdir=.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "patterns"))

from fxfuse import kernels
from fxfuse.kernels import hopper_launch, plans, reference
from fxfuse.ops import grouped_kernels

pytestmark = pytest.mark.gpu
paths = pytest.mark.parametrize("path", list(kernels.PATHS))
KIND = ("silu", "concat", None, None)
TOKENS, CHOSEN, EXPERTS, HIDDEN, INNER = 96, 4, 8, 128, 64


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    plans.forget()


def calls(path: str, shift: int = 0) -> dict[str, Callable[[], Any]]:
    """Every function of a path on new tensors, that begin ``shift`` elements after an aligned address."""
    if path == "hopper" and (reason := hopper_launch.available(torch.cuda.get_device_capability(), triton.__version__)):
        pytest.skip(reason)
    module = kernels.path(path)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.randn(count + 64, device="cuda").to(dtype)[shift : shift + count].view(shape)

    ids = torch.randint(EXPERTS, (TOKENS, CHOSEN), device="cuda")
    order, gather, inverse, ends = reference.route(ids, EXPERTS)
    rows = order.shape[0]
    x, w, down, h = (
        normal(TOKENS, HIDDEN),
        normal(EXPERTS, 2 * INNER, HIDDEN),
        normal(EXPERTS, HIDDEN, INNER),
        normal(rows, 2 * INNER),
    )
    a, y, bias, p = normal(rows, INNER), normal(rows, HIDDEN), normal(EXPERTS, 2 * INNER), normal(TOKENS, CHOSEN)
    weight = normal(rows, dtype=torch.float32)
    return {
        "route": lambda: module.route(ids, EXPERTS),
        "up": lambda: module.up(x, gather, w, None, bias, ends, *KIND, True),
        "matmul": lambda: module.matmul(a, down, ends, transposed=True, bias=None, zero_tail=True),
        "combine": lambda: module.combine(y, p, None, ids, inverse, ends, x),
        "dh": lambda: module.dh(y, None, down, weight, h, None, ends, *KIND),
        "wgrad": lambda: module.wgrad(h, y, None, None, ends),
        "bias_gradient": lambda: module.bias_gradient(h, ends, weight, None),
        "sorted_pairs": lambda: module.sorted_pairs(order, p, CHOSEN),
        "spread": lambda: module.spread(x, x, p, inverse, CHOSEN),
        "router_gradient with a bias": lambda: module.router_gradient(
            weight.view(-1, 1).expand(-1, 3), ids, inverse, torch.bfloat16, down[:, :, 0].contiguous(), x, ends
        ),
        "router_gradient": lambda: module.router_gradient(weight.view(-1, 1).expand(-1, 3), ids, inverse, torch.bfloat16),
    }


def passes(path: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The operators' functions with arguments: of a block, of its backward where everything trains."""
    if path == "hopper" and (reason := hopper_launch.available(torch.cuda.get_device_capability(), triton.__version__)):
        pytest.skip(reason)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    x, w, down = normal(TOKENS, HIDDEN), normal(EXPERTS, 2 * INNER, HIDDEN), normal(EXPERTS, HIDDEN, INNER)
    ids, p = torch.randint(EXPERTS, (TOKENS, CHOSEN), device="cuda"), normal(TOKENS, CHOSEN)
    order, _, inverse, ends = reference.route(ids, EXPERTS)
    saved = (normal(TOKENS * CHOSEN, 2 * INNER), None, order, inverse, ends)
    weights, mask = (w, None, down, None, None), [True, True, True, False, True, False, False]
    forward, backward = (
        (x, ids, p, None, *weights, *KIND, False),
        (normal(TOKENS, HIDDEN), x, ids, p, *weights, *saved, *KIND, False),
    )
    return {
        "training": (grouped_kernels.mlp, (*forward, True, path)),
        "inference": (grouped_kernels.mlp, (*forward, False, path)),
        "backward": (grouped_kernels.mlp_backward, (*backward, mask, path)),
    }


@paths
def test_a_tape_gives_what_the_pass_gives_as_it_is_written(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, args in [*passes(path).values()] * 2:  # the first time Triton launches, the second is taped
        function(*args)
    for name, (function, args) in passes(path).items():
        with monkeypatch.context() as patch:
            patch.setattr(plans, "Operand", None)  # what a plan's key is made of
            got = function(*args)
        assert same(got, function.__wrapped__(*args)), name


@paths
def test_a_tape_on_a_side_stream_with_other_values(path: str) -> None:
    side = torch.cuda.Stream()
    for function, args in [*passes(path).values()] * 2:
        function(*args)
    for name, (function, args) in passes(path).items():
        want = function.__wrapped__(*args)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            busy = torch.ones(2**26, device="cuda")  # keeps the stream busy, not the other one
            for _ in range(20):
                busy = busy * 1.0001
            got = [function(*args) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        assert all(same(g, want) for g in got), name


@paths
def test_a_pass_is_captured(path: str) -> None:
    for name, (function, args) in passes(path).items():
        want = function(*args)
        function(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = function(*args)
        for t in flat(got):
            t.fill_(-1)
        graph.replay()
        assert same(got, want), name


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def same(got: Any, want: Any) -> bool:
    return all(torch.equal(g, w) for g, w in zip(flat(got), flat(want), strict=True))


def own_launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Filled with the launches that are Triton's own from now on."""
    from fxfuse.kernels import prepared

    found: list[Any] = []
    own = prepared.Launch._ordinary
    monkeypatch.setattr(prepared.Launch, "_ordinary", lambda self, tensors: (found.append(self.kernel), own(self, tensors))[1])
    return found


@paths
def test_all_but_the_first_launch_are_prepared(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = own_launches(monkeypatch)
    for name, call in calls(path).items():
        first = call()
        assert found, name
        found.clear()
        for _ in range(3):
            assert same(call(), first), name
        assert not found, name


@paths
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_other_tensors_of_the_same_shapes(path: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also misaligned ones: what was prepared for aligned ones is not used."""
    for call in calls(path).values():
        call()
    for _ in range(3):
        for name, call in calls(path, shift).items():
            got = call()
            with monkeypatch.context() as patch:
                patch.setattr("fxfuse.kernels.prepared.VERSION", (0, 0))
                plans.forget()
                want = call()
            plans.forget()
            assert same(got, want), name
        for call in calls(path).values():
            call()


@paths
def test_a_prepared_launch_is_captured(path: str) -> None:
    for name, call in calls(path).items():
        want = call()
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call()
        for t in flat(got):
            t.fill_(-1)
        graph.replay()
        assert same(got, want), name


@paths
def test_launch_hooks_see_prepared_launches(path: str) -> None:
    seen: list[Any] = []
    hook = triton.knobs.runtime.launch_enter_hook
    for call in calls(path).values():
        call()
        hook.add(watch := seen.append)
        call()
        hook.remove(watch)
        assert seen
        seen.clear()
