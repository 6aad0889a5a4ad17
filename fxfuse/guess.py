"""A guess of where a pattern is, before it is proved or refuted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from .fusion import Fusion
from .pattern import Traced
from .region import Dims, seen_values
from .spellings import evaluate
from .values import Table

Classes = list["int | None"]


@dataclasses.dataclass
class Guess:
    """A root and what may fill the holes there."""

    fusion: Fusion
    root: Node
    classes: Classes
    scalars: tuple[float, ...]
    inputs: list[Node | None] = dataclasses.field(default_factory=list)
    layouts: list[Dims | None] = dataclasses.field(default_factory=list)
    through_bases: bool = False
    """Bind a permuted input through what it is a permute of, even if it has a node of its own."""
    given: set[int] = dataclasses.field(default_factory=set)
    """The input classes, and those of the nodes that hold them in another layout."""

    @property
    def metas(self) -> list[Any]:
        """The fake values of the inputs, as the pattern sees them."""
        return seen_values(self.inputs, self.layouts)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Which inputs may have a gradient."""
        return tuple(m is not None and m.dtype.is_floating_point for m in self.metas)


def evaluate_traced(traced: Traced, table: Table, classes: Sequence[int | None], tangent: int | None = None) -> dict[Node, int]:
    """The class of every node of a traced pattern in the model's table."""
    env: dict[Node, int] = {p: c for p, c in zip(traced.inputs, classes, strict=True) if p is not None and c is not None}
    if traced.tangent is not None and tangent is not None:
        env[traced.tangent] = tangent
    for node in traced.graph.nodes:
        if node.op == "call_function":
            env[node] = evaluate(table, node, env.__getitem__)
    return env
