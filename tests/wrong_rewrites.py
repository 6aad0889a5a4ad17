"""Rewrites that compute something else than their pattern, each with one that is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import fxfuse

Function = Callable[..., Any]
REGISTER = {
    "forward": fxfuse.register_forward_fusion,
    "backward": fxfuse.register_backward_fusion,
    "joint": fxfuse.register_forward_backward_fusion,
}


@dataclasses.dataclass(frozen=True)
class Plant:
    """A wrong rewrite of a pattern; two functions are a forward and a backward."""

    name: str
    side: str
    pattern: Function
    right: tuple[Function, ...]
    wrong: tuple[Function, ...]
    differs: str
    """A regular expression that the first line of the refusal matches."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def register(self, functions: Sequence[Function]) -> fxfuse.Fusion:
        """Register the pattern with these functions.

        Raises:
            PatternError: they are refused.
        """
        fusion = REGISTER[self.side](name=self.name, **self.options)(self.pattern)
        hooks = (fusion.rewrite,) if len(functions) == 1 else (fusion.forward, fusion.backward)
        for hook, function in zip(hooks, functions, strict=True):
            hook(function)
        return fusion


PLANTS: list[Plant] = []


def wrong(
    name: str, pattern: Function, *functions: Function, differs: str = "relative error", side: str = "forward", **options: Any
) -> None:
    """Plant a wrong rewrite. A pattern is its own right rewrite."""
    PLANTS.append(Plant(name, side, pattern, (pattern,), functions, differs, options))


# ------------------------------------------------------------------------------------------------ forward


def linear(x, w, b):
    return F.linear(x, w, b)


def linear_add(x, w, r):
    return F.linear(x, w) + r


def linear_gelu(x, w):
    return F.gelu(F.linear(x, w))


def linear_relu(x, w):
    return F.relu(F.linear(x, w))


def gated(x, w):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def scaled_linear(x, w, s: float):
    return F.linear(x, w) * s


def matmul(x, w):
    return x @ w


def product_sum(x, y):
    return (x * y).sum(0)


