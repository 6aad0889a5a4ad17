"""Families: ways to compute something from the same operands, some of them equal and some only alike."""

from __future__ import annotations

import operator

import torch
from program_writer import CAST, Members, Node, Writer, aten


def linears(w: Writer) -> Members:
    """x @ weight^T + bias, as matrices."""
    x = w.pick(rank=2)
    weight, bias = w.pick(rank=2, rows=w.shape(x)[1]), w.pick(rank=w.rng.choice((1, 1, 1, 2)))
    other = w.pick(rank=2)

    def wt() -> Node:
        return w(aten.t.default, weight)

    def product() -> Node:
        return w(aten.mm.default, x, wt())

    return [
        product,
        lambda: w(aten.mm.default, x, w(aten.permute.default, weight, [1, 0])),
        lambda: w(aten.mm.default, x, weight),
        lambda: w(aten.t.default, w(aten.mm.default, weight, w(aten.t.default, x))),
        lambda: w(aten.mm.default, weight, w(aten.transpose.int, x, 0, 1)),
        lambda: w(aten.addmm.default, bias, x, wt()),
        lambda: w(aten.addmm.default, bias, x, wt(), beta=w.rng.choice((2, 0.5))),
        lambda: w(aten.addmm.default, bias, x, wt(), alpha=w.rng.choice((2, -1))),
        lambda: w(aten.add.Tensor, product(), bias),
        lambda: w(aten.add.Tensor, bias, product()),
        lambda: w(aten.add.Tensor, product(), bias, alpha=2),
        lambda: w(aten.add.Tensor, product(), product()),
        lambda: w(aten.addmm.default, product(), x, wt()),
        lambda: w(aten.addmm.default, other, x, wt()),
        lambda: w(aten.add.Tensor, other, product()),
        lambda: w(aten.t.default, w(aten.addmm.default, bias, x, wt())),
        lambda: w(aten.addmm.default, bias, weight, w(aten.t.default, x)),
    ]


