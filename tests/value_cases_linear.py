"""Cases of value numbering: matrix products, with and without bias, and sums."""

from __future__ import annotations

from typing import Any

import torch
from program_writer import CAST
from value_case import FP32, FP64, apart, aten, floats, ints, itself, rule, same

view = aten.view.default
permute = aten.permute.default
expand = aten.expand.default
t = aten.t.default
mm = aten.mm.default
bmm = aten.bmm.default
addmm = aten.addmm.default
add = aten.add.Tensor
mul = aten.mul.Tensor
total = aten.sum.dim_IntList
cut = aten.slice.Tensor

rule("linear")


def linear(x: Any, w: Any, *_: Any) -> Any:
    return mm(x, t(w))


def stack(w: Any, *shape: int) -> Any:
    return expand(view(w, [1, *shape[-2:]]), list(shape))


same("however the weight is transposed", linear, lambda x, w: mm(x, aten.transpose.int(w, 1, 0)), (4, 5), (3, 5))
same(
    "a view moves to x",
    lambda x, w: view(mm(view(x, [6, 5]), t(w)), [2, 3, 4]),
    lambda x, w: bmm(x, stack(t(w), 2, 5, 4)),
    (2, 3, 5), (4, 5),
)  # fmt: skip
same(
    "a view of the last dimension is one of the matrix",
    lambda x, w: view(bmm(x, stack(t(w), 2, 5, 4)), [2, 3, 2, 2]),
    lambda x, w: view(mm(view(x, [6, 5]), t(w)), [2, 3, 2, 2]),
    (2, 3, 5), (4, 5),
)  # fmt: skip
same(
    "so is one of a vector",
    lambda x, w: view(view(mm(view(x, [1, 5]), t(w)), [4]), [2, 2]),
    lambda x, w: view(mm(view(x, [1, 5]), t(w)), [2, 2]),
    (5,), (4, 5),
)  # fmt: skip
same(
    "a view of a linear with bias",
    lambda x, w, b: view(addmm(b, x, t(w)), [2, 2, 3]),
    lambda x, w, b: add(view(mm(x, t(w)), [2, 2, 3]), b),
    (4, 5), (3, 5), (3,), strict=False,
)  # fmt: skip
same(
    "one matrix for the batch",
    lambda x, w: bmm(x, expand(t(w), [2, 5, 4])),
    lambda x, w: view(mm(view(x, [6, 5]), t(w)), [2, 3, 4]),
    (2, 3, 5),
    (4, 5),
)
same(
    "a batch of one",
    lambda x, y: bmm(x, y),
    lambda x, y: view(mm(view(x, [3, 5]), view(y, [5, 4])), [1, 3, 4]),
    (1, 3, 5),
    (1, 5, 4),
)
same(
    "addmm with its defaults",
    lambda b, x, w: addmm(b, x, t(w), beta=1.0, alpha=1),
    lambda b, x, w: addmm(b, x, t(w)),
    (3,),
    (4, 5),
    (3, 5),
)
same(
    "addmm is mm + bias",
    lambda b, x, w: addmm(b, x, t(w)),
    lambda b, x, w: add(mm(x, t(w)), b),
    (3,),
    (4, 5),
    (3, 5),
    strict=False,
)
same("or bias + mm", lambda b, x, w: addmm(b, x, t(w)), lambda b, x, w: add(b, mm(x, t(w))), (3,), (4, 5), (3, 5), strict=False)
same("a bias of one", lambda b, x, w: addmm(b, x, t(w)), lambda b, x, w: add(b, mm(x, t(w))), (1,), (4, 5), (1, 5), strict=False)
same(
    "addmm of a matrix is mm + it",
    lambda r, x, w: addmm(r, x, t(w)),
    lambda r, x, w: add(mm(x, t(w)), r),
    (4, 3),
    (4, 5),
    (3, 5),
    strict=False,
)
same("transposed", lambda x, w: t(linear(x, w)), lambda x, w: linear(w, x), (4, 5), (3, 5), strict=False)
same(
    "two vectors in either order",
    lambda x, w, v: add(view(mm(view(x, [1, 5]), t(w)), [3]), view(mm(view(x, [1, 5]), t(v)), [3])),
    lambda x, w, v: add(view(mm(view(x, [1, 5]), t(v)), [3]), view(mm(view(x, [1, 5]), t(w)), [3])),
    (5,), (3, 5), (3, 5),
)  # fmt: skip
same(
    "a vector and itself",
    lambda x, w: add(view(mm(view(x, [1, 5]), t(w)), [3]), view(mm(view(x, [1, 5]), t(w)), [3])),
    lambda x, w: mul(view(mm(view(x, [1, 5]), t(w)), [3]), 2.0),
    (5,), (3, 5),
)  # fmt: skip
same(
    "a view of no columns",
    lambda x, w: view(linear(x, w), [2, 2, 0]),
    lambda x, w: view(view(linear(x, w), [1, 4, 0]), [2, 2, 0]),
    (1, 5),
    (0, 5),
)
same("one number", lambda x, w: view(linear(x, w), []), lambda x, w: view(view(linear(x, w), [1, 1, 1]), []), (1, 5), (1, 5))
apart(
    "looked up rows are not one matrix",
    lambda x, w, i: bmm(x, aten.embedding.default(w, i)),
    lambda x, w, i: bmm(x, expand(w, [2, 5, 4])),
    (2, 3, 5),
    (5, 4),
    torch.tensor([[3, 0, 0, 1, 4], [0, 1, 2, 3, 4]]),
)
apart("the weight itself", linear, lambda x, w: mm(x, w), (4, 4), (4, 4))
apart("operands swapped", linear, lambda x, w: linear(w, x), (4, 4), (4, 4))
apart("the bias of the transposed", lambda x, w, b: t(addmm(b, x, t(w))), lambda x, w, b: addmm(b, w, t(x)), (4, 4), (4, 4), (4,))
apart(
    "a transposed batch",
    lambda x, w: permute(bmm(x, expand(w, [4, 4, 4])), [1, 0, 2]),
    lambda x, w: bmm(expand(w, [4, 4, 4]), x),
    (4, 4, 4),
    (4, 4),
)
apart("addmm with alpha", lambda b, x, w: addmm(b, x, t(w), alpha=2), lambda b, x, w: addmm(b, x, t(w)), (3,), (4, 5), (3, 5))
apart("addmm with beta", lambda b, x, w: addmm(b, x, t(w), beta=2), lambda b, x, w: addmm(b, x, t(w)), (3,), (4, 5), (3, 5))
apart(
    "alpha is not beta",
    lambda b, x, w: addmm(b, x, t(w), beta=2),
    lambda b, x, w: addmm(b, x, t(w), alpha=2),
    (3,),
    (4, 5),
    (3, 5),
)
apart(
    "a bias that is added twice",
    lambda b, x, w: add(linear(x, w), b, alpha=2),
    lambda b, x, w: addmm(b, x, t(w)),
    (3,),
    (4, 5),
    (3, 5),
)
apart(
    "a second bias",
    lambda b, c, x, w: add(addmm(b, x, t(w)), c),
    lambda b, c, x, w: addmm(c, x, t(w)),
    (3,),
    (3,),
    (4, 5),
    (3, 5),
)
apart(
    "one number is no bias",
    lambda b, x, w: add(linear(x, w), b),
    lambda b, x, w: add(linear(x, w), expand(b, [3])),
    (1,),
    (4, 5),
    (3, 5),
    alike=True,
)
apart(
    "a row is no bias",
    lambda b, x, w: add(linear(x, w), view(b, [1, 3])),
    lambda b, x, w: addmm(b, x, t(w)),
    (3,),
    (4, 5),
    (3, 5),
    alike=True,
)
apart(
    "a row in addmm",
    lambda b, x, w: addmm(view(b, [1, 3]), x, t(w)),
    lambda b, x, w: addmm(b, x, t(w)),
    (3,),
    (4, 5),
    (3, 5),
    alike=True,
)
apart(
    "a row is no matrix",
    lambda b, x, w: addmm(b, x, t(w)),
    lambda b, x, w: add(linear(x, w), expand(b, [4, 3])),
    (1, 3),
    (4, 5),
    (3, 5),
    alike=True,
)
apart("a column", lambda b, x, w: add(linear(x, w), view(b, [4, 1])), lambda b, x, w: addmm(b, x, t(w)), (4,), (4, 5), (4, 5))
apart(
    "a bias of another dtype",
    lambda b, x, w: add(linear(x, w), b),
    lambda b, x, w: add(linear(x, w), CAST(b, FP32)),
    (3,),
    floats(4, 5),
    floats(3, 5),
)
apart(
    "another matrix for each",
    lambda x, y: bmm(x, y),
    lambda x, y: bmm(x, expand(cut(y, 0, 0, 1), [2, 5, 4])),
    (2, 3, 5),
    (2, 5, 4),
)
apart(
    "a row for each",
    lambda x, y: bmm(x, expand(y, [2, 5, 4])),
    lambda x, y: bmm(x, expand(view(y, [1, 1, 4]), [2, 5, 4])),
    (2, 3, 5),
    (1, 4),
    alike=True,
)
apart("a baddbmm", lambda x, y: aten.baddbmm.default(x, x, y), lambda x, y: bmm(x, y), (2, 4, 4), (2, 4, 4))

