"""Functions that are almost a fusion's pattern: its traced graph with one condition broken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .deferred import capture_table
from .fusion import Fusion
from .pattern import trace_forward
from .samples import SENTINELS
from .verification import sample

aten = torch.ops.aten
NearMiss = tuple[str, Callable[..., Any], list[Any]]


def generate(fusion: Fusion) -> list[NearMiss]:
    """``(what was broken, function, arguments)`` for every condition that can be broken by itself."""
    arguments = sample(fusion)
    tensors = [a for a, h in zip(arguments, fusion.holes, strict=True) if not h.scalar]
    module = _traced(fusion, tensors)
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors if t is not None]
    misses: list[NearMiss] = []
    for index, node in enumerate(n for n in module.graph.nodes if n.op == "call_function"):
        for what, broken in _broken(module, index, node):
            misses.append((f"{what} at {node.name}", broken.forward, list(given)))
    misses += _swapped(module, given)
    return [_in_backward(miss) for miss in misses] if fusion.side == "backward" else misses


class _RunsInBackward(torch.autograd.Function):
    """Its backward computes ``function(grad, *tensors)``; the results are the gradients of ``sinks``."""

    @staticmethod
    def forward(ctx: Any, function: Any, count: int, anchor: Any, *rest: Any) -> Any:
        ctx.function, ctx.count = function, count
        ctx.save_for_backward(*rest[count:])
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        results = ctx.function(grad, *ctx.saved_tensors)
        return (None, None, grad, *results, *[None] * len(ctx.saved_tensors))


def _in_backward(miss: NearMiss) -> NearMiss:
    what, function, (anchor, *tensors) = miss
    shapes = [r.detach() for r in function(anchor.detach(), *[t.detach() for t in tensors])]
    sinks = [torch.zeros_like(r, requires_grad=True) for r in shapes]

    def forward(anchor: Any, *rest: Any) -> Any:
        return _RunsInBackward.apply(function, len(sinks), anchor, *rest)

    return what, forward, [anchor, *sinks, *[t.detach() for t in tensors]]


def _traced(fusion: Fusion, tensors: list[Any]) -> GraphModule:
    from .compat import new_fake_mode

    scalars = SENTINELS[: sum(h.scalar for h in fusion.holes)]
    mode = new_fake_mode()
    metas = [None if t is None else mode.from_tensor(t) for t in tensors]
    traced = trace_forward(lambda *t: fusion.call_pattern(t, scalars), metas, capture_table({}))
    return GraphModule(torch.nn.Module(), traced.graph)


def _broken(module: GraphModule, index: int, node: Node) -> Iterator[tuple[str, GraphModule]]:
    v = node.meta.get("val")
    if not isinstance(v, torch.Tensor) or not v.is_floating_point():
        return
    yield "the value is used outside too", _edit(module, index, _expose)
    yield "a scale lies in between", _edit(module, index, lambda g, n: _insert(g, n, aten.mul.Tensor, 1.5))
    yield "an offset lies in between", _edit(module, index, lambda g, n: _insert(g, n, aten.add.Tensor, 0.25))
    yield "a cast lies in between", _edit(module, index, _round_trip)
    if v.dim() >= 2:
        yield "rows are reversed", _edit(module, index, lambda g, n: _insert(g, n, aten.flip.default, [0]))
    if v.dim() == 2 and v.shape[0] == v.shape[1]:
        yield "a transposition lies in between", _edit(module, index, lambda g, n: _insert(g, n, aten.permute.default, [1, 0]))
    if node.target in (aten.add.Tensor, aten.addmm.default):
        yield "alpha is 2", _edit(module, index, _alpha)
    if node.target is aten.addmm.default:
        yield "beta is 0.5", _edit(module, index, lambda g, n: _keyword(n, "beta", 0.5))
    if node.target in (aten.gelu.default, aten.gelu_backward.default):
        yield "the other gelu", _edit(module, index, _other_gelu)
    for place, argument in enumerate(node.args):
        if isinstance(argument, float) or (
            isinstance(argument, int) and node.target in (aten.pow.Tensor_Scalar, aten.mul.Tensor)
        ):
            yield f"constant {argument} is another", _edit(module, index, lambda g, n, p=place: _constant(n, p))


def _edit(module: GraphModule, index: int, change: Callable[[Any, Node], None]) -> GraphModule:
    edited = copy.deepcopy(module)
    node = [n for n in edited.graph.nodes if n.op == "call_function"][index]
    change(edited.graph, node)
    edited.graph.lint()
    edited.recompile()
    return edited


def _expose(graph: Any, node: Node) -> None:
    output = next(n for n in graph.nodes if n.op == "output")
    with graph.inserting_before(output):
        used = graph.call_function(aten.cos.default, (node,))
    output.args = ((*output.args[0], used),)


def _insert(graph: Any, node: Node, target: Any, *args: Any) -> None:
    with graph.inserting_after(node):
        new = graph.call_function(target, (node, *args))
    node.replace_all_uses_with(new, delete_user_cb=lambda u: u is not new)


def _round_trip(graph: Any, node: Node) -> None:
    with graph.inserting_after(node):
        low = graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
    with graph.inserting_after(low):
        back = graph.call_function(aten._to_copy.default, (low,), {"dtype": node.meta["val"].dtype})
    node.replace_all_uses_with(back, delete_user_cb=lambda u: u is not low)


def _keyword(node: Node, name: str, v: Any) -> None:
    node.kwargs = {**node.kwargs, name: v}


def _alpha(_graph: Any, node: Node) -> None:
    _keyword(node, "alpha", 2)


def _other_gelu(_graph: Any, node: Node) -> None:
    _keyword(node, "approximate", "none" if node.kwargs.get("approximate") == "tanh" else "tanh")


def _constant(node: Node, place: int) -> None:
    args: list[Any] = list(node.args)
    args[place] += 1
    node.args = tuple(args)


def _swapped(module: GraphModule, given: list[Any]) -> list[NearMiss]:
    """Two arguments of one shape change places: the same function of other values, right only if it stays that."""
    misses: list[NearMiss] = []
    placeholders = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    for i in range(len(given)):
        for j in range(i + 1, len(given)):
            if given[i].shape == given[j].shape and given[i].dtype == given[j].dtype:

                def swapped(*args: Any, i: int = i, j: int = j) -> Any:
                    again = list(args)
                    again[i], again[j] = again[j], again[i]
                    return module.forward(*again)

                misses.append((f"{placeholders[i]} and {placeholders[j]} change places", swapped, list(given)))
    return misses
