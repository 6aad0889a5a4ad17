"""Find where a pattern may be: its canonical term against the model's, class by class.

The finder is loose on purpose (sizes and dtypes match anything, views and casts are looked through): it only guesses which
values fill the holes. ``prove`` decides. A wrong guess can lose a match, never make one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from . import compat
from .fusion import Fusion
from .pattern import Decompositions, trace_forward
from .region import inverse, transposed
from .samples import SENTINELS, Example, shape_of
from .spellings import CAST, VIEWS, number_graph, target_name
from .values import (
    COMMUTATIVE,
    LINEAR,
    PERMUTE,
    SCALE,
    SLICE,
    UNIQUE,
    VIEW,
    Arg,
    Key,
    Table,
    is_tensor,
    operands,
    size,
    sizes,
    value,
)

MAX_STEPS = 400
"""How many comparisons one root is worth."""
MAX_BINDINGS = 4
"""How many guesses are handed to the prover."""
NEAR = 6
"""How many operators away from the values of output 0 a further output is looked for."""
_CAST_HEAD = target_name(CAST)

Binding = dict[Any, Any]
"""Pattern class -> model class (None for an absent optional hole); ``("scalar", i)`` -> number."""


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A pattern traced once on example shapes."""

    table: Table
    holes: tuple[int | None, ...]
    """The class of each tensor hole; None where the example left it out."""
    roots: tuple[int, ...]
    """The classes of the required outputs."""
    size: int
    """How many values output 0 has."""

    @property
    def head(self) -> str:
        """The operator of the pattern's first output."""
        return self.table.head(self.roots[0])

    @functools.cached_property
    def form(self) -> Any:
        """Its structure without sizes: two examples of one form need one skeleton."""
        return _form(self)


def skeletons(fusion: Fusion, decompositions: Decompositions, strict: bool) -> Iterator[Skeleton]:
    """One skeleton per form that the pattern takes on its examples, each traced when it is asked for, once per numerics."""
    cache: dict[bool, list[Skeleton | None]] = fusion.__dict__.setdefault("_skeletons", {})
    known = cache.setdefault(strict, [])  # None where an earlier example has the same form
    for i, example in enumerate(fusion.examples):
        if i == len(known):
            skeleton = _skeleton(fusion, example, decompositions, strict)
            known.append(None if any(k is not None and k.form == skeleton.form for k in known) else skeleton)
        skeleton = known[i]
        if skeleton is not None:
            yield skeleton


def _skeleton(fusion: Fusion, example: Example, decompositions: Decompositions, strict: bool) -> Skeleton:
    mode = compat.new_fake_mode()
    with mode:
        metas = [None if slot is None else torch.empty(shape_of(slot), dtype=slot.dtype) for slot in example]
    scalars = SENTINELS[: sum(h.scalar for h in fusion.holes)]
    traced = trace_forward(lambda *t: fusion.call_pattern(t, scalars), metas, decompositions)
    table = number_graph(traced.graph, strict)
    required = traced.outputs[: len(traced.outputs) - fusion.extra]
    roots = tuple(table.class_of[o] for o in required)
    holes = tuple(None if p is None else table.class_of[p] for p in traced.inputs)
    return Skeleton(table, holes, roots, len(_reachable(table, roots[0])))


def _reachable(table: Table, c: int) -> list[int]:
    seen: dict[int, None] = {}
    pending = [c]
    while pending:
        c = pending.pop()
        if c not in seen:
            seen[c] = None
            pending += operands(table.keys[c])
    return list(seen)


def _form(skeleton: Skeleton) -> Any:
    table, places = skeleton.table, {c: i for i, c in enumerate(skeleton.holes) if c is not None}

    def argument(a: Arg) -> Any:
        if a[0] == "n":
            return term(a[1])
        if a[0] == "l":
            return "sizes" if all(x[0] == "i" for x in a[1]) else tuple(argument(x) for x in a[1])
        return "size" if a[0] == "i" else a

    def term(c: int) -> Any:
        return (
            ("hole", places[c], str(table.dtypes[c]))
            if c in places
            else (table.head(c), *[argument(a) for a in table.keys[c][1:]])
        )

    absent = tuple(c is None for c in skeleton.holes)
    return absent, tuple(term(c) for c in skeleton.roots)


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """How far the finder came: ``matched`` values bound, and the first thing that did not fit."""

    matched: int
    total: int
    reason: str
    model_class: int | None


