"""A pass of several kernels is taped: what it allocates and launches follows from the metadata of its arguments.

The first time a pass runs as it is written, and what it does with tensors is noted: those that it makes, launches, and torch's
operators between them. That becomes a function without a decision in it, which later passes with the same metadata call; it frees
what no later step reads.

The tensors of a pass are numbered: its arguments, then what its steps make, in order.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import plans
from .plans import ALIGNMENT

if TYPE_CHECKING:
    from .prepared import Direct

DEVICES = {"cuda"}
"""Where passes launch kernels. What stands for kernels elsewhere reads values, on which its steps depend."""
ATTEMPTS = 3
"""So often a pass is noted in vain before it is let be."""
SMALL, APART = 2**20, 512
"""Bytes: what is no larger shares a tensor with others like it, each so far from the one before."""
RECENT = 8
"""Tapes of one function that are found by their tensors' guards; others take a key."""
BY_VALUE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of operators whose results have sizes, or are numbers, that depend on values."""
Pass = Callable[..., tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a tensor among the arguments of an operator."""

    of: int


class Made(NamedTuple):
    """A new tensor."""

    make: Callable[[], Tensor]


class Launched(NamedTuple):
    """A launch; its tensors' numbers by their places among its arguments."""

    direct: Direct
    numbers: dict[int, int]


class Called(NamedTuple):
    """An operator of torch."""

    operator: Callable[..., Any]
    args: Any
    options: Any


class Step(NamedTuple):
    """What is done, and the tensors that it reads (or writes to) and makes."""

    what: Made | Launched | Called
    read: list[int]
    made: list[int]


