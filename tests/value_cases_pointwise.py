"""Cases of value numbering: sums, products, powers, SiLU, selections and constants."""

from __future__ import annotations

import functools
from typing import Any

import torch
from program_writer import CAST, call
from value_case import FP32, FP64, INF, apart, aten, floats, ints, itself, mask, rule, same

expand = aten.expand.default
add = aten.add.Tensor
mul = aten.mul.Tensor
div = aten.div.Tensor
where = aten.where.self
pow_ = aten.pow.Tensor_Scalar
cut = aten.slice.Tensor
full_like = aten.full_like.default
sigmoid = aten.sigmoid.default
silu = aten.silu.default
silu_backward = aten.silu_backward.default
sigmoid_backward = aten.sigmoid_backward.default
inverse = aten.logical_not.default
full = functools.partial(call, aten.full.default)
zeros_of = functools.partial(call, aten.zeros.default)

rule("add and multiply")
TWICE = 2**60 + 2**36 + 1
"""To the nearest float64 and then to the nearest float32 is another number than at once."""
HUGE = torch.full((4,), 1e200, dtype=FP64)
same("a sum in either order", lambda a, b: add(a, b), lambda a, b: add(b, a), (3, 4), (3, 4))
same("of a row too", lambda a, b: add(a, b), lambda a, b: add(b, a), (3, 4), (4,))
same("alpha of one", lambda a, b: add(a, b, alpha=1), lambda a, b: add(a, b), (4,), (4,))
same("a product in either order", lambda a, b: mul(a, b), lambda a, b: mul(b, a), (3, 4), (4,))
same("of integers", lambda a, b: mul(a, b), lambda a, b: mul(b, a), ints(4), ints(4))
same("twice", lambda a: add(a, a), lambda a: mul(a, 2.0), (4,))
same("two as an integer", lambda a: mul(a, 2), lambda a: mul(a, 2.0), (4,))
same("as a scalar", lambda a: aten.mul.Scalar(a, 2), lambda a: mul(a, 2.0), (4,))
same("once", lambda a: mul(a, 1.0), itself, (4,))
same("half", lambda a: div(a, 2), lambda a: mul(a, 0.5), (4,))
same("a quarter as a scalar", lambda a: aten.div.Scalar(a, 4.0), lambda a: mul(a, 0.25), (4,))
same("a power of two moves out", lambda a, b: mul(mul(a, 2), b), lambda a, b: mul(mul(a, b), 2), (4,), (4,))
same("from the right too", lambda a, b: mul(a, mul(b, -0.5)), lambda a, b: mul(mul(a, b), -0.5), (3, 4), (3, 4))
same("two of them in either order", lambda a, b: mul(mul(a, 2), mul(b, 4)), lambda a, b: mul(mul(b, 4), mul(a, 2)), (4,), (4,))
same("out of a row", lambda a, b: mul(mul(a, 2), b), lambda a, b: mul(mul(a, b), 2), (4,), (3, 4))
same("a number added to a float", lambda a: add(a, 2), lambda a: add(a, 2.0), (4,))
apart("a number added to an integer", lambda a: add(a, 2), lambda a: add(a, 2.0), ints(4))
apart("with alpha", lambda a: add(a, 2, alpha=2), lambda a: add(a, 2.0), (4,))
apart("another number added", lambda a: add(a, 2), lambda a: add(a, 3.0), (4,))
apart("a number that is rounded twice", lambda a: add(a, TWICE), lambda a: add(a, float(TWICE)), torch.zeros(4))
apart("alpha", lambda a, b: add(a, b, alpha=2), lambda a, b: add(a, b), (4,), (4,))
apart("alpha of the other", lambda a, b: add(a, b, alpha=2), lambda a, b: add(b, a, alpha=2), (4,), (4,))
apart("a difference", lambda a, b: aten.sub.Tensor(a, b), lambda a, b: aten.sub.Tensor(b, a), (4,), (4,))
apart("a number added", lambda a: add(a, 2), lambda a: mul(a, 2), (4,))
apart("a quotient", lambda a, b: div(a, b), lambda a, b: div(b, a), (4,), (4,))
apart("twice and thrice", lambda a: add(a, a), lambda a: mul(a, 3.0), (4,))
apart("twice an integer", lambda a: mul(a, 2), lambda a: mul(a, 2.0), ints(4))
apart("one times an integer", lambda a: mul(a, 1.0), itself, ints(4))
apart("a product with True", lambda a: mul(a, True), lambda a: mul(a, 2), (4,))
apart("halves of integers", lambda a: div(a, 2), lambda a: div(a, 4), ints(4))
apart("an integer over one", lambda a: div(a, 1.0), itself, ints(4))
apart("a truncated half", lambda a: aten.div.Tensor_mode(a, 2, rounding_mode="floor"), lambda a: mul(a, 0.5), (4,))
apart("a third", lambda a: div(a, 3), lambda a: mul(a, 1 / 3), (4,), alike=True)
apart("three times moves nowhere", lambda a, b: mul(mul(a, 3), b), lambda a, b: mul(mul(a, b), 3), (4,), (4,), alike=True)
apart("by nothing", lambda a: div(a, 0.0), lambda a: mul(a, INF), torch.zeros(4, dtype=FP64) + 1, alike=True)
apart("by the least number", lambda a: div(a, 2.0**-1074), lambda a: mul(a, INF), torch.zeros(4, dtype=FP64))
apart("by less than float32 can invert", lambda a: div(a, 2.0**-130), lambda a: mul(a, 2.0**130), torch.full((4,), 2.0**-20))
apart("by infinity", lambda a: div(a, INF), lambda a: mul(a, 0.0), (4,), alike=True)
apart("by NaN", lambda a: div(a, float("nan")), lambda a: mul(a, 2), (4,))
apart("times nothing moves out", lambda a, b: mul(mul(a, 0.0), b), lambda a, b: mul(mul(a, b), 0.0), HUGE, HUGE)
apart("of integers and of floats", lambda a, b: mul(mul(a, 2), b), lambda a, b: mul(mul(a, b), 2.0), ints(4), (4,), alike=True)
apart("twice something narrower", lambda a, b: mul(mul(a, 2), b), lambda a, b: mul(mul(a, b), 2), torch.full((4,), 3e38), (4,))

