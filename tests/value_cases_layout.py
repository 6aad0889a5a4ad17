"""Cases of value numbering: views, copies, permutes, broadcasts, pieces and their sums."""

from __future__ import annotations

import functools
from typing import Any

import torch
from program_writer import CAST, call
from value_case import FP32, FP64, apart, aten, floats, ints, itself, rule, same

view = aten.view.default
permute = aten.permute.default
expand = aten.expand.default
t = aten.t.default
add = aten.add.Tensor
cut = aten.slice.Tensor
pad = aten.constant_pad_nd.default
scatter = aten.slice_scatter.default
cat = aten.cat.default
split = aten.split.Tensor
full = functools.partial(call, aten.full.default)

rule("view")
same("two views are one", lambda x: view(view(x, [2, 8]), [4, 4]), lambda x: view(x, [4, 4]), (16,))
same("a view and back", lambda x: view(view(x, [2, 8]), [4, 4]), itself, (4, 4))
same("a view to its own shape", lambda x: view(x, [4, 4]), itself, (4, 4))
same("squeeze", lambda x: aten.squeeze.default(x), lambda x: view(x, [2, 4]), (2, 1, 4))
same("squeeze of a dimension", lambda x: aten.squeeze.dim(x, 1), lambda x: view(x, [2, 4]), (2, 1, 4))
same("squeeze of dimensions", lambda x: aten.squeeze.dims(x, [0, 1]), lambda x: view(x, [2, 4]), (1, 1, 2, 4))
same("unsqueeze", lambda x: aten.unsqueeze.default(x, -1), lambda x: view(x, [2, 4, 1]), (2, 4))
same("flatten", lambda x: aten.flatten.using_ints(x, 0, 1), lambda x: view(x, [8, 4]), (2, 4, 4))
same("reshape", lambda x: aten.reshape.default(x, [8]), lambda x: view(x, [8]), (2, 4))
same("an unsafe view", lambda x: aten._unsafe_view.default(x, [8]), lambda x: view(x, [8]), (2, 4))
apart("other shapes", lambda x: view(x, [2, 8]), lambda x: view(x, [8, 2]), (4, 4))
apart("a view as another dtype", lambda x: aten.view.dtype(x, torch.int64), itself, (4,))

rule("copy")
for copy in (aten.alias.default, aten.clone.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default):
    same(str(copy), copy, itself, (4, 4))
same("a clone of another layout", lambda x: aten.clone.default(t(x), memory_format=torch.contiguous_format), t, (2, 4))
same("a cast to its own dtype", lambda x: CAST(x, FP64), itself, (4,))
apart("a cast to another dtype", lambda x: CAST(x, FP32), itself, (4,))
apart("there and back", lambda x: CAST(CAST(x, FP32), FP64), itself, (4,), alike=True)
apart("two casts", lambda x: CAST(x, FP32), lambda x: CAST(x, torch.bfloat16), (4,))

