"""Time the candidates of one fused operator on tensors of its own shapes, on the GPU that it will run on.

Floats are random, the integers of an expert layer are an even routing. A candidate that computes something else than Inductor's
code for the reference gets no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from . import compat, winners
from .errors import warn_once
from .ops.define import Candidate
from .ops.grouped_mlp import route
from .pattern import as_tuple
from .recipe import Recipe
from .settings import Settings
from .spellings import arguments
from .values import value
from .versions import gpu, numerics_flags, software

log = logging.getLogger(__name__)
MARGIN = 0.98
"""A candidate must be this much faster than Inductor's own code to be taken: noise must not decide."""
MILLISECONDS = {"quick": 20, "max": 100}
"""Time spent on measuring one candidate."""
TOLERANCE = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-4}
"""How far from Inductor's a candidate's result may lie, relative in norm: some roundings, not a wrong term."""
TF32_TOLERANCE = 1e-2
SECONDS = {"quick": 30.0, "max": 300.0}
"""What all measurements of one process may take, compilation of the candidates included; what comes later is inlined."""
ROUTED = frozenset({"x", "ids", "p", "rows", "grad", "h", "u", "order", "inverse"})
"""Arguments of an expert layer whose first dimension is the tokens, or the rows routed to experts."""


class _Spent:
    """What this process has spent on measuring."""

    seconds = 0.0
    told = False
    """Whether the log says that it was too much."""


def forget() -> None:
    """Forget the winners in memory, and the time that was spent on them."""
    winners.forget()
    _Spent.seconds, _Spent.told = 0.0, False


def fastest(node: Node, candidates: Sequence[Candidate], settings: Settings, recipe: Recipe) -> tuple[Candidate, str]:
    """The fastest right candidate, and the times that say so; the first candidate is what Inductor makes of the reference.

    It is measured once for each ``key_of``, on one machine and not only in one process.
    """
    key = key_of(node, candidates, settings, recipe)
    known = {c.name: c for c in candidates}
    found = winners.find(key)
    if found is not None and found.name in known:
        log.debug("%s: %s won before (%s)", node.target, found.name, _listed(found))
        return known[found.name], _listed(found)
    if _exhausted(settings.autotune):
        return candidates[0], f"{candidates[0].name}; no time was left to measure {', '.join(list(known)[1:])}"
    log.info("%s: measuring %d candidates (%s)", node.target, len(candidates), ", ".join(known))
    winner = _measured(node, candidates, settings.autotune)
    winners.keep(key, winner)
    log.info("%s: %s wins (%s)", node.target, winner.name, _listed(winner))
    return known[winner.name], _listed(winner)


def _measured(node: Node, candidates: Sequence[Candidate], autotune: str) -> winners.Winner:
    started = time.perf_counter()
    try:
        with compat.outside_tracing(), torch.no_grad():
            args = list(realistic({name: _real(a) for name, a in arguments(node)}).values())
            times = _times(str(node.target), candidates, args, MILLISECONDS.get(autotune, 20))
    finally:
        _Spent.seconds += time.perf_counter() - started
    inline, *others = [c.name for c in candidates if c.name in times]
    best = min(others, key=lambda name: times[name], default=inline)
    return winners.Winner(best if times[best] < MARGIN * times[inline] else inline, times)


def _exhausted(autotune: str) -> bool:
    """Whether there is no time left; the log says so once."""
    allowed = SECONDS.get(autotune, 0.0)
    exhausted = _Spent.seconds >= allowed
    if exhausted and not _Spent.told:
        _Spent.told = True
        text = "measuring took %.0f s, autotune=%r allows %.0f s in one process: operators not measured yet are inlined"
        log.info(text, _Spent.seconds, autotune, allowed)
    return exhausted


def _listed(winner: winners.Winner) -> str:
    """The winner's time and then the others', as they were measured once."""
    times = sorted(winner.milliseconds.items(), key=lambda item: (item[0] != winner.name, item[1]))
    return ", ".join(f"{name} {t:.4f} ms" for name, t in times)


# ------------------------------------------------------------------------------------------------ what it depends on


