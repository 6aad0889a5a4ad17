"""Further outputs that a model holds transposed: the gradient of a weight that is stored (K, N), as GPT-2's are."""

from __future__ import annotations

from collections.abc import Iterator

import cases
import compare
import local_fusions
import pytest
import torch
from cases import normal
from torch import Tensor, nn

import fxfuse

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does

BOTH, BIASED = "dgrad_wgrad_scale", "dgrad_wgrad_bias_scale"
SCALES = (BIASED, BOTH, "dgrad_scale", "wgrad_scale")
X, W, B = (4, 6, 10), (10, 8), (8,)

table = cases.Table(only=SCALES, fuses={BOTH: 1})


@table.case(normal(X, W))
def stored_in_out(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * 0.3


@table.case(normal((7, 10), W))
def matrix(x: Tensor, w: Tensor) -> Tensor:
    return 3.0 * torch.mm(x, w)


@table.case(normal(X, W, B), fuses={BIASED: 1})
def conv1d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x.view(-1, x.size(-1)), w).view(4, 6, 8) * 0.3


@table.case(normal(X, (8, 10)))
def stored_out_in(x: Tensor, w: Tensor) -> Tensor:
    return nn.functional.linear(x, w) * 0.3


@table.case(normal(X, W, frozen=[0]), fuses={})  # the first output is looked for as it is written
def only_the_weight_trains(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * 0.3


@table.case(normal(X, W, frozen=[1]), fuses={"dgrad_scale": 1})
def only_the_input_trains(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * 0.3


@table.case(normal(X, W, dtype=torch.bfloat16), tolerance=2e-2)
def in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * 0.3


@table.case(normal(X, W), dynamic_dims=((0, 0), (0, 1)), other_inputs=(normal((3, 5, 10), W), normal((2, 9, 10), W)))
def any_number_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * 0.3


@table.case(normal(X, W))
def gradient_used_further(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.exp()) * 0.3


@table.case(normal(X, (80,)))
def gradient_viewed(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.view(10, 8)) * 0.3


@table.case(normal(X, W), fuses={BOTH: 2})
def shared_weight(x: Tensor, w: Tensor) -> Tensor:
    return (torch.sin(x) @ w) * 0.3 + (x @ w) * 0.5


@table.case(normal(X, W), fuses={})
def no_scale(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@table.case(normal(X, W, B), fuses={})
def a_tensor_of_factors(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (x @ w) * s


class TwoScales(torch.autograd.Function):
    """A linear whose two gradients are scaled differently."""

    @staticmethod
    def forward(ctx, x, w):  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (grad * 0.3) @ w.t(), x.t() @ (grad * 0.5)


@table.case(normal((7, 10), W), fuses={"dgrad_scale": 1})
def another_scale_for_the_weight(x: Tensor, w: Tensor) -> Tensor:
    return TwoScales.apply(x, w)


@table.parametrize()
def test_scale_folded_into_both_gradients(case: cases.Case) -> None:
    cases.check(case)


def test_gradients_are_as_near_to_fp64_as_eagers() -> None:
    args = normal((64, 96), (96, 48), dtype=torch.bfloat16)()
    got = compare.run(cases.compiled(stored_in_out, only=[BOTH]), args)
    assert fxfuse.last_report().count(BOTH) == 1
    truth = compare.run(stored_in_out, compare.in_fp64(args))
    compare.assert_as_near_to_fp64(got, compare.run(stored_in_out, args), truth)


# ------------------------------------------------------------------------------------------------ in a forward


@pytest.fixture
def gram() -> Iterator[fxfuse.Fusion]:
    """A product with two results, of which the second is a matrix product."""

    @fxfuse.register_forward_fusion(name="local_gram", example={"x": "m k", "y": "m k"}, check_on_register=False)
    def pattern(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = x * y
        return torch.tanh(g), g.t() @ x

    @pattern.rewrite
    def _(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x * y), torch.einsum("mk,mn->kn", x * y, x)

    with local_fusions.unregistered_at_exit(pattern):
        yield pattern


@pytest.mark.usefixtures("gram")
@pytest.mark.parametrize("swapped", [False, True])
def test_strides_of_a_forward_output_stay(swapped: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = x * y
        return torch.tanh(g), x.t() @ g if swapped else g.t() @ x

    args = [torch.randn(6, 5), torch.randn(6, 5)]
    with torch.no_grad():
        got, want = cases.compiled(fn, only=["local_gram"])(*args), fn(*args)
    assert fxfuse.last_report().count("local_gram") == 1, fxfuse.last_report().why_not("local_gram")
    for a, b in zip(got, want, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("gram")
def test_the_product_of_another_value_is_no_output() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = x * y
        return torch.tanh(g), y.t() @ g

    with torch.no_grad():
        cases.compiled(fn, only=["local_gram"])(torch.randn(6, 5), torch.randn(6, 5))
    # multiplication commutes, so y may play the part of x; a third value may not
    assert fxfuse.last_report().count("local_gram") == 1

    def other(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        g = x * y
        return torch.tanh(g), z.t() @ g

    with torch.no_grad():
        cases.compiled(other, only=["local_gram"])(*[torch.randn(6, 5) for _ in range(3)])
    assert fxfuse.last_report().count("local_gram") == 0
