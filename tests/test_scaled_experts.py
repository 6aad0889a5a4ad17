"""Experts under recipes that quantise: fused in forward and backward, each product that of quantised operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import moe_blocks
import pytest
import reference_moe
import torch
from torch import Tensor

import fxfuse
from fxfuse.ops.grouped_mm import reference_grouped_mm
from fxfuse.ops.quantize import Scheme, dequantize, quantize, schemes

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INNER, CHOSEN = 4, 128, 256, 2
RECIPES = {
    "current": fxfuse.Float8CurrentScaling(),
    "block": fxfuse.Float8BlockScaling(),
    "block, lines of weights": fxfuse.Float8BlockScaling(w_block_scaling_dim=1, fp8_format="HYBRID"),
    "mxfp8": fxfuse.MXFP8BlockScaling(emulate=True),
    "high precision": fxfuse.Float8BlockScaling(backward_override="high_precision"),
    "dequantized": fxfuse.Float8CurrentScaling(backward_override="dequantized", use_power_2_scales=True),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
BLOCKS = {"masked": moe_blocks.masked, "unmasked": moe_blocks.unmasked, "scattered": moe_blocks.scattered}


def tensors(block: str, tokens: int, hidden: int = HIDDEN, inner: int = INNER) -> list[Tensor]:
    """x, router weights and the experts' weights."""
    generator, separate = torch.Generator().manual_seed(tokens), block == "scattered"
    shapes = [(EXPERTS, inner if separate else 2 * inner, hidden), (EXPERTS, hidden, inner)]
    shapes += [(EXPERTS, inner, hidden)] if separate else []
    weights = [torch.randn(s, generator=generator) * s[-1] ** -0.5 for s in shapes]
    p = torch.rand(tokens, CHOSEN, generator=generator).to(torch.float32 if separate else BF16)
    return [torch.randn(tokens, hidden, generator=generator).to(BF16), p, *[w.to(BF16) for w in weights]]


def step(function: Callable[..., Tensor], args: Sequence[Tensor], ids: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    leaves = [a.detach().requires_grad_() for a in args]
    x, p, *weights = leaves
    out = function(x, ids, p, *weights)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]


def compiled(function: Callable[..., Tensor], **settings: Any) -> Any:
    options = {"lower": settings.pop("lower", "eager")}
    return torch.compile(function, backend="fxfuse", fullgraph=True, options=options, **settings)


def fused(block: str, args: Sequence[Tensor], ids: Tensor, recipe: fxfuse.Recipe, **settings: Any) -> list[Tensor]:
    run = compiled(BLOCKS[block], **settings)
    with fxfuse.use_recipe(recipe):
        found = step(run, args, ids)
    report = fxfuse.last_report()
    assert report.count("grouped_mlp", "forward") == report.count("grouped_mlp", "backward") == 1
    return found


