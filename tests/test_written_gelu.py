"""GELU's tanh form out of its parts, as GPT-2 writes it: one op in forward and backward wherever the plain one would be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cases
import compare
import pytest
import torch
import torch.nn.functional as F
from cases import normal
from torch import Tensor, nn

import fxfuse

ROOT = math.sqrt(2.0 / math.pi)
X, W, B = (4, 6, 10), (8, 10), (8,)
BF16 = torch.bfloat16


def gelu(y: Tensor) -> Tensor:
    """As in transformers."""
    return 0.5 * y * (1.0 + torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0))))


def in_fp32(y: Tensor) -> Tensor:
    return gelu(y.float()).to(y.dtype)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "transformers": gelu,
    "integers": lambda y: 0.5 * y * (1 + torch.tanh(ROOT * (y + 0.044715 * y**3))),
    "turned round": lambda y: y * 0.5 * (torch.tanh((y**3 * 0.044715 + y) * ROOT) + 1),
}
HALVED_ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "half last": lambda y: y * (1 + torch.tanh(ROOT * (y + 0.044715 * y**3))) * 0.5,
    "half computed later": lambda y: (1 + torch.tanh(ROOT * (y + 0.044715 * y**3))) * (0.5 * y),
    "half of the sum": lambda y: y * (0.5 * (1 + torch.tanh(ROOT * (y + 0.044715 * y**3)))),
}
"""Another order of roundings in the backward, which is the proof's."""


def linear(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, b: act(F.linear(x, w, b))


def gated(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, w, v: act(F.linear(x, w)) * F.linear(x, v)


def packed(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        gate, up = F.linear(x, w, b).chunk(2, -1)
        return act(gate) * up

    return fn


def check(fn: Callable[..., Any], args: list[Tensor], name: str, train: bool = True) -> None:
    """It fires once, in both directions, and is as near to fp64 as eager."""
    got = compare.run(cases.compiled(fn, only=[name]), args, train=train)
    report = fxfuse.last_report()
    assert [f.directions for f in report.fused] == [("forward", "backward") if train else ("forward",)], report.why_not(name)
    want, truth = compare.run(fn, args, train=train), compare.run(fn, compare.in_fp64(args), train=train)
    compare.assert_same(got, want, 2e-2 if args[0].dtype is BF16 else 1e-5)
    compare.assert_as_near_to_fp64(got, want, truth)


FAMILIES = {
    "linear_gelu_tanh": (linear, normal(X, W, B), normal(X, W, B, dtype=BF16)),
    "gated_mlp_gelu_tanh": (gated, normal(X, W, W), normal(X, W, W, dtype=BF16)),
    "gated_mlp_packed_gelu_tanh": (packed, normal(X, W, B), normal(X, W, B, dtype=BF16)),
}


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("act", [gelu, in_fp32])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, dtype: torch.dtype, act: Callable[[Tensor], Tensor], train: bool) -> None:
    around, fp32, bf16 = FAMILIES[name]
    check(around(act), list((bf16 if dtype is BF16 else fp32)()), name, train)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    check(linear(SPELLINGS[spelling]), list(normal(X, W, B)()), "linear_gelu_tanh")


@pytest.mark.parametrize("spelling", HALVED_ELSEWHERE)
def test_backward_that_rounds_elsewhere_is_explained(spelling: str) -> None:
    fn, args = linear(HALVED_ELSEWHERE[spelling]), list(normal(X, W, B)())
    check(fn, args, "linear_gelu_tanh", train=False)
    compare.run(cases.compiled(fn, only=["linear_gelu_tanh"]), args)
    assert "backward not proven" in fxfuse.last_report().why_not("linear_gelu_tanh")


table = cases.Table(only=("linear_gelu_tanh",), fuses={"linear_gelu_tanh": 1})


@table.case(normal(X, W))
def without_bias(x: Tensor, w: Tensor) -> Tensor:
    return gelu(F.linear(x, w))


@table.case(normal(X, (10, 8), B))
def weight_stored_in_out(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(torch.addmm(b, x.view(-1, 10), w).view(4, 6, 8))


@table.case(normal(X, W, B), dynamic_dims=((0, 1),), other_inputs=(normal((4, 3, 10), W, B),))
def of_any_length(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(F.linear(x, w, b))


@table.case(normal(X, W, B), fuses={})
def another_constant(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return 0.5 * y * (1.0 + torch.tanh(ROOT * (y + 0.0447 * torch.pow(y, 3.0))))


@table.case(normal(X, W, B), fuses={})
def another_root(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return 0.5 * y * (1.0 + torch.tanh(0.8 * (y + 0.044715 * torch.pow(y, 3.0))))


@table.case(normal(X, W, B), fuses={})
def another_power(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return 0.5 * y * (1.0 + torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 5.0))))


@table.case(normal(X, W, B), fuses={})
def not_halved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return y * (1.0 + torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0))))


@table.case(normal(X, W, B), fuses={})
def another_function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return 0.5 * y * (1.0 + torch.sigmoid(ROOT * (y + 0.044715 * torch.pow(y, 3.0))))


@table.case(normal(X, W, B, (4, 6, 8)), fuses={})
def another_factor(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return 0.5 * z * (1.0 + torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0))))


@table.case(normal(X, W, B), fuses={})
def interior_value_used_outside(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    inner = torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0)))
    return 0.5 * y * (1.0 + inner), inner * 2


@table.case(normal(X, W, B), fuses={})
def hook_inside(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    inner = torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0)))
    inner.register_hook(lambda g: g * 3)
    return 0.5 * y * (1.0 + inner)


@table.case(normal(X, W, B, dtype=BF16), fuses={}, tolerance=2e-2)
def cast_that_rounds_in_between(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = F.linear(x, w, b)
    return (0.5 * y.float() * (1.0 + torch.tanh(ROOT * (y + 0.044715 * torch.pow(y, 3.0))))).to(y.dtype)


@table.parametrize()
def test_cases(case: cases.Case) -> None:
    cases.check(case)


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_mlp_of_gpt2(dtype: torch.dtype, train: bool) -> None:
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    config = gpt2.GPT2Config(n_embd=16, n_head=2, resid_pdrop=0.0)
    model = gpt2.GPT2MLP(64, config).to(dtype)
    names = [name for name, _ in model.named_parameters()]

    def fn(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    parameters = [(0.3 * torch.randn(p.shape)).to(dtype).requires_grad_() for p in model.parameters()]
    check(fn, [torch.randn(2, 5, 16).to(dtype).requires_grad_(), *parameters], "linear_gelu_tanh", train)


def test_models_without_its_parts_are_spared_its_traces() -> None:
    forms = [f for f in fxfuse.list_fusions() if "[written out" in f.name]
    for form in forms:
        form.__dict__.pop("_skeletons", None)
    compare.run(cases.compiled(nn.Sequential(nn.Linear(8, 8), nn.GELU("tanh"), nn.Linear(8, 8))), [torch.randn(3, 8)])
    assert forms and not any("_skeletons" in form.__dict__ for form in forms)
