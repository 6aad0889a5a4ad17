"""Our own kernels as candidates of the grouped operators: the same steps as the references, a kernel each.

Against the references: gathered rows and the activation's gradients are never in memory, the down projection's gradient is
not rounded before the activation's derivative, and a bias is added before the product is rounded.

Each candidate is one operator, ``fxfuse::<the grouped operator>_kernels``, with the path of kernels as its last argument: what
lies between its launches costs the host little. On a CPU the kernels' twins run, so that a graph with it can be run there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels import hopper_launch
from ..kernels.tape import taped
from ..versions import software
from .define import TAGS, FusedOp, launch, library
from .grouped_experts import Experts, _grouped_experts, _grouped_experts_backward
from .grouped_mlp import _grouped_mlp, _grouped_mlp_backward, route
from .grouped_mm import used, wide


def refusal(**named: Any) -> str | None:
    """Why the kernels in plain Triton cannot run on these arguments of a grouped operator."""
    floats = [named[n] for n in ("w_gate", "x", "rows", "grad", "p", "h") if named.get(n) is not None]
    experts, device = named["w_down"].shape[0], named["w_down"].device
    return next((r for r in (kernels.refusal(t.dtype, device, experts) for t in floats) if r is not None), None)


def routed(named: Mapping[str, Any]) -> int:
    """How many rows go to experts, by the arguments of a grouped operator."""
    return named["ids"].numel() if "ids" in named else named["rows"].shape[0]


def hopper_refusal(**named: Any) -> str | None:
    """Why those in Gluon cannot."""
    reason = refusal(**named)
    if reason is not None:
        return reason
    down = named["w_down"]
    capability = kernels.capability(down.device) if down.is_cuda else None
    weights = {n: named[n] for n in ("w_gate", "w_up", "w_down")}
    return hopper_launch.supported(capability, software()[1], routed(named), down.shape[0], **weights)


@taped
def mlp(
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    ends: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    first: bool,
    save: bool,
    path: str,
) -> tuple[Tensor, ...]:
    """``fxfuse::grouped_mlp``."""
    kernel = _functions(path, w_gate)
    experts = w_down.shape[0]
    tokens = weight = None
    if ends is None:
        order, tokens, inverse, counted = kernel.route(ids, experts)
    else:
        order, inverse, counted = route(ids, experts, ends)
    if tokens is None or first:
        tokens, weight = kernel.sorted_pairs(order, p if first else None, ids.shape[1])
    tiles = kernel.tile_list(counted, order.shape[0])
    rows, gather = _rows(x, tokens, weight, w_gate.dtype)
    if gather is not None and kernels.PATHS[path].spreads(w_gate.shape[1] + (0 if w_up is None else w_up.shape[1])):
        rows, gather = kernel.spread(rows, None, None, inverse, ids.shape[1])[0], None
    a, h, u = kernel.up(rows, gather, w_gate, w_up, b_gate, counted, act, layout, limit, alpha, save, tiles=tiles)
    y = kernel.matmul(a, w_down, counted, transposed=True, bias=None, zero_tail=False, tiles=tiles)
    out = kernel.combine(y, None if first else p, b_down, ids, inverse, counted, x)
    if not save:
        return (out,)
    return _there(out, h, None if w_up is None else u, order, inverse, counted if ends is None else None)


def _rows(x: Tensor, gather: Tensor | None, weight: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The first linear's rows: x, and which of its lines; or where they are weighted first, the weighted rows."""
    return (_as(x, dtype), gather) if weight is None else ((wide(_lines(x, gather)) * weight.unsqueeze(-1)).to(dtype), None)


def _lines(x: Tensor, gather: Tensor | None) -> Tensor:
    return x if gather is None else x.index_select(0, gather)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


@taped
def mlp_backward(
    grad: Tensor,
    x: Tensor,
    ids: Tensor,
    p: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    h: Tensor | None,
    u: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    first: bool,
    mask: list[bool],
    path: str,
) -> tuple[Tensor, ...]:
    """``fxfuse::grouped_mlp_backward``."""
    kernel = _functions(path, w_gate)
    need_x, need_p, need_gate, need_up, *_ = mask
    of, dtype = Experts(w_gate, w_up, w_down, b_gate, b_down, act, layout, limit, alpha), w_gate.dtype
    tiles = kernel.tile_list(ends, order.shape[0])
    dy, lines = _as(grad, dtype), x if first else _as(x, dtype)
    wanted = need_gate or need_up or first or h is None
    dy, lines, weight, source = _sorted(kernel, path, dy, lines, wanted, p, order, inverse, ids.shape[1])
    before, after = (weight, None) if first else (None, weight)
    rows, gather = _rows(lines, source, before, dtype)
    found, back = _within(kernel, of, (dy, source), (rows, gather), after, (h, u), ends, tiles, mask[2:], need_x or need_p)
    of_x = of_p = None
    if back is not None and (need_x or need_p):
        dh, du, dp = back
        if need_p and not first:
            assert p is not None
            of_p = kernel.router_gradient(dp, ids, inverse, p.dtype, b_down, grad, ends)
        if need_x or first:
            drows = _rows_gradient(kernel, dh, du, w_gate, w_up, ends, tiles, False)
            if need_p and first:
                assert p is not None
                inside = used(ends, torch.arange(order.shape[0], device=order.device))
                products = torch.where(inside, wide(drows) * wide(_lines(lines, source)), 0)
                of_p = products.sum(-1).index_select(0, inverse).view(ids.shape).to(p.dtype)
            if need_x:
                of_x = kernel.combine(drows, p if first else None, None, ids, inverse, ends, x)
    return _there(of_x, of_p, *found)