def key_of(node: Node, candidates: Sequence[Candidate], settings: Settings, recipe: Recipe) -> winners.Key:
    """Everything that a winner depends on, as data that is the same in every process.

    Dynamic sizes and the rows of an expert layer stand for all up to the next power of two. How the rows are spread over the
    experts is not part of it.
    """
    named = {name: _values(a) for name, a in arguments(node)}
    rows = _rows(named)
    return {
        "operator": str(node.target),
        "arguments": [[name, _described(v, rows if name in ROUTED else 0)] for name, v in named.items()],
        "candidates": [c.name for c in candidates],
        "recipe": recipe.key,
        "autotune": settings.autotune,
        "inductor": repr(sorted(settings.inductor.items(), key=str)),
        "numerics": [str(flag) for flag in numerics_flags()],
        "versions": [*software(), gpu(_device_index(named))],
    }


def _values(a: Any) -> Any:
    """The values of the nodes in an argument."""
    if isinstance(a, (list, tuple)):
        return [_values(item) for item in a]
    return value(a) if isinstance(a, Node) else a


def _rows(named: Mapping[str, Any]) -> int:
    """How many tokens (or rows, where there are no tokens) an expert layer was given when it was captured; else 0."""
    first = next((named[n] for n in ("ids", "rows") if isinstance(named.get(n), Tensor)), None)
    return compat.size_hint(first.shape[0]) if first is not None and isinstance(named.get("w_down"), Tensor) else 0


def _device_index(named: Mapping[str, Any]) -> int | None:
    """Which GPU it is for; None for the current one."""
    tensors = (v for v in pytree.tree_leaves(list(named.values())) if isinstance(v, Tensor))
    return next((t.device.index for t in tensors if t.device.type == "cuda"), None)


def bucket(n: int) -> int:
    """The next power of two; 0 and less stay as they are."""
    return 1 << (n - 1).bit_length() if n > 0 else n


def _described(v: Any, rows: int) -> Any:
    """An argument as data; ``rows`` are those that its first dimension is a multiple of, or 0."""
    if isinstance(v, list):
        return [_described(item, rows) for item in v]
    if isinstance(v, torch.SymInt):
        return _size(v)
    if not isinstance(v, Tensor):
        return repr(v)
    sizes = [_size(s) for s in v.shape]
    if rows and sizes:
        n = compat.size_hint(v.shape[0])
        sizes[0] = f"~{bucket(rows) * (n // rows) if n % rows == 0 else bucket(n)}"
    return [str(v.dtype), v.device.type, sizes, [_size(s) for s in v.stride()]]


def _size(s: Any) -> int | str:
    """A number as it is; a size with symbols as it would be at the upper ends of their buckets."""
    return f"~{compat.size_with(s, bucket)}" if isinstance(s, torch.SymInt) else int(s)


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
    """Milliseconds of the first candidate and of those others that agree with it.

    A result may be wider than what it is computed from: what was rounded on the way decides how near two of them are.
    """
    calls = {c: compat.compiled_by_inductor(c.function, args, {}) for c in candidates}
    coarsest = max((_tolerance(a.dtype) for a in args if isinstance(a, Tensor) and a.dtype.is_floating_point), default=0.0)
    (first, inline), *others = calls.items()
    times, expected = {first.name: _time(inline, milliseconds)}, as_tuple(inline())
    for c, call in others:
        reason = disagreement(as_tuple(call()), expected, max(c.tolerance, coarsest))
        if reason is None:
            times[c.name] = _time(call, milliseconds)
        else:
            text = f"{target}: the lowering {c.name!r} is not used, its result is wrong: {reason}"
            warn_once(text, cause=f"{target}:{c.name}")
    return times


def disagreement(got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 0.0) -> str | None:
    """How a result differs from the expected one by more than roundings do and ``tolerance`` says, or None."""
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        if (g.shape, g.dtype) != (e.shape, e.dtype):  # strides are Inductor's choice
            return f"output {i} is {_text(g)} instead of {_text(e)}"
        if not e.dtype.is_floating_point:
            continue  # the order of equal keys is no error
        wide = torch.float64 if e.dtype is torch.float64 else torch.float32
        off = _norm(g.to(wide) - e.to(wide)) / max(_norm(e.to(wide)), 1e-30) if g.numel() else 0.0
        allowed = max(_tolerance(e.dtype), tolerance)
        if not off <= allowed:
            return f"output {i} is off by {off:.1e}, relative in norm; {allowed:.0e} is let pass"
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