class Finder:
    """Guesses for the holes of one skeleton at one root."""

    def __init__(self, skeleton: Skeleton, table: Table) -> None:
        self.skeleton, self.pattern, self.model = skeleton, skeleton.table, table
        self.holes = {c for c in skeleton.holes if c is not None}
        self.steps = 0
        self._deepest = -1
        self._blame: tuple[Any, int | None] = (None, None)

    def bindings(self, root: int) -> Iterator[Binding]:
        """Every guess, until the budget is spent; further outputs bind what the first one leaves open."""
        first, *rest = self.skeleton.roots
        for bound in self._match(first, root, {}):
            yield from self._extend(bound, rest)

    def _extend(self, bound: Binding, outputs: list[int]) -> Iterator[Binding]:
        if not outputs or self.holes <= bound.keys():
            yield bound
            return
        for near in self._near(bound, self.pattern.head(outputs[0])):
            for m in (near, transposed(near, self.model)):
                for extended in self._match(outputs[0], m, bound) if m is not None else ():
                    yield from self._extend(extended, outputs[1:])

    def _near(self, bound: Binding, head: str) -> list[int]:
        """Model classes with this operator that are computed, a few steps on, from something already bound."""
        table = self.model
        nodes = [n for c in bound.values() if isinstance(c, int) for n in table.members.get(c, ())]
        found: dict[int, None] = {}
        seen = set(nodes)
        for _ in range(NEAR):
            nodes = [u for n in nodes for u in n.users if u not in seen and u in table.class_of]
            seen.update(nodes)
            found.update(dict.fromkeys(c for c in (table.class_of[n] for n in nodes) if table.head(c) == head))
        return list(found)

    # -------------------------------------------------------------------------------------- matching

    def _match(self, p: int, m: int, bound: Binding) -> Iterator[Binding]:
        self.steps += 1
        if self.steps > MAX_STEPS:
            return
        if p in bound:
            if bound[p] == m:
                yield bound
            else:
                self._fail(bound, p, m)
        elif p in self.holes:
            if self.model.dtypes[m] is not None and self.model.is_float(m) == self.pattern.is_float(p):
                yield {**bound, p: m}
            else:
                self._fail(bound, p, m)
        else:
            yield from self._match_operator(p, m, bound)

    def _match_operator(self, p: int, m: int, bound: Binding) -> Iterator[Binding]:
        want, have = self.pattern.keys[p], self.model.keys[m]
        if want[0] == PERMUTE and len(self.model.shapes[m] or ()) == len(want[2][1]):
            undone = self.model.permute(m, inverse(self.pattern.permuted_dims(p)))
            yield from self._match(want[1][1], undone, {**bound, p: m})
            return
        if want[0] == have[0] and len(want) == len(have):
            orders = [have[1:], (have[2], have[1])] if want[0] in COMMUTATIVE else [have[1:]]
            for order in orders:
                yield from self._match_arguments(want[1:], order, {**bound, p: m}, (p, m))
        elif want[0] == have[0]:
            self._fail(bound, p, m)
        if want[0] == VIEW:
            yield from self._match_view(p, m, bound)
        elif have[0] == VIEW and set(sizes(self.model.shape(m))) <= {"1"}:  # one element: sizes of one make views of other steps
            yield from self._match(p, have[1][1], bound)
        elif want[0] != have[0]:
            self._fail(bound, p, m)
            if want[0] == _CAST_HEAD:
                yield from self._match(want[1][1], m, bound)
            elif have[0] == _CAST_HEAD:
                yield from self._match(p, have[1][1], bound)

    def _match_view(self, p: int, m: int, bound: Binding) -> Iterator[Binding]:
        """A view in the pattern: look through each way the model views the same value, and through none."""
        inner, have = self.pattern.operand(p, 0), self.model.keys[m]
        seen = {have[1][1]} if have[0] == VIEW else set()
        for node in self.model.members.get(m, ()):
            if node.target in VIEWS and is_tensor(node.args[0]):
                source = self.model.class_of.get(node.args[0])
                if source is not None and source not in seen and source != m:
                    seen.add(source)
                    yield from self._match(inner, source, {**bound, p: m})
        yield from self._match(inner, m, {**bound, p: m})

    def _match_arguments(self, want: Key, have: Key, bound: Binding, owner: tuple[int, int]) -> Iterator[Binding]:
        if not want:
            yield bound
            return
        for extended in self._match_argument(want[0], have[0], bound, owner):
            yield from self._match_arguments(want[1:], have[1:], extended, owner)

    def _match_argument(self, want: Arg, have: Arg, bound: Binding, owner: tuple[int, int]) -> Iterator[Binding]:
        if want[0] == "n" and have[0] == "n":
            yield from self._match(want[1], have[1], bound)
        elif want[0] == "l" and have[0] == "l":
            if all(a[0] == "i" for a in want[1] + have[1]):
                yield bound
            elif len(want[1]) == len(have[1]):
                yield from self._match_arguments(want[1], have[1], bound, owner)
        elif want[0] == have[0] == "i":
            yield bound
        elif want[0] == "k" and (have[0] == "k" or (have[0] == "i" and _scalar_hole(want[1])[0] is not None)):
            yield from self._match_constant(want, have, bound, owner)
        else:
            self._fail(bound, want[1] if want[0] == "n" else owner[0], have[1] if have[0] == "n" else owner[1])

    def _match_constant(self, want: Arg, have: Arg, bound: Binding, owner: tuple[int, int]) -> Iterator[Binding]:
        hole, sign = _scalar_hole(want[1])
        if hole is not None:
            number = _number(have[1])
            if number is not None:
                exact = int(number) if have[0] == "i" else number  # an integer has another key than the float
                yield {**bound, ("scalar", hole): sign * exact}
        elif want == have or str(want[1]).startswith(("dtype", "device", "layout", "memory_format")):
            yield bound
        elif len(bound) > self._deepest:
            self._deepest, self._blame = len(bound), ((want[1], have[1], owner[0]), owner[1])

    def _fail(self, bound: Binding, p: int, m: int | None) -> None:
        if len(bound) > self._deepest:
            self._deepest, self._blame = len(bound), (p, m)

    # -------------------------------------------------------------------------------------- explaining

    def mismatch(self) -> Mismatch:
        """What stopped the best attempt."""
        blame, m = self._blame
        total = self.skeleton.size
        if blame is None:
            return Mismatch(0, total, "nothing of it was found", None)
        if isinstance(blame, tuple):
            want, have, p = blame
            reason = f"{_readable(self.pattern, p)}: pattern has {want}, model has {have}"
        else:
            reason = f"pattern wants {self._wanted(blame)}, model has {_found(self.model, m)}{self._hint(blame, m)}"
        return Mismatch(min(self._deepest, total), total, reason, m)

    def _wanted(self, p: int) -> str:
        if p in self.holes:
            return "the value that it bound elsewhere" if self.pattern.is_float(p) else "a tensor that is not floating point"
        return _readable(self.pattern, p)

    def _hint(self, p: int, m: int | None) -> str:
        if m is None or p in self.holes:
            return ""
        want, have = self.pattern.keys[p], self.model.keys[m]
        if want[0] == LINEAR and have[0] == "add":
            return _bias_hint(self.model, have)
        if want[0] == LINEAR and have[0].startswith("aten.addmm"):
            return f"; addmm with beta={have[4][1]}, alpha={have[5][1]}, bias {_dims(self.model, have[1][1])}"
        if have[0] in (VIEW, PERMUTE, SLICE, SCALE, _CAST_HEAD) and self.model.head(have[1][1]) == want[0]:
            between = "cast" if have[0] == _CAST_HEAD else have[0]
            return f" of {_readable(self.model, have[1][1])}: a {between} lies in between"
        if want[0] == SCALE and any(_is_float_input(self.model, c) for c in operands(have)):
            return (
                "; the factor is a Python float that dynamic=True makes an input of the graph: with "
                "torch._dynamo.config.specialize_float = True it stays a number"
            )
        return ""