rule("powers")
same("a square", lambda a: mul(a, a), lambda a: pow_(a, 2), (4,))
same("with a float exponent", lambda a: pow_(a, 2.0), lambda a: pow_(a, 2), (4,))
same("the first power", lambda a: pow_(a, 1), itself, (4,))
same("a cube with a float exponent", lambda a: pow_(a, 3.0), lambda a: pow_(a, 3), (4,))
apart("a cube of integers", lambda a: pow_(a, 3.0), lambda a: pow_(a, 3), ints(4))
apart("another power", lambda a: pow_(a, 3.0), lambda a: pow_(a, 4), (4,))
apart("a cube", lambda a: pow_(a, 3), lambda a: mul(a, a), (4,))
apart("the other way round", lambda a: aten.pow.Scalar(2, a), lambda a: pow_(a, 2), ints(4).abs().double() / 8)
apart("the first power of integers", lambda a: pow_(a, 1.0), itself, ints(4))
apart("a square of integers", lambda a: pow_(a, 2.0), lambda a: mul(a, a), ints(4))
apart("the power zero", lambda a: pow_(a, 0), itself, (4,))

rule("silu")


def silu_gradient(g: Any, x: Any) -> Any:
    return add(mul(g, sigmoid(x)), sigmoid_backward(mul(g, x), sigmoid(x)))


