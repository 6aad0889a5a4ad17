"""Time the candidates of one fused operator on random tensors of its own shapes, on the GPU that it will run on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from . import compat
from .ops.define import Candidate
from .recipe import Recipe
from .settings import Settings
from .values import metadata, value

log = logging.getLogger(__name__)
MARGIN = 0.98
"""A candidate must be this much faster than Inductor's own code to be taken: noise must not decide."""
MILLISECONDS = {"quick": 20, "max": 100}
"""Time spent on measuring one candidate."""
_winners: dict[Any, Candidate] = {}


def fastest(node: Node, candidates: Sequence[Candidate], settings: Settings, recipe: Recipe) -> Candidate:
    """The fastest candidate; the first one is what Inductor makes of the reference."""
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    described = tuple(metadata(value(a)) if isinstance(a, Node) else repr(a) for a in flat)
    key = (str(node.target), described, tuple(c.name for c in candidates), recipe)
    if key not in _winners:
        with compat.outside_tracing(), torch.no_grad():
            args, kwargs = pytree.tree_unflatten([_real(a) for a in flat], spec)
            times = {c.name: _time(c, args, kwargs, MILLISECONDS.get(settings.autotune, 20)) for c in candidates}
        inline, *others = candidates
        best = min(others, key=lambda c: times[c.name])
        _winners[key] = best if times[best.name] < MARGIN * times[inline.name] else inline
        log.info("%s: %s wins (%s)", node.target, _winners[key].name, ", ".join(f"{n} {t:.4f} ms" for n, t in times.items()))
    return _winners[key]


def _real(a: Any) -> Any:
    """A random tensor like a fake one; symbolic sizes take their hints."""
    v = value(a) if isinstance(a, Node) else a
    if isinstance(v, torch.SymInt):
        return compat.size_hint(v)
    if not isinstance(v, torch.Tensor):
        return v
    shape, stride = [compat.size_hint(s) for s in v.shape], [compat.size_hint(s) for s in v.stride()]
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
    storage = torch.randn(extent, device=v.device, dtype=torch.float32).to(v.dtype)
    return storage.as_strided(shape, stride)


def _time(candidate: Candidate, args: Sequence[Any], kwargs: dict[str, Any], milliseconds: int) -> float:
    from triton.testing import do_bench

    run: Callable[[], Any] = compat.compiled_by_inductor(candidate.function, args, kwargs)
    median: Any = do_bench(run, warmup=5, rep=milliseconds, return_mode="median")  # its type allows for a list of quantiles
    return float(median)
