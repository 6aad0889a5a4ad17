"""Device side of the activations: values and derivatives as ``ops.activations`` and ``ops.grouped_experts`` have them, in fp32.

NaNs pass as in PyTorch: comparisons keep the value where they do not hold.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    t = tl.exp(-2.0 * tl.abs(x))  # the exponent is never positive: nothing overflows
    y = (1.0 - t) / (1.0 + t)
    return tl.where(x < 0, -y, y)


@triton.jit
def value_and_slope(x, ACT: tl.constexpr):
    """The activation of x and its derivative."""
    if ACT == "silu":
        s = tl.sigmoid(x)
        y = x * s
        d = s * (1.0 + x * (1.0 - s))
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        y = x * s
        d = s + y * (1.0 - s) * 1.702
    elif ACT == "gelu":
        c = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * c
        d = c + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACT == "gelu_tanh":
        t = _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = 0.5 * x * (1.0 + t)
        d = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    elif ACT == "relu":
        y = tl.where(x < 0, 0.0, x)
        d = tl.where(x <= 0, 0.0, 1.0)
    elif ACT == "relu2":
        r = tl.where(x < 0, 0.0, x)
        y = r * r
        d = 2.0 * r
    elif ACT == "sigmoid":
        y = tl.sigmoid(x)
        d = y * (1.0 - y)
    else:
        tl.static_assert(ACT == "tanh", "unknown activation")
        y = _tanh(x)
        d = 1.0 - y * y
    return y, d


@triton.jit
def _gate(g, limit, alpha, ACT: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Value and derivative of the gate, clamped from above by limit."""
    inner = g
    if LIMIT:
        inner = tl.where(g > limit, limit, g)
    if ALPHA:
        s = tl.sigmoid(alpha * inner)
        y = inner * s
        d = s + alpha * y * (1.0 - s)
    else:
        y, d = value_and_slope(inner, ACT)
    return y, d


@triton.jit
def _up(u, limit, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """What the gate's activation is multiplied by."""
    if LIMIT:
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    if ALPHA:
        u = u + 1.0
    return u


@triton.jit
def activated(g, u, limit, alpha, ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """``act(g) * u``, or ``act(g)`` where not GATED."""
    y, _ = _gate(g, limit, alpha, ACT, LIMIT, ALPHA)
    if GATED:
        y = y * _up(u, limit, LIMIT, ALPHA)
    return y


@triton.jit
def differentiated(
    da, weight, g, u, limit, alpha, ACT: tl.constexpr, GATED: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr
):
    """The activation, and the gradients of g and u from ``weight * da``."""
    y, slope = _gate(g, limit, alpha, ACT, LIMIT, ALPHA)
    scaled = da * weight
    a, dg, du = y, scaled * slope, y
    if GATED:
        factor = _up(u, limit, LIMIT, ALPHA)
        a = y * factor
        dg = scaled * factor * slope
        du = scaled * y
        if LIMIT:
            du = tl.where((u >= -limit) & (u <= limit), du, 0.0)
    if LIMIT:
        dg = tl.where(g <= limit, dg, 0.0)
    return a, dg, du