def _scalar_hole(constant: Any) -> tuple[int | None, int]:
    """Which scalar hole a constant of the pattern is, and its sign there (a pattern may negate a hole)."""
    number = _number(constant)
    found = [i for i, s in enumerate(SENTINELS) if number is not None and abs(abs(number) - s) < 1e-9]
    return (found[0], 1 if number > 0 else -1) if found and number is not None else (None, 1)


def _number(constant: Any) -> float | None:
    """The number in a constant of a key (``"float 0.5"`` or ``"0.5"``)."""
    try:
        return float(str(constant).split()[-1])
    except (ValueError, IndexError):
        return None


def _readable(table: Table, c: int) -> str:
    head = table.head(c)
    return head.replace("aten.", "").replace("prims.", "").replace(".default", "").replace(".Tensor", "")


def _dims(table: Table, c: int) -> str:
    return f"[{', '.join(sizes(table.shapes[c] or ()))}]"


def _dtype(table: Table, c: int) -> str:
    return str(table.dtypes[c]).removeprefix("torch.")


def _found(table: Table, m: int | None) -> str:
    if m is None:
        return "nothing"
    name = "an input" if table.head(m) in UNIQUE else _readable(table, m)
    node = next(iter(table.members.get(m, ())), None)
    where = f" = {node.name}" if node is not None else ""
    return f"{name}{where} {_dims(table, m)} {_dtype(table, m)}"


def _is_float_input(table: Table, c: int) -> bool:
    """Whether a class is what Dynamo makes of a float that may change: a float64 scalar on the CPU, cast or not."""
    while table.head(c) == _CAST_HEAD:
        c = table.operand(c, 0)
    inputs = [n for n in table.members.get(c, ()) if n.op == "placeholder" and is_tensor(n)]
    return any((v := value(n)).dtype is torch.float64 and v.dim() == 0 and v.device.type == "cpu" for n in inputs)


def _bias_hint(table: Table, have: Key) -> str:
    """Why an add of a linear is not its bias."""
    for p, q in ((have[1][1], have[2][1]), (have[2][1], have[1][1])):
        inner = table.operand(p, 0) if table.head(p) == _CAST_HEAD else p
        if table.head(inner) == LINEAR:
            width = size(table.shape(inner)[-1])
            added = f"{_dims(table, q)} {_dtype(table, q)}"
            return f"; it is linear + {added}, a bias must be [{width}] {_dtype(table, inner)}"
    return ""
