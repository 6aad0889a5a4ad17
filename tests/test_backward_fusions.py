"""Fusions written over gradients: they find their place among the nodes that autograd derived."""

from __future__ import annotations

from collections.abc import Iterator

import cases
import local_fusions
import pytest
import reference_ops
import torch
import torch.nn.functional as F
from cases import normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxfuse


def dgrad_add() -> fxfuse.Fusion:
    """The input gradient of a linear, added to the gradient that another branch left."""

    @fxfuse.register_backward_fusion(name="local_dgrad_add", check_on_register=False)
    def fusion(dy: Tensor, w: Tensor, dx: Tensor) -> Tensor:
        return dy @ w + dx

    @fusion.check
    def _(m: fxfuse.Match) -> object:
        if tuple(m.dx.shape) != (*m.dy.shape[:-1], m.w.shape[-1]):
            return m.reject("the other gradient has another shape")

    @fusion.rewrite
    def _(dy: Tensor, w: Tensor, dx: Tensor) -> Tensor:
        return reference_ops.dgrad_add(dy, w, dx)

    return fusion


def gelu_backward_bias() -> fxfuse.Fusion:
    """GELU's backward and the bias gradient: two outputs of one region."""

    @fxfuse.register_backward_fusion(name="local_gelu_backward_bias", check_on_register=False)
    def fusion(dy: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        d = torch.ops.aten.gelu_backward(dy, pre)
        return d, d.sum(tuple(range(d.dim() - 1)))

    @fusion.rewrite
    def _(dy: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        return reference_ops.gelu_backward_bias(dy, pre)

    return fusion


def scaled_dgrad() -> fxfuse.Fusion:
    """A constant scale folded into the input gradient; ``s`` is whatever number the model has."""

    @fxfuse.register_backward_fusion(name="local_scaled_dgrad", check_on_register=False)
    def fusion(dy: Tensor, w: Tensor, s: float) -> Tensor:
        return (s * dy) @ w

    @fusion.rewrite
    def _(dy: Tensor, w: Tensor, s: float) -> Tensor:
        return reference_ops.scaled_dgrad(dy, w, s)

    return fusion


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    everything = dgrad_add(), gelu_backward_bias(), scaled_dgrad(), local_fusions.identity(linear_gelu)
    with local_fusions.unregistered_at_exit(*everything):
        yield


def linear_gelu(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def inputs(*x: int, frozen: tuple[int, ...] = ()) -> cases.Inputs:
    return normal((*x, 16), (32, 16), (32,), frozen=frozen)


SHAPES = {"matrix": (8,), "batch": (2, 4), "four_dims": (2, 2, 2)}


# ---------------------------------------------------------------- dgrad + accumulation
accumulation = cases.Table(only=("local_dgrad_add",), fuses={"local_dgrad_add": 1})


def residual_and_two_linears(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x + F.linear(x.sin(), w[:16], b[:16]).sin() + F.linear(x, w[:16], b[:16])


for name, shape in SHAPES.items():
    accumulation.case(inputs(*shape), name=f"residual_branch_{name}")(residual_and_two_linears)


# A weight gradient is a product too, so "product + what another use left" also finds the sum of two weight gradients.
@accumulation.case(inputs(2, 4), fuses={"local_dgrad_add": 2})
def two_linears_on_one_input(x, w, b):
    return F.linear(x, w).sin() * F.linear(x, w.cos(), b)


@accumulation.case(inputs(2, 4), fuses={"local_dgrad_add": 3})
def three_linears_on_one_input(x, w, b):
    return F.linear(x, w).sin() * F.linear(x, w.cos(), b) * F.linear(x, w.tanh())


@accumulation.case(inputs(2, 4), fuses={"local_dgrad_add": 2})
def linears_spelled_as_matmuls(x, w, b):
    return x.sin() @ w.t() * (x @ w.t() + b) + x.sum()


@accumulation.case(inputs(2, 4))
def other_gradient_is_an_expanded_scalar(x, w, b):
    return F.linear(x, w, b) * x.sum()


@accumulation.case(inputs(2, 4), fuses={})
def single_use_has_nothing_to_add(x, w, b):
    return F.linear(x, w, b)


# ---------------------------------------------------------------- activation backward + bias gradient
bias_gradient = cases.Table(only=("local_gelu_backward_bias",), fuses={"local_gelu_backward_bias": 1})
for name, shape in SHAPES.items():
    bias_gradient.case(inputs(*shape), name=f"linear_gelu_{name}")(linear_gelu)
bias_gradient.case(inputs(2, 4), dynamic=True, other_inputs=(inputs(3, 5),), name="linear_gelu_dynamic")(linear_gelu)


@bias_gradient.case(inputs(2, 4))
def bias_added_to_a_batched_matmul(x, w, b):
    return F.gelu(x @ w.t() + b)


@bias_gradient.case(inputs(2, 4), fuses={"local_gelu_backward_bias": 2})
def two_layers(x, w, b):
    return F.gelu(F.linear(F.gelu(F.linear(x, w, b)), w.t(), b[:16]))


@bias_gradient.case(inputs(2, 4))
def checkpointed(x, w, b):
    return checkpoint(linear_gelu, x, w, b, use_reentrant=False)


@bias_gradient.case(inputs(2, 4), fuses={})
def frozen_bias_has_no_gradient(x, w, b):
    return F.gelu(F.linear(x, w, b.detach()))


@bias_gradient.case(inputs(2, 4), fuses={})
def tanh_gelu_backward_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


# ---------------------------------------------------------------- scale folded into dgrad
FROZEN = (1, 2)
scale = cases.Table(only=("local_scaled_dgrad",), fuses={"local_scaled_dgrad": 1})


@scale.case(inputs(2, 4, frozen=FROZEN))
def scaled_by_a_power_of_two(x, w, b):
    return F.linear(x, w, b) * 0.125


@scale.case(inputs(2, 4, frozen=FROZEN))
def scaled_by_a_fraction(x, w, b):
    return F.linear(x, w) * 0.3


@scale.case(inputs(8, frozen=FROZEN))
def divided_by_a_power_of_two(x, w, b):
    return F.linear(x, w, b) / 8


@scale.case(inputs(2, 4, frozen=FROZEN), fuses={"local_scaled_dgrad": 2})
def two_layers_with_two_scales(x, w, b):
    return F.linear(F.linear(x, w, b) * 0.3, w.t()) * 0.7


@scale.case(inputs(2, 4), fuses={}, reason="used by")
def scaled_gradient_that_wgrad_needs_too_is_not_fused(x, w, b):
    return F.linear(x, w, b) * 0.125


@scale.case(inputs(2, 4), fuses={})
def unscaled_dgrad_is_not_fused(x, w, b):
    return F.linear(x, w, b)


# ---------------------------------------------------------------- all of them in one model
together = cases.Table(only=("identity_linear_gelu", "local_gelu_backward_bias", "local_dgrad_add"))


@together.case(inputs(2, 4), fuses={"identity_linear_gelu": 1, "local_dgrad_add": 1})
def joint_fusion_takes_its_backward_first(x, w, b):
    h = x.cos()
    return h + F.linear(h.sin(), w[:16], b[:16]).sin() + F.linear(F.gelu(F.linear(h, w, b)), w.t()) * 0.5


@accumulation.parametrize()
def test_dgrad_and_accumulation(case: cases.Case) -> None:
    check_and_count_calls(case, "dgrad_add")


@bias_gradient.parametrize()
def test_activation_backward_and_bias_gradient(case: cases.Case) -> None:
    check_and_count_calls(case, "gelu_backward_bias")


@scale.parametrize()
def test_scale_and_dgrad(case: cases.Case) -> None:
    check_and_count_calls(case, "scaled_dgrad")


@together.parametrize()
def test_order_of_joint_and_backward_fusions(case: cases.Case) -> None:
    cases.check(case)


def check_and_count_calls(case: cases.Case, op: str) -> None:
    """What the report says was fused is what runs: once a fused place and a call."""
    reference_ops.calls.clear()
    cases.check(case)
    assert reference_ops.calls.count(op) == sum(case.fuses.values()) * (1 + len(case.other_inputs))