rule("permute")
same("two permutes are one", lambda x: permute(permute(x, [1, 2, 0]), [0, 2, 1]), lambda x: permute(x, [1, 0, 2]), (2, 3, 4))
same("three are none", lambda x: permute(permute(permute(x, [1, 2, 0]), [1, 2, 0]), [1, 2, 0]), itself, (2, 3, 4))
same("t", t, lambda x: permute(x, [1, 0]), (2, 3))
same("t of a vector", t, itself, (4,))
same("transpose", lambda x: aten.transpose.int(x, 0, 2), lambda x: permute(x, [2, 1, 0]), (2, 3, 4))
same("transpose of a number", lambda x: aten.transpose.int(x, 0, -1), itself, ())
same("permute of a number", lambda x: permute(x, []), itself, ())
same("from the end", lambda x: aten.transpose.int(x, -1, -2), lambda x: permute(x, [0, -1, 1]), (2, 3, 4))
same("only a dimension of one moves", lambda x: permute(x, [1, 0, 2]), lambda x: view(x, [1, 2, 4]), (2, 1, 4))
same("one of two moves", lambda x: permute(x, [2, 1, 0]), lambda x: view(t(view(x, [2, 4])), [4, 1, 2]), (2, 1, 4))
same(
    "three of four move",
    lambda x: permute(x, [3, 1, 0, 2]),
    lambda x: view(
        aten.clone.default(permute(view(x, [2, 3, 4]), [2, 0, 1]), memory_format=torch.contiguous_format), [4, 1, 2, 3]
    ),
    (2, 1, 3, 4),
)
same("a view between permutes", lambda x: t(view(permute(x, [2, 1, 0]), [4, 2])), lambda x: view(x, [2, 4]), (2, 1, 4))
same("of a broadcast matrix", lambda m: permute(expand(m, [2, 3, 4]), [0, 2, 1]), lambda m: expand(t(m), [2, 4, 3]), (3, 4))
same("of a broadcast row", lambda m: permute(expand(m, [2, 3, 4]), [0, 2, 1]), lambda m: expand(t(m), [2, 4, 3]), (1, 4))
apart("a transposed square", t, itself, (4, 4))
apart("a permute as a view", lambda x: permute(x, [1, 0, 2]), lambda x: view(x, [3, 2, 4]), (2, 3, 4))
apart("there and forth", lambda x: permute(x, [1, 2, 0]), lambda x: permute(x, [2, 0, 1]), (3, 3, 3))
apart(
    "other dimensions of a broadcast",
    lambda m: permute(expand(m, [4, 4, 4]), [1, 0, 2]),
    lambda m: expand(t(m), [4, 4, 4]),
    (4, 4),
)
apart("a broadcast cube", lambda m: permute(expand(m, [2, 4, 4, 4]), [0, 1, 3, 2]), lambda m: expand(m, [2, 4, 4, 4]), (4, 4, 4))

rule("expand")
same("to its own shape", lambda x: expand(x, [-1, 4]), itself, (4, 4))
same("of a stacked matrix", lambda m: expand(view(m, [1, 3, 4]), [2, 3, 4]), lambda m: expand(m, [2, 3, 4]), (3, 4))
same("of one stacked twice", lambda m: expand(view(m, [1, 1, 3, 4]), [2, 5, 3, 4]), lambda m: expand(m, [2, 5, 3, 4]), (3, 4))
same("stacks of a stack", lambda m: view(expand(m, [2, 2, 3, 4]), [4, 3, 4]), lambda m: expand(m, [4, 3, 4]), (3, 4))
apart("by columns", lambda m: expand(view(m, [4, 1, 4]), [4, 4, 4]), lambda m: expand(m, [4, 4, 4]), (4, 4))
apart(
    "of another view",
    lambda m: expand(view(m, [1, 4, 4]), [2, 4, 4]),
    lambda m: expand(view(aten.clone.default(t(m), memory_format=torch.contiguous_format), [1, 4, 4]), [2, 4, 4]),
    (8, 2),
)
apart(
    "stacks of two matrices",
    lambda x: aten.reshape.default(expand(x, [2, 2, 3, 4]), [4, 3, 4]),
    lambda x: aten.reshape.default(expand(view(x, [2, 1, 3, 4]), [2, 2, 3, 4]), [4, 3, 4]),
    (2, 3, 4),
)
same("of one stacked and more", lambda m: expand(view(m, [1, 3, 4]), [2, 5, 3, 4]), lambda m: expand(m, [2, 5, 3, 4]), (3, 4))
same("a stack of one", lambda m: view(expand(m, [1, 3, 4]), [3, 4]), itself, (3, 4))
apart(
    "a stack as another one",
    lambda m: aten.reshape.default(expand(m, [2, 3, 4]), [2, 4, 3]),
    lambda m: expand(t(m), [2, 4, 3]),
    (3, 4),
)
apart(
    "a matrix of looked up rows",
    lambda w, i: expand(aten.embedding.default(w, i), [2, 4, 4]),
    lambda w, i: expand(w, [2, 4, 4]),
    (4, 4),
    torch.tensor([[3, 0, 0, 1]]),
)
apart("a wider row", lambda x: expand(x, [2, 4]), lambda x: expand(x, [3, 4]), (1, 4))

