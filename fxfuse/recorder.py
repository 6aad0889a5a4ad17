"""A quick tracer for functions of static shapes that change nothing in place but fresh tensors of their own.

It gives what ``make_fx`` over functionalization gives for such a function, in half of the time: where every size is a number
and no memory is shared by what is mutated, there are no symbols to follow and no views to bring up to date. Anything else
raises ``NotPlain``, and is traced in full.
"""

from __future__ import annotations

import contextvars
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from . import compat
from .values import metadata

log = logging.getLogger(__name__)
DEVICES = ("cpu", "cuda")
"""Where it was tested: on a GPU autograd runs the backward in a thread of its own."""
NUMBERS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotPlain(Exception):
    """The function needs the full tracer."""


_recording: contextvars.ContextVar[Recorder | None] = contextvars.ContextVar("fxfuse_recording", default=None)


def trace(
    function: Callable[..., Any], args: Sequence[Any], table: Mapping[Any, Callable[..., Any]], *, forbid_guards: bool
) -> Graph:
    """The functional aten graph of ``function`` on fake ``args``, dead code included; see ``compat.trace``."""
    static = all(isinstance(s, int) for a in args for s in (*a.shape, *a.stride()))
    if static and all(a.device.type in DEVICES for a in args):
        recorder = Recorder(table)
        token = _recording.set(recorder)
        try:
            with compat.tracing(args, forbid_guards=forbid_guards):
                return recorder.record(function, args)
        except Exception as error:  # the full tracer raises it too if it is the function's own
            log.debug("traced in full: %s", error)
        finally:
            _recording.reset(token)
    return compat.trace(function, args, table, forbid_guards=forbid_guards)


def traced_so_far() -> int:
    """How many nodes the trace in progress has."""
    recorder = _recording.get()
    return compat.traced_so_far() if recorder is None else len(recorder.graph.nodes)


class Recorder:
    """Records the operators that a function runs on fake tensors, those of a table by their decompositions."""

    def __init__(self, decompositions: Mapping[Any, Callable[..., Any]]) -> None:
        self.graph = Graph()
        self._decompositions = decompositions
        self._mode = compat.dispatch_mode(self._call)
        self._nodes: dict[int, Node] = {}
        self._sharing: dict[int, list[torch.Tensor]] = {}
        """The tensors of each storage."""
        self._results: list[tuple[Node, Any]] = []  # kept: an id names a tensor as long as the tensor lives
        self._inside = 0

    def record(self, function: Callable[..., Any], args: Sequence[torch.Tensor]) -> Graph:
        """The graph of ``function(*args)``, a tuple of tensors and None.

        Raises:
            NotPlain: it does something that is not recorded.
        """
        for i, tensor in enumerate(args):
            self._remember(tensor, self.graph.create_node("placeholder", f"arg{i}_1"))
        with self._mode:
            results = function(*args)
        self.graph.output([self._argument(r) for r in results])
        for node, result in self._results:
            node.meta["val"] = pytree.tree_map_only(torch.Tensor, compat.without_history, result)
        self._results.clear()
        self._nodes.clear()
        self._sharing.clear()
        return self.graph

    def _call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(op, torch._ops.OpOverload):
            raise NotPlain(str(op))
        if op._schema.is_mutable:
            return self._in_place(op, args, kwargs)
        first, second = (self._decomposed, self._composite) if self._inside else (self._composite, self._decomposed)
        for expand in (first, second):
            result = expand(op, args, kwargs)
            if result is not NotImplemented:
                return result
        node = self.graph.create_node(
            "call_function",
            op,
            tuple(self._argument(a) for a in args),
            {name: self._argument(a) for name, a in kwargs.items()},
            op.overloadpacket.__name__,
        )
        result = op(*args, **kwargs)
        self._remember(result, node)
        return result

    def _in_place(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Give a fresh tensor, and whatever is another name for all of it, another value."""
        name, target = op._schema.name.removeprefix("aten::"), args[0] if args else None
        pure = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), op._overloadname, None)
        unusual = torch.Tag.inplace_view in op.tags or torch.Tag.nondeterministic_seeded in op.tags
        if unusual or not name.endswith("_") or pure is None or not isinstance(target, torch.Tensor):
            raise NotPlain(str(op))
        self._node(target)
        sharing = self._sharing[compat.storage(target)]
        if any(_extent(t) != _extent(target) or self._node(t).op == "placeholder" for t in sharing):
            raise NotPlain(f"{op} of an argument or of part of a tensor")
        result = self._expand(pure, args, kwargs)
        if metadata(result) != metadata(target):
            raise NotPlain(f"{op} gives another type")
        self._nodes |= dict.fromkeys(map(id, sharing), self._node(result))
        return target

    def _decomposed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = self._decompositions.get(op)
        return NotImplemented if how is None else self._expand(how, args, kwargs)

    def _composite(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._expand(op.decompose, args, kwargs) if compat.is_composite(op, args, kwargs) else NotImplemented

    def _expand(self, how: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside += 1
        try:
            with self._mode:
                return how(*args, **kwargs)
        finally:
            self._inside -= 1

    def _remember(self, result: Any, node: Node) -> None:
        self._results.append((node, result))
        if isinstance(result, torch.Tensor):
            self._nodes[id(result)] = node
            self._sharing.setdefault(compat.storage(result), []).append(result)
        elif isinstance(result, (list, tuple)) and all(r is None or isinstance(r, torch.Tensor) for r in result):
            for i, r in enumerate(result):
                if r is not None:
                    self._remember(r, self.graph.create_node("call_function", operator.getitem, (node, i), name="getitem"))
        else:
            raise NotPlain(f"a result of {type(result).__name__}")

    def _node(self, tensor: torch.Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is None:
            raise NotPlain("a tensor from elsewhere")
        return node

    def _argument(self, a: Any) -> Any:
        """An argument of a call as the argument of a node."""
        if isinstance(a, torch.Tensor):
            return self._node(a)
        if isinstance(a, (list, tuple)):
            return [self._argument(x) for x in a]
        if not isinstance(a, NUMBERS):
            raise NotPlain(f"an argument of {type(a).__name__}")
        return a


def _extent(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype
