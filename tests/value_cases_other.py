"""Cases of value numbering: every other operator, random numbers, writes to memory, symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch
from program_writer import call
from value_case import FP32, Function, apart, aten, in_order, rule, same

view = aten.view.default
t = aten.t.default
mm = aten.mm.default
add = aten.add.Tensor
cut = aten.slice.Tensor
neg = aten.neg.default
split = aten.split.Tensor

rule("any other operator")
softmax = aten._softmax.default
same("equal arguments", lambda x: aten.exp.default(x), lambda x: aten.exp.default(x), (4,))
same("defaults filled in", lambda x: aten.gelu.default(x), lambda x: aten.gelu.default(x, approximate="none"), (4,))
same("a dimension from the end", lambda x: softmax(x, -1, False), lambda x: softmax(x, 1, False), (3, 4))
same("dimensions from the end", lambda x: aten.amax.default(x, [-1, -2]), lambda x: aten.amax.default(x, [2, 1]), (3, 4, 4))
same("of a number", lambda x: aten.cumsum.default(x, -1), lambda x: aten.cumsum.default(x, 0), ())
same(
    "pinned or not",
    lambda: call(aten.arange.start_step, 0, 4, 1, pin_memory=False),
    lambda: call(aten.arange.start_step, 0, 4, 1),
)
same(
    "lists of equal values",
    lambda x, y: aten.stack.default([add(x, y)]),
    lambda x, y: aten.stack.default([add(y, x)]),
    (4,),
    (4,),
)
same("by name", lambda x: softmax(x, 1, False), lambda x: softmax(self=x, dim=1, half_to_float=False), (3, 4))
same(
    "differentiable or not",
    lambda: call(torch.ops.prims.full.default, [2], 1.5, dtype=FP32, device=torch.device("cpu"), requires_grad=True),
    lambda: call(torch.ops.prims.full.default, [2], 1.5, dtype=FP32, device=torch.device("cpu"), requires_grad=False),
)
apart("no dimension", lambda x: aten.argmax.default(x), lambda x: aten.argmax.default(x, 0), (4, 4))
same("outputs of equal calls", lambda x: aten.sort.default(x)[1], lambda x: aten.sort.default(x, -1)[1], (4,))
same(
    "arguments that are spelled otherwise",
    lambda x, y: aten.exp.default(add(x, y)),
    lambda x, y: aten.exp.default(add(y, x)),
    (4,),
    (4,),
)
same("mm by name", lambda x, y: mm(x, mat2=y), lambda x, y: mm(x, mat2=y), (4, 4), (4, 4))
apart("another operator", lambda x: aten.sin.default(x), lambda x: aten.cos.default(x), (4,))
apart("another overload", lambda x: aten.all.default(x), lambda x: aten.all.dim(x, 0), (4,), alike=True)
apart(
    "another word", lambda x: aten.gelu.default(x), lambda x: aten.gelu.default(x, approximate="tanh"), torch.linspace(-2, 2, 4)
)
apart("another dimension", lambda x: softmax(x, 0, False), lambda x: softmax(x, 1, False), (4, 4))
apart("other dimensions", lambda x: aten.amax.default(x, [0]), lambda x: aten.amax.default(x, [-1]), (4, 4))
apart("a kept dimension", lambda x: aten.amax.default(x, [0], True), lambda x: aten.amax.default(x, [0]), (4, 4))
apart("another number", lambda x: add(x, 2.0), lambda x: add(x, 2.5), (4,))
apart("another order of arguments", lambda x, y: aten.atan2.default(x, y), lambda x, y: aten.atan2.default(y, x), (4,), (4,))
apart(
    "a dimension of the result", lambda x: aten.unsqueeze_copy.default(x, -1), lambda x: aten.unsqueeze_copy.default(x, 1), (4, 4)
)
apart(
    "a dimension of another tensor",
    lambda g: aten.select_backward.default(g, [4, 4, 4], -1, 0),
    lambda g: aten.select_backward.default(g, [4, 4, 4], 1, 0),
    (4, 4),
)
apart("the other output", lambda x: aten.sort.default(x)[0], lambda x: aten.sort.default(x)[1], (4,))
apart("of other inputs", lambda x, y: aten.exp.default(x), lambda x, y: aten.exp.default(y), (4,), (4,))

rule("random numbers")
apart("drawn twice", lambda x: aten.rand_like.default(x), lambda x: aten.rand_like.default(x), (4,))
apart("and what is computed from them", lambda x: neg(aten.rand_like.default(x)), lambda x: neg(aten.rand_like.default(x)), (4,))
apart(
    "dropped twice",
    lambda x: aten.native_dropout.default(x, 0.5, True)[0],
    lambda x: aten.native_dropout.default(x, 0.5, True)[0],
    (64,),
)
apart("drawn from a distribution", lambda x: aten.bernoulli.p(x, 0.5), lambda x: aten.bernoulli.p(x, 0.5), (64,))

rule("writes to memory")


def before_and_after(name: str, read: Function, write: Function, *shapes: Any, same: bool = False) -> None:
    """What ``read`` gives before and after ``write``."""

    def both(*inputs: Any) -> tuple[Any, Any]:
        before = read(*inputs)
        write(*inputs)
        return before, read(*inputs)

    in_order(name, both, *shapes, same=same)


def write(x: Any, *_: Any) -> Any:
    return aten.add_.Tensor(x, 1)


before_and_after("of the value itself", neg, write, (4, 4))
before_and_after("of a view", lambda x: neg(x), lambda x: write(view(x, [16])), (4, 4))
before_and_after("of a transposed view", lambda x: neg(x), lambda x: write(t(x)), (4, 4))
before_and_after("of a part", lambda x: neg(x), lambda x: write(cut(x, 0, 0, 1)), (4, 4))
before_and_after("of a row", lambda x: neg(x), lambda x: write(aten.select.int(x, 0, 0)), (4, 4))
before_and_after("of a piece of a split", lambda x: neg(x), lambda x: write(split(x, 2)[0]), (4, 4))
before_and_after("of a diagonal", lambda x: neg(x), lambda x: write(aten.diagonal.default(x)), (4, 4))
before_and_after("read through a view", lambda x: neg(view(x, [16])), write, (4, 4))
before_and_after("read through a part", lambda x: neg(cut(x, 0, 0, 1)), write, (4, 4))
before_and_after("read through a piece", lambda x: neg(split(x, 2)[0]), write, (4, 4))
before_and_after("as an out argument", lambda x, y: neg(y), lambda x, y: aten.neg.out(x, out=y), (4,), (4,))
before_and_after("by a list", lambda x, y: neg(y), lambda x, y: aten._foreach_add_.Scalar([x, y], 1), (4,), (4,))
before_and_after("a copy over it", lambda x, y: neg(x), lambda x, y: aten.copy_.default(x, y), (4,), (4,))
before_and_after("of something else", lambda x, y: neg(y), write, (4,), (4,), same=True)
before_and_after("of what is only read", lambda x, y: neg(y), lambda x, y: aten.add_.Tensor(x, y), (4,), (4,), same=True)


before_and_after("of an unsafe view", neg, lambda x: write(aten._unsafe_view.default(x, [16])), (4, 4))


def computed_from_it(x: Any) -> tuple[Any, Any]:
    y = neg(x)
    before = aten.exp.default(y)
    write(x)
    return before, aten.exp.default(y)


in_order("of what something was computed from", computed_from_it, (4, 4), same=True)


def written_through_an_older_view(x: Any) -> tuple[Any, Any]:
    rows = view(x, [2, 8])
    before = neg(rows)
    write(x)
    return before, neg(rows)


def written_twice(x: Any) -> tuple[Any, Any]:
    result = write(x)
    before = neg(result)
    write(x)
    return before, neg(result)


def read_twice_after(x: Any) -> tuple[Any, Any]:
    write(x)
    return neg(x), neg(x)


in_order("through an older view", written_through_an_older_view, (4, 4), same=False)
in_order("twice", written_twice, (4, 4), same=False)
in_order(
    "a copy read after the write", lambda x: ((y := aten.clone.default(x)), write(y), neg(x), neg(y))[2:], (4, 4), same=False
)
in_order(
    "of what is computed from it later",
    lambda x: (write(x), (y := neg(x)), aten.exp.default(y), aten.exp.default(y))[2:],
    (4, 4),
    same=True,
)
in_order("then read twice", read_twice_after, (4, 4), same=False, alike=True)
in_order("the written value", lambda x: (x, write(x)), (4, 4), same=False)
