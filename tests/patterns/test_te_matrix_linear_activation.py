"""Linear, bias or none, and activation over TransformerEngine's shapes, dtypes and requires_grad subsets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import te
import torch
import torch.nn.functional as F
from te import BF16, DTYPES, FP16, FP32, INPUTS, WEIGHTS, Site, filled
from torch import Tensor

import fxfuse

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu2": lambda y: F.relu(y) ** 2,
    "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
}
activations = pytest.mark.parametrize("name", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
SHAPES = [(x, w) for w in WEIGHTS for x in INPUTS]


def layer(name: str, dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, int], *, bias: bool = True, **more: object) -> Site:
    """One linear with activation and what must happen to it."""
    act = ACTIVATIONS[name]
    shapes = [filled(x, w[1]), w, (w[0],)][: 3 if bias else 2]
    return te.site(f"{name} {dtype} {shapes} {more}", lambda *t: act(F.linear(*t)), shapes, dtype, f"linear_{name}", **more)


@dtypes
@activations
def test_shapes_forward_and_gradients(name: str, dtype: torch.dtype) -> None:
    shapes = SHAPES if name == "gelu" else te.share(SHAPES, dtype)
    te.check([layer(name, dtype, *shape) for shape in shapes])


@activations
def test_every_subset_of_gradients(name: str) -> None:
    biased = [layer(name, FP32, (4, 2, 4, -1), (64, 32), grads=g) for g in te.subsets(3)]
    te.check([*biased, *[layer(name, BF16, (4, 2, 4, -1), (64, 32), bias=False, grads=g) for g in te.subsets(2)]])


@activations
def test_inference(name: str) -> None:
    sites = [layer(name, dtype, *shape) for dtype in DTYPES.values() for shape in te.share(SHAPES, dtype)]
    te.check([*sites, *[layer(name, BF16, x, (3, 5), bias=False) for x in INPUTS]], train=False)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_linear_with_bias_alone_stays_one_product(dtype: torch.dtype) -> None:
    shapes = [(w, x) for w in ((32, 64), (3, 5)) for x in ((-1,), (1, 7, -1), (8, 2, 10, -1))]
    sites = [te.site(f"{w} {x}", F.linear, [filled(x, w[1]), w, (w[0],)], dtype) for w, x in shapes]
    report = te.check(sites)
    assert report.graphs[0].after.count("torch.ops.aten.addmm.default") == len(sites)


class Stack(torch.nn.Module):
    """Two layers with activation and a residual: several fusions, several plans."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + x


@pytest.mark.parametrize("order", ["train infer train infer", "infer train infer train"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_training_and_inference_alternate(dtype: torch.dtype, order: str) -> None:
    model = Stack().to(dtype)
    compiled = torch.compile(model, backend="fxfuse", fullgraph=True, options={"lower": "eager"})
    for phase in order.split():
        for _ in range(3):
            with torch.no_grad():
                for p in model.parameters():
                    p.uniform_(-0.5, 0.5)
            x = te.uniform(5, 1, 32, dtype=dtype, grad=phase == "train")
            _check_step(model, compiled, x, phase)
    info = fxfuse.plan_info()
    assert (info.builds, info.hits) == (2, 10)
    assert [r.count("linear_gelu") for r in fxfuse.reports()] == [1, 1]


def _check_step(model: Stack, compiled: Callable[[Tensor], Tensor], x: Tensor, phase: str) -> None:
    exact_model = Stack().double()
    exact_model.load_state_dict(model.state_dict())
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2)] + [
        x.detach().double().requires_grad_(x.requires_grad)
    ]
    results: list[list[Tensor]] = []
    for run, leaf in zip((compiled, model, exact_model), leaves, strict=True):
        owner = exact_model if run is exact_model else model
        owner.zero_grad()
        with torch.inference_mode(phase == "infer"):
            out = run(leaf)
        if phase == "train":
            out.backward(torch.ones_like(out))
        results.append([out.detach()] + [g for t in (leaf, *owner.parameters()) if (g := t.grad) is not None])
    for got, eager, exact in zip(*results, strict=True):
        assert te.excess(got, exact, x.dtype) <= max(1.0, 1.5 * te.excess(eager, exact, x.dtype))
