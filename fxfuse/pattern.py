"""Trace a Python function with given metadata, forward or joint, through the same pipeline as a model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from . import compat
from .recorder import trace, traced_so_far
from .values import is_tensor, metadata, value

Decompositions = Mapping[Any, Callable[..., Any]]
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function.

    ``inputs`` has one placeholder per tensor argument (None where the argument was None), ``tangent`` is the placeholder
    of the cotangent of output 0 in a joint trace, ``grads`` has one gradient (or None) per argument.
    """

    graph: Graph
    inputs: tuple[Node | None, ...]
    outputs: tuple[Any, ...]
    tangent: Node | None = None
    grads: tuple[Node | None, ...] = ()
    forward: frozenset[Node] = frozenset()
    """In a joint trace: the nodes that ran before the gradient was asked for."""
    depends: frozenset[Node] = frozenset()
    """In a joint trace: the nodes that depend on the tangent."""


def as_tuple(x: Any) -> tuple[Any, ...]:
    """The outputs of a function as a tuple."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def with_operands(function: Function, flat: Sequence[Any], spec: Any, places: Sequence[int]) -> Function:
    """``function`` of the values at ``places`` of its flattened arguments; the other arguments stay as they are."""

    def call(*values: Any) -> Any:
        filled = list(flat)
        for place, v in zip(places, values, strict=True):
            filled[place] = v
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    return call


def fresh(meta: Any, requires_grad: bool = False) -> Any:
    """A new fake tensor with the metadata of another one."""
    with meta.fake_mode:
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=meta.device, requires_grad=requires_grad)


def refake(v: Any, mode: Any) -> Any:
    """A cached trace carries the fake tensors of another compile: make them this one's."""
    if isinstance(v, (tuple, list)):
        return type(v)(refake(x, mode) for x in v)
    if not isinstance(v, torch.Tensor) or mode is None or compat.fake_mode_of([v]) is mode:
        return v
    with mode:
        return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)


def trace_forward(
    function: Function,
    metas: Sequence[Any],
    table: Decompositions,
    *,
    requires_grad: Sequence[bool] = (),
    forbid_guards: bool = False,
) -> Traced:
    """``function(*metas)``; inputs that require a gradient can change which aten form eager code takes."""
    wanted = requires_grad or [False] * len(metas)
    given = [i for i, m in enumerate(metas) if m is not None]

    def run(*tensors: Any) -> tuple[Any, ...]:
        return as_tuple(function(*_spread(tensors, given, len(metas))))

    graph = trace(run, [fresh(metas[i], wanted[i]) for i in given], table, forbid_guards=forbid_guards)
    graph.eliminate_dead_code()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Traced(graph, tuple(_spread(placeholders, given, len(metas))), tuple(_results(graph)))


def trace_joint(
    function: Function,
    metas: Sequence[Any],
    mask: Sequence[bool],
    tangent: Any,
    table: Decompositions,
    *,
    forbid_guards: bool = False,
) -> Traced:
    """``function`` and the gradients of its first output with respect to the inputs in ``mask``."""
    given = [i for i, m in enumerate(metas) if m is not None]
    forward_length = 0

    def run(*tensors: Any) -> tuple[Any, ...]:
        nonlocal forward_length
        *inputs, cotangent = tensors
        outputs = as_tuple(function(*_spread(inputs, given, len(metas))))
        forward_length = traced_so_far()
        wanted = [t for t, i in zip(inputs, given, strict=True) if mask[i]]
        if not outputs[0].requires_grad:
            return (*[None] * len(wanted), *outputs)
        return (*torch.autograd.grad(outputs[0], wanted, cotangent, allow_unused=True), *outputs)

    inputs = [fresh(metas[i], mask[i]) for i in given]
    graph = trace(run, [*inputs, fresh(tangent)], table, forbid_guards=forbid_guards)
    first = set(itertools.islice(graph.nodes, forward_length))
    graph.eliminate_dead_code()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    results = _results(graph)
    wanted = iter(results)
    grads = tuple(next(wanted) if m else None for m in mask)
    depends = _dependants(graph, placeholders[-1])
    return Traced(
        graph,
        tuple(_spread(placeholders[:-1], given, len(metas))),
        tuple(wanted),
        placeholders[-1],
        grads,
        frozenset(n for n in graph.nodes if n in first and n not in depends),
        depends,
    )


def _results(graph: Graph) -> Sequence[Any]:
    return next(n for n in reversed(graph.nodes) if n.op == "output").args[0]


def _spread(values: Sequence[Any], places: Sequence[int], length: int) -> list[Any]:
    spread: list[Any] = [None] * length
    for place, v in zip(places, values, strict=True):
        spread[place] = v
    return spread


def _dependants(graph: Graph, source: Node) -> frozenset[Node]:
    found = {source}
    for node in graph.nodes:
        if any(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def contributions(gradient: Node | None, depends: frozenset[Node]) -> list[Node]:
    """The terms of a gradient that is a sum over several uses of one input."""
    if gradient is None:
        return []
    summands = [a for a in gradient.args if is_tensor(a)]
    if _is_plain_sum(gradient) and all(a in depends for a in summands):
        return [term for a in summands for term in contributions(a, depends)]
    return [gradient]


def _is_plain_sum(node: Node) -> bool:
    if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    return all(is_tensor(a) and same_shape_and_dtype(value(a), value(node)) for a in node.args)


def same_shape_and_dtype(a: Any, b: Any) -> bool:
    """Whether two fake tensors agree but for strides and device."""
    x, y = metadata(a), metadata(b)
    return x is not None and y is not None and (x[0], x[2]) == (y[0], y[2])


class TraceCache:
    """Traces by function and metadata.

    Traces with static shapes are kept for the process; symbolic ones hold another compile's symbols and are kept only as
    long as this cache.
    """

    LIMIT: ClassVar[int] = 4096
    _static: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        self._symbolic: dict[Any, Any] = {}

    def get(self, key: Any, metas: Sequence[Any], build: Callable[[], Any]) -> Any:
        """The cached result of ``build`` for ``key`` and the metadata of ``metas``."""
        symbolic = any(isinstance(s, torch.SymInt) for m in metas if m is not None for s in (*m.shape, *m.stride()))
        cache = self._symbolic if symbolic else self._static
        full = (key, tuple(metadata(m) for m in metas))
        if full not in cache:
            if len(cache) >= self.LIMIT:
                cache.clear()
            cache[full] = build()
        return cache[full]

    @classmethod
    def clear(cls) -> None:
        """Forget every static trace."""
        cls._static.clear()
