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
from torch.fx.experimental.proxy_tensor import make_fx

import fxfuse
from fxfuse import compat, deferred

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


def signature(graph: torch.fx.Graph) -> Signature:
    """Every node by number, with its operator, arguments, metadata and the partitioner's tag; not its name."""
    number = {n: i for i, n in enumerate(graph.nodes)}

    def plain(a: Any) -> str:
        return str(torch.fx.map_arg(a, lambda n: f"%{number[n]}"))

    def metadata(v: Any) -> str:
        if isinstance(v, Tensor):
            return f"{v.dtype} {tuple(v.shape)} {v.stride()} {v.device}"
        return str(v) if isinstance(v, (int, torch.SymInt)) else type(v).__name__

    def row(n: torch.fx.Node) -> tuple[str, ...]:
        target = "" if n.op == "placeholder" else str(n.target)
        return n.op, target, plain(n.args), plain(n.kwargs), metadata(n.meta.get("val")), str(n.meta.get("partitioner_tag"))

    return [row(n) for n in graph.nodes]


class Recorder:
    """Stands for Inductor's compiler of one graph: keeps the graph and runs it as it is."""

    def __init__(self) -> None:
        self.joint: list[Signature] = []
        self.compiled: list[Signature] = []
        self.saved: list[list[str]] = []
        """Of each compiled graph, dtype and size of what it returns."""

    def before_partition(self, graph: torch.fx.Graph) -> None:
        """A joint pass that comes last."""
        self.joint.append(signature(graph))

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        self.compiled.append(signature(gm.graph))
        outputs = [n.meta["val"] for n in gm.graph.output_node().all_input_nodes]
        self.saved.append(sorted(f"{v.dtype} {v.numel()}" for v in outputs if isinstance(v, Tensor)))
        return compat.boxed(gm.forward)


def step(model: Callable[..., Tensor], x: Tensor, backend: Any, train: bool, dynamic: bool, **options: Any) -> Tensor:
    """Compile and run once, with a backward if it trains."""
    torch._dynamo.reset()
    more = {"options": options} if options else {}
    with torch.set_grad_enabled(train):
        out = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True, **more)(x)
        if train:
            out.float().square().sum().backward()
    return out.detach()


def inductors(recorder: Recorder) -> Callable[..., Any]:
    """Inductor without its last step."""
    from torch._inductor.compile_fx import compile_fx

    patches = {"joint_custom_pre_pass": recorder.before_partition}
    return lambda gm, inputs: compile_fx(gm, inputs, inner_compile=recorder, config_patches=patches)


def compare(
    model: Callable[..., Tensor], x: Tensor, train: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Inductor's graphs and ours: joint ones and those of an inference are equal, a partition hands over as much."""
    theirs, ours = Recorder(), Recorder()
    step(model, x, inductors(theirs), train, dynamic)
    monkeypatch.setattr(compat, "compile_fx_inner", ours)
    step(model, x, "fxfuse", train, dynamic, joint_custom_pre_pass=ours.before_partition, **options)
    assert fxfuse.last_report().fused == []
    _assert_equal(ours.joint, theirs.joint)
    if not train:
        _assert_equal(ours.compiled, theirs.compiled)
    assert ours.saved == theirs.saved


def _assert_equal(ours: list[Signature], theirs: list[Signature]) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        differing = [(a, b) for a, b in zip(mine, other, strict=False) if a != b]
        assert not differing, f"{len(differing)} of {len(other)} nodes differ, first: {differing[0]}"
        assert len(mine) == len(other)


SITUATIONS = list(itertools.product((FP32, BF16), (True, False), (False, True)))


@pytest.mark.parametrize(("dtype", "train", "dynamic"), SITUATIONS, ids=lambda v: str(v).removeprefix("torch."))
def test_graph_is_inductors(dtype: torch.dtype, train: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Activations().to(dtype), torch.randn(6, 16).to(dtype)
    compare(model, x, train, dynamic, monkeypatch, fusions={"only": []})


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_tiny_products_are_spelled_as_inductor_spells_them(
    dtype: torch.dtype, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(Tiny().to(dtype), torch.randn(6, 16).to(dtype), train, False, monkeypatch, fusions={"only": []})


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_graph_is_inductors_where_no_fusion_applies(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def pointwise(x: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x) + F.silu(x).sin() + torch.sigmoid(x) * torch.tanh(x), (16,)) + F.relu(x) ** 2

    compare(pointwise, torch.randn(6, 16, requires_grad=train), train, False, monkeypatch)


@pytest.mark.parametrize("build", [Activations, Tiny], ids=["activations", "tiny"])
def test_results_are_inductors_bit_for_bit(build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build(), torch.randn(6, 16)
    monkeypatch.setattr(compat, "compile_fx_inner", Recorder())
    results = []
    for backend, options in ((inductors(Recorder()), {}), ("fxfuse", {"fusions": {"only": []}})):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        out = step(model, leaf, backend, True, False, **options)
        results.append([out, leaf.grad, *[p.grad.clone() for p in model.parameters()]])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_an_input_that_beta_leaves_out_is_not_read() -> None:
    """Inductor multiplies it by zero, and a NaN in it comes through."""

    def products(left_out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        batches = torch.baddbmm(left_out, a.expand(1, 3, 4), b.expand(1, 4, 5), beta=0)
        return F.relu(torch.addmm(left_out, a, b, beta=0, alpha=2)), torch.addmm(left_out, a, b, beta=0.0), batches

    shapes = [torch.empty(5), torch.empty(3, 4), torch.empty(4, 5)]
    graph = make_fx(products, deferred.capture_table({}))(*shapes).graph
    assert not next(iter(graph.find_nodes(op="placeholder"))).users
