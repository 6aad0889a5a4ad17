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


def register(form: str, stable: bool) -> None:
    """Register the fusions for one spelling of the sort, ``torch.sort(ids)`` or ``torch.sort(ids, stable=True)``."""
    sort = aten.sort.stable if stable else aten.sort.default

    def order_of(ids: Tensor) -> Tensor:
        return torch.sort(ids.reshape(-1), stable=True)[1] if stable else torch.sort(ids.reshape(-1))[1]

    def backward(name: str, ids: Tensor):
        return fxfuse.register_backward_fusion(
            name=f"scatter_{name}[{form}]",
            example={"v": ROWS, "ids": ids},
            requires=(aten.index_put.default, sort),
            check_on_register=False,
        )

    @backward("permutation", IDS)
    def scatter_rows(v, ids):
        return torch.zeros_like(v).index_put((order_of(ids),), v, accumulate=True)

    @scatter_rows.rewrite
    def _(v, ids):
        return v[inverse_of(order_of(ids))]

    @backward("inverse", IDS)
    def scatter_rows_back(v, ids):
        return torch.zeros_like(v).index_put((inverse_of(order_of(ids)),), v, accumulate=True)

    @scatter_rows_back.rewrite
    def _(v, ids):
        return v[order_of(ids)]

    @backward("tokens", PAIRS)
    def scatter_to_tokens(v, ids):
        tokens = order_of(ids) // ids.shape[1]
        return v.new_zeros(ids.shape[0], v.shape[1]).index_put((tokens,), v, accumulate=True)

    scatter_to_tokens.check(check_pairs)

    @scatter_to_tokens.rewrite
    def _(v, ids):
        return sum_of_rows(v, order_of(ids), ids)

    @fxfuse.register_forward_fusion(
        name=f"combine_rows[{form}]",
        example={"y": ROWS, "ids": PAIRS},
        requires=(aten.scatter_add.default, sort),
        check_on_register=False,
    )
    def combine_rows(y, ids):
        tokens = (order_of(ids) // ids.shape[1]).reshape(-1, 1).expand(-1, y.shape[1])
        return y.new_zeros(ids.shape[0], y.shape[1]).scatter_add(0, tokens, y)

    combine_rows.check(check_pairs)

    @combine_rows.rewrite
    def _(y, ids):
        return sum_of_rows(y, order_of(ids), ids)


register("sort", stable=False)
register("stable sort", stable=True)