same("x sigmoid(x)", lambda x: mul(x, sigmoid(x)), silu, (4,), strict=False)
same("sigmoid(x) x", lambda x: mul(sigmoid(x), x), silu, (4,), strict=False)
same("its derivative", silu_gradient, silu_backward, (4,), (4,), strict=False)
same(
    "its derivative otherwise",
    lambda g, x: add(sigmoid_backward(mul(x, g), sigmoid(x)), mul(sigmoid(x), g)),
    silu_backward,
    (4,), (4,), strict=False,
)  # fmt: skip
same(
    "with g computed last",
    lambda h, x: ((s := sigmoid(x)), (g := aten.neg.default(h)), add(mul(g, s), sigmoid_backward(mul(g, x), s)))[2],
    lambda h, x: silu_backward(aten.neg.default(h), x),
    (4,),
    (4,),
    strict=False,
)
apart("y sigmoid(x)", lambda x, y: mul(y, sigmoid(x)), lambda x, y: silu(x), (4,), (4,))
apart("y silu(x)", lambda x, y: mul(y, sigmoid(x)), lambda x, y: silu(y), (4,), (4,))
apart("x hardsigmoid(x)", lambda x: mul(x, aten.hardsigmoid.default(x)), silu, (4,))
apart("of integers", lambda x: mul(x, sigmoid(x)), lambda x: sigmoid(x), ints(4))
SMALL = torch.linspace(-2, 2, 4, dtype=FP64)
ROWS = torch.arange(3, dtype=FP64)[:, None]
GRADIENT = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=FP64)
apart("the derivative of g", silu_gradient, lambda g, x: silu_backward(x, g), GRADIENT, SMALL)
apart("g not times x", lambda g, x: add(mul(g, sigmoid(x)), sigmoid_backward(g, sigmoid(x))), silu_backward, GRADIENT, SMALL)
apart("g plus x", lambda g, x: add(mul(g, sigmoid(x)), sigmoid_backward(add(g, x), sigmoid(x))), silu_backward, GRADIENT, SMALL)
apart(
    "x instead of g",
    lambda g, x: add(mul(x, sigmoid(x)), sigmoid_backward(mul(g, x), sigmoid(x))),
    silu_backward,
    GRADIENT,
    SMALL,
)
apart(
    "no sigmoid in the first",
    lambda g, x: add(mul(g, x), sigmoid_backward(mul(g, x), sigmoid(x))),
    silu_backward,
    GRADIENT,
    SMALL,
)
apart(
    "another sigmoid",
    lambda g, x: add(mul(g, sigmoid(x)), sigmoid_backward(mul(g, x), sigmoid(g))),
    silu_backward,
    GRADIENT,
    SMALL,
)
apart("no sigmoid at all", lambda g, x: add(mul(g, g), sigmoid_backward(mul(g, x), g)), silu_backward, GRADIENT, SMALL)
apart(
    "tanh for sigmoid",
    lambda g, x: add(mul(g, aten.tanh.default(x)), sigmoid_backward(mul(g, x), aten.tanh.default(x))),
    silu_backward,
    GRADIENT,
    SMALL,
)
apart(
    "tanh_backward for its like",
    lambda g, x: add(mul(g, sigmoid(x)), aten.tanh_backward.default(mul(g, x), sigmoid(x))),
    silu_backward,
    GRADIENT,
    SMALL,
)
apart("a quotient", lambda g, x: add(div(g, sigmoid(x)), sigmoid_backward(mul(g, x), sigmoid(x))), silu_backward, GRADIENT, SMALL)
apart("of a row", silu_gradient, lambda g, x: expand(silu_backward(cut(g, 0, 0, 1), x), [3, 4]), SMALL + ROWS, SMALL[None])
apart("of a row of gradients", silu_gradient, lambda g, x: silu_backward(expand(g, [3, 4]), x), (1, 4), (3, 4), alike=True)
apart(
    "of a narrower gradient",
    silu_gradient,
    lambda g, x: CAST(silu_backward(g, CAST(x, FP32)), FP64),
    floats(4),
    (4,),
    alike=True,
)
apart("with a narrower sigmoid", silu_gradient, silu_backward, (4,), floats(4), alike=True)
apart(
    "of something narrower", silu_gradient, lambda g, x: CAST(silu_backward(CAST(g, FP32), x), FP64), (4,), floats(4), alike=True
)

