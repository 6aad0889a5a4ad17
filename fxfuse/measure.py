"""Time the candidates of one fused operator on tensors of its own shapes, on the GPU that it will run on.

Floats are random, the integers of an expert layer are an even routing. A candidate that computes something else than Inductor's
code for the reference gets no time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from . import compat
from .errors import warn_once
from .ops.define import Candidate
from .ops.grouped_mlp import route
from .pattern import as_tuple
from .recipe import Recipe
from .settings import Settings
from .spellings import arguments
from .values import metadata, value

log = logging.getLogger(__name__)
MARGIN = 0.98
"""A candidate must be this much faster than Inductor's own code to be taken: noise must not decide."""
MILLISECONDS = {"quick": 20, "max": 100}
"""Time spent on measuring one candidate."""
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""How far from Inductor's a candidate's result may lie, relative in norm: some roundings, not a wrong term."""
TF32_TOLERANCE = 1e-2
_winners: dict[Any, Candidate] = {}


def fastest(node: Node, candidates: Sequence[Candidate], settings: Settings, recipe: Recipe) -> Candidate:
    """The fastest right candidate; the first one is what Inductor makes of the reference."""
    flat, _ = pytree.tree_flatten((node.args, dict(node.kwargs)))
    described = tuple(metadata(value(a)) if isinstance(a, Node) else repr(a) for a in flat)
    key = (str(node.target), described, tuple(c.name for c in candidates), recipe)
    if key not in _winners:
        with compat.outside_tracing(), torch.no_grad():
            args = list(realistic({name: _real(a) for name, a in arguments(node)}).values())
            times = _times(str(node.target), candidates, args, MILLISECONDS.get(settings.autotune, 20))
        inline, *others = [c for c in candidates if c.name in times]
        best = min(others, key=lambda c: times[c.name], default=inline)
        _winners[key] = best if times[best.name] < MARGIN * times[inline.name] else inline
        log.info("%s: %s wins (%s)", node.target, _winners[key].name, ", ".join(f"{n} {t:.4f} ms" for n, t in times.items()))
    return _winners[key]


# ------------------------------------------------------------------------------------------------ what it is measured on


def _real(a: Any) -> Any:
    """A random tensor like a fake one, ints all zero; symbolic sizes take their hints. Lists by element."""
    if isinstance(a, (list, tuple)):
        return [_real(item) for item in a]
    v = value(a) if isinstance(a, Node) else a
    if isinstance(v, torch.SymInt):
        return compat.size_hint(v)
    if not isinstance(v, Tensor):
        return v
    shape, stride = [compat.size_hint(s) for s in v.shape], [compat.size_hint(s) for s in v.stride()]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    if not v.dtype.is_floating_point and not v.dtype.is_complex:
        return torch.zeros(extent, device=v.device, dtype=v.dtype).as_strided(shape, stride)
    storage = torch.randn(extent, device=v.device, dtype=torch.float32).to(v.dtype)
    return storage.as_strided(shape, stride)


def realistic(named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an expert layer with the integers of one even routing, its weights scaled so that no product overflows.

    Other operators' arguments stay as they are.
    """
    down = named.get("w_down")
    if not isinstance(down, Tensor):
        return named
    experts = down.shape[0]
    for name in ("w_gate", "w_up", "w_down"):
        if isinstance(named.get(name), Tensor):
            named[name].mul_(named[name].shape[-1] ** -0.5)
    routing: dict[str, Tensor] = {}
    if isinstance(named.get("ids"), Tensor):
        routing["ids"] = _even_ids(named["ids"], experts)
        routing |= route(routing["ids"], experts)._asdict()
    else:
        rows = named["rows"]
        routing["ends"] = torch.arange(1, experts + 1, device=rows.device) * rows.shape[0] // experts
    for name, values in routing.items():
        if isinstance(named.get(name), Tensor):
            named[name].copy_(values)
    return named


def _even_ids(like: Tensor, experts: int) -> Tensor:
    """Distinct random experts for each row of ``like`` (T, K) where there are enough of them."""
    tokens, chosen = like.shape
    if chosen > experts:
        return torch.randint(experts, (tokens, chosen), device=like.device)
    return torch.rand(tokens, experts, device=like.device).topk(chosen).indices


# ------------------------------------------------------------------------------------------------ measuring


def _times(target: str, candidates: Sequence[Candidate], args: Sequence[Any], milliseconds: int) -> dict[str, float]:
    """Milliseconds of the first candidate and of those others that agree with it."""
    calls = {c.name: compat.compiled_by_inductor(c.function, args, {}) for c in candidates}
    (first, inline), *others = calls.items()
    times, expected = {first: _time(inline, milliseconds)}, as_tuple(inline())
    for name, call in others:
        reason = disagreement(as_tuple(call()), expected)
        if reason is None:
            times[name] = _time(call, milliseconds)
        else:
            warn_once(f"{target}: the lowering {name!r} is not used, its result is wrong: {reason}", cause=f"{target}:{name}")
    return times


def disagreement(got: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """How a result differs from the expected one by more than roundings do, or None."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if (g.shape, g.dtype) != (e.shape, e.dtype):  # strides are Inductor's choice
            return f"output {i} is {_text(g)} instead of {_text(e)}"
        if not e.dtype.is_floating_point:
            continue  # the order of equal keys is no error
        wide = torch.float64 if e.dtype is torch.float64 else torch.float32
        off = _norm(g.to(wide) - e.to(wide)) / max(_norm(e.to(wide)), 1e-30) if g.numel() else 0.0
        if not off <= _tolerance(e.dtype):
            return f"output {i} is off by {off:.1e}, relative in norm; {_tolerance(e.dtype):.0e} is let pass"
    return None


def _text(t: Tensor) -> str:
    return f"{t.dtype} {tuple(t.shape)}"


def _norm(t: Tensor) -> float:
    return t.norm().item()


def _tolerance(dtype: torch.dtype) -> float:
    if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return TF32_TOLERANCE
    return TOLERANCE.get(dtype, 1e-9)


def _time(call: Callable[[], Any], milliseconds: int) -> float:
    from triton.testing import do_bench

    median: Any = do_bench(call, warmup=5, rep=milliseconds, return_mode="median")  # its type allows for a list of quantiles
    return float(median)
