"""Activations and their derivatives in registers, for Hopper, as ``ops.activations`` and ``ops.grouped_experts`` define them.

ACT is a name of ``ops.activations``; with ALPHA the activation is ``x sigmoid(ALPHA x)`` and one is added to u. LIMIT clamps g
from above and u on both sides. All in fp32.
"""

from __future__ import annotations

import triton.language as tl

from .hopper import gl, gluon

NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def exp2(x):
    # ex2.approx without the steps that save what rounds to zero in fp32.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    # To one unit in the last place, in one instruction where a division takes more; 1 / inf is 0.
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sigmoid(x, SCALE: gl.constexpr = 1.0):
    # Of SCALE x.
    return reciprocal(1 + exp2(x * (-1.4426950408889634 * SCALE)))


@gluon.jit
def where_at_most(x, BOUND: gl.constexpr, y):
    # y where x <= BOUND and else 0. The compiler would compare what x was widened from, two at a time, and take results apart.
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.le.f32 p, $1, $2; selp.f32 $0, $3, 0f00000000, p; }", "=f,f,f,f", [x, BOUND, y],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def value_and_slope(x, ACT: gl.constexpr, ALPHA: gl.constexpr):
    # The activations of ops.activations, or x sigmoid(ALPHA x), in fp32.
    if ALPHA is not None:
        s = sigmoid(x, ALPHA)
        value = x * s
        slope = s + ALPHA * value * (1 - s)
    elif ACT == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s + value * (1 - s)
    elif ACT == "quick_gelu":
        s = sigmoid(x, 1.702)
        value = x * s
        slope = s + 1.702 * value * (1 - s)
    elif ACT == "gelu":
        # The normal distribution by Abramowitz and Stegun, 7.1.26, to 1e-7: fewer registers than erf, and the density for free.
        e = exp2(x * x * -0.7213475204444817)
        r = reciprocal(1 + gl.abs(x) * 0.23164190189395)
        tail = r * (0.127414796 + r * (-0.142248368 + r * (0.7107068705 + r * (-0.7265760135 + r * 0.5307027145)))) * e
        s = gl.where(x < 0, tail, 1 - tail)
        value = x * s
        slope = s + x * (e * 0.3989422804014327)
    elif ACT == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        s = sigmoid(x * (1.5957691216057308 + 0.07135481282553147 * x * x))
        value = x * s
        slope = s + value * (1 - s) * (1.5957691216057308 + 0.2140644384765944 * x * x)
    elif ACT == "relu":
        value = gl.where(x < 0, 0.0, x)
        slope = gl.where(x <= 0, 0.0, 1.0)
    elif ACT == "relu2":
        r = gl.where(x < 0, 0.0, x)
        value = r * r
        slope = 2 * r
    elif ACT == "sigmoid":
        value = sigmoid(x)
        slope = value * (1 - value)
    else:
        gl.static_assert(ACT == "tanh")
        square = x * x
        series = x * (1 + square * (-0.3333333333333333 + square * 0.13333333333333333))
        value = gl.where(square < 0.01, series, 2 * sigmoid(2 * x) - 1)
        slope = 1 - value * value
    return value, slope


@gluon.jit
def clamped(g, LIMIT: gl.constexpr):
    if LIMIT is not None:
        g = gl.minimum(g, LIMIT, propagate_nan=NAN)
    return g


@gluon.jit
def factor(u, LIMIT: gl.constexpr, ALPHA: gl.constexpr):
    # What multiplies the gate's activation.
    if LIMIT is not None:
        u = gl.maximum(gl.minimum(u, LIMIT, propagate_nan=NAN), -LIMIT, propagate_nan=NAN)
    if ALPHA is not None:
        u = u + 1
    return u


@gluon.jit
def activated(g, ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr):
    value, _slope = value_and_slope(clamped(g, LIMIT), ACT, ALPHA)
    return value


@gluon.jit
def gated(g, u, ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr):
    return activated(g, ACT, LIMIT, ALPHA) * factor(u, LIMIT, ALPHA)


@gluon.jit
def activated_backward(g, ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr):
    # The activation and da/dg.
    value, slope = value_and_slope(clamped(g, LIMIT), ACT, ALPHA)
    if LIMIT is not None:
        slope = where_at_most(g, LIMIT, slope)
    return value, slope


@gluon.jit
def gated_backward(g, u, ACT: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr):
    # The activation, da/dg and da/du.
    value, slope = activated_backward(g, ACT, LIMIT, ALPHA)
    times = factor(u, LIMIT, ALPHA)
    upward = value
    if LIMIT is not None:
        upward = where_at_most(gl.abs(u), LIMIT, value)
    return value * times, slope * times, upward
