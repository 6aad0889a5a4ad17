"""One linear + GELU, written once, is found however a model spells it; what computes something else is not.

The fusions are identities (the pattern is put back), so every difference to eager comes from matching or splicing, and
where the model's spelling is the pattern's own the result has the bits of the unfused graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import cases
import local_fusions
import pytest
import torch
import torch.nn.functional as F
from cases import normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BF16, FP64 = torch.bfloat16, torch.float64


def linear_gelu(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x, w, b))


@pytest.fixture(scope="module", autouse=True)
def identities() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(*map(local_fusions.identity, (linear_gelu,))):
        yield


linear = cases.identities(linear_gelu)


def biased(*x: int, **options: object) -> cases.Inputs:
    return normal(x, (32, 16), (32,), **options)


def mixed(x: cases.Inputs, y: cases.Inputs) -> cases.Inputs:
    return lambda: [*x(), *y()]


for name, shape in {"matrix": (8, 16), "batch": (2, 4, 16), "four_dims": (2, 2, 2, 16), "vector": (16,)}.items():
    linear.case(biased(*shape), bit_equal=True, name=f"f_linear_{name}")(linear_gelu)
linear.case(normal((8, 16), (32, 16)), bit_equal=True, name="f_linear_matrix_without_bias")(linear_gelu)
linear.case(normal((2, 4, 16), (32, 16)), bit_equal=True, name="f_linear_batch_without_bias")(linear_gelu)
linear.case(biased(2, 4, 16), autocast=BF16, tolerance=2e-2, bit_equal=True, name="f_linear_under_autocast")(linear_gelu)


@linear.case(biased(8, 16), bit_equal=True)
def torch_addmm(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t()))


def matmul_plus_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w.t() + b)


linear.case(biased(8, 16), name="matmul_plus_bias_matrix")(matmul_plus_bias)
linear.case(biased(2, 4, 16), name="matmul_plus_bias_batch")(matmul_plus_bias)
linear.case(biased(16), name="matmul_plus_bias_vector")(matmul_plus_bias)
linear.case(biased(8, 16, frozen=(2,)), name="matmul_plus_frozen_bias")(matmul_plus_bias)
linear.case(biased(8, 16, frozen=(0,)), name="matmul_of_frozen_input")(matmul_plus_bias)
linear.case(biased(2, 4, 16), dynamic=True, other_inputs=(biased(3, 5, 16),), name="dynamic_matmul_plus_bias")(matmul_plus_bias)
linear.case(biased(8, 16, dtype=BF16), tolerance=2e-2, name="bfloat16_matmul_plus_bias")(matmul_plus_bias)


@linear.case(biased(8, 16))
def bias_plus_matmul(x, w, b):
    return F.gelu(b + x @ w.t())


@linear.case(biased(2, 2, 2, 16))
def bias_plus_matmul_of_four_dims(x, w, b):
    return F.gelu(b + torch.matmul(x, w.mT))


@linear.case(biased(2, 4, 16))
def einsum(x, w, b):
    return F.gelu(torch.einsum("bsk,mk->bsm", x, w) + b)


def transposed_input(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x.transpose(0, 1), w, b))


linear.case(biased(2, 4, 16), name="transposed_batch")(transposed_input)
linear.case(biased(2, 4, 16), train=False, name="transposed_batch_inference_is_a_bmm")(transposed_input)
linear.case(biased(2, 4, 16, frozen=(1, 2)), name="transposed_batch_frozen_weights_is_a_bmm")(transposed_input)
linear.case(biased(2, 3, 4, 16), train=False, name="transposed_four_dims_inference")(transposed_input)
linear.case(normal((2, 4, 16), (32, 16)), name="transposed_batch_without_bias")(transposed_input)


@linear.case(biased(1, 8, 16))
def expanded_input(x, w, b):
    return F.gelu(F.linear(x.expand(4, 8, 16), w, b))


@linear.case(biased(2, 4, 16), bit_equal=True)
def flattened_and_unflattened_around(x, w, b):
    return F.gelu(F.linear(x.flatten(0, 1), w, b)).unflatten(0, (2, 4))


@linear.case(biased(2, 4, 16))
def flattened_and_unflattened_before_the_activation(x, w, b):
    return F.gelu(F.linear(x.flatten(0, 1), w, b).unflatten(0, (2, 4)))


@linear.case(biased(2, 4, 16), autocast=BF16, tolerance=2e-2, fuses={})
def matmul_plus_fp32_bias_under_autocast_is_not_fused(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear.case(biased(2, 4, 16))
def checkpointed_matmul_plus_bias(x, w, b):
    return checkpoint(matmul_plus_bias, x, w, b, use_reentrant=False)


@linear.case(biased(2, 4, 16))
def input_used_elsewhere(x, w, b):
    return F.gelu(x @ w.t() + b), x.sin()


@linear.case(biased(2, 4, 16), fuses={"identity_linear_gelu": 2})
def two_spellings_in_one_model(x, w, b):
    return F.gelu(x @ w.t() + b) * F.gelu(F.linear(x.sin(), w, b))


@linear.case(biased(2, 4, 16))
def weight_used_again_untransposed(x, w, b):
    return F.gelu(x @ w.t() + b) @ w


@linear.case(biased(8, 16), fuses={})
def addmm_with_alpha_is_not_fused(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t(), alpha=2))


@linear.case(biased(2, 4, 16), fuses={})
def bias_add_with_alpha_is_not_fused(x, w, b):
    return F.gelu(torch.add(x @ w.t(), b, alpha=2))


@linear.case(biased(2, 4, 16), fuses={})
def tanh_gelu_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


@linear.case(normal((8, 16), (32, 16), (8, 32)), fuses={})
def addmm_of_a_matrix_is_not_fused(x, w, r):
    return F.gelu(torch.addmm(r, x, w.t()))


@linear.case(normal((8, 16), (32, 16), (8, 32)), fuses={})
def residual_is_not_a_bias(x, w, r):
    return F.gelu(x @ w.t() + r)


@linear.case(normal((8, 16), (32, 16), (1, 32)), fuses={})
def bias_of_one_row_is_not_fused(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear.case(normal((16, 16), (16, 16), (16,)))
def untransposed_square_weight(x, w, b):
    return F.gelu(torch.addmm(b, x, w))


@linear.case(biased(2, 4, 16), fuses={})
def reshape_before_the_activation_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b).view(2, 4, 4, 8))


@linear.case(mixed(normal((8, 16), (32, 16)), normal((32,), dtype=FP64)), fuses={})
def promoting_bias_is_not_fused(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear.case(normal((16, 8), (16, 8), (16,)), fuses={})
def bias_along_the_batch_is_not_fused(x, w, b):
    return F.gelu((x @ w.t()).t() + b)


@linear.case(biased(2, 4, 16), fuses={}, reason="used by")
def preactivation_used_elsewhere_is_not_fused(x, w, b):
    pre = x @ w.t() + b
    return F.gelu(pre), pre.sin()


# ---------------------------------------------------------------- strict numerics keep apart what rounds differently
strict = cases.identities(linear_gelu, recipe="strict")
strict.case(biased(2, 4, 16), bit_equal=True, name="strict_f_linear")(linear_gelu)
strict.case(biased(2, 4, 16), fuses={}, name="strict_matmul_plus_bias_is_not_fused")(matmul_plus_bias)
strict.case(biased(2, 4, 16), fuses={}, name="strict_transposed_batch")(transposed_input)


@linear.parametrize()
def test_linear_gelu(case: cases.Case) -> None:
    cases.check(case)


@strict.parametrize()
def test_strict_linear_gelu(case: cases.Case) -> None:
    cases.check(case)


# In training a gradient that does not fit refuses too; in inference the forward has to be told apart by itself.
@cases.in_inference((*linear, *strict)).parametrize()
def test_is_left_alone_in_inference_too(case: cases.Case) -> None:
    cases.check(case)
