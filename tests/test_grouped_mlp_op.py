"""``fxfuse.ops.grouped_mlp`` as an ordinary differentiable function, against plain PyTorch.

In fp64 it equals the definition, one token at a time. In other dtypes it is as near to it as plain PyTorch is.
"""

from __future__ import annotations

import itertools
from typing import Any

import cases
import compare
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_checks import (
    ALIGNED,
    EXACT,
    ODD,
    assert_equals_definition,
    both,
    check,
    fixed_cotangent,
    layouts,
    named,
    orders,
    present,
    run,
    varied,
)
from reference_moe import ACTIVATIONS, BF16, F16, F32, F64, LAYOUTS, ROUTINGS, Block, per_expert, per_token, zipf
from torch import Tensor

import fxfuse
from fxfuse.ops import grouped_mlp

dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo instantiates ``autograd.Function``."""

# ------------------------------------------------------------------------------------------------ values


@layouts
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(layout: dict[str, Any], activation: str) -> None:
    check(activation=activation, **layout)


@varied
def test_every_option(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize("chosen", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 3, 71, 127])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(routing: str, tokens: int, chosen: int) -> None:
    check(routing=routing, tokens=tokens, chosen=chosen, experts=9, width=16, inner=9)


@layouts
@pytest.mark.parametrize(("width", "inner"), [(1, 1), (7, 3), (9, 40), (40, 9), (24, 8), (16, 33)])
def test_every_width(layout: dict[str, Any], width: int, inner: int) -> None:
    check(width=width, inner=inner, **layout)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Any block of up to a few tokens and experts."""
    small, options = st.integers(1, 6), {**draw(st.sampled_from([*LAYOUTS.values()]))}
    if options.get("gated", True):
        options["alpha"] = draw(st.sampled_from([None, 1.702]))
    return Block(
        **options,
        **{name: draw(small) for name in ("tokens", "chosen", "width", "inner")},
        **{name: draw(st.booleans()) for name in ("biases", "routed", "weights_first")},
        experts=draw(st.integers(2, 6)),
        routing=draw(st.sampled_from([name for name in ROUTINGS if name != "zipf"])),
        activation=draw(st.sampled_from([*ACTIVATIONS])),
        limit=draw(st.sampled_from([None, 0.3])),
    )


@settings(deadline=None, derandomize=True, max_examples=100)
@given(block=blocks(), trains=st.lists(st.booleans(), min_size=8, max_size=8), seed=st.integers(0, 2**31))
def test_any_block(block: Block, trains: list[bool], seed: int) -> None:
    torch.manual_seed(seed)
    args = block.inputs()
    for arg, train in zip(args, trains, strict=True):
        if arg is not None and arg.is_floating_point():
            arg.requires_grad_(train)
    assert_equals_definition(block.of(grouped_mlp), block.of(per_token), args)