rule("slice")
same("a piece of a split", lambda x: split(x, 2)[1], lambda x: cut(x, 0, 2, 4), (5, 4))
same("the last piece is shorter", lambda x: split(x, 2)[2], lambda x: cut(x, 0, 4, 5), (5, 4))
same("of another dimension", lambda x: split(x, 2, -1)[1], lambda x: cut(x, 1, 2, 4), (5, 4))
same("named dim", lambda x: split(x, 2, dim=1)[1], lambda x: cut(x, 1, 2, 4), (5, 4))
same("of sizes", lambda x: aten.split_with_sizes.default(x, [1, 3, 1])[2], lambda x: cut(x, 0, 4, 5), (5, 4))
same("of sizes by columns", lambda x: aten.split_with_sizes.default(x, [1, 3], 1)[1], lambda x: cut(x, 1, 1, 4), (5, 4))
same("to the end", lambda x: cut(x, 0, 2, 2**63 - 1), lambda x: cut(x, 0, 2, 5), (5, 4))
same("to no end", lambda x: cut(x, 0, 2), lambda x: cut(x, 0, 2, 5), (5, 4))
same("from no start", lambda x: cut(x, 0, None, 2), lambda x: cut(x, 0, 0, 2), (5, 4))
same("from the end", lambda x: cut(x, 0, -3, -1), lambda x: cut(x, 0, 2, 4), (5, 4))
same("from before the start", lambda x: cut(x, 0, -9, 2), lambda x: cut(x, 0, 0, 2), (5, 4))
same("from behind the end", lambda x: cut(x, 0, 7, 9), lambda x: cut(x, 0, 5, 6), (5, 4))
same("all of it", lambda x: cut(x, 1, 0, 4), itself, (5, 4))
same("dimensions from the end", lambda x: cut(x, -1, 1, 3), lambda x: cut(x, 1, 1, 3), (5, 4))
same("in steps of one", lambda x: cut(x, 0, 1, 3, 1), lambda x: cut(x, 0, 1, 3), (5, 4))
apart("other pieces", lambda x: split(x, 2)[0], lambda x: split(x, 2)[1], (4, 4))
apart("a piece from the end", lambda x: split(x, 2)[-1], lambda x: cut(x, 0, 3, 4), (5, 4))
apart("pieces of other dimensions", lambda x: cut(x, 0, 1, 3), lambda x: cut(x, 1, 1, 3), (4, 4))
apart("a longer piece", lambda x: cut(x, 0, 0, 2), lambda x: cut(x, 0, 0, 3), (4, 4))
apart("in steps of two", lambda x: cut(x, 0, 0, 4, 2), lambda x: cut(x, 0, 0, 2), (4, 4))
apart("the half without its first", lambda x: cut(x, 0, 1, 4), lambda x: cut(x, 0, 0, 3), (4, 4))
apart("outputs of another operator", lambda x: aten.unbind.int(x)[1], lambda x: cut(x, 0, 1, 2), (4, 4))
apart("of a sorted tensor", lambda x: aten.sort.default(x)[0], lambda x: aten.sort.default(x)[1], (4,))

rule("pad and cat")


def low(x: Any, n: int = 4) -> Any:
    return pad(x, [0, n])


def high(x: Any, n: int = 4) -> Any:
    return pad(x, [n, 0])


def zeros(x: Any, *shape: int) -> Any:
    return aten.new_zeros.default(x, list(shape))


