"""Functional aten graphs written node by node: from a function, or by a writer that runs each operator as it adds it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default)
LARGEST = 1e4
"""Larger values are not kept: float32 and float64 hold integers of this size, and products of two, exactly."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph and inputs that it runs on."""

    graph: Graph
    inputs: tuple[Any, ...]

    def run(self, inputs: Sequence[Any] | None = None) -> dict[Node, Any]:
        """What every node gave when it ran; copies, so that later writes to its memory do not show."""
        given = iter(self.inputs if inputs is None else inputs)
        live: dict[Node, Any] = {}
        seen: dict[Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                v = next(given)
                live[node] = v.clone() if isinstance(v, Tensor) else v
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, dict(node.kwargs)), live.__getitem__)
                live[node] = node.target(*args, **kwargs)
            else:
                continue
            seen[node] = _copied(live[node])
        return seen


def _copied(v: Any) -> Any:
    if isinstance(v, (tuple, list)):
        return [_copied(x) for x in v]
    return v.detach().clone() if isinstance(v, Tensor) else v


_tracers: list[GraphAppendingTracer] = []


def call(target: Any, *args: Any, **kwargs: Any) -> Proxy:
    """A call in the function being traced, for operators that take no tensor."""
    return _tracers[-1].create_proxy("call_function", target, args, kwargs)


def traced(function: Callable[..., Any], *inputs: Tensor) -> tuple[Program, tuple[Any, ...]]:
    """A function of aten operators as a program, node for node as it is written, and its results."""
    graph = Graph()
    _tracers.append(GraphAppendingTracer(graph))
    results = function(*[Proxy(graph.placeholder(f"input_{i}"), _tracers[-1]) for i in range(len(inputs))])
    _tracers.pop()
    nodes = tuple(r.node for r in (results if isinstance(results, tuple) else (results,)))
    program = Program(graph, inputs)
    for node, v in program.run().items():
        node.meta["val"] = v
    return program, nodes


class Refused(Exception):
    """Eager does not take these operands, or the result is too large."""


Members = list[Callable[[], Node]]
Family = Callable[["Writer"], Members]
UNFIT = (Refused, IndexError, ValueError, ZeroDivisionError)
"""What a family raises over operands that are not for it."""


class Writer:
    """A graph in the making, whose nodes run as they are added."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        self.rng, self.dtype = rng, dtype
        self.graph = Graph()
        self.live: dict[Node, Any] = {}
        self.pool: list[Node] = []
        self.masks: list[Node] = []

    def input(self, v: Tensor) -> Node:
        """A placeholder."""
        node = self.graph.placeholder(f"input_{len(self.live)}")
        return self._keep(node, v)

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call."""
        real_args, real_kwargs = map_arg((args, kwargs), self.live.__getitem__)
        if target in PRODUCTS and len({a.dtype for a in real_args}) > 1:
            raise Refused  # eager takes two dtypes when the result is empty
        try:
            v = target(*real_args, **real_kwargs)
        except Exception as error:
            raise Refused from error
        if isinstance(v, Tensor) and (v.numel() > 256 or v.dim() > 4 or _too_large(v)):
            raise Refused
        return self._keep(self.graph.call_function(target, args, kwargs), v)

    def _keep(self, node: Node, v: Any) -> Node:
        self.live[node] = v
        node.meta["val"] = _copied(v)
        if isinstance(v, Tensor):
            (self.masks if v.dtype is torch.bool else self.pool).append(node)
        return node

    def pick(self, *, rank: int | None = None, like: Node | None = None, rows: int | None = None) -> Node:
        """An operand: of a rank, of the shape of another one, with a last dimension of ``rows``; recent ones rather."""
        fits = [
            n
            for n in self.pool
            if (rank is None or self.live[n].dim() == rank)
            and (like is None or self.live[n].shape == self.live[like].shape)
            and (rows is None or self.live[n].shape[-1:] == (rows,))
        ]
        if not fits:
            raise Refused
        return self.rng.choice(fits[-12:] if self.rng.random() < 0.5 else fits)

    def shape(self, node: Node) -> list[int]:
        """The shape of a node."""
        return list(self.live[node].shape)

    def dim(self, node: Node) -> int:
        """Some dimension of a node."""
        if self.live[node].dim() == 0:
            raise Refused
        return self.rng.randrange(self.live[node].dim())


def _too_large(v: Tensor) -> bool:
    return v.numel() > 0 and v.dtype is not torch.bool and not v.abs().max().item() <= LARGEST