@varied
@dtypes
def test_every_option_is_as_near_to_fp64_as_eager(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    check(dtype, tokens=31, coarse="limit" in fields, **fields)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@dtypes
def test_every_activation_is_as_near_to_fp64_as_eager(dtype: torch.dtype, activation: str) -> None:
    check(dtype, tokens=31, activation=activation, coarse=activation == "relu")


@pytest.mark.parametrize("chosen", [1, 2, 8])
@pytest.mark.parametrize("tokens", [1, 3, 71, 127])
@pytest.mark.parametrize(
    ("dtype", "width"), [(F32, ODD), (F16, ODD), (BF16, ODD), (BF16, ALIGNED)], ids=["fp32", "fp16", "bf16", "bf16-aligned"]
)
def test_every_size_is_as_near_to_fp64_as_eager(dtype: torch.dtype, width: dict[str, int], tokens: int, chosen: int) -> None:
    check(dtype, tokens=tokens, chosen=chosen, experts=8, routing="zipf", **width)


@pytest.mark.parametrize("routing", ROUTINGS)
@dtypes
def test_every_routing_is_as_near_to_fp64_as_eager(dtype: torch.dtype, routing: str) -> None:
    check(dtype, tokens=71, routing=routing, **ALIGNED)


@pytest.mark.parametrize("router", [F32, F64, BF16], ids=["fp32", "fp64", "bf16"])
@pytest.mark.parametrize("first", [False, True], ids=["after", "first"])
@dtypes
def test_router_weights_of_another_dtype(dtype: torch.dtype, router: torch.dtype, first: bool) -> None:
    check(dtype, tokens=31, router=router, weights_first=first)


@pytest.mark.parametrize("width", [ALIGNED, ODD], ids=["aligned", "odd"])
def test_a_thousand_tokens_in_bf16(width: dict[str, int]) -> None:
    check(BF16, tokens=1024, chosen=2, experts=8, routing="zipf", **width)


@pytest.mark.parametrize(("tokens", "chosen"), [(0, 1), (0, 8), (3, 0)])
@layouts
@both
def test_no_pairs(dtype: torch.dtype, width: dict[str, int], layout: dict[str, Any], tokens: int, chosen: int) -> None:
    block = Block(dtype=dtype, tokens=tokens, chosen=chosen, **width, **layout)
    args = block.inputs()
    got = run(block.of(grouped_mlp), args)
    assert torch.equal(got.outputs[0], torch.zeros(tokens, block.width, dtype=dtype))
    for arg, grad in zip(got.inputs, got.grads, strict=True):
        assert grad is None if not arg.is_floating_point() else torch.equal(grad, torch.zeros_like(arg))


@pytest.mark.parametrize("experts", [2**15 - 1, 2**15])
def test_many_experts(experts: int) -> None:
    block = Block(dtype=BF16, experts=experts, width=8, inner=8, routing="some_outside", biases=False)
    args = [None if a is None else a.detach() for a in block.inputs()]
    args[3][0, 0] = experts - 1
    compare.assert_same(run(block.of(grouped_mlp), args), run(block.of(per_expert_of_few), args), 1e-2)


def per_expert_of_few(x: Tensor, w_gate_up: Tensor, w_down: Tensor, expert_ids: Tensor, *args: Any, **options: Any) -> Tensor:
    """``per_expert`` of the experts in use alone."""
    inside = (expert_ids >= 0) & (expert_ids < w_down.shape[0])
    few, places = torch.unique(torch.where(inside, expert_ids, 0), return_inverse=True)
    return per_expert(x, w_gate_up[few], w_down[few], torch.where(inside, places, -1), *args, **options)


@layouts
def test_int32_ids(layout: dict[str, Any]) -> None:
    block = Block(routing="some_outside", **layout)
    args = block.inputs()
    assert args[3] is not None
    args[3] = args[3].clamp(-5, 5)
    wide = run(block.of(grouped_mlp), args)
    args[3] = args[3].to(torch.int32)
    compare.assert_bit_equal(run(block.of(grouped_mlp), args), wide)


def test_same_bits_on_two_runs() -> None:
    block = Block(dtype=BF16, tokens=127, chosen=8, experts=9, routing="zipf", **ALIGNED)
    args = block.inputs()
    compare.assert_bit_equal(run(block.of(grouped_mlp), args), run(block.of(grouped_mlp), args))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    block = Block(dtype=dtype, **ALIGNED)
    args = block.inputs()
    want = run(block.of(grouped_mlp), args)
    with torch.autocast("cpu", dtype=BF16):
        compare.assert_bit_equal(run(block.of(grouped_mlp), args), want)


# ------------------------------------------------------------------------------------------------ gradients


@orders
@layouts
def test_what_trains_changes_no_bit_of_the_rest(layout: dict[str, Any], first: bool) -> None:
    block = Block(tokens=4, weights_first=first, **layout)
    args = block.inputs()
    everything = dict(zip(present(args), run(block.of(grouped_mlp), args).grads, strict=True))
    out = block.of(grouped_mlp)(*args)
    floats = [name for name in present(args) if name != "expert_ids"]
    for n in range(len(floats) + 1):
        for trained in itertools.combinations(floats, n):
            some = [a if a is None else a.detach().requires_grad_(name in trained) for name, a in named(args).items()]
            got = run(block.of(grouped_mlp), some)
            assert torch.equal(got.outputs[0], out)
            for name, grad in zip(present(some), got.grads, strict=True):
                want = everything[name] if name in trained else None
                assert grad is want is None or torch.equal(grad, want), f"{name} of {trained}"


def test_nothing_trains() -> None:
    block = Block()
    args = block.inputs()
    with torch.no_grad():
        assert block.of(grouped_mlp)(*args).grad_fn is None
    assert block.of(grouped_mlp)(*[a if a is None else a.detach() for a in args]).grad_fn is None


@layouts
def test_keeps_h_and_the_order_of_the_rows(layout: dict[str, Any]) -> None:
    block = Block(tokens=5, chosen=2, experts=4, **ODD, **layout)
    h = {"separate": [(10, 9), (10, 9)], "gated": [(10, 9)]}.get(next(iter(layout), ""), [(10, 18)])
    assert run(block.of(grouped_mlp), block.inputs()).kept == tuple(sorted([*h, (10,), (10,), (4,)]))


@pytest.mark.parametrize("name", ["w_gate_up", "w_down", "w_up"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@both
def test_weight_gradients_lie_in_memory_as_the_weights(
    dtype: torch.dtype, width: dict[str, int], transposed: bool, name: str
) -> None:
    block = Block(dtype=dtype, separate=True, tokens=31, **width)
    args = named(block.inputs())
    weight = args[name]
    assert weight is not None
    args[name] = weight = (weight.detach().mT.contiguous().mT if transposed else weight.detach()).requires_grad_()
    (grad,) = torch.autograd.grad(fixed_cotangent((block.of(grouped_mlp)(*args.values()),)), weight)
    assert grad.stride() == weight.stride()


@pytest.mark.parametrize("fields", [{}, {"weights_first": True}, {"limit": 0.3, "alpha": 1.702}], ids=["", "first", "clamped"])
@layouts
def test_gradcheck(layout: dict[str, Any], fields: dict[str, Any]) -> None:
    block = Block(tokens=3, experts=3, width=4, inner=3, **{**layout, **fields})
    if not block.gated and block.alpha is not None:
        block = Block(tokens=3, experts=3, width=4, inner=3, limit=0.3, **layout)
    assert torch.autograd.gradcheck(block.of(grouped_mlp), tuple(block.inputs()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_are_refused(activation: str) -> None:
    block = Block(activation=activation)
    args = block.inputs()
    (grad,) = torch.autograd.grad(block.of(grouped_mlp)(*args).square().sum(), args[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.square().sum(), args[:1])


# ------------------------------------------------------------------------------------------------ compiled

COMPILED = {
    **{f"fp32_{name}": {"dtype": F32, **layout} for name, layout in LAYOUTS.items()},
    **{f"bf16_{name}": {"dtype": BF16, **ALIGNED, **layout} for name, layout in LAYOUTS.items()},
    "fp16": {"dtype": F16, "limit": 0.3, "alpha": 1.702},
    "fp64_first": {"weights_first": True, "biases": False},
    "bf16_odd_no_router": {"dtype": BF16, **ODD, "routed": False},
}


@pytest.mark.parametrize("fields", COMPILED.values(), ids=COMPILED)
def test_compiled(fields: dict[str, Any]) -> None:
    check_compiled(Block(routing="some_outside", **fields))


@pytest.mark.parametrize("fields", [{"dtype": F32}, {"dtype": BF16, **ALIGNED}], ids=["fp32", "bf16"])
def test_compiled_for_inference(fields: dict[str, Any]) -> None:
    check_compiled(Block(routing="some_outside", **fields), train=False)


def check_compiled(block: Block, **options: Any) -> None:
    """Eager's bits, or nearly."""
    call, args = block.of(grouped_mlp), block.inputs()
    got, want = (compare.run(f, args, loss=fixed_cotangent, **options) for f in (cases.compiled(call), call))
    compare.assert_same(got, want, EXACT)
    assert not fxfuse.last_report().failures


def sparse(x: Tensor, w_router: Tensor, w_gate_up: Tensor, w_down: Tensor, ids: Tensor) -> Tensor:
    """A layer with the weights of its router, and a residual. The ids are given: rounding may not change the routing."""
    p = F.linear(x, w_router).float().softmax(-1).gather(1, ids)
    return x + grouped_mlp(x.tanh(), w_gate_up, w_down, ids, p)


def layer(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    floats = cases.normal((tokens, 64), (4, 64), (4, 64, 64), (4, 64, 32), dtype=dtype)()
    return [*floats, zipf(tokens, 2, 4)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_compiled_with_its_router_and_any_number_of_tokens(dtype: torch.dtype) -> None:
    compiled = cases.compiled(sparse)

    def marked(x: Tensor, *rest: Tensor) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(rest[-1], 0)
        return compiled(x, *rest)

    for tokens in (5, 9, 31):
        args = layer(tokens, dtype)
        with torch._dynamo.config.patch(error_on_recompile=tokens > 5):
            compare.assert_same(run(marked, args), run(sparse, args), 1e-6)


@pytest.mark.inductor
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["fp32", "bf16"])
def test_through_inductor(dtype: torch.dtype) -> None:
    args = layer(7, dtype)
    got, eager = run(cases.compiled(sparse, lower="auto"), args), run(sparse, args)
    compare.assert_as_near_to_fp64(got, eager, run(sparse, compare.in_fp64(args)), slack=1e-6 if dtype is F32 else 2e-3)
