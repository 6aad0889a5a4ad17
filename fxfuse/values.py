"""Value numbering: one class for every value of a functional aten graph, however the value is spelled.

A class is named by its *key*, ``(head, *arguments)``, where an argument is ``("n", class)``, ``("i", size expression)``,
``("k", constant)`` or ``("l", (argument, ...))``. Two nodes share a class exactly when their keys are equal, and keys are
made by *normalising constructors* below: each may look at the keys of its operands and returns the class of a normal
form. A normal form need not have a node in the graph. Strides are never part of a value.

Each rule is directed, local and exact, or rounds as another spelling of the same computation does; the latter are off
under ``strict``. ``spellings`` maps operators to these constructors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch.fx import Node

Arg = tuple[Any, ...]
Key = tuple[Any, ...]
Env = Callable[[Node], int]

LINEAR, VIEW, PERMUTE, EXPAND, SCALE, SLICE, PAD = "linear", "view", "permute", "expand", "scale", "slice", "pad"
ADD, MUL, SQUARE, COLSUM, WHERE, CAT, FULL, CONST = "add", "mul", "square", "colsum", "where", "cat", "full", "const"
COMMUTATIVE = frozenset({ADD, MUL})
UNIQUE = frozenset({"input", "opaque", "stale"})


def value(node: Node) -> Any:
    """The node's fake value."""
    return node.meta.get("val")


def operand(node: Node, i: int) -> Any:
    """Argument ``i`` of a call. Untyped: the operator, not fx, says whether it is a node, a number or a list."""
    return node.args[i] if i < len(node.args) else node.kwargs[node.target._schema.arguments[i].name]  # type: ignore[union-attr]


def is_tensor(x: Any) -> TypeGuard[Node]:
    """Whether ``x`` is a node with a tensor value."""
    return isinstance(x, Node) and isinstance(value(x), torch.Tensor)


def is_size(x: Any) -> bool:
    """Whether ``x`` is an integer or symbolic integer (not a bool)."""
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def size(x: Any) -> str:
    """The name of a size: its number, or its expression over the graph's own symbols."""
    if isinstance(x, torch.SymInt):
        expression: Any = x.node.expr
        return str(int(expression)) if expression.is_number else str(expression)
    return str(x)


def sizes(shape: Sequence[Any]) -> tuple[str, ...]:
    """The names of all sizes of a shape or stride."""
    return tuple(size(s) for s in shape)


def metadata(x: Any) -> tuple[Any, ...] | None:
    """Shape, stride, dtype and device of a fake tensor, comparable across traces."""
    if not isinstance(x, torch.Tensor):
        return None
    return sizes(x.shape), sizes(x.stride()), x.dtype, str(x.device)


def is_power_of_two(k: float) -> bool:
    """Whether multiplying by ``k``, and dividing by it, is exact in every binary float format (range of the result aside)."""
    return 0.5**126 <= abs(k) <= 2.0**126 and math.frexp(abs(k))[0] == 0.5


def ref(c: int) -> Arg:
    """A class as an argument of a key."""
    return ("n", c)


def operands(key: Key) -> list[int]:
    """Every class that a key refers to."""
    found: list[int] = []
    for argument in key[1:]:
        if argument[0] == "n":
            found.append(argument[1])
        elif argument[0] == "l":
            found += operands(("", *argument[1]))
    return found


