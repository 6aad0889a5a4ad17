"""Cases of value numbering: two values that are one class, or that look alike and are not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from program_writer import Program, traced
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from value_meaning import Run, misread, unequal

aten = torch.ops.aten
FP32, FP64, INF = torch.float32, torch.float64, float("inf")
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Two values computed from the same inputs."""

    rule: str
    name: str
    both: Function
    """The two values."""
    inputs: tuple[Tensor, ...]
    same: bool
    strict: bool
    """Whether they are one class in a strict table."""
    alike: bool = False
    """The numbers agree on these inputs, but not in general or not in every bit."""
    traced_with: tuple[Tensor, ...] | None = None
    """Inputs of the trace, if every size of it shall be a symbol."""

    @functools.cached_property
    def traced(self) -> tuple[Program, tuple[Node, Node]]:
        """The program of both values, and their nodes."""
        if self.traced_with is None:
            return traced(self.both, *self.inputs)  # type: ignore[return-value]
        graph = make_fx(self.both, tracing_mode="symbolic")(*self.traced_with).graph
        return Program(graph, self.inputs), next(n for n in reversed(graph.nodes) if n.op == "output").args[0]  # type: ignore[return-value]

    @functools.cached_property
    def run(self) -> Run:
        """What the program gives on the inputs."""
        return Run(self.traced[0].run())

    @property
    def equal(self) -> bool:
        """Whether the two values are the same numbers."""
        first, second = self.traced[1]
        return self.run.number[first] == self.run.number[second]

    def failures(self, number_graph: Function, strict: bool) -> Iterator[str]:
        """What is wrong with the numbering of the program."""
        graph, nodes = self.traced[0].graph, self.traced[1]
        guards = _shape_guards(graph)
        table = number_graph(graph, strict)
        first, second = (table.class_of[n] for n in nodes)
        if (first == second) is not (self.strict if strict else self.same):
            yield f"{self}: {table.keys[first]} and {table.keys[second]}"
        yield from unequal(table, self.run)
        if self.traced_with is None and not table.mutated:
            yield from misread(table, self.run)
        if _shape_guards(graph) != guards:
            del self.__dict__["traced"], self.__dict__["run"]  # its sizes are symbols no longer
            yield f"{self}: numbering has specialised a size"

    def __str__(self) -> str:
        return f"{self.rule}: {self.name}"


def _shape_guards(graph: Graph) -> int:
    """How many guards the sizes of a symbolic trace have."""
    modes = (getattr(n.meta.get("val"), "fake_mode", None) for n in graph.nodes)
    return next((len(mode.shape_env.guards) for mode in modes if mode is not None), 0)


CASES: list[Case] = []
_rule = ""
_generator = torch.Generator().manual_seed(7)


def rule(name: str) -> None:
    """The rule that the next cases are about."""
    global _rule
    _rule = name


def _input(shape: Any) -> Tensor:
    return shape if isinstance(shape, Tensor) else torch.randint(-40, 41, shape, generator=_generator).double()


def ints(*shape: int) -> Tensor:
    """Integers."""
    return torch.randint(-40, 41, shape, generator=_generator)


def floats(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Whole numbers in another floating dtype than float64."""
    return ints(*shape).to(dtype)


def mask(*shape: int) -> Tensor:
    """Booleans."""
    return torch.rand(shape, generator=_generator) > 0.5


def in_order(name: str, both: Function, *shapes: Any, same: bool, strict: bool = True, alike: bool = False) -> None:
    """Two values of one function."""
    CASES.append(Case(_rule, name, both, tuple(_input(s) for s in shapes), same, same and strict, alike))


def same(name: str, left: Function, right: Function, *shapes: Any, strict: bool = True) -> None:
    """Two spellings of one value; ``strict=False``: they round differently, so strict numbering keeps them apart."""
    in_order(name, lambda *inputs: (left(*inputs), right(*inputs)), *shapes, same=True, strict=strict)


def apart(name: str, left: Function, right: Function, *shapes: Any, alike: bool = False) -> None:
    """Two values that are not one."""
    in_order(name, lambda *inputs: (left(*inputs), right(*inputs)), *shapes, same=False, alike=alike)


def symbolic(name: str, both: Function, *shapes: Any, same: bool, strict: bool = True, alike: bool = False) -> None:
    """Two values of one function: shapes to trace it with, then shapes to run it with."""
    half = len(shapes) // 2
    with_, inputs = (tuple(_input(s) for s in part) for part in (shapes[:half], shapes[half:]))
    CASES.append(Case(_rule, name, both, inputs, same, same and strict, alike, with_))


def itself(x: Any, *_: Any) -> Any:
    """The first input."""
    return x