def off(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


# ------------------------------------------------------------------------------------------------ the definition


def rounded(t: Tensor, scheme: Scheme) -> Tensor:
    return dequantize(quantize(t.float(), scheme), scheme.block).double()


def rounded_weights(w: Tensor, scheme: Scheme) -> Tensor:
    """A scale a tensor is one for all experts; blocks are each expert's own."""
    return (
        rounded(w.flatten(0, 1), scheme).view(w.shape) if not scheme.block else torch.stack([rounded(one, scheme) for one in w])
    )


@every_recipe
def test_each_product_is_the_definition(recipe: Any) -> None:
    """In fp64, expert after expert."""
    x, _, w, _ = tensors("unmasked", 64)
    d = torch.randn(64, w.shape[1], generator=torch.Generator().manual_seed(1)).to(BF16)
    ends = torch.tensor([10, 20, 20, 64], dtype=torch.int32)
    of_x, of_w, of_g = schemes(recipe)
    forward = rounded(x, of_x), rounded_weights(w, of_w)
    dgrad, wgrad = {
        None: (
            (rounded(d, of_g), rounded_weights(w.transpose(1, 2), of_w).transpose(1, 2)),
            (rounded(d.t(), of_g), rounded(x.t(), of_x).t()),
        ),
        "high_precision": ((d.double(), w.double()), (d.t().double(), x.double())),
        "dequantized": ((d.double(), forward[1]), (d.t().double(), forward[0])),
    }[recipe.backward_override]
    experts = fxfuse.ops.ScaledExperts(w, None, w, None, None, "silu", "concat", None, None)
    with fxfuse.use_recipe(recipe):
        assert off(experts.product(x, w, ends), reference_grouped_mm(forward[0], forward[1].transpose(1, 2), ends)) <= 2.0**-8
        assert off(experts.dgrad(d, w, ends), reference_grouped_mm(*dgrad, ends)) <= 2.0**-8
        assert off(experts.wgrad(d, x, ends, w), reference_grouped_mm(*wgrad, ends)) <= 2.0**-8


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_only_the_operands_that_the_recipe_names_are_rounded(override: str) -> None:
    """With operands that the format holds, gradients are those of full precision, bit for bit."""
    x, p, w, w_down = tensors("unmasked", 64)
    exact = [x, p, *[t.to(torch.float8_e4m3fn).to(BF16) for t in (w, w_down)]]
    recipe = fxfuse.Float8CurrentScaling(backward_override=override, use_power_2_scales=True)
    ids = reference_moe.balanced(64, CHOSEN, EXPERTS)
    of_w = schemes(recipe)[1]
    assert all(torch.equal(dequantize(quantize(t.flatten(0, 1), of_w), ()).view(t.shape).to(BF16), t) for t in exact[2:])
    with_override, without = (
        fused("unmasked", exact, ids, recipe),
        fused("unmasked", exact, ids, recipe.replace(backward_override=None)),
    )
    assert torch.equal(with_override[0], without[0])
    assert any(not torch.equal(a, b) for a, b in zip(with_override[1:], without[1:], strict=True))


@every_recipe
@pytest.mark.parametrize("block", BLOCKS)
def test_near_fp64_in_forward_and_backward(block: str, recipe: fxfuse.Recipe) -> None:
    args, ids = tensors(block, 80), torch.rand(80, EXPERTS).topk(CHOSEN).indices  # the scattered block counts an expert once

    def exact(x: Tensor, ids: Tensor, p: Tensor, w: Tensor, w_down: Tensor, w_up: Tensor | None = None) -> Tensor:
        return reference_moe.per_expert(x, w, w_down, ids, p, w_up=w_up)

    true = step(exact, [a.double() for a in args], ids)
    for a, b in zip(fused(block, args, ids, recipe), true, strict=True):
        assert off(a, b) <= 0.12


@pytest.mark.parametrize("routing", ["one_idle", "nobody", "one_busy"])
def test_idle_experts_and_rows_of_nobody(routing: str) -> None:
    args, ids = tensors("unmasked", 40), getattr(reference_moe, routing)(40, CHOSEN, EXPERTS)
    found = fused("unmasked", args, ids, RECIPES["current"])
    assert all(t.isfinite().all() for t in found)
    used = torch.zeros(EXPERTS, dtype=torch.bool)
    used[ids[(ids >= 0) & (ids < EXPERTS)].unique()] = True
    for gradient in found[3:]:
        assert not gradient[~used].any()


def test_undefined_rows_do_not_scale_the_others() -> None:
    """Rows past the last expert's, full of huge numbers and NaN, change nothing."""
    x, _, w, w_down = tensors("unmasked", 64)
    experts = fxfuse.ops.ScaledExperts(w, None, w_down, None, None, "silu", "concat", None, None)
    ends = torch.tensor([10, 20, 20, 48], dtype=torch.int32)
    with fxfuse.use_recipe("fp8_current"):
        poisoned = x.clone()
        poisoned[48:60], poisoned[60:] = 1e30, float("nan")
        for function in (experts.product, lambda r, w, e: experts.wgrad(r[:, :64], r, e, w[:, :64])):
            a, b = function(x, w, ends), function(poisoned, w, ends)
            assert torch.equal(a[:48] if a.dim() == 2 else a, b[:48] if b.dim() == 2 else b)
        d, e = experts.product(x, w, ends), experts.product(poisoned, w, ends)
        assert torch.equal(experts.dgrad(d, w, ends)[:48], experts.dgrad(torch.cat([d[:48], e[48:]]), w, ends)[:48])


@pytest.mark.parametrize(
    "recipe, hidden, inner, text",
    [
        ("fp8_block", 128, 192, "intermediate width 192 is not a multiple of 128, as Float8BlockScaling needs"),
        ("fp8_current", 72, 64, "hidden width 72 is not a multiple of 16"),
        ("fp8_delayed", 128, 128, "DelayedScaling is for dense linears"),
    ],
)
def test_what_a_recipe_cannot_take_stays_in_high_precision(recipe: str, hidden: int, inner: int, text: str) -> None:
    args, ids = tensors("unmasked", 40, hidden, inner), reference_moe.balanced(40, CHOSEN, EXPERTS)
    run = compiled(moe_blocks.unmasked)
    with fxfuse.use_recipe(recipe):
        got = step(run, args, ids)
    assert fxfuse.last_report().count("grouped_mlp") == 0 and text in fxfuse.last_report().why_not("grouped_mlp")
    for a, b in zip(got, step(moe_blocks.unmasked, args, ids), strict=True):
        assert off(a, b) <= 0.01


def test_any_number_of_tokens_in_one_plan() -> None:
    run = compiled(moe_blocks.unmasked)
    for tokens in (40, 33, 7):
        args, ids = tensors("unmasked", tokens), reference_moe.balanced(tokens, CHOSEN, EXPERTS)
        leaves = [a.requires_grad_() for a in args]
        for t in (leaves[0], leaves[1], ids):
            torch._dynamo.mark_dynamic(t, 0)
        x, p, *weights = leaves
        with fxfuse.use_recipe("fp8_block"):
            out = run(x, ids, p, *weights)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        got = [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
        for a, b in zip(got, step(moe_blocks.unmasked, args, ids), strict=True):
            assert off(a, b) <= 0.12
    assert fxfuse.last_report().count("grouped_mlp", "backward") == 1 and fxfuse.plan_info().builds == 1


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=4))[1:-1])
def test_frozen_inputs(needs: Sequence[bool]) -> None:
    args, ids = tensors("unmasked", 40), reference_moe.balanced(40, CHOSEN, EXPERTS)
    leaves = [a.detach().requires_grad_(n) for a, n in zip(args, needs, strict=True)]
    x, p, *weights = leaves
    with fxfuse.use_recipe("fp8_block"):
        out = compiled(moe_blocks.unmasked)(x, ids, p, *weights)
    assert fxfuse.last_report().count("grouped_mlp") == 1
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    got = torch.autograd.grad(out, [t for t in leaves if t.requires_grad], cotangent)
    torch._dynamo.reset()
    want = [g for g, n in zip(fused("unmasked", args, ids, RECIPES["block"])[1:], needs, strict=True) if n]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.inductor
def test_through_inductor() -> None:
    args, ids = tensors("unmasked", 40), reference_moe.balanced(40, CHOSEN, EXPERTS)
    want = fused("unmasked", args, ids, RECIPES["block"])
    torch._dynamo.reset()
    for a, b in zip(fused("unmasked", args, ids, RECIPES["block"], lower="auto"), want, strict=True):
        assert off(a, b) <= 0.06