class Table:
    """The classes of one graph, and of any graph traced over the same inputs."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.keys: list[Key] = []
        self.shapes: list[tuple[Any, ...] | None] = []
        self.dtypes: list[torch.dtype | None] = []
        self.class_of: dict[Node, int] = {}
        self.members: dict[int, list[Node]] = {}
        self._known: dict[Key, int] = {}
        self.mutated: set[Node] = set()
        """Nodes whose memory has been written to: reading them again gives another value."""

    # -------------------------------------------------------------------------------------- classes

    def intern(self, key: Key, shape: Sequence[Any] | None, dtype: torch.dtype | None) -> int:
        """The class with this key."""
        known = self._known.get(key)
        if known is not None:
            return known
        self._known[key] = len(self.keys)
        self.keys.append(key)
        self.shapes.append(tuple(shape) if shape is not None else None)
        self.dtypes.append(dtype)
        return len(self.keys) - 1

    def unique(self, kind: str, node: Node) -> int:
        """A class that no other node can join."""
        v = value(node)
        tensor = isinstance(v, torch.Tensor)
        return self.intern((kind, ("u", len(self.keys))), v.shape if tensor else None, v.dtype if tensor else None)

    def head(self, c: int) -> str:
        """The operator of a class."""
        return self.keys[c][0]

    def shape(self, c: int) -> tuple[Any, ...]:
        """The shape of a tensor class."""
        shape = self.shapes[c]
        assert shape is not None, self.keys[c]
        return shape

    def operand(self, c: int, i: int) -> int:
        """The class that is argument ``i`` of a class's key."""
        return self.keys[c][1 + i][1]

    def is_float(self, c: int) -> bool:
        """Whether a class is a real floating-point tensor."""
        dtype = self.dtypes[c]
        return dtype is not None and dtype.is_floating_point

    def assign(self, node: Node, c: int) -> None:
        """Put a node into a class, out of any it was in."""
        self.drop(node)
        self.class_of[node] = c
        self.members.setdefault(c, []).append(node)

    def drop(self, node: Node) -> None:
        """Forget a node."""
        c = self.class_of.pop(node, None)
        if c is not None:
            self.members[c].remove(node)

    # -------------------------------------------------------------------------------------- views

    def view(self, c: int, shape: Sequence[Any]) -> int:
        """The same elements in row-major order under another shape."""
        if self.head(c) == VIEW:
            c = self.operand(c, 0)
        if sizes(shape) == sizes(self.shape(c)):
            return c
        if self.head(c) == LINEAR and size(self.shape(c)[-1]) != "0":
            if len(shape) >= 1 and size(shape[-1]) == size(self.shape(c)[-1]):
                x, w, b = self.linear_parts(c)  # only leading dims change: the view moves to x
                return self.linear(self.view(x, [*shape[:-1], self.shape(x)[-1]]), w, b)
            c = self.view(c, [math.prod(self.shape(c)[:-1]), self.shape(c)[-1]])
        elif self.head(c) == EXPAND and sizes(shape[-2:]) == sizes(self.shape(c)[-2:]):
            base = self.operand(c, 0)
            if len(self.shape(base)) == 2:
                return self.expand(base, shape)
        return self.intern((VIEW, ref(c), ("l", tuple(("i", s) for s in sizes(shape)))), shape, self.dtypes[c])

    def permute(self, c: int, dims: Sequence[int]) -> int:
        """Dimensions reordered; permutes compose, and one that only moves size-1 dimensions is a view."""
        rank = len(self.shape(c))
        dims = [d % rank for d in dims]
        if self.head(c) == PERMUTE:
            inner = self.permuted_dims(c)
            dims, c = [inner[d] for d in dims], self.operand(c, 0)
        old = self.shape(c)
        new = [old[d] for d in dims]
        moving = [d for d in dims if size(old[d]) != "1"]
        if moving == sorted(moving):
            return self.view(c, new)
        if len(moving) < rank:
            kept = sorted(moving)
            squeezed = self.view(c, [old[d] for d in kept])
            return self.view(self.permute(squeezed, [kept.index(d) for d in moving]), new)
        if self.head(c) == EXPAND and dims == [*range(rank - 2), rank - 1, rank - 2]:
            base = self.operand(c, 0)
            if len(self.shape(base)) == 2:
                return self.expand(self.permute(base, [1, 0]), new)
        if self.head(c) == LINEAR and rank == 2 and not self.strict:
            x, w, b = self.linear_parts(c)
            if b is None:
                return self.linear(w, x, None)  # (x w^T)^T = w x^T
        return self.intern((PERMUTE, ref(c), ("l", tuple(("i", str(d)) for d in dims))), new, self.dtypes[c])

    def permuted_dims(self, c: int) -> tuple[int, ...]:
        """The order of dimensions of a permute."""
        return tuple(int(d[1]) for d in self.keys[c][2][1])

    def expand(self, c: int, shape: Sequence[Any]) -> int:
        """Broadcast to a shape."""
        if sizes(shape) == sizes(self.shape(c)):
            return c
        if self.head(c) == VIEW:
            base = self.operand(c, 0)
            if sizes(shape[-2:]) == sizes(self.shape(c)[-2:]) == sizes(self.shape(base)):
                c = base  # a matrix with leading dimensions of one
        return self.intern((EXPAND, ref(c), ("l", tuple(("i", s) for s in sizes(shape)))), shape, self.dtypes[c])

    def slice(self, c: int, dim: int, start: Any, length: Any) -> int:
        """``length`` elements of one dimension from ``start`` on; the length is the output's own, so nothing is clamped."""
        whole = self.shape(c)[dim]
        if isinstance(start, int):
            if start < 0:
                start = max(whole + start, 0) if isinstance(whole, int) else whole + start
            if isinstance(whole, int):
                start = min(start, whole)
        if size(length) == size(whole):
            return c
        shape = list(self.shape(c))
        shape[dim] = length
        return self.intern(
            (SLICE, ref(c), ("i", str(dim)), ("i", size(start)), ("i", size(start + length))), shape, self.dtypes[c]
        )

    # -------------------------------------------------------------------------------------- linear algebra

    def linear_parts(self, c: int) -> tuple[int, int, int | None]:
        """``x``, ``w`` and the bias of a linear."""
        _, x, w, b = self.keys[c]
        return x[1], w[1], b[1]

    def linear(self, x: int, w: int, b: int | None) -> int:
        """``x w^T + b`` with x (..., K), w (N, K), b (N,) or None."""
        bias: Arg = ("k", None) if b is None else ref(b)
        return self.intern((LINEAR, ref(x), ref(w), bias), [*self.shape(x)[:-1], self.shape(w)[0]], self.dtypes[x])

    def matmul(self, a: int, b: int) -> int:
        """``a b`` with b (K, N)."""
        return self.linear(a, self.permute(b, [1, 0]), None)

    def takes_bias(self, c: int, b: int) -> bool:
        """Whether ``c + b`` is a linear with bias ``b``."""
        if self.head(c) != LINEAR or self.linear_parts(c)[2] is not None or len(self.shape(b)) != 1:
            return False
        return size(self.shape(b)[0]) == size(self.shape(c)[-1]) and self.dtypes[b] == self.dtypes[c]

    def with_bias(self, c: int, b: int) -> int:
        """The linear ``c`` with bias ``b``."""
        x, w, _ = self.linear_parts(c)
        return self.linear(x, w, b)

    def colsum(self, c: int, dims: Any, shape: Sequence[Any], dtype: torch.dtype) -> int:
        """A sum; over all leading dimensions it is a column sum of the (N, M) matrix, whatever the rank."""
        old = self.shape(c)
        rank = len(old)
        if rank == 0:
            return c
        chosen = sorted(d % rank for d in (dims if isinstance(dims, (list, tuple)) and len(dims) else range(rank)))
        if chosen == list(range(rank - 1)) and (rank == 2 or not self.strict):
            matrix = self.view(c, [math.prod(old[:-1]), old[-1]])
            if size(self.shape(matrix)[0]) == "1":
                total = self.view(matrix, [old[-1]])
            else:
                total = self.intern((COLSUM, ref(matrix)), [old[-1]], dtype)
        else:
            rest = [s for i, s in enumerate(old) if i not in chosen]
            total = self.intern(("sum", ref(c), ("l", tuple(("i", str(d)) for d in chosen))), rest, dtype)
        return self.view(total, shape)

    # -------------------------------------------------------------------------------------- pointwise

    def add(self, a: int, b: int, shape: Sequence[Any], dtype: torch.dtype) -> int:
        """``a + b``."""
        a, b = sorted((a, b))
        if not self.strict:
            for p, q in ((a, b), (b, a)):
                if p != q and self.takes_bias(p, q):
                    return self.with_bias(p, q)
            silu = self._silu_backward(a, b, shape, dtype)
            if silu is not None:
                return silu
        if a == b and dtype.is_floating_point:
            return self.scale(a, 2.0)
        for p, q in ((a, b), (b, a)):
            joined = self._joined_pads(p, q, shape, dtype)
            if joined is not None:
                return joined
        return self.intern((ADD, *sorted([ref(a), ref(b)])), shape, dtype)

    def _joined_pads(self, a: int, b: int, shape: Sequence[Any], dtype: torch.dtype) -> int | None:
        """Zero-padded pieces added up: pieces side by side are a cat, pieces of one range add inside."""
        if self.head(b) != PAD or self.head(a) not in (PAD, CAT) or sizes(self.shape(a)) != sizes(self.shape(b)):
            return None
        _, piece, dim, start, stop, whole = self.keys[b]
        d = int(dim[1])
        if self.head(a) == PAD:
            _, other, *place = self.keys[a]
            if place == [dim, start, stop, whole]:
                inner = self.add(other[1], piece[1], self.shape(other[1]), dtype)
                return self.pad(inner, d, start[1], stop[1], whole[1], shape)
            if place == [dim, ("i", "0"), start, whole] and stop == whole:
                return self.cat([other[1], piece[1]], d, shape, dtype)
            return None
        if self.keys[a][2] != dim:
            return None
        parts = [part[1] for part in self.keys[a][1][1]]
        offset = 0
        for i, part in enumerate(parts):
            extent = self.shape(part)[d]
            if not isinstance(extent, int):
                return None
            if (str(offset), str(offset + extent)) == (start[1], stop[1]):
                parts[i] = self.add(part, piece[1], self.shape(part), dtype)
                return self.cat(parts, d, shape, dtype)
            offset += extent
        return None

    def _silu_backward(self, a: int, b: int, shape: Sequence[Any], dtype: torch.dtype) -> int | None:
        """``g sigmoid(x) + sigmoid_backward(g x, sigmoid(x))`` is ``silu_backward(g, x)``."""
        for p, q in ((a, b), (b, a)):
            if self.head(p) != MUL or self.head(q) != "aten.sigmoid_backward.default":
                continue
            sigmoid = self.operand(q, 1)
            factors = [self.operand(p, 0), self.operand(p, 1)]
            if self.head(sigmoid) != "aten.sigmoid.default" or sigmoid not in factors:
                continue
            x = self.operand(sigmoid, 0)
            g = factors[1] if factors[0] == sigmoid else factors[0]
            if self.dtypes[x] == dtype and self.keys[self.operand(q, 0)] == (MUL, *sorted([ref(g), ref(x)])):
                return self.intern(("aten.silu_backward.default", ref(g), ref(x)), shape, dtype)
        return None

    def scale(self, c: int, k: float) -> int:
        """``c`` times a number, in c's own dtype."""
        return c if k == 1.0 else self.intern((SCALE, ref(c), ("k", repr(float(k)))), self.shape(c), self.dtypes[c])

    def mul(self, a: int, b: int, shape: Sequence[Any], dtype: torch.dtype) -> int:
        """``a b``."""
        a, b = sorted((a, b))
        if dtype.is_floating_point and self.dtypes[a] == self.dtypes[b]:
            if a == b:
                return self.intern((SQUARE, ref(a)), shape, dtype)
            for p, q in ((a, b), (b, a)):
                if self.head(p) == SCALE and is_power_of_two(self.factor(p)):
                    return self.scale(self.mul(self.operand(p, 0), q, shape, dtype), self.factor(p))
                if not self.strict and self.keys[q] == ("aten.sigmoid.default", ref(p)):
                    return self.intern(("aten.silu.default", ref(p)), shape, dtype)
        return self.intern((MUL, *sorted([ref(a), ref(b)])), shape, dtype)

    def factor(self, c: int) -> float:
        """The number of a scale."""
        return float(self.keys[c][2][1])

    def where(self, mask: int, a: int, b: int, shape: Sequence[Any], dtype: torch.dtype) -> int:
        """``a`` where the mask holds, else ``b``."""
        if self.head(mask) in ("aten.logical_not.default", "aten.bitwise_not.default") and self.dtypes[mask] == torch.bool:
            return self.where(self.operand(mask, 0), b, a, shape, dtype)
        return self.intern((WHERE, ref(mask), ref(a), ref(b)), shape, dtype)

    # -------------------------------------------------------------------------------------- constants and pieces

    def constant(self, k: float, dtype: torch.dtype) -> int:
        """A 0-d constant."""
        return self.intern((CONST, ("k", repr(float(k))), ("k", f"dtype {dtype}")), [], dtype)

    def fill(self, k: float, shape: Sequence[Any], dtype: torch.dtype, device: Any) -> int:
        """A tensor of one repeated constant."""
        c = self.constant(k, dtype)
        if len(shape) == 0:
            return c
        dims: Arg = ("l", tuple(("i", s) for s in sizes(shape)))
        return self.intern((FULL, ref(c), dims, ("k", f"device {device}")), shape, dtype)

    def constant_of(self, c: int) -> float | None:
        """The number that a class is filled with, if it is a constant."""
        if self.head(c) == FULL:
            c = self.operand(c, 0)
        return float(self.keys[c][1][1]) if self.head(c) == CONST else None

    def unfilled(self, a: int, other: int, shape: Sequence[Any], dtype: torch.dtype) -> int:
        """A full tensor as its 0-d constant, where ``other`` alone already decides the shape."""
        if self.head(a) != FULL or self.head(other) == FULL:
            return a
        decides = sizes(self.shape(other)) == sizes(shape) and self.dtypes[other] == dtype
        return self.operand(a, 0) if decides else a

    def pad(self, c: int, dim: int, start: Any, stop: Any, whole: Any, shape: Sequence[Any]) -> int:
        """Zeros of extent ``whole`` with ``c`` at ``start:stop`` of one dimension."""
        place = (("i", str(dim)), ("i", str(start)), ("i", str(stop)), ("i", str(whole)))
        return self.intern((PAD, ref(c), *place), shape, self.dtypes[c])

    def cat(self, parts: Sequence[int], dim: int, shape: Sequence[Any], dtype: torch.dtype) -> int:
        """Pieces side by side."""
        return self.intern((CAT, ("l", tuple(ref(p) for p in parts)), ("i", str(dim))), shape, dtype)
