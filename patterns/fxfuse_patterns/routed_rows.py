"""What is left of a mixture-of-experts block that is not recognised as a whole: scatters that add, written as gathers.

Rows are scattered by a permutation that ``sort`` returned (or its inverse), or K of them are added to each token: both are a
gather by the inverse permutation. That needs no atomics, is the same on every run, and adds up in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fxfuse

aten = torch.ops.aten
IDS = torch.tensor([3, 1, 0, 2, 3, 0, 1, 1, 0, 3, 2, 1])
PAIRS = IDS.view(6, 2)
ROWS = torch.zeros(12, 8)


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order).index_put((order,), torch.arange(order.shape[0], device=order.device))


def sum_of_rows(rows: Tensor, order: Tensor, ids: Tensor) -> Tensor:
    """For each token the sum of its K rows, added up in fp32; rows (S, H) in ``order``, ids (T, K)."""
    places = inverse_of(order).view(ids.shape)
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    total = wide[places[:, 0]]
    for k in range(1, ids.shape[1]):
        total = total + wide[places[:, k]]
    return total.to(rows.dtype)


def check_pairs(m: fxfuse.Match):
    """Refuse what ``sum_of_rows`` cannot take."""
    if m.recipe.numerics == "strict":
        return m.reject("it adds up in fp32 where the model rounds after each row, and numerics is strict")
    if not isinstance(m.ids.shape[1], int) or m.ids.shape[1] < 1:
        return m.reject(f"the number of rows a token, {m.ids.shape[1]}, must be known and at least one")
    return None


@fxfuse.register_backward_fusion(
    name="scatter_rows[permutation]",
    example={"v": ROWS, "ids": IDS},
    requires=(aten.index_put.default, aten.sort.default),
    check_on_register=False,
)
def scatter_rows(v, ids):
    order = torch.sort(ids)[1]
    return torch.zeros_like(v).index_put((order,), v, accumulate=True)


@scatter_rows.rewrite
def _(v, ids):
    return v[inverse_of(torch.sort(ids)[1])]


@fxfuse.register_backward_fusion(
    name="scatter_rows[inverse]",
    example={"v": ROWS, "ids": IDS},
    requires=(aten.index_put.default, aten.sort.default),
    check_on_register=False,
)
def scatter_rows_back(v, ids):
    return torch.zeros_like(v).index_put((inverse_of(torch.sort(ids)[1]),), v, accumulate=True)


@scatter_rows_back.rewrite
def _(v, ids):
    return v[torch.sort(ids)[1]]


@fxfuse.register_backward_fusion(
    name="scatter_rows[tokens]",
    example={"v": ROWS, "ids": PAIRS},
    requires=(aten.index_put.default, aten.sort.default),
    check_on_register=False,
)
def scatter_to_tokens(v, ids):
    order = torch.sort(ids.reshape(-1))[1]
    return v.new_zeros(ids.shape[0], v.shape[1]).index_put((order // ids.shape[1],), v, accumulate=True)


scatter_to_tokens.check(check_pairs)


@scatter_to_tokens.rewrite
def _(v, ids):
    return sum_of_rows(v, torch.sort(ids.reshape(-1))[1], ids)


@fxfuse.register_forward_fusion(
    name="combine_rows[scatter_add]",
    example={"y": ROWS, "ids": PAIRS},
    requires=(aten.scatter_add.default,),
    check_on_register=False,
)
def combine_rows(y, ids):
    order = torch.argsort(ids.reshape(-1), stable=True)
    tokens = (order // ids.shape[1]).reshape(-1, 1).expand(-1, y.shape[1])
    return y.new_zeros(ids.shape[0], y.shape[1]).scatter_add(0, tokens, y)


combine_rows.check(check_pairs)


@combine_rows.rewrite
def _(y, ids):
    return sum_of_rows(y, torch.argsort(ids.reshape(-1), stable=True), ids)
