"""Grouped linears and grouped MLPs on the sizes, data and tolerances of TransformerEngine's ``test_grouped_mlp.py``.

    python3 -m pytest tests/test_grouped_matrix.py -m gpu -q -p no:cacheprovider -W default --noconftest -c /dev/null --rootdir=.

Four groups, one of them empty, in every rotation of their sizes; rows past the last group. What is compared is in fp64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))

import reference_moe
from reference_moe import BF16, F16, F32

import fxfuse
from fxfuse.ops import grouped_linear, grouped_mlp

GROUPS, WIDTH = 4, 128
TOLERANCES = {F32: (1e-3, 1e-5), F16: (1e-3, 1e-5), BF16: (1.6e-2, 1e-5)}
"""rtol and atol of a product in each dtype; fp32 has that of fp16 there, as TF32 may be allowed."""
MLP_TOLERANCE = (0.125, 0.25)
CLOSE = 1e-2
"""What a grouped MLP has to reach here, relative in norm."""
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
rotations = pytest.mark.parametrize("first", range(GROUPS))
lowerings = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def uniform(*shape: int, dtype: torch.dtype, device: str, low: float = -0.25, high: float = 0.25) -> Tensor:
    """Numbers that fp8 holds, so that operands are exact in every dtype."""
    values = torch.empty(shape).uniform_(low, high).to(torch.float8_e4m3fn)
    return values.to(torch.float32).to(device, dtype)


def rotated(sizes: Sequence[int], first: int) -> list[int]:
    return [*sizes[first:], *sizes[:first]]


def ready(function: Callable[..., Tensor], compiled: bool, device: str) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    options = {"lower": "auto" if device == "cuda" else "eager"}
    return torch.compile(function, backend="fxfuse", dynamic=False, options=options) if compiled else function


def gradients(function: Callable[..., Tensor], args: Sequence[Any], trains: Sequence[bool], grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of what trains."""
    leaves = [a.detach().requires_grad_(t) if isinstance(a, Tensor) else a for a, t in zip(args, trains, strict=True)]
    out = function(*leaves)
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    return [out.detach(), *(torch.autograd.grad(out, wanted, grad.to(out.dtype)) if wanted else [])]


def doubles(args: Sequence[Any]) -> list[Any]:
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]


@devices
@lowerings
@rotations
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("trains", ["all", "input", "weight", "nothing"])
def test_grouped_linear(trains: str, bias: bool, dtype: torch.dtype, first: int, compiled: bool, device: str) -> None:
    torch.manual_seed(first)
    sizes, padding = rotated([0, 128, 256, 384], first), 256
    offs = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    rows, used = sum(sizes) + padding, sum(sizes)
    x, w = uniform(rows, WIDTH, dtype=dtype, device=device), uniform(GROUPS, WIDTH, WIDTH, dtype=dtype, device=device)
    b = uniform(GROUPS, WIDTH, dtype=dtype, device=device) if bias else None
    grad = uniform(rows, WIDTH, dtype=dtype, device=device)
    mask = [trains in ("all", "input"), trains in ("all", "weight"), False, bias and trains in ("all", "weight")]
    run = ready(grouped_linear, compiled, device)
    got = gradients(run, [x, w, offs, b], mask, grad)
    want = gradients(reference_moe.grouped_linear, doubles([x, w, offs, b]), mask, grad)
    assert not got[0][used:].any()
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=TOLERANCES[dtype][0], atol=max(TOLERANCES[dtype][1], 1e-3 * e.abs().max()))


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "clamped_qgeglu": {"limit": 7.0, "alpha": 1.702, "layout": "interleaved"},
    "srelu": {"activation": "relu2", "gated": False},
}


def mlp_case(kind: str, dtype: torch.dtype, hidden: int, first: int, bias: bool, device: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments in the order of ``reference_moe.ARGUMENTS`` and options: each token has one expert."""
    options, sizes = ACTIVATIONS[kind], rotated([256 * n for n in range(GROUPS)], first)
    ids = torch.repeat_interleave(torch.arange(GROUPS), torch.tensor(sizes))
    ids = torch.cat([ids, torch.full((64,), GROUPS)])  # of no expert
    ids = ids[torch.randperm(len(ids))].unsqueeze(1).to(device)
    wide = hidden if kind == "srelu" else 2 * hidden
    x, w = uniform(len(ids), hidden, dtype=dtype, device=device), uniform(GROUPS, wide, hidden, dtype=dtype, device=device)
    down = uniform(GROUPS, hidden, hidden, dtype=dtype, device=device)
    p = uniform(len(ids), 1, dtype=F32, device=device, low=0, high=1)
    biases = [uniform(GROUPS, n, dtype=dtype, device=device, low=-0.5, high=0.5) if bias else None for n in (wide, hidden)]
    return [x, w, down, ids, p, None, *biases], options


def named(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    return lambda *args: function(**dict(zip(reference_moe.ARGUMENTS, args, strict=True)), **options)


@devices
@lowerings
@rotations
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "hidden"), [(BF16, 128), (BF16, 256), (F16, 256)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_grouped_mlp(bias: bool, dtype: torch.dtype, hidden: int, kind: str, first: int, compiled: bool, device: str) -> None:
    torch.manual_seed(first)
    args, options = mlp_case(kind, dtype, hidden, first, bias, device)
    grad = uniform(len(args[0]), hidden, dtype=dtype, device=device)
    trains = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    got = gradients(ready(named(grouped_mlp, options), compiled, device), args, trains, grad)
    want = gradients(named(reference_moe.per_expert, options), doubles(args), trains, grad)
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), e, rtol=MLP_TOLERANCE[0], atol=MLP_TOLERANCE[1])
        assert (g.double() - e).norm() <= CLOSE * e.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_grouped_mlp_in_a_cuda_graph(kind: str) -> None:
    """Another routing and other data after the capture."""
    args, options = mlp_case(kind, BF16, 256, 0, True, "cuda")
    run = ready(named(grouped_mlp, options), True, "cuda")
    with torch.no_grad():
        for _ in range(3):
            run(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(*args)
        for first in range(1, GROUPS):
            torch.manual_seed(first)
            for mine, new in zip(args, mlp_case(kind, BF16, 256, first, True, "cuda")[0], strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(new)
            graph.replay()
            want = named(reference_moe.per_expert, options)(*doubles(args))
            assert (out.double() - want).norm() <= CLOSE * want.norm()


@devices
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_one_group(kind: str, device: str) -> None:
    torch.manual_seed(0)
    args, options = mlp_case(kind, BF16, 128, 0, True, device)
    args = [a[:1] if isinstance(a, Tensor) and i in (1, 2, 6, 7) else a for i, a in enumerate(args)]
    args[3] = torch.zeros_like(args[3])
    got = ready(named(fxfuse.ops.grouped_mlp, options), True, device)(*args)
    want = named(reference_moe.per_expert, options)(*doubles(args))
    assert (got.double() - want).norm() <= CLOSE * want.norm()
