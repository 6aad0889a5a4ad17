"""Squares, masks and doublings after a linear are found however a model spells them.

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


def relu_squared(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)).square()


def masked_linear(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return F.linear(x, w).masked_fill(mask, 0.0)


def doubled_linear_gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w) * 2.0)


@pytest.fixture(scope="module", autouse=True)
def identities() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(
        *map(
            local_fusions.identity,
            (
                relu_squared,
                masked_linear,
                doubled_linear_gelu,
            ),
        )
    ):
        yield


square = cases.identities(relu_squared)
SMALL = normal((2, 4, 16), (32, 16))
SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch_square": torch.square,
    "power_of_two": lambda t: t**2,
    "pow_of_a_float_two": lambda t: t.pow(2.0),
    "product_with_itself": lambda t: t * t,
}
for name, squared in SQUARES.items():
    square.case(SMALL, name=name)(lambda x, w, squared=squared: squared(F.relu(F.linear(x, w))))


@square.case(SMALL, fuses={})
def cube_is_not_fused(x, w):
    return F.relu(F.linear(x, w)) ** 3


masked = cases.identities(masked_linear)


def with_mask() -> list[Tensor]:
    return [*SMALL(), torch.rand(2, 4, 32) > 0.5]


@masked.case(with_mask)
def masked_fill(x, w, mask):
    return F.linear(x, w).masked_fill(mask, 0.0)


@masked.case(with_mask)
def masked_fill_in_place(x, w, mask):
    return F.linear(x, w).masked_fill_(mask, 0.0)


@masked.case(with_mask)
def where_mask_then_zero(x, w, mask):
    return torch.where(mask, 0.0, F.linear(x, w))


@masked.case(with_mask)
def where_not_mask_then_value(x, w, mask):
    return torch.where(~mask, F.linear(x, w), 0.0)


@masked.case(with_mask)
def where_mask_then_zeros_like(x, w, mask):
    y = F.linear(x, w)
    return torch.where(mask, torch.zeros_like(y), y)


@masked.case(with_mask, fuses={})
def inverted_mask_is_not_fused(x, w, mask):
    return torch.where(mask, F.linear(x, w), 0.0)


@masked.case(with_mask, fuses={})
def another_fill_value_is_not_fused(x, w, mask):
    return F.linear(x, w).masked_fill(mask, -1.0)


doubled = cases.identities(doubled_linear_gelu)


@doubled.case(SMALL)
def times_two(x, w):
    return F.gelu(F.linear(x, w) * 2)


@doubled.case(SMALL)
def added_to_itself(x, w):
    pre = F.linear(x, w)
    return F.gelu(pre + pre)


@doubled.case(SMALL)
def divided_by_a_half(x, w):
    return F.gelu(F.linear(x, w) / 0.5)


@square.parametrize()
def test_square(case: cases.Case) -> None:
    cases.check(case)


@masked.parametrize()
def test_mask(case: cases.Case) -> None:
    cases.check(case)


@doubled.parametrize()
def test_doubled(case: cases.Case) -> None:
    cases.check(case)


# In training a gradient that does not fit refuses too; in inference the forward has to be told apart by itself.
@cases.in_inference((*square, *masked)).parametrize()
def test_is_left_alone_in_inference_too(case: cases.Case) -> None:
    cases.check(case)
