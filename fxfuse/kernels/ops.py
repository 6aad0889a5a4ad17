"""The kernels as operators: ``fxfuse::moe_<function>``, each with the path that it takes as its last argument.

On a CUDA device a kernel of that path is launched, elsewhere the twin runs, so that a graph with these operators can be run on a
CPU. Outputs are contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.define import TAGS, launch, library
from . import path


def _define(schema: str, name: str, **keywords: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of a fake: define ``fxfuse::moe_<name>``. The arguments in ``keywords`` go by keyword."""
    operator, named, last = f"moe_{name}", tuple(keywords), -1 - len(keywords)

    def call(module: Any, args: tuple[Any, ...]) -> Any:
        function = getattr(module, name)
        return function(*args[:last], **dict(zip(named, args[last:-1], strict=True))) if named else function(*args[:-1])

    def twin(*args: Any) -> Any:
        from . import reference

        return call(reference, args)

    def kernel(*args: Any) -> Any:
        return call(path(args[-1]), args)

    def make(fake: Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(torch.ops.fxfuse, operator):  # a reloaded module finds its operator defined
            options = "".join(f", {kind} {keyword}" for keyword, kind in keywords.items())
            arguments, results = schema.split(" -> ")
            library.define(f"{operator}({arguments}{options}, str path) -> {results}", tags=TAGS)
            library.impl(operator, twin, "CompositeExplicitAutograd")
            library.impl(operator, launch(operator, kernel, twin), "CUDA")
            library.impl(operator, fake, "Meta")
        return getattr(torch.ops.fxfuse, operator).default

    return make


KIND = "str act, str layout, float? limit, float? alpha"


@_define(
    f"Tensor x, Tensor? gather, Tensor w_gate, Tensor? w_up, Tensor? b_gate, Tensor ends, {KIND}, bool save"
    " -> (Tensor, Tensor, Tensor)",
    "up",
)
def up(
    x: Tensor, gather: Tensor | None, w_gate: Tensor, w_up: Any, b_gate: Any, ends: Tensor, act: str, layout: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.up``."""
    save, rows, width = rest[2], x.shape[0] if gather is None else gather.shape[0], w_gate.shape[1]
    inner = width // 2 if layout in ("concat", "interleaved") else width
    a = x.new_empty(rows, inner)
    if not save:
        return a, x.new_empty(0), x.new_empty(0)
    return a, x.new_empty(rows, width), x.new_empty(0) if w_up is None else x.new_empty(rows, inner)


@_define("Tensor a, Tensor w, Tensor ends -> Tensor", "matmul", transposed="bool", bias="Tensor?", zero_tail="bool")
def matmul(a: Tensor, w: Tensor, ends: Tensor, transposed: bool, bias: Any, zero_tail: bool, path: str) -> Tensor:
    """As ``reference.matmul``."""
    return a.new_empty(a.shape[0], w.shape[1] if transposed else w.shape[2])


@_define(
    f"Tensor grad, Tensor? gather, Tensor w_down, Tensor? p, Tensor h, Tensor? u, Tensor ends, {KIND}"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "dh",
)
def dh(grad: Tensor, gather: Any, w_down: Tensor, p: Any, h: Tensor, u: Any, *rest: Any) -> tuple[Tensor, ...]:
    """As ``reference.dh``."""
    sums = torch.float64 if h.dtype is torch.float64 else torch.float32
    du = grad.new_empty(0) if u is None else u.new_empty(u.shape)
    return h.new_empty(h.shape), du, h.new_empty(h.shape[0], dtype=sums), grad.new_empty(h.shape[0], w_down.shape[2])


@_define("Tensor d, Tensor x, Tensor? gather_d, Tensor? gather_x, Tensor ends -> Tensor", "wgrad")
def wgrad(d: Tensor, x: Tensor, gather_d: Any, gather_x: Any, ends: Tensor, path: str) -> Tensor:
    """As ``reference.wgrad``."""
    return d.new_empty(ends.shape[0], d.shape[1], x.shape[1])


@_define("Tensor d, Tensor ends, Tensor? weights, Tensor? gather -> Tensor", "bias_gradient")
def bias_gradient(d: Tensor, ends: Tensor, weights: Any, gather: Any, path: str) -> Tensor:
    """As ``reference.bias_gradient``."""
    return d.new_empty(ends.shape[0], d.shape[1])


@_define("Tensor ids, SymInt experts -> (Tensor, Tensor, Tensor)", "route")
def route(ids: Tensor, experts: int, path: str) -> tuple[Tensor, Tensor, Tensor]:
    """As ``reference.route``."""
    order, inverse = (ids.new_empty(ids.numel(), dtype=torch.int64) for _ in range(2))
    return order, inverse, ids.new_empty(experts, dtype=torch.int32)


@_define(
    "Tensor y, Tensor? p, Tensor? b_down, Tensor ids, Tensor inverse, Tensor ends, Tensor like -> Tensor",
    "combine",
)
def combine(y: Tensor, p: Any, b_down: Any, ids: Tensor, inverse: Tensor, ends: Tensor, like: Tensor, path: str) -> Tensor:
    """As ``reference.combine``."""
    return like.new_empty(ids.shape[0], y.shape[1])