same("a slice scattered into zeros", lambda x: scatter(zeros(x, 3, 8), x, 1, 4, 8), high, (3, 4))
same("to the end", lambda x: scatter(zeros(x, 3, 8), x, -1, 4), high, (3, 4))
same("behind the end", lambda x: scatter(zeros(x, 3, 8), x, 1, 4, 2**63 - 1), high, (3, 4))
same("from no start", lambda x: scatter(zeros(x, 3, 8), x, 1, None, 4), low, (3, 4))
same("a floating zero", lambda x: pad(x, [0, 4], 0.0), low, (3, 4))
same("no padding elsewhere", lambda x: pad(x, [0, 4, 0, 0]), low, (3, 4))
same("side by side", lambda x, y: add(low(x), high(y)), lambda x, y: cat([x, y], 1), (3, 4), (3, 4))
same("in the other order", lambda x, y: add(high(y), low(x)), lambda x, y: cat([x, y], -1), (3, 4), (3, 4))
same("of other widths", lambda x, y: add(low(x, 2), high(y)), lambda x, y: cat([x, y], 1), (3, 4), (3, 2))
same("by rows", lambda x, y: add(pad(x, [0, 0, 0, 3]), pad(y, [0, 0, 3, 0])), lambda x, y: cat([x, y]), (3, 4), (3, 4))
same("at one place", lambda x, y: add(low(x), low(y)), lambda x, y: low(add(x, y)), (3, 4), (3, 4))
same("in either order", lambda x, y: add(high(y), high(x)), lambda x, y: high(add(x, y)), (3, 4), (3, 4))
same("of integers", lambda x, y: add(low(x), low(y)), lambda x, y: low(add(y, x)), ints(3, 4), ints(3, 4))
same("onto a piece", lambda x, y: add(cat([x, y], 1), high(x)), lambda x, y: cat([x, add(x, y)], 1), (3, 4), (3, 4))
same("onto the first", lambda x, y: add(low(y), cat([x, y], 1)), lambda x, y: cat([add(x, y), y], 1), (3, 4), (3, 4))
same(
    "onto the last of three",
    lambda x, y: add(cat([x, y, x], 1), pad(y, [8, 0])),
    lambda x, y: cat([x, y, add(x, y)], 1),
    (3, 4),
    (3, 4),
)
same(
    "onto one of three",
    lambda x, y: add(cat([x, y, x], 1), pad(y, [4, 4])),
    lambda x, y: cat([x, add(y, y), x], 1),
    (3, 4),
    (3, 4),
)
same(
    "a third piece",
    lambda x, y: add(add(low(x), high(y)), low(y)),
    lambda x, y: cat([add(x, y), y], 1),
    (3, 4), (3, 4),
)  # fmt: skip
same("a cat with zeros", lambda x: cat([zeros(x, 3, 4), x], 1), high, (3, 4))
same("between zeros", lambda x: cat([zeros(x, 3, 2), x, zeros(x, 3, 1)], 1), lambda x: pad(x, [2, 1]), (3, 4))
same("a cat with zeros by rows", lambda x: cat([x, zeros(x, 2, 4)]), lambda x: pad(x, [0, 0, 0, 2]), (3, 4))
apart("a cat with ones", lambda x: cat([aten.new_full.default(x, [3, 4], 1), x], 1), high, (3, 4))
apart(
    "a cat with zeros of another dtype",
    lambda x: cat([zeros(CAST(x, FP64), 3, 4), x], 1),
    lambda x: high(CAST(x, FP32)),
    floats(3, 4),
)
apart("a cat of zeros", lambda x: cat([zeros(x, 3, 4), zeros(x, 3, 4)], 1), lambda x: zeros(x, 3, 4), (3, 4))
apart("a cat of one", lambda x: cat([x], 1), lambda x: pad(x, [1, 0]), (3, 4))
apart("zeros in between", lambda x, y: cat([x, zeros(x, 3, 4), y], 1), lambda x, y: pad(x, [0, 8]), (3, 4), (3, 4))
apart(
    "onto pieces of the other dimension",
    lambda x, y, z: add(cat([x, y]), scatter(zeros(z, 4, 4), z, 1, 0, 4)),
    lambda x, y, z: cat([add(x, cut(z, 0, 0, 2)), y]),
    (2, 4),
    (2, 4),
    (4, 4),
)
apart(
    "a row onto a wider piece",
    lambda x, y: add(low(x), high(y)),
    lambda x, y: cat([x, expand(y, [3, 4])], 1),
    (3, 4),
    (1, 4),
    alike=True,
)
apart("padding on the other side", low, high, (3, 4))
apart("padding with ones", lambda x: pad(x, [0, 4], 1.0), low, (3, 4))
apart("two paddings", lambda x: pad(x, [0, 4]), lambda x: pad(x, [0, 4, 0, 1]), (3, 4))
apart("padding of other dimensions", lambda x: pad(x, [0, 4]), lambda x: pad(x, [0, 0, 0, 4]), (4, 4))
apart("two paddings and one", lambda x: pad(x, [1, 1, 1, 1]), lambda x: pad(pad(x, [0, 2]), [0, 0, 1, 1]), (4, 4))
apart("padding that takes away", lambda x: pad(x, [-1, 1]), lambda x: pad(cut(x, 1, 0, 3), [0, 1]), (3, 4))
apart("a piece taken away", lambda x, y: add(pad(x, [-1, 5]), high(y)), lambda x, y: cat([x, y], 1), (3, 4), (3, 4))
apart("into ones", lambda x: scatter(aten.ones_like.default(low(x)), x, 1, 0, 4), low, (3, 4))
apart("into a constant", lambda x: scatter(full([3, 8], 2.0, dtype=FP64), x, 1, 0, 4), low, (3, 4))
apart("into something", lambda x, y: scatter(y, x, 1, 0, 4), lambda x, y: low(x), (3, 4), (3, 8))
apart("in steps", lambda x: scatter(zeros(x, 3, 8), x, 1, 0, 8, 2), lambda x: scatter(zeros(x, 3, 8), x, 1, 0, 4), (3, 4))
apart("from the end", lambda x: scatter(zeros(x, 3, 8), x, 1, -4), lambda x: scatter(zeros(x, 3, 8), x, 1, 0, 4), (3, 4))
apart("to before the end", lambda x: scatter(zeros(x, 3, 8), x, 1, 0, -4), lambda x: scatter(zeros(x, 3, 8), x, 1, 4, 8), (3, 4))
apart("of another dtype", lambda x: scatter(zeros(CAST(x, FP64), 3, 8), x, 1, 4, 8), high, floats(3, 4))
apart("overlapping", lambda x, y: add(low(x, 3), high(y, 3)), lambda x, y: cat([x, y], 1), (3, 4), (3, 4))
apart("with a gap", lambda x, y: add(low(x, 5), high(y, 5)), lambda x, y: cat([x, y], 1), (3, 4), (3, 4))
apart("not from the start", lambda x, y: add(pad(x, [1, 4]), high(y, 5)), lambda x, y: cat([x, y], 1), (3, 4), (3, 4))
apart("not to the end", lambda x, y: add(low(x, 5), pad(y, [4, 1])), lambda x, y: cat([x, y], 1), (3, 4), (3, 4))
apart("the other order", lambda x, y: add(low(x), high(y)), lambda x, y: cat([y, x], 1), (3, 4), (3, 4))
apart(
    "other dimensions", lambda x, y: add(low(x), pad(y, [0, 0, 4, 0])), lambda x, y: cat([x, view(y, [8, 4])], 1), (8, 4), (4, 8)
)
apart(
    "at places of other lengths",
    lambda x, y: add(low(x), low(y, 5)),
    lambda x, y: low(add(x, pad(y, [0, 1]))),
    (3, 4),
    (3, 3),
    alike=True,
)
apart(
    "of a row, at one place",
    lambda x, y: add(pad(x, [0, 7]), pad(y, [0, 0, 0, 7])),
    lambda x, y: pad(add(x, y), [0, 0, 0, 7]),
    (1,),
    (1, 8),
)
apart(
    "of a row, side by side",
    lambda x, y: add(low(x), high(y)),
    lambda x, y: cat([expand(x, [3, 4]), y], 1),
    (1, 4),
    (3, 4),
    alike=True,
)
apart(
    "of a row, onto a piece",
    lambda x, y: add(cat([x, x], 1), high(y)),
    lambda x, y: cat([expand(x, [3, 4]), add(x, y)], 1),
    (1, 4),
    (3, 4),
    alike=True,
)
apart("onto another piece", lambda x, y: add(cat([x, y], 1), low(x)), lambda x, y: cat([x, add(x, y)], 1), (3, 4), (3, 4))
apart("onto two halves", lambda x, y: add(cat([x, y], 1), pad(x, [2, 2])), lambda x, y: cat([x, add(x, y)], 1), (3, 4), (3, 4))
apart(
    "onto pieces of another dimension",
    lambda x, y: add(cat([x, y]), high(view(y, [8, 4]))),
    lambda x, y: cat([x, add(y, y)]),
    (4, 8),
    (4, 8),
)
apart("a padded value and another", lambda x, y: add(low(x), y), lambda x, y: low(add(x, cut(y, 1, 0, 4))), (3, 4), (3, 8))
apart("cats of other dimensions", lambda x, y: cat([x, y], 0), lambda x, y: cat([x, y], 1), (4, 4), (4, 4))
apart("cats of another order", lambda x, y: cat([x, y]), lambda x, y: cat([y, x]), (4, 4), (4, 4))
apart("a cat of two dtypes", lambda x, y: cat([x, y]), lambda x, y: cat([x, CAST(y, FP32)]), floats(4), (4,))
apart("a cat with nothing", lambda x, y: cat([x, y], -1), lambda x, y: cat([x, x], -1), (3, 4), (0,))
