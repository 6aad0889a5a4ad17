"""Expert blocks on a GPU: as near to fp64 as eager, the same bits on every run, without a host sync."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

import reference_moe
from moe_blocks import EXPERTS, masked, scattered, unmasked

import fxfuse
from fxfuse import choose

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor
BF16 = torch.bfloat16
ROUTINGS = {
    "balanced": reference_moe.balanced,
    "zipf": reference_moe.zipf,
    "one idle": reference_moe.one_idle,
    "one busy": reference_moe.one_busy,
}
BLOCKS = {"masked": masked, "unmasked": unmasked, "scattered": scattered}


def tensors(block: str, tokens: int, chosen: int, hidden: int = 128, inner: int = 72) -> list[Tensor]:
    """x, router weights and the experts' weights."""
    separate = block == "scattered"
    torch.manual_seed(0)
    shapes = [(EXPERTS, inner if separate else 2 * inner, hidden), (EXPERTS, hidden, inner)]
    shapes += [(EXPERTS, inner, hidden)] if separate else []
    weights = [torch.randn(s, device="cuda") * s[-1] ** -0.5 for s in shapes]
    p = torch.rand(tokens, chosen, device="cuda").to(torch.float32 if separate else BF16)
    return [torch.randn(tokens, hidden, device="cuda").to(BF16), p, *[w.to(BF16) for w in weights]]


