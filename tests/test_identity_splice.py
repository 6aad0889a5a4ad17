"""A fusion that puts its own pattern back changes no bit: whatever it changed would be a fault of the rerouting.

The exception is known: where an input enters a region twice and is used outside too, its gradient is a sum of three terms
or more, and the region hands over its own terms already added. That sum is associated differently and only fp32 shows it.
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

BF16 = torch.bfloat16


def linear_gelu(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


@pytest.fixture(scope="module", autouse=True)
def identities() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(local_fusions.identity(linear_gelu), local_fusions.identity(swiglu_mlp)):
        yield


BOTH = ("identity_linear_gelu", "identity_swiglu_mlp")
A1, B1 = {BOTH[0]: 1}, {BOTH[1]: 1}
A2, B2 = {BOTH[0]: 2}, {BOTH[1]: 2}
LINEAR = normal((2, 8, 16), (32, 16), (32,))
SQUARE = normal((2, 8, 16), (16, 16), (16,))


def mlp(dtype: torch.dtype = BF16, copies: int = 1) -> cases.Inputs:
    return normal((2, 8, 16), *((32, 16), (32, 16), (16, 32)) * copies, dtype=dtype)


exact = cases.Table(only=BOTH, tolerance=4e-2, bit_equal=True)
exact.case(LINEAR, fuses=A1, name="linear_gelu_alone")(linear_gelu)
exact.case(mlp(), fuses=B1, name="mlp_alone_bfloat16")(swiglu_mlp)
exact.case(mlp(torch.float32), fuses=B1, name="mlp_alone_float32")(swiglu_mlp)


@exact.case(LINEAR, fuses=A1)
def linear_gelu_and_its_input_summed(x, w, b):
    return linear_gelu(x, w, b) + x.sum()


@exact.case(SQUARE, fuses=A1)
def linear_gelu_residual_and_elsewhere(x, w, b):
    return x + linear_gelu(x, w, b) + x.sin()


@exact.case(LINEAR, fuses=A2)
def linear_gelu_of_shared_weights(x, w, b):
    return linear_gelu(x, w, b) + linear_gelu(x * 0.5, w, b)


@exact.case(LINEAR, fuses=A1)
def linear_gelu_output_twice_and_transposed(x, w, b):
    out = linear_gelu(x, w, b)
    return (out * out.sin()).transpose(0, 1) * 2


@exact.case(LINEAR, fuses=A2)
def linear_gelu_twins_of_different_cotangents(x, w, b):
    return linear_gelu(x, w, b) * 2 + linear_gelu(x, w, b).sin()


@exact.case(SQUARE, fuses={BOTH[0]: 4})
def four_residual_layers(x, w, b):
    for _ in range(4):
        x = x + linear_gelu(x, w, b)
    return x


@exact.case(mlp(), fuses=B1)
def mlp_output_twice_and_transposed(x, w_gate, w_up, w_down):
    out = swiglu_mlp(x, w_gate, w_up, w_down)
    return (out * out.sin()).transpose(0, 1) * 2


@exact.case(mlp(torch.float32, copies=2), fuses=B2)
def two_stacked_mlps(x, *weights):
    return swiglu_mlp(swiglu_mlp(x, *weights[:3]), *weights[3:])


@exact.case(normal((2, 8, 16), (32, 16), (32,), *((32, 32), (32, 32), (16, 32))), fuses={**A1, **B1})
def both_patterns_in_one_model(x, w, b, *weights):
    return swiglu_mlp(linear_gelu(x, w, b), *weights)


reassociated = cases.Table(only=BOTH, tolerance=1e-6)


@reassociated.case(mlp(torch.float32), fuses=B1)
def mlp_residual_and_elsewhere(x, *weights):
    return x + swiglu_mlp(x, *weights) + x.sin()


@reassociated.case(mlp(torch.float32), fuses=B2)
def mlp_of_shared_weights(x, *weights):
    return swiglu_mlp(x, *weights) + swiglu_mlp(x * 0.5, *weights)


@reassociated.case(mlp(torch.float32), fuses=B2)
def mlp_twins_of_different_cotangents(x, *weights):
    return swiglu_mlp(x, *weights) * 2 + swiglu_mlp(x, *weights).sin()


@exact.parametrize()
def test_identity_splice_is_bit_exact(case: cases.Case) -> None:
    cases.check(case)


@reassociated.parametrize()
def test_identity_splice_only_reassociates_a_gradient_sum(case: cases.Case) -> None:
    cases.check(case)
