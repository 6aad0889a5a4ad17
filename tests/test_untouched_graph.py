"""With nothing fused, the graphs that reach Inductor are Inductor's own, node for node, in the forward and in the backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import fxfuse
from fxfuse import compat

FP32, BF16 = torch.float32, torch.bfloat16
Signature = list[tuple[str, ...]]


class Activations(nn.Module):
    """One of each operator whose decomposition is held back while fusions are looked for, and products between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        x = self.norm(self.down(F.gelu(x, approximate="tanh")))
        x = torch.sigmoid(F.silu(x)) + F.relu(x)
        return torch.tanh(x) @ self.down.weight


class Tiny(nn.Module):
    """Products that Inductor spells as multiply and sum on a CPU, a batch of products, and a residual of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = nn.Linear(5, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        small = self.row(x[:1, :5]) + self.column(x[:1])
        outer = x[:, :1] @ x[:1, :4]
        batch = torch.bmm(x[None], x.t()[None])[0]
        return torch.addmm(batch[:, :3], x, self.row.weight.new_ones(16, 3)) * small + outer.sum() + x.var(0).sum()


def signature(gm: GraphModule) -> Signature:
    """Every node by number, with its operator, arguments and metadata."""
    number = {n: i for i, n in enumerate(gm.graph.nodes)}

    def plain(a: Any) -> str:
        return str(torch.fx.map_arg(a, lambda n: f"%{number[n]}"))

    def metadata(v: Any) -> str:
        if isinstance(v, Tensor):
            return f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device}"
        return str(v) if isinstance(v, (int, torch.SymInt)) else type(v).__name__

    return [(n.op, str(n.target), plain(n.args), plain(n.kwargs), metadata(n.meta.get("val"))) for n in gm.graph.nodes]


class Recorder:
    """Stands for Inductor's compiler of one graph: keeps the graph and runs it as it is."""

    def __init__(self) -> None:
        self.graphs: list[Signature] = []

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        self.graphs.append(signature(gm))
        return compat.boxed(gm.forward)


def graphs_of(model: nn.Module, x: Tensor, backend: Any, recorder: Recorder, train: bool, dynamic: bool, **options: Any) -> list[Signature]:
    """The graphs of one step."""
    torch._dynamo.reset()
    more = {"options": options} if options else {}
    with torch.set_grad_enabled(train):
        out = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True, **more)(x)
        if train:
            out.float().square().sum().backward()
    return recorder.graphs


def inductors(gm: GraphModule, example_inputs: Sequence[Any], recorder: Recorder) -> Callable[..., Any]:
    """Inductor without its last step."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, inner_compile=recorder)


@pytest.mark.parametrize("build", [Activations, Tiny], ids=["activations", "tiny"])
@pytest.mark.parametrize(
    ("dtype", "train", "dynamic"),
    list(itertools.product((FP32, BF16), (True, False), (False, True))),
    ids=lambda v: str(v).removeprefix("torch."),
)
def test_graph_is_inductors(
    build: Callable[[], nn.Module], dtype: torch.dtype, train: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build().to(dtype), torch.randn(6, 16).to(dtype)
    theirs, ours = Recorder(), Recorder()
    graphs_of(model, x, lambda gm, inputs: inductors(gm, inputs, theirs), theirs, train, dynamic)
    monkeypatch.setattr(compat, "compile_fx_inner", ours)
    graphs_of(model, x, "fxfuse", ours, train, dynamic, fusions={"only": []})
    _assert_equal(ours.graphs, theirs.graphs)
    assert fxfuse.last_report().fused == []


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_graph_is_inductors_where_no_fusion_applies(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def pointwise(x: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x) + F.silu(x).sin() + torch.sigmoid(x) * torch.tanh(x), (16,)) + F.relu(x) ** 2

    x = torch.randn(6, 16, requires_grad=train)
    theirs, ours = Recorder(), Recorder()
    graphs_of(pointwise, x, lambda gm, inputs: inductors(gm, inputs, theirs), theirs, train, False)
    monkeypatch.setattr(compat, "compile_fx_inner", ours)
    graphs_of(pointwise, x, "fxfuse", ours, train, False, autotune="off")
    _assert_equal(ours.graphs, theirs.graphs)
    assert fxfuse.last_report().fused == []


@pytest.mark.parametrize("build", [Activations, Tiny], ids=["activations", "tiny"])
def test_results_are_inductors_bit_for_bit(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(), torch.randn(6, 16)
    results = []
    monkeypatch.setattr(compat, "compile_fx_inner", Recorder())
    for backend, options in ((lambda gm, inputs: inductors(gm, inputs, Recorder()), {}), ("fxfuse", {"fusions": {"only": []}})):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        torch._dynamo.reset()
        out = torch.compile(model, backend=backend, **({"options": options} if options else {}))(leaf)
        out.square().sum().backward()
        results.append([out.detach(), leaf.grad, *[p.grad.clone() for p in model.parameters()]])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def _assert_equal(ours: list[Signature], theirs: list[Signature]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        differing = [(a, b) for a, b in zip(mine, other, strict=False) if a != b]
        assert not differing, f"{len(differing)} of {len(other)} nodes differ, first: {differing[0]}"
        assert len(mine) == len(other)