rule("where")
same("of the inverse", lambda m, a, b: where(inverse(m), a, b), lambda m, a, b: where(m, b, a), mask(4), (4,), (4,))
same(
    "of a bitwise inverse",
    lambda m, a, b: where(aten.bitwise_not.default(m), a, b),
    lambda m, a, b: where(m, b, a),
    mask(4),
    (4,),
    (4,),
)
same("of the inverse's inverse", lambda m, a, b: where(inverse(inverse(m)), a, b), where, mask(4), (4,), (4,))
same(
    "masked_fill",
    lambda m, a: aten.masked_fill.Scalar(a, m, 0),
    lambda m, a: where(m, full([], 0.0, dtype=FP64), a),
    mask(3, 4),
    (3, 4),
)
same(
    "a full tensor", lambda m, a: where(m, full_like(a, 0), a), lambda m, a: aten.masked_fill.Scalar(a, m, 0), mask(3, 4), (3, 4)
)
same(
    "on the other side",
    lambda m, a: where(m, a, full_like(a, 2.0)),
    lambda m, a: where(m, a, full([], 2, dtype=FP64)),
    mask(3, 4),
    (3, 4),
)
same(
    "of zeros",
    lambda m, a: where(m, aten.zeros_like.default(a), a),
    lambda m, a: where(m, full([], 0.0, dtype=FP64), a),
    mask(4),
    (4,),
)
same(
    "filled outside", lambda m, a: where(inverse(m), full_like(a, 0), a), lambda m, a: where(m, a, full_like(a, 0)), mask(4), (4,)
)
apart("the other way round", where, lambda m, a, b: where(m, b, a), mask(8), (8,), (8,))
apart(
    "filled inside or outside",
    lambda m, a: where(m, full_like(a, 0), a),
    lambda m, a: where(m, a, full_like(a, 0)),
    mask(8),
    (8,),
)
apart(
    "filled with something else",
    lambda m, a: where(m, full_like(a, 0), a),
    lambda m, a: where(m, full_like(a, 1), a),
    mask(8),
    (8,),
)
apart(
    "of bits",
    lambda m, a, b: where(aten.bitwise_not.default(m), a, b),
    lambda m, a, b: where(m, b, a),
    torch.tensor([0, 1, 2, 255]).byte(),
    (4,),
    (4,),
)
apart(
    "of its opposite",
    lambda m, a, b: where(aten.gt.Scalar(a, 0), a, b),
    lambda m, a, b: where(aten.lt.Scalar(a, 0), b, a),
    mask(4),
    torch.zeros(4),
    (4,),
)
same(
    "two constants outside",
    lambda m: where(inverse(m), full([2, 4], 0.0), full([2, 4], 1.0)),
    lambda m: where(m, full([2, 4], 1.0), full([2, 4], 0.0)),
    mask(4),
)
apart(
    "two constants of other shapes",
    lambda m: where(m, full([2, 4], 1.0), full([2, 4], 0.0)),
    lambda m: where(m, full([], 1.0), full([], 0.0)),
    mask(4),
)
apart(
    "the shape of a constant",
    lambda m, a: where(m, full([2, 4], 1.0, dtype=FP64), a),
    lambda m, a: where(m, full([], 1.0, dtype=FP64), a),
    mask(4),
    (4,),
)
apart(
    "the dtype of a constant",
    lambda m, a: where(m, full_like(a, 1.0, dtype=FP64), a),
    lambda m, a: where(m, full([], 1.0, dtype=FP64), a),
    mask(4),
    floats(4),
)
same(
    "a masked row",
    lambda m, a: aten.masked_fill.Scalar(a, m, 0),
    lambda m, a: where(m, full([], 0.0, dtype=FP64), a),
    mask(3, 4),
    (4,),
)
apart(
    "filled with True",
    lambda m, a: aten.masked_fill.Scalar(a, m, True),
    lambda m, a: aten.masked_fill.Scalar(a, m, 0),
    mask(8),
    (8,),
)
apart(
    "filled with a tensor",
    lambda m, a, b: aten.masked_fill.Tensor(a, m, b),
    lambda m, a, b: aten.masked_fill.Scalar(a, m, 0),
    torch.ones(4) > 0,
    (4,),
    torch.ones(()),
)

rule("constant")
same("two and 2.0", lambda: full([2], 2), lambda: full([2], 2.0, dtype=torch.int64))
same("zeros", lambda: zeros_of([2, 3]), lambda: full([2, 3], 0.0))
same("like another", lambda a: full_like(a, 3), lambda a: full([4], 3.0, dtype=FP64), (4,))
same("zeros like another", lambda a: aten.zeros_like.default(a), lambda a: full([4], 0.0, dtype=FP64), (4,))
same("new zeros", lambda a: aten.new_zeros.default(a, [3]), lambda a: full([3], 0.0, dtype=FP64), (4,))
same("new and full", lambda a: aten.new_full.default(a, [3], 5), lambda a: full([3], 5.0, dtype=FP64), (4,))
same("a scalar tensor", lambda: call(aten.scalar_tensor.default, 2.0), lambda: full([], 2.0))
same("not a number", lambda a: full_like(a, float("nan")), lambda a: full([4], float("nan"), dtype=FP64), (4,))
apart("imaginary", lambda: full([2], 1j), lambda: full([2], 2j))
apart("of other shapes", lambda: full([2], 0.0), lambda: full([3], 0.0))
apart("of other dtypes", lambda: full([2], 0.0), lambda: full([2], 0))
apart("other numbers", lambda: full([2], 1.0), lambda: full([2], 1.5))
apart("integers that no float is", lambda: full([2], 2**53), lambda: full([2], 2**53 + 1))
apart("True", lambda: full([2], True), lambda: full([2], False))
apart("ones", lambda a: aten.ones_like.default(a), lambda a: aten.zeros_like.default(a), (4,))
