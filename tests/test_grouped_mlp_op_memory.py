"""``fxfuse.ops.grouped_mlp`` with any strides, with memory that nobody wrote, and with numbers that are not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import compare
import pytest
import torch
import torch.nn.functional as F
from moe_checks import both, check, check_calls, fixed_cotangent, layouts, named, orders, present, run, varied
from reference_moe import ARGUMENTS, BF16, Args, Block
from torch import Tensor

from fxfuse.ops import grouped_mlp

numbers = pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
places = pytest.mark.parametrize("where", ["x", "router_weights", "cotangent"])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "permuted": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "every_second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "first_expanded": lambda t: t[:1].expand_as(t),
    "last_expanded": lambda t: t[..., :1].expand_as(t),
    "offset": lambda t: F.pad(t.flatten(), (1, 0))[1:].view(t.shape),
    "padded": lambda t: F.pad(t, (0, 8))[..., : t.shape[-1]],
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("view", VIEWS)
@both
def test_any_strides(dtype: torch.dtype, width: dict[str, int], view: str, name: str) -> None:
    block = Block(dtype=dtype, tokens=16, separate=name == "w_up", **width)

    def viewed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        inner, place = block.of(function), ARGUMENTS.index(name)
        return lambda *args: inner(*args[:place], VIEWS[view](args[place]), *args[place + 1 :])

    check_calls(block, viewed, draws=16 if "expanded" in view else 1)  # some gradients are a few numbers then


COTANGENTS: dict[str, compare.Loss] = {
    "expanded": compare.total,
    "transposed": lambda outputs: fixed_cotangent((outputs[0].t(),)),
    "row_expanded": lambda outputs: fixed_cotangent((outputs[0].sum(0),)),
    "column_expanded": lambda outputs: fixed_cotangent((outputs[0].sum(1),)),
    "sliced": lambda outputs: fixed_cotangent((outputs[0][::2, 1:],)),
}


@pytest.mark.parametrize("loss", COTANGENTS.values(), ids=COTANGENTS)
@orders
@both
def test_any_cotangent(dtype: torch.dtype, width: dict[str, int], first: bool, loss: compare.Loss) -> None:
    block = Block(dtype=dtype, tokens=16, weights_first=first, **width)
    check_calls(block, loss=loss)


# ------------------------------------------------------------------------------------------------ undefined memory, NaN, inf


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    ends = torch.tensor([1], dtype=torch.int32)
    assert torch._grouped_mm(torch.ones(2, 8, dtype=BF16), torch.ones(1, 8, 8, dtype=BF16), offs=ends)[1].isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("routing", ["some_outside", "nobody", "one_idle"])
@varied
@both
def test_undefined_memory_is_never_read(dtype: torch.dtype, width: dict[str, int], fields: dict[str, Any], routing: str) -> None:
    check(dtype, tokens=16, routing=routing, coarse="limit" in fields, **width, **fields)


def spoiled(args: Args, where: str, token: int, value: float) -> tuple[list[Tensor | None], compare.Loss]:
    """The arguments with ``value`` in one token's row of one of them, or of the output's gradient."""
    copies = named([a if a is None else a.detach().clone().requires_grad_(a.requires_grad) for a in args])
    target = copies.get(where)
    if target is not None:
        with torch.no_grad():
            target[token] = value

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        (out,) = outputs
        cotangent = torch.ones_like(out)
        if where == "cotangent":
            cotangent[token] = value
        return Scaled.apply(out, cotangent)

    return list(copies.values()), loss


class Scaled(torch.autograd.Function):
    """A loss with a given gradient, whatever its value."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, cotangent: Tensor) -> Tensor:
        ctx.save_for_backward(cotangent)
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@places
@numbers
@orders
@layouts
@both
def test_a_token_without_experts_may_hold_anything(
    dtype: torch.dtype, width: dict[str, int], layout: dict[str, Any], first: bool, value: float, where: str
) -> None:
    block = Block(dtype=dtype, weights_first=first, **width, **layout)
    args = block.inputs()
    assert args[3] is not None
    args[3][2] = torch.tensor([-1, block.experts])
    dirty, loss = spoiled(args, where, 2, value)
    clean, clean_loss = spoiled(args, "", 2, value)
    compare.assert_bit_equal(run(block.of(grouped_mlp), dirty, loss), run(block.of(grouped_mlp), clean, clean_loss))


@places
@numbers
@orders
@layouts
@both
def test_what_is_not_finite_stays_in_its_token(
    dtype: torch.dtype, width: dict[str, int], layout: dict[str, Any], first: bool, value: float, where: str
) -> None:
    block = Block(dtype=dtype, tokens=9, experts=6, weights_first=first, **width, **layout)
    args = block.inputs()
    ids = args[3]
    assert ids is not None
    dirty, loss = spoiled(args, where, 2, value)
    clean, clean_loss = spoiled(args, "", 2, value)
    got, want = run(block.of(grouped_mlp), dirty, loss), run(block.of(grouped_mlp), clean, clean_loss)
    touched = got.outputs[0] if where != "cotangent" else got.grads[0]
    assert touched is not None and not touched[2].isfinite().any()
    others = torch.arange(9) != 2
    idle = torch.tensor([e not in ids[2] for e in range(block.experts)])
    for name, g, w in zip(["out", *present(args)], [*got.outputs, *got.grads], [*want.outputs, *want.grads], strict=True):
        if g is not None and w is not None:
            kept = others if name in ("out", "x", "router_weights") else idle
            assert torch.equal(g[kept], w[kept]) and w.isfinite().all(), name


@pytest.mark.parametrize("name", ["w_gate_up", "w_down", "w_up", "bias_gate_up", "bias_down"])
@both
def test_nan_weights_stay_in_their_expert(dtype: torch.dtype, width: dict[str, int], name: str) -> None:
    block = Block(dtype=dtype, tokens=9, experts=6, separate=name == "w_up", **width)
    args = block.inputs()
    dirty, _ = spoiled(args, name, 1, float("nan"))
    got, want = run(block.of(grouped_mlp), dirty), run(block.of(grouped_mlp), args)
    ids = args[3]
    assert ids is not None
    used = (ids == 1).any(1)
    assert torch.equal(got.outputs[0][~used], want.outputs[0][~used]) and got.outputs[0][used].isnan().all()
