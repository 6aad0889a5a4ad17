"""What a class's key says its value is, computed independently of the rules; and the checks that a table agrees with a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

TOLERANCE = 1e-6
"""Of the largest element; only sigmoids and their like are inexact."""


def close(a: Any, b: Any, exact: bool) -> bool:
    """Whether two values are the same, NaN and infinities included."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    if exact or torch.equal(a, b):
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    finite = a[a.isfinite()].abs()
    scale = max(float(finite.max()), 1.0) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True)


class Run:
    """The values of one run of a program, numbered so that equal numbers are equal values."""

    def __init__(self, values: Mapping[Node, Any], *, exact: bool = False) -> None:
        self.values = {n: v for n, v in values.items() if isinstance(v, Tensor)}
        self.exact = exact
        self.number: dict[Node, int] = {}
        self._same_bits: dict[Any, int] = {}
        self._inexact: dict[Any, list[tuple[Tensor, int]]] = {}
        for node, v in self.values.items():
            bits = (v.shape, v.dtype, _bits(v))
            if bits not in self._same_bits:
                self._same_bits[bits] = self._find(v, len(self.number))
            self.number[node] = self._same_bits[bits]

    def _find(self, v: Tensor, new: int) -> int:
        """The number of a value that is the same but for rounding; whole numbers are exact."""
        if self.exact or not v.is_floating_point() or torch.equal(v.nan_to_num().round(), v.nan_to_num()):
            return new
        alike = self._inexact.setdefault((v.shape, v.dtype), [])
        known = next((number for other, number in alike if close(v, other, False)), new)
        alike.append((v, known))
        return known


def _bits(v: Tensor) -> bytes:
    """The bits of a value, one NaN and one zero for all."""
    if v.is_floating_point():
        v = torch.where(v.isnan(), torch.nan, v + 0.0)
    return (v.float() if v.dtype is torch.bfloat16 else v).numpy().tobytes()


def unequal(table: Any, run: Run) -> Iterator[str]:
    """Members of one class that have different values, and classes whose shape or dtype is not their members'."""
    for c, members in table.members.items():
        tensors = [n for n in members if n in run.values]
        for n in tensors:
            v = run.values[n]
            symbolic = any(not isinstance(s, int) for s in table.shapes[c])
            if not (symbolic or tuple(table.shapes[c]) == tuple(v.shape)) or table.dtypes[c] != v.dtype:
                yield f"{n} is {tuple(v.shape)} {v.dtype}, its class {table.shapes[c]} {table.dtypes[c]}: {table.keys[c]}"
            if run.number[n] != run.number[tensors[0]]:
                yield f"{tensors[0]} ({tensors[0].target}) and {n} ({n.target}) differ but share {table.keys[c]}"


def misread(table: Any, run: Run) -> Iterator[str]:
    """Classes whose key says something else than their members are."""
    meaning = Meaning(table, run)
    for c, members in table.members.items():
        tensors = [n for n in members if n in run.values]
        rule = _RULES.get(table.head(c))
        if not tensors or rule is None:
            continue
        try:
            v = rule(meaning, c, table.keys[c][1:])
        except Exception as error:
            yield f"{tensors[0]} ({tensors[0].target}): {table.keys[c]} cannot be computed: {error}"
            continue
        if not close(v, run.values[tensors[0]], run.exact):
            yield f"{tensors[0]} ({tensors[0].target}) is not what {table.keys[c]} says"


class Meaning:
    """Values of classes, by their members where there are any, else by their keys."""

    def __init__(self, table: Any, run: Run) -> None:
        self.table, self.run = table, run
        self._known: dict[int, Tensor] = {}

    def __getitem__(self, argument: Sequence[Any]) -> Tensor:
        c = argument[1]
        if c not in self._known:
            member = next((n for n in self.table.members.get(c, ()) if n in self.run.values), None)
            if member is not None:
                self._known[c] = self.run.values[member]
            else:
                v = _RULES[self.table.head(c)](self, c, self.table.keys[c][1:])
                stated = tuple(self.table.shape(c)), self.table.dtypes[c]
                if stated != (tuple(v.shape), v.dtype):
                    raise ValueError(f"{self.table.keys[c]} is {tuple(v.shape)} {v.dtype}, recorded as {stated}")
                self._known[c] = v
        return self._known[c]


def _integers(argument: Sequence[Any]) -> list[int]:
    return [int(i) for _, i in argument[1]]


def _linear(of: Meaning, _c: int, key: Sequence[Any]) -> Tensor:
    x, w, b = key
    assert of[w].dim() == 2 and of[x].dtype == of[w].dtype
    product = of[x] @ of[w].t()
    if b[1] is None:
        return product
    assert of[b].shape == product.shape[-1:] and of[b].dtype == product.dtype
    return product + of[b]


def _pad(of: Meaning, c: int, key: Sequence[Any]) -> Tensor:
    piece, dim, start, stop, whole = of[key[0]], *(int(i[1]) for i in key[1:])
    padded = piece.new_zeros([*piece.shape[:dim], whole, *piece.shape[dim + 1 :]])
    padded.narrow(dim, start, stop - start).copy_(piece)
    return padded


def _slice(of: Meaning, _c: int, key: Sequence[Any]) -> Tensor:
    dim, start, stop = (int(i[1]) for i in key[1:])
    return of[key[0]].narrow(dim, start, stop - start)


def _constant(of: Meaning, c: int, key: Sequence[Any]) -> Tensor:
    return torch.tensor(float(key[0][1])).to(of.table.dtypes[c])


def _where(of: Meaning, _c: int, key: Sequence[Any]) -> Tensor:
    mask, a, b = (of[k] for k in key)
    return torch.where(mask != 0, a, b)


_RULES: dict[str, Any] = {
    "linear": _linear,
    "view": lambda of, _c, key: of[key[0]].reshape(_integers(key[1])),
    "permute": lambda of, _c, key: of[key[0]].permute(_integers(key[1])),
    "expand": lambda of, _c, key: of[key[0]].expand(_integers(key[1])),
    "scale": lambda of, _c, key: of[key[0]] * float(key[1][1]),
    "slice": _slice,
    "pad": _pad,
    "add": lambda of, _c, key: of[key[0]] + of[key[1]],
    "mul": lambda of, _c, key: of[key[0]] * of[key[1]],
    "square": lambda of, _c, key: of[key[0]] ** 2.0,
    "colsum": lambda of, _c, key: of[key[0]].sum(0),
    "sum": lambda of, _c, key: of[key[0]].sum(_integers(key[1])),
    "where": _where,
    "cat": lambda of, _c, key: torch.cat([of[part] for part in key[0][1]], int(key[1][1])),
    "full": lambda of, _c, key: of[key[0]].expand(_integers(key[1])),
    "const": _constant,
    "aten.silu.default": lambda of, _c, key: F.silu(of[key[0]]),
    "aten.silu_backward.default": lambda of, _c, key: torch.ops.aten.silu_backward(of[key[0]], of[key[1]]),
}
