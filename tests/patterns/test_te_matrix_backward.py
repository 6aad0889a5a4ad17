"""TransformerEngine's backward fusions by themselves: dgrad + add, activation backward + bias gradient, gated activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import te
import torch
import torch.nn.functional as F
from te import BF16, DTYPES, FP16, FP32, Site
from torch import Tensor

import fxfuse

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu2": lambda y: F.relu(y) ** 2,
}
GATED = ("silu", "gelu", "gelu_tanh")


# ---------------------------------------------------------------- dgrad + the other branch's gradient
def linear_and_its_input(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The input leaves as an extra output, whose gradient is added to dgrad."""
    return F.linear(x, w), x * 1


@pytest.mark.parametrize("extra_grad", [True, False], ids=["extra_grad", "no_extra_grad"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=DTYPES)
def test_dgrad_accumulates_into_the_extra_outputs_gradient(dtype: torch.dtype, extra_grad: bool) -> None:
    def grads(fn: Callable[..., tuple[Tensor, Tensor]], x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        leaves = [t.detach().clone().requires_grad_() for t in (x, w)]
        outputs = fn(*leaves)[: 2 if extra_grad else 1]
        cotangents = [te.uniform(*o.shape, dtype=dtype, grad=False).to(o.dtype) for o in outputs]
        return torch.autograd.grad(outputs, leaves, cotangents)

    x, w = te.uniform(8, 16, dtype=dtype), te.uniform(24, 16, dtype=dtype)
    compiled = torch.compile(linear_and_its_input, backend="fxfuse", fullgraph=True, options={"lower": "eager"})
    got, exact = grads(compiled, x, w), grads(linear_and_its_input, x.double(), w.double())
    assert fxfuse.last_report().count("dgrad_add", graph="backward") == 1
    for g, e in zip(got, exact, strict=True):
        assert te.excess(g, e, dtype) <= 1


@pytest.mark.parametrize("shape", [(16, 32), (5, 1, 32), (4, 2, 4, 32), (1, 7, 32)], ids=str)
def test_residual_branch_adds_its_gradient_in_dgrad(shape: tuple[int, ...]) -> None:
    def branch(dtype: torch.dtype, grads: tuple[bool, ...]) -> Site:
        names = ("linear_add", "dgrad_add") if grads[0] else ("linear_add",)
        return te.site(
            f"{dtype} {grads}", lambda x, w, b: F.linear(x, w, b) + x, [shape, (32, 32), (32,)], dtype, *names, grads=grads
        )

    te.check([branch(dtype, g) for dtype in (FP32, BF16) for g in te.subsets(3) if any(g)])


# ---------------------------------------------------------------- activation backward + bias gradient
def biased(name: str, shape: Sequence[int], dtype: torch.dtype, grads: tuple[bool, bool] = (True, True)) -> Site:
    """An activation of a bias sum, no linear before it."""
    names = (f"{name}_backward_bias",) if grads[1] else ()
    label = f"{name} {shape} {dtype} {grads}"
    return te.site(label, lambda x, b: ACTIVATIONS[name](x + b), [shape, (32,)], dtype, *names, grads=grads)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_backward_with_bias_gradient(name: str) -> None:
    shapes = [(32, 32), (32, 1, 32), (8, 2, 2, 32)]
    te.check([biased(name, s, d) for s, d in itertools.product(shapes, DTYPES.values())])


def test_frozen_bias_leaves_the_activation_backward_alone() -> None:
    te.check([biased(name, (8, 2, 2, 32), FP32, (True, False)) for name in ACTIVATIONS])


def test_activation_backward_without_bias_is_not_fused() -> None:
    te.check([te.site(name, act, [shape], FP32) for name, act in ACTIVATIONS.items() for shape in ((2, 13), (32, 1, 32))])


@pytest.mark.parametrize("shape", [(37,), (1, 37)], ids=str)
def test_one_row_has_no_bias_gradient_to_sum(shape: tuple[int, ...]) -> None:
    te.check([te.site(name, act, [shape], FP32) for name, act in ACTIVATIONS.items()])


@pytest.mark.parametrize("shape", [(37,), (1, 37)], ids=str)
def test_one_row_of_a_gated_activation_has_no_bias_gradient_to_sum(shape: tuple[int, ...]) -> None:
    te.check([gated(name, shape, FP32) for name in OTHERS])


# ---------------------------------------------------------------- gated activations of a packed input
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "reglu": F.relu,
    "glu": torch.sigmoid,
    "sreglu": ACTIVATIONS["relu2"],
    "qgeglu": lambda y: y * torch.sigmoid(1.702 * y),
}


def gated(name: str, shape: Sequence[int], dtype: torch.dtype) -> Site:
    """``act(first half) * second half``, as TransformerEngine orders them."""
    act = {**ACTIVATIONS, **OTHERS}[name]

    def fn(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return act(gate) * up

    names = (f"gated_{name}_backward",) if name in GATED else ()
    return te.site(f"{name} {shape} {dtype}", fn, [(*shape[:-1], 2 * shape[-1])], dtype, *names)


@pytest.mark.parametrize("name", [*GATED, *OTHERS])
def test_gated_activation_backward(name: str) -> None:
    shapes = [(2, 13), (32, 1, 32)] + [(37,)] * (name in GATED)
    te.check([gated(name, s, d) for s, d in itertools.product(shapes, DTYPES.values())])


@pytest.mark.parametrize("name", GATED)
def test_gated_activation_backward_needs_both_gradients(name: str) -> None:
    def halves(grads: tuple[bool, ...]) -> Site:
        names = (f"gated_{name}_backward",) if all(grads) else ()
        return te.site(f"{grads}", lambda g, u: ACTIVATIONS[name](g) * u, [(8, 16), (8, 16)], BF16, *names, grads=grads)

    te.check([halves(g) for g in te.subsets(2)])


# ---------------------------------------------------------------- what is left to Inductor
@pytest.mark.inductor
def test_rms_norm_backward_and_add_is_no_more_kernels_than_inductors() -> None:
    from torch._inductor import metrics

    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return F.rms_norm(x, (64,), w, 1e-5), x * 1

    kernels = []
    for backend in ("inductor", "fxfuse"):
        torch._dynamo.reset()
        metrics.reset()
        x, w = torch.rand(19, 64, requires_grad=True), torch.rand(64, requires_grad=True)
        y, extra = torch.compile(fn, backend=backend)(x, w)
        (y.sum() + extra.square().sum()).backward()
        kernels.append(metrics.generated_kernel_count)
    assert kernels[1] == kernels[0] > 0