def batched_linears(w: Writer) -> Members:
    """A linear over leading dimensions."""
    x = w.pick(rank=3)
    weight, bias = w.pick(rank=2, rows=w.shape(x)[2]), w.pick(rank=1)
    batch, rows, inner = w.shape(x)
    flat = w(aten.view.default, x, [batch * rows, inner])
    wt = w(aten.t.default, weight)
    outer = w.shape(wt)[1]
    left = w.pick(rank=2)

    def stacked(matrix: Node) -> Node:
        spread = w(aten.expand.default, w(aten.unsqueeze.default, matrix, 0), [batch, *w.shape(matrix)])
        return w(aten.view.default, spread, [batch, *w.shape(matrix)]) if w.rng.random() < 0.5 else spread

    return [
        lambda: w(aten.view.default, w(aten.mm.default, flat, wt), [batch, rows, outer]),
        lambda: w(aten.view.default, w(aten.mm.default, flat, wt), [rows, batch, outer]),
        lambda: w(aten.view.default, w(aten.mm.default, flat, wt), [batch, rows, 2, outer // 2]),
        lambda: w(aten.view.default, w(aten.addmm.default, bias, flat, wt), [batch, rows, outer]),
        lambda: w(aten.add.Tensor, w(aten.view.default, w(aten.mm.default, flat, wt), [batch, rows, outer]), bias),
        lambda: w(aten.bmm.default, x, stacked(wt)),
        lambda: w(aten.bmm.default, x, stacked(left)),
        lambda: w(aten.bmm.default, x, w(aten.permute.default, stacked(weight), [0, 2, 1])),
        lambda: w(aten.bmm.default, x, w(aten.permute.default, x, [0, 2, 1])),
        lambda: w(aten.bmm.default, x, w(aten.expand.default, w.pick(rank=2), [batch, inner, 4])),
        lambda: w(aten.unsqueeze.default, w(aten.mm.default, w(aten.squeeze.default, x), wt), 0),
    ]


def views(w: Writer) -> Members:
    """The same elements under other shapes."""
    a = w.pick()
    count = w.live[a].numel()
    shapes = [s for s in ((count,), (1, count), (2, count // 2), (count // 2, 2), (2, 2, count // 4), (4, count // 4)) if count]
    i, shape = w.rng.randrange(-1, 3), w.rng.choice(shapes)
    d = w.dim(a)
    return [
        lambda: w(aten.view.default, w(aten.clone.default, a), list(shape)),
        lambda: w(aten.reshape.default, a, list(shape)),
        lambda: w(aten._unsafe_view.default, w(aten.reshape.default, a, [count]), list(shape)),
        lambda: w(aten.unsqueeze.default, a, i),
        lambda: w(aten.squeeze.default, a),
        lambda: w(aten.squeeze.dim, a, d),
        lambda: w(aten.squeeze.dims, a, [d]),
        lambda: w(aten.flatten.using_ints, a, 0, -1),
        lambda: w(aten.expand.default, a, [w.rng.choice((1, 2, 3)), *w.shape(a)]),
        lambda: w(aten.expand.default, a, [w.rng.choice((s, 4)) if s == 1 else s for s in w.shape(a)]),
        lambda: w(aten.view.default, w(aten.expand.default, a, [2, 2, *w.shape(a)]), [4, *w.shape(a)]),
        lambda: w(aten.expand.default, a, [4, *w.shape(a)]),
    ]


def permutes(w: Writer) -> Members:
    """Dimensions in another order."""
    a = w.pick()
    dims = w.rng.sample(range(len(w.shape(a))), len(w.shape(a)))
    i, j = w.dim(a), w.dim(a)
    swapped = list(range(len(dims)))
    swapped[i], swapped[j] = j, i
    return [
        lambda: w(aten.permute.default, a, dims),
        lambda: w(aten.permute.default, a, [d - len(dims) for d in dims]),
        lambda: w(aten.permute.default, a, [dims.index(k) for k in range(len(dims))]),
        lambda: w(aten.permute.default, w(aten.permute.default, a, dims), dims),
        lambda: w(aten.transpose.int, w(aten.permute.default, a, dims), i, j),
        lambda: w(aten.permute.default, a, swapped),
        lambda: w(aten.transpose.int, a, i, j),
        lambda: w(aten.t.default, a),
        lambda: w(aten.reshape.default, a, [w.shape(a)[d] for d in dims]),
        lambda: w(aten.permute.default, w(aten.expand.default, a, [2, *w.shape(a)]), [0, 2, 1]),
        lambda: w(aten.expand.default, w(aten.t.default, a), [2, *reversed(w.shape(a))]),
    ]


def copies(w: Writer) -> Members:
    """The value itself, or a cast of it."""
    a = w.pick()
    other = w.rng.choice((torch.float32, torch.int64))
    return [
        lambda: w(aten.alias.default, a),
        lambda: w(aten.detach.default, a),
        lambda: w(aten.clone.default, a, memory_format=torch.contiguous_format),
        lambda: w(CAST, a, w.live[a].dtype),
        lambda: w(CAST, a, other),
        lambda: w(CAST, w(CAST, a, other), w.live[a].dtype),
        lambda: w(aten.neg.default, a),
    ]


def sums(w: Writer) -> Members:
    """Sums over some dimensions."""
    a = w.pick()
    shape = w.shape(a)
    leading = list(range(len(shape) - 1))
    some = w.rng.sample(range(len(shape)), w.rng.randint(0, len(shape)))
    keep = w.rng.random() < 0.5
    return [
        lambda: w(aten.sum.dim_IntList, a, leading),
        lambda: w(aten.sum.dim_IntList, a, leading, True),
        lambda: w(aten.sum.dim_IntList, w(aten.reshape.default, a, [-1, *shape[-1:]]), [0]),
        lambda: w(aten.sum.dim_IntList, w(aten.reshape.default, a, [-1, *shape[-1:]]), [0], True),
        lambda: w(aten.sum.dim_IntList, a, some, keep),
        lambda: w(aten.sum.dim_IntList, a, [d - len(shape) for d in some], not keep),
        lambda: w(aten.sum.dim_IntList, a, [w.dim(a)], keep),
        lambda: w(aten.sum.dim_IntList, a, None),
        lambda: w(aten.sum.dim_IntList, a, some, keep, dtype=torch.float32),
        lambda: w(aten.mean.dim, a, some, keep),
    ]


def sums_and_products(w: Writer) -> Members:
    """Sums and products of two values, numbers moved about."""
    a = w.pick()
    b = w.pick(like=a) if w.rng.random() < 0.7 else w.pick()
    k = w.rng.choice((2, 2.0, 0.5, 3, -1.0, 4))

    def scaled(c: Node) -> Node:
        return w(aten.mul.Tensor, c, k)

    return [
        lambda: w(aten.add.Tensor, a, b),
        lambda: w(aten.add.Tensor, b, a),
        lambda: w(aten.add.Tensor, a, b, alpha=w.rng.choice((2, -1))),
        lambda: w(aten.sub.Tensor, a, b),
        lambda: w(aten.sub.Tensor, b, a),
        lambda: w(aten.add.Tensor, a, a),
        lambda: w(aten.add.Tensor, a, 2),
        lambda: w(aten.mul.Tensor, a, b),
        lambda: w(aten.mul.Tensor, b, a),
        lambda: w(aten.mul.Tensor, scaled(a), b),
        lambda: w(aten.mul.Tensor, a, scaled(b)),
        lambda: scaled(w(aten.mul.Tensor, a, b)),
        lambda: w(aten.mul.Scalar, a, k),
        lambda: scaled(a),
        lambda: w(aten.div.Tensor, a, 1 / k),
        lambda: w(aten.div.Tensor, a, k),
        lambda: w(aten.div.Tensor, a, b),
        lambda: w(aten.mul.Tensor, a, 1.0),
    ]


def squares(w: Writer) -> Members:
    """Squares and doubles."""
    a = w.pick()
    return [
        lambda: w(aten.mul.Tensor, a, a),
        lambda: w(aten.pow.Tensor_Scalar, a, w.rng.choice((2, 2.0))),
        lambda: w(aten.pow.Tensor_Scalar, a, w.rng.choice((1, 1.0))),
        lambda: w(aten.pow.Tensor_Scalar, a, w.rng.choice((3, 0))),
        lambda: w(aten.add.Tensor, a, a),
        lambda: w(aten.mul.Tensor, a, w.rng.choice((2, 2.0))),
        lambda: w(aten.pow.Tensor_Tensor, a, a),
    ]


def selections(w: Writer) -> Members:
    """One value where a mask holds, another one elsewhere."""
    a, mask = w.pick(), w.rng.choice(w.masks)
    b, k = w.pick(like=a), w.rng.choice((0.0, 0.0, 1.0))
    dtype, shape = w.live[a].dtype, w.shape(a)

    def inverse() -> Node:
        return w(w.rng.choice((aten.logical_not.default, aten.bitwise_not.default)), mask)

    def number() -> Node:
        return (
            w(w.rng.choice((aten.full.default, aten.full.default, aten.new_full.default)), *([], k), dtype=dtype)
            if w.rng.random() < 0.5
            else w(aten.scalar_tensor.default, k, dtype=w.rng.choice((dtype, torch.float32)))
        )

    def filled() -> Node:
        if k == 0.0 and w.rng.random() < 0.5:
            return w(aten.zeros_like.default, a) if w.rng.random() < 0.5 else w(aten.zeros.default, shape, dtype=dtype)
        return w(aten.full_like.default, a, k) if w.rng.random() < 0.5 else w(aten.full.default, [4, 4], k, dtype=dtype)

    return [
        lambda: w(aten.where.self, mask, a, b),
        lambda: w(aten.where.self, inverse(), b, a),
        lambda: w(aten.where.self, mask, b, a),
        lambda: w(aten.where.self, mask, number(), a),
        lambda: w(aten.where.self, mask, filled(), a),
        lambda: w(aten.masked_fill.Scalar, a, mask, k),
        lambda: w(aten.masked_fill.Scalar, a, inverse(), k),
        lambda: w(aten.where.self, inverse(), a, filled()),
        lambda: w(aten.where.self, inverse(), number(), a),
        lambda: w(aten.where.self, mask, filled(), filled()),
        lambda: w(aten.where.self, mask, number(), filled()),
        lambda: w(aten.gt.Scalar, a, 0),
        inverse,
    ]


def pieces(w: Writer) -> Members:
    """Parts of a dimension."""
    a = w.pick()
    d = w.dim(a)
    whole = w.shape(a)[d]
    half, start = max(whole // 2, 1), w.rng.randrange(whole)
    stop, i = w.rng.randint(start, whole), w.rng.randrange(2)
    return [
        lambda: w(operator.getitem, w(aten.split.Tensor, a, half, d), i),
        lambda: w(operator.getitem, w(aten.split.Tensor, a, w.rng.randint(1, 3), d - len(w.shape(a))), i),
        lambda: w(operator.getitem, w(aten.split_with_sizes.default, a, [start, whole - start], d), i),
        lambda: w(operator.getitem, w(aten.split_with_sizes.default, a, [whole - start, start], d), i),
        lambda: w(aten.slice.Tensor, a, d, i * half, (i + 1) * half),
        lambda: w(aten.slice.Tensor, a, d, start, stop),
        lambda: w(aten.slice.Tensor, a, d, start, stop, 2),
        lambda: w(aten.slice.Tensor, a, d - len(w.shape(a)), start - whole, 9223372036854775807),
        lambda: w(aten.slice.Tensor, a, d, None, start - whole),
        lambda: w(aten.slice.Tensor, a, d, start, None),
        lambda: w(aten.select.int, a, d, start),
    ]


def paddings(w: Writer) -> Members:
    """Zero-padded pieces and what they add up to."""
    a = w.pick()
    b = w.pick(like=a) if w.rng.random() < 0.7 else w.pick()
    d = w.dim(a)
    rank, extent = len(w.shape(a)), w.shape(a)[d]
    before = w.rng.choice((0, extent, extent, 1))

    def padded(c: Node, low: int, high: int) -> Node:
        if w.rng.random() < 0.3:
            shape = w.shape(c)
            shape[d] += low + high
            zeros = w(aten.full.default, shape, w.rng.choice((0, 0, 0, 1)), dtype=w.live[c].dtype)
            return w(
                aten.slice_scatter.default,
                zeros,
                c,
                d,
                low,
                w.rng.choice((low + w.shape(c)[d], 100)) if not high else shape[d] - high,
            )
        return w(
            aten.constant_pad_nd.default, c, [0, 0] * (len(w.shape(c)) - 1 - d) + [low, high], w.rng.choice((0, 0, 0.0, 1.0))
        )

    def added(p: Node, q: Node) -> Node:
        return w(aten.add.Tensor, p, q)

    return [
        lambda: padded(a, before, extent),
        lambda: added(padded(a, 0, extent), padded(b, extent, 0)),
        lambda: added(padded(b, extent, 0), padded(a, 0, extent)),
        lambda: added(padded(b, 0, extent), padded(a, before, 0)),
        lambda: added(padded(a, 0, before), padded(b, 0, before)),
        lambda: padded(added(a, b), 0, before),
        lambda: added(padded(a, extent, 1), padded(b, 0, extent + 1)),
        lambda: w(aten.cat.default, [a, b], d),
        lambda: w(aten.cat.default, [b, a], d - rank),
        lambda: w(aten.cat.default, [a, b], w.dim(a)),
        lambda: added(w(aten.cat.default, [a, b], d), padded(b, extent, 0)),
        lambda: added(padded(b, 0, extent), w(aten.cat.default, [a, b], d)),
        lambda: w(aten.cat.default, [added(a, b), b], d),
        lambda: w(aten.constant_pad_nd.default, a, [1, 1] * rank),
        lambda: w(aten.cat.default, [a, b, a], d),
    ]


def sigmoids(w: Writer) -> Members:
    """SiLU and its like."""
    a = w.pick()
    b = w.pick(like=a) if w.rng.random() < 0.7 else w.pick()

    def s() -> Node:
        return w(aten.sigmoid.default, a)

    return [
        s,
        lambda: w(aten.mul.Tensor, a, s()),
        lambda: w(aten.mul.Tensor, s(), a),
        lambda: w(aten.mul.Tensor, b, s()),
        lambda: w(aten.mul.Tensor, s(), s()),
        lambda: w(aten.silu.default, a),
        lambda: w(aten.silu.default, b),
        lambda: w(aten.gelu.default, a),
        lambda: w(aten.gelu.default, a, approximate="tanh"),
    ]


def sigmoid_derivatives(w: Writer) -> Members:
    """The derivative of SiLU. Where a gradient is infinite its spellings differ: inf - inf in some of them."""
    x = w.pick()
    g = w.pick(like=x) if w.rng.random() < 0.6 else w.pick()

    def s() -> Node:
        return w(aten.sigmoid.default, x)

    def direct() -> Node:
        return w(aten.mul.Tensor, g, s())

    def through(product: Node) -> Node:
        return w(aten.sigmoid_backward.default, product, s())

    def product() -> Node:
        return w(aten.mul.Tensor, g, x)

    return [
        lambda: w(aten.silu_backward.default, g, x),
        lambda: w(aten.silu_backward.default, x, g),
        lambda: w(aten.add.Tensor, direct(), through(product())),
        lambda: w(aten.add.Tensor, through(w(aten.mul.Tensor, x, g)), w(aten.mul.Tensor, s(), g)),
        lambda: w(aten.add.Tensor, direct(), through(g)),
        lambda: w(aten.add.Tensor, direct(), through(w(aten.add.Tensor, g, x))),
        lambda: w(aten.add.Tensor, direct(), product()),
        lambda: w(aten.add.Tensor, w(aten.mul.Tensor, x, s()), through(product())),
        lambda: w(aten.add.Tensor, product(), through(product())),
        lambda: w(aten.add.Tensor, direct(), w(aten.sigmoid_backward.default, product(), w(aten.sigmoid.default, g))),
        lambda: w(aten.add.Tensor, w(aten.mul.Tensor, g, g), w(aten.sigmoid_backward.default, w(aten.mul.Tensor, g, x), g)),
        lambda: through(product()),
    ]


def random_numbers(w: Writer) -> Members:
    """The same call again gives something else."""
    a = w.pick()
    draw: Members = [
        lambda: w(aten.rand_like.default, a),
        lambda: w(aten.rand.default, w.shape(a), dtype=w.live[a].dtype),
        lambda: w(operator.getitem, w(aten.native_dropout.default, a, 0.5, True), 0),
    ]
    return draw * 2


def writes(w: Writer) -> Members:
    """Values read before and after their memory, or memory that they share, is written to."""
    a = w.pick()
    d = w.dim(a)
    views: Members = [
        lambda: a,
        lambda: w(aten.slice.Tensor, a, d, 0, 1),
        lambda: w(aten.select.int, a, d, 0),
        lambda: w(operator.getitem, w(aten.split.Tensor, a, 1, d), 0),
        lambda: w(aten.t.default, a),
        lambda: w(aten.view.default, a, [-1]),
    ]

    def write() -> Node:
        return w(w.rng.choice((aten.add_.Tensor, aten.sub_.Tensor)), w.rng.choice(views)(), 1)

    reads: Members = [lambda: w(aten.neg.default, a), lambda: w(aten.neg.default, w.rng.choice(views)())]
    return [write, *reads, lambda: (write(), reads[0]())[1], lambda: (reads[1](), write(), reads[0]())[2]]


FAMILIES = (
    *(linears, linears, batched_linears, sums),
    *(views, permutes, copies, pieces, paddings, paddings),
    *(sums_and_products, squares, selections),
)
TRANSCENDENTAL = (sigmoids, sigmoid_derivatives)
IMPURE = (random_numbers, writes, writes)