def _within(
    kernel: ModuleType,
    of: Experts,
    grad: tuple[Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor | None],
    p: Tensor | None,
    saved: tuple[Tensor | None, Tensor | None],
    ends: Tensor,
    tiles: Tensor | None,
    mask: Sequence[bool],
    of_rows: bool,
) -> tuple[list[Tensor | None], tuple[Tensor, Tensor, Tensor] | None]:
    """Back through both linears of the experts, but not to their rows.

    Args:
        grad, rows: of the results and the arguments, each with which of its lines the sorted rows are.
        p: what the results were weighted with after the second linear.
        saved: h and u; None where they are to be computed again.
        mask: which gradients are wanted, of w_gate, w_up, w_down, b_gate and b_down.
        of_rows: whether those of the rows or of p are.

    Returns:
        What ``mask`` names; and if anything needs them, the gradients of h and u, and parts of p's.
    """
    (dy, source), (x, gather), (h, u), kind = grad, rows, saved, (of.act, of.layout, of.limit, of.alpha)
    need_gate, need_up, need_down, need_b_gate, need_b_down = mask
    if h is None:
        _, h, u = kernel.up(x, gather, of.w_gate, of.w_up, of.b_gate, ends, *kind, True, tiles=tiles)
        u = None if of.w_up is None else u
    found: list[Tensor | None] = [None] * 5
    if need_b_down:
        found[4] = kernel.bias_gradient(dy, ends, p, source)
    if not (of_rows or any(mask[:4])):
        return found, None
    dh, du, dp, scaled = kernel.dh(dy, source, of.w_down, p, h, u, ends, *kind, tiles=tiles)
    if need_down:
        found[2] = _weight_gradient(kernel, dy, scaled, source, None, ends, tiles, of.w_down)
    if need_gate:
        found[0] = _weight_gradient(kernel, dh, x, None, gather, ends, tiles, of.w_gate)
    if need_up and of.w_up is not None:
        found[1] = _weight_gradient(kernel, du, x, None, gather, ends, tiles, of.w_up)
    if need_b_gate:
        found[3] = kernel.bias_gradient(dh, ends, None, None)
    return found, (dh, du, dp)


def _there(*found: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in found if t is not None)