wrong("alpha dropped", lambda x, w, r: torch.add(F.linear(x, w), r, alpha=2), linear_add)
wrong("erf for tanh", lambda x, w: F.gelu(F.linear(x, w), approximate="tanh"), linear_gelu)
wrong("tanh for erf", linear_gelu, lambda x, w: F.gelu(F.linear(x, w), approximate="tanh"))
wrong("bias twice", linear, lambda x, w, b: F.linear(x, w, b) + b)
wrong("bias forgotten", linear, lambda x, w, b: F.linear(x, w))
wrong("optional bias forgotten", lambda x, w, b=None: F.linear(x, w, b), lambda x, w, b=None: F.linear(x, w))
wrong(
    "optional bias required",
    lambda x, w, b=None: F.linear(x, w, b),
    lambda x, w, b=None: F.linear(x, w) + b,
    differs="raises where the pattern runs.*b=None",
)
wrong(
    "scale on the wrong side",
    lambda x, w, r, s: F.linear(x, w) * s + r,
    lambda x, w, r, s: (F.linear(x, w) + r) * s,
    example={"x": "m k", "w": "n k", "r": "m n", "s": "n"},
)
wrong("residual missing", linear_add, lambda x, w, r: F.linear(x, w))
wrong("residual subtracted", linear_add, lambda x, w, r: F.linear(x, w) - r)
wrong("a number of zero", scaled_linear, lambda x, w, s: F.linear(x, w) * (s or 1.0), differs=r"relative error.*s=0\.0")
wrong("another activation", linear_relu, lambda x, w: F.relu6(F.linear(x, w)))
wrong("another activation where it is negative", linear_relu, lambda x, w: F.leaky_relu(F.linear(x, w), 1e-3))
wrong("sign of a scalar lost", scaled_linear, lambda x, w, s: F.linear(x, w) * abs(s), differs=r"relative error.*s=-2\.5")
wrong("halves swapped", gated, lambda x, w: (lambda gate, up: gate * F.silu(up))(*F.linear(x, w).chunk(2, -1)))
wrong(
    "off by one in a split",
    gated,
    lambda x, w: (lambda h, n: F.silu(h[..., :n]) * h[..., n - 1 : -1])(F.linear(x, w), w.shape[0] // 2),
)
wrong("sum over other dimensions", product_sum, lambda x, y: (x * y).sum(-1), differs=r"is \(6,\).*the pattern's \(10,\)")
wrong(
    "dimension not kept",
    lambda x: (x * x).sum(-1, keepdim=True),
    lambda x: (x * x).sum(-1),
    differs=r"is \(6,\).*the pattern's \(6, 1\)",
)
wrong("mean for sum", product_sum, lambda x, y: (x * y).mean(0))
wrong(
    "transposed by shape",
    matmul,
    lambda x, w: F.linear(x, w if w.shape[1] == x.shape[-1] else w.t()),
    differs=r"x=\[6, 6\], w=\[6, 6\]",
)
wrong(
    "two outputs swapped",
    lambda x, w: (lambda p: (F.relu(p), p))(F.linear(x, w)),
    lambda x, w: (lambda p: (p, F.relu(p)))(F.linear(x, w)),
    extra=1,
)
wrong(
    "an output too few",
    lambda x, w: (lambda p: (F.relu(p), p))(F.linear(x, w)),
    linear_relu,
    differs="returns 1 outputs, the pattern 2",
    extra=1,
)
wrong("an output too many", linear_relu, lambda x, w: (linear_relu(x, w), x), differs="returns 2 outputs, the pattern 1")
wrong("nothing returned", linear_relu, lambda x, w: None, differs="NoneType, not a tensor")
wrong("wider result", linear_relu, lambda x, w: F.linear(x, w).relu().double(), differs="float64, the pattern's.*float32")
wrong("narrower result", linear_relu, lambda x, w: F.linear(x, w).relu().float(), differs="float32, the pattern's.*float64")
wrong("low precision inside", linear_relu, lambda x, w: F.relu(F.linear(x.float(), w.float())).to(x.dtype))
wrong("bfloat16 inside", linear_relu, lambda x, w: F.relu(F.linear(x.bfloat16(), w.bfloat16()).to(x.dtype)))
wrong(
    "raises in float16",
    linear_relu,
    lambda x, w: F.relu(F.linear(x, w)) if x.dtype is not torch.float16 else torch.ops.aten.linear(x, w.float()),
    differs="raises where the pattern runs.*float16",
)
wrong(
    "NaN swallowed", linear_relu, lambda x, w: torch.where(F.linear(x, w) > 0, F.linear(x, w), 0), differs="NaN at other places"
)
wrong("NaN of a weight swallowed", linear, lambda x, w, b: F.linear(x, w.nan_to_num(), b), differs="NaN at other places")
wrong("NaN of a bias swallowed", linear, lambda x, w, b: F.linear(x, w, b.nan_to_num()), differs="NaN at other places")
wrong("infinity clamped", linear, lambda x, w, b: F.linear(x, w, b).clamp(-1e4, 1e4), differs="inf at other places")
wrong(
    "wrong for zero rows",
    linear_relu,
    lambda x, w: linear_relu(x, w) if len(x) else x.new_zeros(1, len(w)),
    differs=r"x=\[0, 10\]",
)
wrong("fails for zero rows", linear_relu, lambda x, w: linear_relu(x, w) + 0 * x[0, 0].detach(), differs=r"raises.*x=\[0, 10\]")
wrong("wrong for one row", linear_relu, lambda x, w: linear_relu(x.squeeze(0), w), differs=r"x=\[1, 10\]")
wrong(
    "wrong for K = 1", linear_relu, lambda x, w: linear_relu(x, w) if w.shape[1] > 1 else x * 2 * w[:, 0], differs=r"w=\[8, 1\]"
)
wrong("wrong for one column", linear, lambda x, w, b: F.linear(x, w, b).squeeze(-1), differs=r"w=\[1, 10\]")
wrong("width baked in", linear_relu, lambda x, w: linear_relu(x, w)[:, :8], differs=r"w=\[12, 10\]")
wrong("columns baked in", linear_relu, lambda x, w: linear_relu(x[:, :10], w[:, :10]), differs=r"w=\[8, 33\]")
wrong("contiguous view", linear_relu, lambda x, w: linear_relu(x.view(-1).view(x.shape), w), differs="raises.*transposed")
wrong(
    "storage order taken for row order",
    linear_relu,
    lambda x, w: linear_relu(torch.as_strided(x, x.shape, (x.shape[1], 1)), w),
    differs="transposed",
)
wrong(
    "rows of a slice taken for rows of a matrix",
    linear_relu,
    lambda x, w: linear_relu(torch.as_strided(x, x.shape, (x.shape[1], 1)) if x.stride(-1) == 1 and x.stride(0) else x, w),
    differs="offset",
)
wrong(
    "storage offset forgotten",
    linear_relu,
    lambda x, w: linear_relu(torch.as_strided(x, x.shape, x.stride(), 0), w),
    differs="offset",
)
wrong(
    "argument changed in place",
    scaled_linear,
    lambda x, w, s: F.linear(x.mul_(s), w),
    differs="changes its argument x",
)
wrong(
    "last argument changed in place",
    linear_add,
    lambda x, w, r: r.add_(F.linear(x, w)),
    differs="changes its argument r",
)
wrong(
    "argument changed after its use",
    linear_add,
    lambda x, w, r: (F.linear(x, w) + r, w.zero_())[0],
    differs="changes its argument w",
)

# ------------------------------------------------------------------------------------------------ backward
wrong(
    "data gradient transposed",
    lambda dy, w, r: dy @ w + r,
    lambda dy, w, r: F.linear(dy, w) + r,
    side="backward",
    differs="raises|x=",
)
wrong(
    "operands of a weight gradient swapped",
    lambda dy, x: dy.t() @ x,
    lambda dy, x: x.t() @ dy,
    side="backward",
    differs=r"is \(10, 8\).*the pattern's \(8, 10\)",
    example={"dy": "m n", "x": "m k"},
)
wrong(
    "bias gradient over columns",
    lambda dy, w: (dy @ w).sum(0),
    lambda dy, w: (dy @ w).sum(1),
    side="backward",
    differs="the pattern's",
)
