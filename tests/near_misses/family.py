"""Programs that a built-in fusion must not take: each breaks one condition of it and keeps all others.

A family is a set of fusions that differ in their activation. It has one whole form, which does fuse, and many broken ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import cases
import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
Program = Callable[..., Any]
Shapes = Callable[["Sizes"], Sequence[tuple[int, ...]]]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu2": lambda t: F.relu(t).square(),
    "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
}
NEIGHBOURS: dict[str, Activation] = {
    "gelu": lambda t: F.gelu(t, approximate="tanh"),
    "gelu_tanh": F.gelu,
    "relu": lambda t: F.leaky_relu(t, 0.01),
    "silu": F.hardswish,
    "sigmoid": F.hardsigmoid,
    "tanh": F.softsign,
    "relu2": lambda t: F.relu(t) ** 3,
    "quick_gelu": lambda t: t * torch.sigmoid(1.7 * t),
}
"""What each activation is easily taken for."""

GATES = ("silu", "gelu", "gelu_tanh", "relu")
"""The activations of gated products."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one program: x is (*batch, k), weights are (n, k)."""

    batch: tuple[int, ...]
    k: int
    n: int

    @property
    def rows(self) -> int:
        return int(torch.Size(self.batch).numel())


def linear_shapes(s: Sizes) -> list[tuple[int, ...]]:
    """Of x, w and b."""
    return [(*s.batch, s.k), (s.n, s.k), (s.n,)]


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A program in which ``fusion`` must not fire."""

    fusion: str
    broken: str
    fn: Program
    inputs: cases.Inputs
    training_only: bool = False
    """Without gradients the condition is not broken."""

    @property
    def name(self) -> str:
        return f"{self.fusion}-{self.broken}"


@dataclasses.dataclass(frozen=True)
class Broken:
    """One broken form; ``dtypes`` and ``shapes`` are those of its inputs where they are not the family's own."""

    fn: Program
    shapes: Shapes
    dtypes: tuple[torch.dtype, ...]
    frozen: tuple[int, ...]
    spared: tuple[str, ...] = ()
    """Activations for which the form breaks nothing."""
    training_only: bool = False


class Family:
    """Fusions ``prefix + activation``; ``activations`` is ("",) where the pattern has none."""

    def __init__(
        self, name: str, activations: Sequence[str], shapes: Shapes, frozen: tuple[int, ...] = (), training_only: bool = False
    ) -> None:
        self.name, self.activations, self.shapes, self.frozen = name, tuple(activations), shapes, frozen
        self.training_only = training_only
        self.broken_forms: dict[str, Broken] = {}
        self.whole_form: Program | None = None

    def whole(self, fn: Program) -> Program:
        """The form that fuses: ``fn(act, *inputs)``."""
        self.whole_form = fn
        return fn

    def broken(
        self,
        fn: Program | None = None,
        *,
        shapes: Shapes | None = None,
        dtypes: tuple[torch.dtype, ...] = (),
        spared: tuple[str, ...] = (),
        training_only: bool = False,
    ) -> Any:
        """Collect a form with one condition broken: ``fn(act, *inputs)``, named after the condition."""

        def add(fn: Program) -> Program:
            training = training_only or self.training_only
            self.broken_forms[fn.__name__] = Broken(fn, shapes or self.shapes, dtypes, self.frozen, spared, training)
            return fn

        return add(fn) if fn is not None else add

    def fusion(self, activation: str) -> str:
        return self.name.format(act=activation)

    def miss(self, activation: str, condition: str, sizes: Sizes) -> NearMiss:
        form = self.broken_forms[condition]
        act = NEIGHBOURS.get(activation) if condition == "another_activation" else ACTIVATIONS.get(activation)
        return NearMiss(self.fusion(activation), condition, _bound(form.fn, act), _inputs(form, sizes), form.training_only)

    def unbroken(self, activation: str, sizes: Sizes) -> NearMiss:
        """The whole form, to show that the others are near."""
        assert self.whole_form is not None
        form = Broken(self.whole_form, self.shapes, (), self.frozen)
        return NearMiss(self.fusion(activation), "nothing", _bound(form.fn, ACTIVATIONS.get(activation)), _inputs(form, sizes))


def _bound(fn: Program, act: Activation | None) -> Program:
    return lambda *args: fn(act, *args)


def _inputs(form: Broken, sizes: Sizes) -> cases.Inputs:
    def make() -> list[Tensor]:
        pairs = itertools.zip_longest(form.shapes(sizes), form.dtypes, fillvalue=torch.float32)
        drawn = [(torch.randn(shape) * 0.5).to(dtype) for shape, dtype in pairs]
        return [t.requires_grad_(i not in form.frozen) for i, t in enumerate(drawn)]

    return make


def generate(families: Sequence[Family], count: int, seed: int) -> list[NearMiss]:
    """``count`` near misses of sizes drawn at random: each condition once, then at random among all activations."""
    rng = random.Random(seed)
    every = [(f, c, a) for f in families for c, form in f.broken_forms.items() for a in f.activations if a not in form.spared]
    rng.shuffle(every)
    every.sort(key=_already_seen(set()))
    made = [family.miss(activation, condition, _sizes(rng)) for family, condition, activation in every[:count]]
    return sorted(made, key=lambda miss: miss.name)


def _already_seen(seen: set[tuple[str, str]]) -> Callable[[tuple[Family, str, str]], bool]:
    """False for the first of each (family, condition): a stable sort by it brings those to the front."""

    def again(item: tuple[Family, str, str]) -> bool:
        key = item[0].name, item[1]
        known = key in seen
        seen.add(key)
        return known

    return again


def _sizes(rng: random.Random) -> Sizes:
    return Sizes(batch=rng.choice([(8,), (2, 4), (3, 5), (2, 3, 2)]), k=rng.choice([8, 12, 16]), n=rng.choice([8, 16, 24]))
