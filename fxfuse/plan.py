"""Plans and what identifies one: a plan is used only where every part of its key is the same."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from .capture import Traits
from .recipe import Recipe, region_of
from .report import Report

# ------------------------------------------------------------------------------------------------ the structural hash


class _Canonical:
    """A graph as plain data that is the same in every process: nodes by number, symbols by first use, floats in hex."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.symbols: dict[Any, str] = {}
        self.numbers: dict[Any, int] = {}

    def graph(self, gm: GraphModule) -> list[Any]:
        rows = []
        for i, node in enumerate(gm.graph.nodes):
            self.numbers[node] = i
            row = [
                node.op,
                self.target(gm, node),
                self.argument(node.args),
                self.argument(node.kwargs),
                self.value(_value_of(node)),
            ]
            region = region_of(node)
            rows.append(row if region is None else [*row, region])
        return rows

    def target(self, gm: GraphModule, node: Any) -> Any:
        if node.op == "get_attr":
            held = functools.reduce(getattr, str(node.target).split("."), gm)
            return _Canonical(self.gradients).graph(held) if isinstance(held, GraphModule) else self.value(held)
        return _name(node.target) if node.op.startswith("call") else ""

    def argument(self, a: Any) -> Any:
        if isinstance(a, torch.fx.Node):
            return ["n", self.numbers[a]]
        if isinstance(a, (tuple, list)):
            return ["l", *[self.argument(x) for x in a]]
        if isinstance(a, Mapping):
            return ["d", *[[str(k), self.argument(v)] for k, v in sorted(a.items(), key=lambda kv: str(kv[0]))]]
        if isinstance(a, slice):
            return ["s", self.argument(a.start), self.argument(a.stop), self.argument(a.step)]
        if isinstance(a, float):
            return ["f", a.hex()]
        if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ["y", self.size(a)]
        if isinstance(a, (int, str, bool, type(None), complex, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return [type(a).__name__, str(a)]
        return ["?", _name(a)]

    def value(self, v: Any) -> Any:
        if isinstance(v, torch.Tensor):
            shape, stride = [self.size(s) for s in v.shape], [self.size(s) for s in v.stride()]
            return ["T", str(v.dtype), str(v.device), shape, stride, v.requires_grad and self.gradients]
        if isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return ["S", self.size(v)]
        if isinstance(v, (tuple, list)):
            return [self.value(x) for x in v]
        return ["P", type(v).__name__]

    def size(self, s: Any) -> Any:
        if not isinstance(s, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return s
        expression: Any = s.node.expr
        for symbol in sorted(expression.free_symbols, key=lambda q: q.name):
            self.symbols.setdefault(symbol, f"S{len(self.symbols)}")
        return str(expression.xreplace({q: sympy.Symbol(self.symbols[q]) for q in expression.free_symbols}))


def _value_of(node: Any) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _name(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return f"op:{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"hop:{target.name()}"
    if getattr(operator, getattr(target, "__name__", ""), None) is target:
        return f"operator:{target.__name__}"
    qualified = getattr(target, "__qualname__", getattr(target, "__name__", type(target).__qualname__))
    return f"{getattr(target, '__module__', '')}.{qualified}"


def structural_hash(gm: GraphModule, gradients: bool = True) -> str:
    """A hash of a Dynamo graph with all its constants and input metadata: the same in every process and for every size symbol.

    Without ``gradients`` it is also the same whether gradients are enabled or not.
    """
    text = json.dumps(_Canonical(gradients).graph(gm), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------ the key


@dataclasses.dataclass(frozen=True)
class PlanKey:
    """Everything that a plan depends on."""

    graph: str
    """Structural hash: operators, constants, input metadata, requires_grad mask."""
    grad_mode: bool
    autocast: tuple[Any, ...]
    recipe: Recipe
    fusions: tuple[str, ...]
    """Identities (source hashes) of the active fusions, in order."""
    options: tuple[Any, ...]
    numerics: tuple[Any, ...]
    versions: tuple[str, ...]


def ambient() -> tuple[bool, tuple[Any, ...]]:
    """Grad mode and autocast, as the compile in progress sees them (Dynamo leaves inference mode, and guards on it)."""
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))) for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), autocast


@dataclasses.dataclass
class Plan:
    """One compiled form of one graph."""

    key: PlanKey
    run: Callable[..., Any]
    seconds: float
    report: Report
    guard: Callable[[Sequence[Any]], bool] | None = None
    """Of a plan built after Dynamo froze its guards: whether it may run on these arguments."""
    unverified: bool = False
    """Whether its next call is to be compared with its unfused form."""
    traits: Traits = dataclasses.field(default_factory=Traits)
    mask: tuple[bool, ...] = ()
    """Which inputs require a gradient."""
    broken: bool = False
    """It failed as it ran, or differed from its unfused form: the unfused plan runs in its place."""
    calls: int = 0

    @property
    def hits(self) -> int:
        """Calls that found it built."""
        return max(self.calls - 1, 0)

    @property
    def fused(self) -> int:
        """How many regions were fused."""
        return len(self.report.fused)

    @property
    def saved_bytes(self) -> int | None:
        """Memory that its forward keeps for the backward, inputs and parameters left out; None in inference.

        Dynamic sizes are taken as they were when it was captured.
        """
        return self.traits.saved

    @property
    def graph(self) -> str:
        """The structural hash of its graph."""
        return self.key.graph

    @property
    def recipe(self) -> Recipe:
        """The recipe it was built for."""
        return self.key.recipe

    @property
    def grad_mode(self) -> bool:
        """Whether it was built with gradients enabled."""
        return self.key.grad_mode


@dataclasses.dataclass(frozen=True)
class PlanInfo:
    """Counters and the live plans."""

    builds: int
    hits: int
    plans: list[Plan]


class Counters:
    """How many plans this process has built."""

    def __init__(self) -> None:
        self.builds = 0
        self.lock = threading.RLock()

    def built(self) -> None:
        """Count a plan."""
        with self.lock:
            self.builds += 1


counters = Counters()