def _sorted(
    kernel: ModuleType,
    path: str,
    grad: Tensor,
    x: Tensor,
    wanted: bool,
    p: Tensor | None,
    order: Tensor,
    inverse: Tensor,
    chosen: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients, x and router weights (S,) of the sorted rows, and which lines of the first two these are.

    Where a path's products do not gather, lines are spread once for all of them; those of x only if they are ``wanted``.
    """
    if kernels.PATHS[path].gathers:
        tokens, weight = kernel.sorted_pairs(order, p, chosen)
        return grad, x, weight, tokens
    grads, rows, weight = kernel.spread(grad, x if wanted else None, p, inverse, chosen)
    return grads, rows if wanted else x, weight, None


def _weight_gradient(
    kernel: ModuleType,
    d: Tensor,
    x: Tensor,
    gather_d: Tensor | None,
    gather_x: Tensor | None,
    ends: Tensor,
    tiles: Tensor | None,
    like: Tensor,
) -> Tensor:
    """(E, N, M), laid out in memory as the weight ``like`` is."""
    if like.stride(-1) == 1:
        return kernel.wgrad(d, x, gather_d, gather_x, ends, tiles=tiles)
    return kernel.wgrad(x, d, gather_x, gather_d, ends, tiles=tiles).transpose(1, 2)


def _rows_gradient(
    kernel: ModuleType,
    dh: Tensor,
    du: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    ends: Tensor,
    tiles: Tensor | None,
    zero_tail: bool,
) -> Tensor:
    """(S, H) of the rows that went into the first linear."""
    product = functools.partial(kernel.matmul, transposed=False, bias=None, zero_tail=zero_tail, tiles=tiles)
    drows = product(dh, w_gate, ends)
    return drows if w_up is None else drows + product(du, w_up, ends)


@taped
def experts(
    rows: Tensor,
    ends: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
    path: str,
) -> tuple[Tensor, ...]:
    """``fxfuse::grouped_experts``."""
    kernel = _functions(path, w_gate)
    tiles = kernel.tile_list(ends, rows.shape[0])
    a, h, u = kernel.up(rows, None, w_gate, w_up, b_gate, ends, act, layout, limit, alpha, save, tiles=tiles)
    y = kernel.matmul(a, w_down, ends, transposed=True, bias=b_down, zero_tail=True, tiles=tiles)
    return _there(y, h, None if w_up is None else u) if save else (y,)


@taped
def experts_backward(
    grad: Tensor,
    rows: Tensor,
    ends: Tensor,
    w_gate: Tensor,
    w_up: Tensor | None,
    w_down: Tensor,
    b_gate: Tensor | None,
    b_down: Tensor | None,
    h: Tensor | None,
    u: Tensor | None,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    mask: list[bool],
    path: str,
) -> tuple[Tensor, ...]:
    """``fxfuse::grouped_experts_backward``."""
    kernel = _functions(path, w_gate)
    of, tiles = Experts(w_gate, w_up, w_down, b_gate, b_down, act, layout, limit, alpha), kernel.tile_list(ends, rows.shape[0])
    found, back = _within(kernel, of, (grad, None), (rows, None), None, (h, u), ends, tiles, mask[1:], mask[0])
    if back is None or not mask[0]:
        return _there(*found)
    return _there(_rows_gradient(kernel, *back[:2], w_gate, w_up, ends, tiles, True), *found)


def _functions(path: str, like: Tensor) -> ModuleType:
    """The functions of a path, or where it cannot run their twins."""
    return kernels.path(path) if like.is_cuda else kernels.twins()


# ------------------------------------------------------------------------------------------------ as operators


Results = Callable[..., list[torch.dtype | None]]
"""Given an operator's arguments: of each of its results None, or the dtype of the empty tensor that stands for it."""


def _mlp_results(x: Tensor, ids: Tensor, p: Any, ends: Tensor | None, *rest: Any) -> list[torch.dtype | None]:
    (w_gate, w_up, *_, save), order = rest, None if rest[-1] else torch.int64
    of_h, of_u = (None if there else w_gate.dtype for there in (save, save and w_up is not None))
    return [None, of_h, of_u, order, order, None if save and ends is None else torch.int32]


def _experts_results(rows: Tensor, ends: Tensor, w_gate: Tensor, w_up: Tensor | None, *rest: Any) -> list[torch.dtype | None]:
    return [None, *[None if there else w_gate.dtype for there in (rest[-1], rest[-1] and w_up is not None)]]


def _gradients(grad: Tensor, *rest: Any) -> list[torch.dtype | None]:
    return [None if wanted else grad.dtype for wanted in rest[-1]]


def whole(function: Callable[..., Sequence[Tensor]], results: Results, args: Sequence[Any], path: str) -> tuple[Tensor, ...]:
    """All results of an operator of these arguments: those of a pass, and empty tensors in the places of others."""
    there = iter(function(*args, path))
    return tuple(next(there) if dtype is None else args[0].new_empty(0, dtype=dtype) for dtype in results(*args))


PASSES: tuple[tuple[FusedOp, Callable[..., Any], Results], ...] = (
    (_grouped_mlp, mlp, _mlp_results),
    (_grouped_mlp_backward, mlp_backward, _gradients),
    (_grouped_experts, experts, _experts_results),
    (_grouped_experts_backward, experts_backward, _gradients),
)
"""Each takes the arguments of its operator and a path."""


def _operator(op: FusedOp, function: Callable[..., Any], results: Results) -> Any:
    """``fxfuse::<op>_kernels``: the arguments of ``op`` and the path; where a launch fails, the reference of ``op``.

    It returns what is there alone: to make an empty tensor and to hand it over costs the host as much as a large one.
    """
    name = op.overload.overloadpacket.__name__
    kernels_name = f"{name}_kernels"
    if not hasattr(torch.ops.fxfuse, kernels_name):  # a reloaded module finds its operator defined
        arguments, _ = str(op.overload._schema).removeprefix(f"fxfuse::{name}(").split(") -> ")

        def reference(*args: Any) -> list[Tensor]:
            found, there = op.reference(*args[:-1]), results(*args[:-1])
            return [t for t, dtype in zip(found, there, strict=True) if dtype is None]

        library.define(f"{kernels_name}({arguments}, str path) -> Tensor[]", tags=TAGS)
        library.impl(kernels_name, reference, "CompositeExplicitAutograd")
        library.impl(kernels_name, function, "CPU")
        library.impl(kernels_name, launch(kernels_name, function, reference), "CUDA")
    return getattr(torch.ops.fxfuse, kernels_name).default


def _candidate(operator: Any, results: Results, path: str) -> Callable[..., tuple[Tensor, ...]]:
    names = [argument.name for argument in operator._schema.arguments]

    def call(*args: Any, **named: Any) -> tuple[Tensor, ...]:
        return whole(operator, results, [*args, *[named[n] for n in names[len(args) : -1]]], path)

    return call


def register(name: str, path: str, refuses: Callable[..., str | None]) -> None:
    """Make a path of kernels a candidate of all grouped operators."""
    for op, function, results in PASSES:
        op.candidate(name, refuses)(_candidate(_operator(op, function, results), results, path))


register("triton", "portable", refusal)
register("hopper", "hopper", hopper_refusal)