def step(function, args: Sequence[Tensor], ids: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    leaves = [a.detach().requires_grad_() for a in args]
    x, p, *weights = leaves
    out = function(x, ids, p, *weights)
    cotangent = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def exact(args: Sequence[Tensor], ids: Tensor) -> list[Tensor]:
    """The same in fp64, expert after expert."""

    def function(x: Tensor, ids: Tensor, p: Tensor, w: Tensor, w_down: Tensor, w_up: Tensor | None = None) -> Tensor:
        return reference_moe.per_expert(x, w, w_down, ids, p, w_up=w_up)

    return step(function, [a.double() for a in args], ids)


def errors(got: Sequence[Tensor], true: Sequence[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, true, strict=True)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens,chosen", [(1, 2), (71, 1), (127, 4), (1024, 2)])
@pytest.mark.parametrize("block", BLOCKS)
def test_is_as_near_to_fp64_as_eager(block: str, tokens: int, chosen: int, routing: str) -> None:
    torch._dynamo.reset()
    args = tensors(block, tokens, chosen)
    ids = ROUTINGS[routing](tokens, chosen, EXPERTS).cuda()
    if block == "scattered" and any(len(set(row)) < chosen for row in ids.tolist()):
        pytest.skip("it counts an expert once a token")
    run = torch.compile(BLOCKS[block], backend="fxfuse", fullgraph=True, dynamic=False)
    got, again = step(run, args, ids), step(run, args, ids)
    assert fxfuse.last_report().count("grouped_mlp", "backward") == 1
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    true = exact(args, ids)
    slack = 2**-7 if tokens == 1 else 1e-4  # the relative error of a router gradient of two numbers is chance
    for mine, eager in zip(errors(got, true), errors(step(BLOCKS[block], args, ids), true), strict=True):
        assert mine <= 1.5 * eager + slack


SIZES = {
    "T 8191, K 8": {"tokens": 8191, "chosen": 8, "experts": 16, "width": 256, "inner": 96},
    "H I 2880": {"tokens": 71, "chosen": 4, "experts": 8, "width": 2880, "inner": 2880},
    "H 768, I 40": {"tokens": 1024, "chosen": 1, "experts": 8, "width": 768, "inner": 40},
    "H 40, I 768": {"tokens": 127, "chosen": 8, "experts": 9, "width": 40, "inner": 768},
    "T 3": {"tokens": 3, "chosen": 2, "experts": 4, "width": 2880, "inner": 768},
    "odd": {"tokens": 127, "chosen": 2, "experts": 5, "width": 37, "inner": 9},
}
SLACK = {torch.float32: 1e-6, torch.float16: 2e-4, BF16: 1e-3}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", SLACK, ids=str)
@pytest.mark.parametrize("lowering", ["inline", "triton", "hopper"])
def test_every_lowering_of_the_operator(lowering: str, dtype: torch.dtype, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, for every routing: as near to fp64 as eager, the same bits again, never waiting for the host."""
    took: set[str] = set()

    def forced(node: Any, candidates: Sequence[Any], *_: Any) -> Any:
        found = next((c for c in candidates if c.name == lowering), None)
        took.add("none" if found is None else found.name)
        return found or candidates[0], "forced"

    torch._dynamo.reset()
    monkeypatch.setattr(choose, "_fastest", forced)
    permuted, oss = size == "T 3", {"layout": "interleaved", "limit": 7.0, "alpha": 1.702} if size == "H I 2880" else {}
    made = reference_moe.Block(dtype=dtype, routing="balanced", biases=bool(oss), **SIZES[size], **oss)
    run = torch.compile(made.of(fxfuse.ops.grouped_mlp), backend="fxfuse", fullgraph=True, dynamic=False)
    for routing in reference_moe.ROUTINGS:
        torch.manual_seed(0)
        args = [None if a is None else a.detach().cuda() for a in dataclasses.replace(made, routing=routing).inputs()]
        args = [a * (2 * a.shape[-1] ** -0.5) if a is not None and a.dim() == 3 else a for a in args]
        args[0] = args[0].t().contiguous().t() if permuted else args[0]
        got = operator_step(run, args)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = operator_step(run, args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        doubles = [a.double() if a is not None and a.is_floating_point() else a for a in args]
        true = operator_step(made.of(reference_moe.per_expert), doubles)
        eager = operator_step(made.of(reference_moe.per_expert), args)
        for i, (mine, theirs) in enumerate(zip(distances(got, true), distances(eager, true), strict=True)):
            assert mine <= 1.5 * theirs + SLACK[dtype], (routing, i)
    if "none" in took:
        pytest.skip(f"{lowering} does not take this")


def operator_step(function: Any, args: Sequence[Tensor | None]) -> list[Tensor]:
    """Output and the gradients of all floats."""
    leaves = [a.detach().requires_grad_(a.is_floating_point()) if a is not None else None for a in args]
    out = function(*leaves)
    cotangent = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, [a for a in leaves if a is not None and a.requires_grad], cotangent)]


def distances(got: Sequence[Tensor], true: Sequence[Tensor]) -> list[float]:
    """Relative errors, in norm; of what is exactly zero the norm itself."""
    return [((a.double() - b).norm() / (b.norm() if b.any() else 1.0)).item() for a, b in zip(got, true, strict=True)]


def test_runs_inside_a_cuda_graph_with_changing_routing() -> None:
    args = tensors("unmasked", 256, 2)
    x, p, *weights = args
    ids = reference_moe.balanced(256, 2, EXPERTS).cuda()
    with torch.no_grad():
        run = torch.compile(unmasked, backend="fxfuse", fullgraph=True, dynamic=False)
        run(x, ids, p, *weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, ids, p, *weights)
        for seed in range(3):
            torch.manual_seed(seed)
            ids.copy_(torch.rand(256, EXPERTS, device="cuda").topk(2).indices)
            graph.replay()
            torch.testing.assert_close(out, unmasked(x, ids, p, *weights), rtol=2e-2, atol=2e-2)


def test_rows_of_no_expert_are_zero_in_poisoned_memory() -> None:
    args = tensors("unmasked", 64, 2)
    ids = reference_moe.balanced(64, 2, EXPERTS).cuda()
    ids[5], ids[9, 1] = EXPERTS, -1
    poison = torch.full((2**26,), float("nan"), device="cuda")
    del poison
    got = step(lambda x, i, p, *w: fxfuse.ops.grouped_mlp(x, w[0], w[1], i, p), args, ids)
    assert all(t.isfinite().all() for t in got)
    assert not got[0][5].any() and not got[1][5].any() and not got[2][5].any() and got[2][9, 1] == 0


def test_more_than_two_to_the_31_elements_in_a_weight() -> None:
    experts, hidden, inner = 40, 4096, 6720  # 2.2e9 elements of w_gate_up
    w_up = torch.zeros(experts, 2 * inner, hidden, device="cuda", dtype=BF16)
    w_down = torch.zeros(experts, hidden, inner, device="cuda", dtype=BF16)
    w_up[-1].normal_(std=hidden**-0.5)
    w_down[-1].normal_(std=inner**-0.5)
    x = torch.randn(16, hidden, device="cuda").to(BF16)
    ids = torch.full((16, 1), experts - 1, device="cuda")
    got = fxfuse.ops.grouped_mlp(x, w_up, w_down, ids, None)
    alone = fxfuse.ops.grouped_mlp(x, w_up[-1:].clone(), w_down[-1:].clone(), torch.zeros_like(ids), None)
    assert torch.equal(got, alone) and got.abs().sum() > 0
