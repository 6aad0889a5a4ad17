"""The holes of a pattern, and inputs on which it runs.

A pattern says nothing about shapes, but tracing needs some. It is run on meta tensors: the first time that a hole is used
it is given the shapes of a short menu in turn, until the rest of the pattern runs. Dimensions have names (m, k, n, ...) so
that other sizes can be filled in later.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .errors import PatternError

SIZES: Mapping[str, int] = {"m": 6, "k": 10, "n": 8, "i": 14, "b": 4, "e": 2}
"""Even and distinct: halves exist and nothing fits by accident."""
MENU: tuple[tuple[str, ...], ...] = (
    ("m", "k"), ("n", "k"), ("m", "n"), ("n",), ("k", "n"), ("k",), ("i", "k"), ("n", "m"), ("k", "m"), ("i", "n"), ("k", "i"),
    ("i",), ("m",), ("b", "m", "k"), ("b", "m", "n"), ("b", "k", "n"), ("b", "n", "k"), ("e", "m", "k"), ("m", "i"), (),
)  # fmt: skip
DTYPES = (torch.float32, torch.bool, torch.int64)
SENTINELS = (0.123456789, 0.246913578, 0.370370367, 0.493827156)
"""What scalar holes are filled with while a skeleton is traced; the finder recognises them."""
MAX_EXAMPLES = 6
MAX_TRIALS = 4000


@dataclasses.dataclass(frozen=True)
class Hole:
    """One argument of a pattern."""

    name: str
    scalar: bool = False
    """Filled by a Python number of the graph, not by a tensor."""
    optional: bool = False
    """May be absent (None), as a bias may."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """Dimension names and dtype of one tensor hole."""

    dims: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    values: tuple[int, ...] | None = None
    """The values of an integer example: random ones may be out of a pattern's range."""


Example = tuple["Slot | None", ...]
"""One slot per tensor hole, in order."""


def holes_of(pattern: Callable[..., Any]) -> tuple[Hole, ...]:
    """The holes of a pattern function.

    Raises:
        PatternError: an argument is variadic, or a default is something else than None.
    """
    holes = []
    for parameter in inspect.signature(pattern).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PatternError(f"pattern {name_of(pattern)}: argument {parameter} must be an ordinary named argument")
        if parameter.default not in (parameter.empty, None):
            raise PatternError(
                f"pattern {name_of(pattern)}: the only default a hole may have is None (it may be absent); "
                f"{parameter.name} has {parameter.default!r}"
            )
        scalar = parameter.annotation in (float, "float")
        holes.append(Hole(parameter.name, scalar, parameter.default is None))
    if not any(not h.scalar for h in holes):
        raise PatternError(f"pattern {name_of(pattern)} takes no tensor: its arguments are the holes that tensors fill")
    return tuple(holes)


def name_of(function: Callable[..., Any]) -> str:
    """Name, file and line of a function, for messages."""
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__name__', function)}{where}"


def fill_scalars(holes: Sequence[Hole], tensors: Sequence[Any], scalars: Sequence[float]) -> list[Any]:
    """Arguments in the pattern's order."""
    t, s = iter(tensors), iter(scalars)
    return [next(s) if h.scalar else next(t) for h in holes]


def find_examples(pattern: Callable[..., Any], holes: Sequence[Hole]) -> list[Example]:
    """Examples on which the pattern runs, the plainest first; with and without each optional hole.

    Raises:
        PatternError: none was found.
    """
    found: list[Example] = []
    optional = [h.name for h in holes if h.optional and not h.scalar]
    last_error = ""
    for absent in itertools.chain.from_iterable(itertools.combinations(optional, r) for r in range(len(optional) + 1)):
        for dtypes in ((torch.float32,), DTYPES):
            search = _Search(pattern, holes, frozenset(absent), dtypes)
            examples = _one_of_each_rank(search.solutions({}))
            last_error = search.last_error
            if examples:
                break
        found += examples
    if not found:
        shapes = ", ".join(f"{h.name!r}: shape" for h in holes if not h.scalar)
        raise PatternError(
            f"pattern {name_of(pattern)} runs on none of the shapes that were tried (last error: {last_error}); "
            f"pass example={{{shapes}}}"
        )
    return found


def _one_of_each_rank(solutions: Iterator[Example]) -> list[Example]:
    found: dict[Any, Example] = {}
    for example in itertools.islice(solutions, 4 * MAX_EXAMPLES):
        found.setdefault(tuple(s and (len(s.dims), s.dtype) for s in example), example)
        if len(found) == MAX_EXAMPLES:
            break
    return list(found.values())


def explicit_examples(pattern: Callable[..., Any], holes: Sequence[Hole], given: Sequence[Mapping[str, Any]]) -> list[Example]:
    """The examples that the user gave, with and without each optional hole.

    An entry is names of dimensions ("m k"), a shape or a tensor; equal sizes of shapes are one dimension. None leaves an
    optional hole out; where an example says so, all are taken as they are.

    Raises:
        PatternError: an entry is missing or names an unknown dimension, or the pattern does not run on the example.
    """
    if not given:
        raise PatternError(f"pattern {name_of(pattern)}: example= is empty; leave it out, or give one")
    examples = [_slots(pattern, holes, example) for example in given]
    if any(None in example for example in examples):
        return examples
    optional = [i for i, h in enumerate(h for h in holes if not h.scalar) if h.optional]
    absent = itertools.chain.from_iterable(itertools.combinations(optional, r) for r in range(len(optional) + 1))
    return [tuple(None if i in out else slot for i, slot in enumerate(e)) for out in absent for e in examples]