class Tape:
    """The steps of a pass as a function of the stream and the arguments' tensors; None, and nothing done, if one is misaligned.

    ``source`` is its text: t and a with a number are a tensor and its address, c with a number is in ``constants``.
    """

    def __init__(self, steps: Sequence[Step], tensors: Sequence[Tensor], given: int, results: Sequence[int]) -> None:
        self.constants: list[Any] = []
        last = {n: at for at, step in enumerate(steps) for n in step.read}
        others = {*results, *[n for what, read, _ in steps if isinstance(what, Called) for n in read]}
        new = [made[0] for what, _, made in steps if isinstance(what, Made)]
        small = [n for n in new if n not in others and n in last and tensors[n].untyped_storage().nbytes() <= SMALL]
        small = small if len(small) > 1 else []
        kept = {*results, *small}
        pointed = {n for what, *_ in steps if isinstance(what, Launched) for n in what.numbers.values()}
        lines = [f"def play({', '.join(['stream', *[f't{n}' for n in range(given)]])}):"]
        lines += [f"a{n} = t{n}.data_ptr()" for n in range(given)]
        lines += [f"if ({' | '.join(f'a{n}' for n in range(given))}) % {ALIGNMENT}:", "    return None"]
        lines += self._together(small, tensors) if small else []
        for at, (what, read, made) in enumerate(steps):
            if isinstance(what, Made) and (made[0] not in {*last, *results} or made[0] in small):
                continue  # nobody asks for it, or it is made together with others
            lines += [self._line(what, read, made), *[f"a{n} = t{n}.data_ptr()" for n in made if n in pointed]]
            lines += [f"del t{n}" for n in dict.fromkeys(read) if last[n] == at and n >= given and n not in kept]
        lines.append(f"return {_listed('t', results)}")
        self.source = "\n    ".join(lines)
        space: dict[str, Any] = {f"c{i}": c for i, c in enumerate(self.constants)}
        exec(compile(self.source, "<a pass of fxfuse>", "exec"), space)
        self.play: Callable[..., tuple[Tensor, ...] | None] = space["play"]

    def _together(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> list[str]:
        """One tensor for several: small ones cost the host more than memory, and only their addresses are asked for."""
        from .fresh import fresh

        lines, end = [], 0
        for n in numbers:
            lines.append(f"a{n} = base + {end}")
            end += -(-tensors[n].untyped_storage().nbytes() // APART) * APART
        like = tensors[numbers[0]]
        make = fresh((end,), plans.Operand(like.shape, like.stride(), torch.uint8, like.device))
        return [f"shared = {self._named(make)}()", "base = shared.data_ptr()", *lines]

    def _line(self, what: Made | Launched | Called, read: Sequence[int], made: Sequence[int]) -> str:
        if isinstance(what, Launched):
            return self._launch(what)
        if isinstance(what, Made):
            return f"t{made[0]} = {self._named(what.make)}()"
        call = self._named(functools.partial(_call, what, read))
        return f"{_listed('t', made)} = {call}({_listed('t', read)})"

    def _launch(self, launched: Launched) -> str:
        direct, numbers = launched
        args = [repr(a) if type(a) in (int, bool, type(None)) else self._named(a) for a in direct.filled]
        args[direct.STREAM] = "stream"
        for i, place, shift in direct.pointers:
            args[place] = f"a{numbers[i]} + {shift}" if shift else f"a{numbers[i]}"
        for i, place, encode in direct.maps:
            args[place] = f"{self._named(encode)}(a{numbers[i]})"
        return f"{self._named(direct.run)}({', '.join(args)})"

    def _named(self, constant: Any) -> str:
        self.constants.append(constant)
        return f"c{len(self.constants) - 1}"


def _listed(kind: str, numbers: Iterable[int]) -> str:
    return "".join(f"{kind}{n}," for n in numbers)


def _call(called: Called, numbers: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    known = dict(zip(numbers, tensors, strict=True))
    args, options = tree_map_only(Number, lambda number: known[number.of], (called.args, called.options))
    return _tensors(called.operator(*args, **options))


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


# ------------------------------------------------------------------------------------------------ noting


class Recorder(TorchDispatchMode):
    """Notes what a pass does in this thread."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = len(given)
        self.kept = list(given)
        """All tensors of the pass by number; none is freed, so that no other takes the identity of one."""
        self.numbers = {id(t): i for i, t in enumerate(given)}
        self.steps: list[Step] = []
        self.fails = len(self.numbers) < self.given
        """Whether another pass may do something else: one tensor is two arguments, or a step is not known."""

    def __enter__(self) -> Recorder:
        _recording.now = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _recording.now = None
        super().__exit__(*error)

    def made(self, make: Callable[[], Tensor], tensor: Tensor) -> None:
        """A tensor was made."""
        self._note(Made(make), [], [tensor])

    def launched(self, direct: Direct | None, tensors: Sequence[Any]) -> None:
        """A launch of these arguments, which ``direct`` makes again; None where nothing does."""
        given = {i: t for i, t in enumerate(tensors) if isinstance(t, Tensor)}
        if direct is None or not all(id(t) in self.numbers for t in given.values()):
            self.fails = True
        else:
            numbers = {i: self.numbers[id(t)] for i, t in given.items()}
            self._note(Launched(direct, numbers), list(given.values()), [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, read = kwargs or {}, _tensors((args, kwargs))
        result = func(*args, **options)
        known = all(id(t) in self.numbers for t in read) and all(isinstance(t, Tensor) for t in tree_leaves(result))
        if not known or not BY_VALUE.isdisjoint(func.tags):
            self.fails = True
        else:
            number = lambda t: Number(self.numbers[id(t)])  # noqa: E731
            self._note(Called(func, *tree_map_only(Tensor, number, (args, options))), read, _tensors(result))
        return result

    def _note(self, what: Made | Launched | Called, read: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        numbers = list(dict.fromkeys(self.numbers[id(t)] for t in read))
        new = range(len(self.kept), len(self.kept) + len(made))
        self.steps.append(Step(what, numbers, list(new)))
        self.kept += made
        self.numbers |= {id(t): n for n, t in zip(new, made, strict=True)}

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        """Of the pass that returned these; None where it may not be repeated."""
        if self.fails or not all(id(t) in self.numbers for t in results):
            return None
        return Tape(self.steps, self.kept, self.given, [self.numbers[id(t)] for t in results])


class _Recording(threading.local):
    now: Recorder | None = None


_recording = _Recording()


def recorder() -> Recorder | None:
    """What notes the pass that is under way in this thread, if anything does."""
    return _recording.now


# ------------------------------------------------------------------------------------------------ passes


@functools.cache
def _prepared() -> ModuleType:
    """Loads Triton."""
    return importlib.import_module("fxfuse.kernels.prepared")


class _Kept:
    """What is known of the passes with one key."""

    tape: Tape | None = None
    attempts = 0


class _Recent:
    """What has a tape, and whether it is that of other arguments: the host's time of a pass is that of its launches and this."""

    def __init__(self, precision: str, args: Sequence[Any], tensors: Sequence[Tensor], tape: Tape) -> None:
        from ..compat import guards_of

        self.precision, self.count, self.guards, self.play = precision, len(args), guards_of(tensors), tape.play
        self.tensors = _picked([i for i, a in enumerate(args) if type(a) not in PLAIN])
        self.others = _picked([i for i, a in enumerate(args) if type(a) in PLAIN])
        self.described = tuple(a.copy() if isinstance(a, list) else a for a in self.others(args))
        self.device = tensors[0].device.index
        self.several = self.device is not None and torch.accelerator.device_count() > 1

    def __call__(self, precision: str, args: Sequence[Any]) -> tuple[Tensor, ...] | None:
        """What the pass gives; None if another way must be taken."""
        if self.precision != precision or self.count != len(args) or self.others(args) != self.described:
            return None
        tensors = self.tensors(args)
        if not self.guards(*tensors) or (self.several and torch.accelerator.current_device_index() != self.device):
            return None
        return self.play(_prepared().current_stream(self.device), *tensors)


PLAIN = frozenset({type(None), bool, int, float, str, list})
"""Types of an operator's arguments that are no tensors; asking for them takes less time than asking for tensors."""


def _picked(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda args: tuple(args[i] for i in places)


def taped(function: Pass) -> Pass:
    """``function``, a pass, with a tape for each set of metadata of its arguments.

    What it does may depend on shapes, strides, dtypes, the device and arguments that are no tensors, on torch's matmul precision,
    and on nothing else. It runs as it is written where an address is misaligned, for which it may copy a tensor, and where a hook
    wants to see every launch.
    """
    known = plans.bounded(lambda *key: _Kept())
    recent: Callable[[], list[_Recent]] = plans.bounded(lambda: [])

    def noted(precision: str, args: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The long way: by key, or as it is written."""
        plain = [tuple(a) if isinstance(a, list) else a if type(a) in PLAIN else Tensor for a in args]
        kept = known(precision, *plain, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        if kept.tape is not None:
            some = recent()
            some.insert(0, _Recent(precision, args, tensors, kept.tape))
            del some[RECENT:]
            found = kept.tape.play(_prepared().current_stream(tensors[0].device.index), *tensors)
            return function(*args) if found is None else found
        if kept.attempts == ATTEMPTS:
            return function(*args)
        kept.attempts += 1
        with Recorder(tensors) as notes:
            result = function(*args)
        kept.tape = notes.tape(result)
        return result

    @functools.wraps(function)
    def call(*args: Any) -> tuple[Tensor, ...]:
        if _recording.now is not None:
            return function(*args)
        precision, some = torch.get_float32_matmul_precision(), recent()
        if some and not _prepared().hooked():
            for there in some.copy():
                found = there(precision, args)
                if found is not None:
                    return found
        tensors = [a for a in args if type(a) not in PLAIN]
        device = tensors[0].device
        if device.type not in DEVICES or any(t.data_ptr() % ALIGNMENT for t in tensors):
            return function(*args)
        if device.index is not None and torch.accelerator.current_device_index() != device.index:
            with torch.cuda.device(device):
                return call(*args)
        return function(*args) if _prepared().hooked() else noted(precision, args, tensors)

    return call
