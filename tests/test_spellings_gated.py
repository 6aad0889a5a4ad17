"""Gated products, of the halves of one linear or as a whole MLP, are found however a model spells them.

The fusions are identities (the pattern is put back), so every difference to eager comes from matching or splicing, and
where the model's spelling is the pattern's own the result has the bits of the unfused graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cases
import local_fusions
import pytest
import torch
import torch.nn.functional as F
from cases import normal
from torch import Tensor


def gate_up(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def silu_by_hand(t: Tensor) -> Tensor:
    return t * torch.sigmoid(t)


@pytest.fixture(scope="module", autouse=True)
def identities() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(
        *map(
            local_fusions.identity,
            (
                gate_up,
                swiglu_mlp,
            ),
        )
    ):
        yield


gate = cases.identities(gate_up)
BATCH = normal((2, 4, 16), (64, 16))


def halves(split: Callable[[Tensor], tuple[Tensor, ...]], act: Callable[[Tensor], Tensor] = F.silu) -> Callable[..., Tensor]:
    """The gated product over the two parts that ``split`` makes."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        first, second = split(F.linear(x, w))
        return act(first) * second

    return fn


def chunk(t: Tensor) -> tuple[Tensor, ...]:
    return t.chunk(2, -1)


def slices(t: Tensor) -> tuple[Tensor, ...]:
    return t[..., :32], t[..., 32:]


def slices_at_half(t: Tensor) -> tuple[Tensor, ...]:
    return t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]


def narrows(t: Tensor) -> tuple[Tensor, ...]:
    return t.narrow(-1, 0, 32), t.narrow(-1, 32, 32)


gate.case(BATCH, bit_equal=True, name="chunk")(halves(chunk))
gate.case(BATCH, bit_equal=True, name="split")(halves(lambda t: t.split(32, dim=2)))
gate.case(BATCH, name="split_with_sizes")(halves(lambda t: torch.split(t, [32, 32], -1)))
gate.case(BATCH, name="slices")(halves(slices))
gate.case(BATCH, name="narrows")(halves(narrows))
gate.case(BATCH, name="tensor_split")(halves(lambda t: torch.tensor_split(t, 2, -1)))
gate.case(BATCH, name="silu_by_hand")(halves(chunk, silu_by_hand))
gate.case(BATCH, train=False, name="narrows_and_silu_by_hand_inference")(halves(narrows, silu_by_hand))
gate.case(BATCH, dynamic_dims=((0, 0), (0, 1)), other_inputs=(normal((3, 5, 16), (64, 16)),), name="dynamic_slices")(
    halves(slices_at_half)
)
gate.case(BATCH, dynamic=True, name="every_size_dynamic_chunk")(halves(chunk))
gate.case(BATCH, dynamic=True, fuses={}, name="slices_at_half_of_an_unknown_size_are_not_a_chunk")(halves(slices_at_half))
gate.case(BATCH, fuses={}, name="sigmoid_gate_is_not_fused")(halves(chunk, torch.sigmoid))
gate.case(BATCH, fuses={}, name="overlapping_halves_are_not_fused")(halves(lambda t: (t.narrow(-1, 0, 32), t.narrow(-1, 16, 32))))
gate.case(BATCH, fuses={}, name="interleaved_halves_are_not_fused")(halves(lambda t: (t[..., ::2], t[..., 1::2])))


@gate.case(BATCH)
def commuted_product(x, w):
    first, second = F.linear(x, w).chunk(2, -1)
    return second * F.silu(first)


@gate.case(BATCH)
def everything_respelled(x, w):
    h = x @ w.mT
    return h[..., 32:] * (torch.sigmoid(h[..., :32]) * h[..., :32])


@gate.case(BATCH, fuses={}, reason="differs")
def gate_and_up_swapped_is_not_fused(x, w):
    first, second = F.linear(x, w).chunk(2, -1)
    return F.silu(second) * first


whole_mlp = cases.identities(swiglu_mlp)
MLP = normal((2, 4, 16), (32, 16), (32, 16), (16, 32))


@whole_mlp.case(MLP)
def matmuls_and_silu_by_hand(x, w_gate, w_up, w_down):
    return (silu_by_hand(x @ w_gate.t()) * (x @ w_up.t())) @ w_down.t()


@whole_mlp.case(MLP)
def mlp_of_a_transposed_batch(x, w_gate, w_up, w_down):
    return swiglu_mlp(x.transpose(0, 1), w_gate, w_up, w_down)


# ---------------------------------------------------------------- strict numerics keep apart what rounds differently
strict = cases.identities(gate_up, recipe="strict")
strict.case(BATCH, name="strict_slices")(halves(slices))
strict.case(BATCH, fuses={}, name="strict_silu_by_hand_is_not_fused")(halves(chunk, silu_by_hand))


@gate.parametrize()
def test_gate_up(case: cases.Case) -> None:
    cases.check(case)


@whole_mlp.parametrize()
def test_whole_mlp(case: cases.Case) -> None:
    cases.check(case)


@strict.parametrize()
def test_strict_gate_up(case: cases.Case) -> None:
    cases.check(case)


# In training a gradient that does not fit refuses too; in inference the forward has to be told apart by itself.
@cases.in_inference((*gate, *strict)).parametrize()
def test_is_left_alone_in_inference_too(case: cases.Case) -> None:
    cases.check(case)