def _slots(pattern: Callable[..., Any], holes: Sequence[Hole], given: Mapping[str, Any]) -> Example:
    slots: list[Slot | None] = []
    for hole in holes:
        if not hole.scalar:
            if hole.name not in given:
                raise PatternError(f"pattern {name_of(pattern)}: example= has no entry for {hole.name!r}; it has {sorted(given)}")
            absent = hole.optional and given[hole.name] is None
            slots.append(None if absent else _slot(pattern, hole, given[hole.name]))
    named = dict(zip([h.name for h in holes if not h.scalar], slots, strict=True))
    try:
        search = _Search(pattern, holes, frozenset(n for n, s in named.items() if s is None), DTYPES)
        search.run({n: s for n, s in named.items() if s is not None})
    except Exception as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PatternError(f"pattern {name_of(pattern)} does not run on its example=: {first}") from error
    return tuple(slots)


def _slot(pattern: Callable[..., Any], hole: Hole, given: Any) -> Slot:
    if isinstance(given, torch.Tensor):
        integer = not (given.dtype.is_floating_point or given.dtype.is_complex or given.dtype is torch.bool)
        return Slot(tuple(f"={s}" for s in given.shape), given.dtype, tuple(given.flatten().tolist()) if integer else None)
    dims = given.split() if isinstance(given, str) else given
    if not isinstance(dims, Sequence):
        raise PatternError(f"pattern {name_of(pattern)}: example= of {hole.name} is {given!r}, not a shape or a tensor")
    unknown = [d for d in dims if d not in SIZES and not str(d).isdecimal()]
    if unknown:
        raise PatternError(
            f"pattern {name_of(pattern)}: example= of {hole.name} names {unknown[0]!r}; dimensions are {', '.join(SIZES)}"
        )
    return Slot(tuple(d if d in SIZES else f"={d}" for d in dims))


def extent(dim: str, sizes: Mapping[str, int]) -> int:
    """The size of a named dimension; ``=5`` is 5 unless ``sizes`` says otherwise."""
    if dim in sizes:
        return sizes[dim]
    return int(dim[1:]) if dim.startswith("=") else SIZES[dim]


def shape_of(slot: Slot, sizes: Mapping[str, int] = SIZES) -> tuple[int, ...]:
    """The shape of a slot under some sizes."""
    return tuple(extent(d, sizes) for d in slot.dims)


class _Needed(Exception):
    """An unbound hole was used."""


class _Unbound(torch.Tensor):
    """A hole without a shape yet: using it in any way says so."""

    hole: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Needed(next(a.hole for a in _flat((args, kwargs or {})) if isinstance(a, _Unbound)))


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, (list, tuple)):
        for item in x:
            yield from _flat(item)
    else:
        yield x


def _unbound(hole: str) -> torch.Tensor:
    tensor = torch.empty(0, device="meta").as_subclass(_Unbound)
    object.__setattr__(tensor, "hole", hole)
    return tensor


class _VectorBias(TorchFunctionMode):
    """torch takes a matrix as the bias of a linear; a fusion's bias is a vector."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if func is torch.nn.functional.linear and bias is not None and not isinstance(bias, _Unbound) and bias.dim() != 1:
            raise ValueError("the bias of a linear is a vector")
        return func(*args, **kwargs)


class _Search:
    """Depth-first search for shapes; one hole is one level."""

    def __init__(
        self, pattern: Callable[..., Any], holes: Sequence[Hole], absent: frozenset[str], dtypes: Sequence[torch.dtype]
    ) -> None:
        self.pattern, self.holes, self.absent, self.dtypes = pattern, holes, absent, dtypes
        self.trials = 0
        self.last_error = ""

    def solutions(self, bound: Mapping[str, Slot]) -> Iterator[Example]:
        self.trials += 1
        if self.trials > MAX_TRIALS:
            return
        try:
            self.run(bound)
        except _Needed as needed:
            hole = str(needed)
            for slot in self._choices(bound):
                yield from self.solutions({**bound, hole: slot})
        except Exception as error:  # these shapes do not fit; the next may
            self.last_error = self.last_error or f"{type(error).__name__}: {str(error).strip().splitlines()[0:1]}"
        else:
            yield tuple(None if h.name in self.absent else bound.get(h.name, Slot(MENU[0])) for h in self.holes if not h.scalar)

    def run(self, bound: Mapping[str, Slot]) -> None:
        """Run the pattern with these holes bound."""
        scalars = iter(SENTINELS)
        arguments: list[Any] = []
        for hole in self.holes:
            if hole.scalar:
                arguments.append(next(scalars))
            elif hole.name in self.absent:
                arguments.append(None)
            elif hole.name in bound:
                slot = bound[hole.name]
                arguments.append(torch.empty(shape_of(slot), dtype=slot.dtype, device="meta"))
            else:
                arguments.append(_unbound(hole.name))
        with _VectorBias():
            self.pattern(*arguments)

    def _choices(self, bound: Mapping[str, Slot]) -> list[Slot]:
        """A new shape first (a swap of equal shapes shows nothing), then shapes in use, then the other new ones."""
        used = [dims for dims in MENU if dims in {s.dims for s in bound.values()}]
        new = [dims for dims in MENU if dims not in used]
        menu = [*new[:1], *used, *new[1:]]
        return [Slot(dims, dtype) for dtype in self.dtypes for dims in menu]