rule("sum")
same("over leading dimensions", lambda x: total(x, [0, 1]), lambda x: total(view(x, [6, 4]), [0]), (2, 3, 4), strict=False)
same("from the end", lambda x: total(x, [-2]), lambda x: total(x, [0]), (3, 4))
same("in another order", lambda x: total(x, [2, 0]), lambda x: total(x, [0, -1]), (2, 3, 4))
same("over everything", lambda x: total(x, None), lambda x: total(x, [0, 1]), (3, 4))
same("over nothing named", lambda x: total(x, []), lambda x: total(x, [1, 0]), (3, 4))
same("a kept dimension", lambda x: total(x, [0], True), lambda x: view(total(x, [0]), [1, 4]), (3, 4))
same("kept ones in the middle", lambda x: total(x, [1], True), lambda x: view(total(x, [1]), [2, 1, 4]), (2, 3, 4))
same("of one row", lambda x: total(x, [0]), lambda x: view(x, [4]), (1, 4))
same("of one row of rows", lambda x: total(x, [0, 1]), lambda x: view(x, [4]), (1, 1, 4), strict=False)
same("of a number", lambda x: total(x, []), itself, ())
same("in its own dtype", lambda x: total(x, [0], dtype=FP64), lambda x: total(x, [0]), (3, 4))
apart("over other dimensions", lambda x: total(x, [0]), lambda x: total(x, [1]), (4, 4))
apart("over one of two", lambda x: total(x, [0]), lambda x: total(x, [1]), (3, 3, 4))
apart("over two of three", lambda x: total(x, [0, 2]), lambda x: total(x, [0, 1]), (3, 4, 4))
apart("over all but the first", lambda x: total(x, [1, 2]), lambda x: total(x, [0, 1]), (4, 4, 4))
apart("kept or not", lambda x: total(x, [0], True), lambda x: total(x, [0]), (3, 4))
apart("of one column", lambda x: total(x, [1]), lambda x: view(x, [4]), (1, 4))
apart("in another dtype", lambda x: total(x, [0], dtype=FP32), lambda x: total(x, [0]), (3, 4))
apart("a wider sum of one row", lambda x: total(x, [0]), lambda x: view(x, [4]), ints(1, 4).int())
apart("a wider sum named by its dtype", lambda x: total(x, [0], dtype=FP64), lambda x: view(x, [4]), floats(1, 4))
apart("a mean", lambda x: aten.mean.dim(x, [0]), lambda x: total(x, [0]), (3, 4))
