"""Cases of value numbering: sizes that are symbols. They are compared at sizes that they were not traced with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from value_case import rule, symbolic

aten = torch.ops.aten
rule("symbolic sizes")


def halves(x: Tensor) -> Any:
    return torch.chunk(x, 2, dim=-1)


symbolic("a view by its size", lambda x: (x.view(-1), x.view(x.shape[0] * x.shape[1])), (4, 6), (3, 5), same=True)
symbolic("a view and back", lambda x: (x.view(-1).view(x.shape[0], x.shape[1]), aten.alias(x)), (4, 6), (3, 8), same=True)
symbolic(
    "a flattened linear",
    lambda x, w: (F.linear(x, w), (x.view(-1, x.shape[2]) @ w.t()).view(*x.shape[:2], -1)),
    (2, 3, 6),
    (4, 6),
    (4, 5, 7),
    (3, 7),
    same=True,
)
symbolic(
    "a bias",
    lambda x, w, b: (F.linear(x, w, b), x @ w.t() + b),
    (5, 6),
    (4, 6),
    (4,),
    (4, 5),
    (3, 5),
    (3,),
    same=True,
    strict=False,
)
symbolic(
    "a bias of unknown length",
    lambda x, w, b: (x @ w.t() + b[:1], F.linear(x, w, b[:1].expand(4))),
    (5, 6),
    (4, 6),
    (4,),
    (3, 5),
    (4, 5),
    (4,),
    same=False,
    alike=True,
)
symbolic("halves", lambda x: (halves(x)[1], x[..., (x.shape[1] + 1) // 2 :]), (4, 6), (5, 8), same=True)
symbolic("other halves", lambda x: (halves(x)[0], halves(x)[1]), (4, 6), (5, 8), same=False)
symbolic("a half that is rounded down", lambda x: (halves(x)[0], x[..., : x.shape[1] // 2]), (4, 6), (5, 7), same=False)
symbolic(
    "pieces",
    lambda x: (x.split(x.shape[0] // 2)[1], x[x.shape[0] // 2 :]),
    (6, 4),
    (8, 3),
    same=True,
)
symbolic("pieces of given sizes", lambda x: (x.split([2, x.shape[0] - 2])[1], x[2:]), (6, 4), (8, 3), same=True)
symbolic("the last row", lambda x: (x[-1:], x.narrow(0, x.shape[0] - 1, 1)), (6, 4), (8, 3), same=True)
symbolic("the last and the first row", lambda x: (x[-1:], x[:1]), (6, 4), (8, 3), same=False)
symbolic("all of it", lambda x: (x.narrow(0, 0, x.shape[0]), aten.alias(x)), (6, 4), (8, 3), same=True)
symbolic("not quite all of it", lambda x: (x[: x.shape[0] - 1], x[1:]), (6, 4), (8, 3), same=False)
symbolic(
    "a sum over rows", lambda x: (x.sum((0, 1)), x.reshape(-1, x.shape[2]).sum(0)), (2, 3, 4), (3, 5, 6), same=True, strict=False
)
symbolic(
    "zeros",
    lambda x, m: (x.masked_fill(m > 0, 0.0), torch.where(m > 0, torch.zeros_like(x), x)),
    (3, 4),
    (3, 4),
    (5, 6),
    (5, 6),
    same=True,
)
symbolic("zeros of other shapes", lambda x: (x.new_zeros(x.shape[0]), x.new_zeros(x.shape[1])), (3, 4), (5, 6), same=False)
symbolic(
    "a transposed linear", lambda x, w: ((x @ w.t()).t(), w @ x.t()), (3, 4), (5, 4), (6, 7), (2, 7), same=True, strict=False
)
symbolic(
    "a broadcast matrix",
    lambda x, w: (torch.bmm(x, w.t().expand(x.shape[0], -1, -1)), F.linear(x, w)),
    (2, 3, 4),
    (5, 4),
    (3, 2, 6),
    (7, 6),
    same=True,
)
symbolic("sizes as numbers", lambda x: (x + x.shape[0], x + x.shape[1]), (3, 4), (5, 6), same=False)
symbolic("one size as a number", lambda x: (x * x.shape[0], x * x.shape[0]), (3, 4), (5, 6), same=True)
symbolic("a padded cat", lambda x: (F.pad(x, [0, 2]) + F.pad(x, [2, 0]), torch.cat([x, x], 1)), (3, 4), (5, 6), same=False)
symbolic(
    "scattered at a symbol",
    lambda x: (
        x.new_zeros(x.shape[0] * 2, 4).slice_scatter(x, 0, x.shape[0]),
        x.new_zeros(x.shape[0] * 2, 4).slice_scatter(x, 0, 0, x.shape[0]),
    ),
    (3, 4),
    (5, 4),
    same=False,
)
symbolic(
    "onto a cat",
    lambda x, y: (torch.cat([x, y]) + F.pad(y, [0, 0, x.shape[0], 0]), torch.cat([x, y + y])),
    (3, 4),
    (5, 4),
    (2, 4),
    (7, 4),
    same=False,
    alike=True,
)
symbolic(
    "a size added to a linear",
    lambda x, w: (F.linear(x, w) + x.shape[0], F.linear(x, w) + w.shape[0]),
    (5, 6),
    (4, 6),
    (3, 5),
    (7, 5),
    same=False,
)
symbolic("twice a size", lambda x: (x + (x.shape[0] + x.shape[0]), x + x.shape[0] * 2), (3, 4), (5, 6), same=True)
symbolic(
    "scattered up to a symbol",
    lambda x: (x.new_zeros(8, 4).slice_scatter(x, 0, 0, x.shape[0]), F.pad(x, [0, 0, 0, 8 - x.shape[0]])),
    (3, 4),
    (5, 4),
    same=False,
    alike=True,
)
symbolic(
    "scattered from a symbol on",
    lambda x: (x.new_zeros(8, 4).slice_scatter(x, 0, 8 - x.shape[0]), F.pad(x, [0, 0, 8 - x.shape[0], 0])),
    (3, 4),
    (5, 4),
    same=False,
    alike=True,
)
symbolic(
    "scattered into a symbol",
    lambda x: (
        x.new_zeros(x.shape[0], 4).slice_scatter(x[:2], 0, 0, 2),
        x.new_zeros(x.shape[0], 4).slice_scatter(x[:2], 0, 2, 4),
    ),
    (6, 4),
    (5, 4),
    same=False,
)
symbolic(
    "a number of a symbol", lambda x: (torch.full((2,), x.shape[0]), torch.full((2,), x.shape[1])), (3, 4), (5, 6), same=False
)
symbolic(
    "one row from a symbol on",
    lambda x, y: (x[y.shape[0] :], x[y.shape[0] - 8 :]),
    (8, 4),
    (3, 4),
    (8, 6),
    (5, 6),
    same=False,
    alike=True,
)
symbolic(
    "pieces of unknown start",
    lambda x, n: (x.narrow(0, n.item(), 2), x[:2]),
    (8, 4),
    torch.tensor(3),
    (8, 4),
    torch.tensor(2),
    same=False,
)
