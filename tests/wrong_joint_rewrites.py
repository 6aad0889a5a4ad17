"""Wrong forwards and backwards of joint fusions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from wrong_rewrites import PLANTS as PLANTS
from wrong_rewrites import Plant as Plant
from wrong_rewrites import wrong

Function = Callable[..., Any]


def wrong_joint(
    name: str, pattern: Function, right: tuple[Function, Function], *, differs: str = "relative error",
    forward: Function | None = None, backward: Function | None = None,
) -> None:  # fmt: skip
    """Plant a wrong forward or backward of a joint fusion."""
    last = pattern.__code__.co_varnames[2]
    options = {"example": {"x": "m k", pattern.__code__.co_varnames[1]: "n k", last: "n" if last == "b" else "n k"}}
    PLANTS.append(Plant(name, "joint", pattern, right, (forward or right[0], backward or right[1]), differs, options))


def gated_pair(x, w_gate, w_up):
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def gated_pair_forward(x, w_gate, w_up, *, save):
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    return F.silu(gate) * up, (gate, up) if save else ()


def gated_pair_backward(grad, x, w_gate, w_up, gate, up, *, mask):
    d_gate, d_up = torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
    return d_gate @ w_gate + d_up @ w_up, d_gate.t() @ x, d_up.t() @ x


GATED = gated_pair_forward, gated_pair_backward


def biased_relu(x, w, b):
    return F.relu(F.linear(x, w, b))


def biased_relu_forward(x, w, b, *, save):
    out = biased_relu(x, w, b)
    return out, (out,) if save else ()


def biased_relu_backward(grad, x, w, b, out, *, mask):
    grad = torch.ops.aten.threshold_backward(grad, out, 0)
    return grad @ w, grad.t() @ x, grad.sum(0)


RELU = biased_relu_forward, biased_relu_backward


def changed(backward: Function, change: Function) -> Function:
    """``backward`` with its result passed through ``change(gradients, grad, mask)``."""
    if backward is gated_pair_backward:

        def new(grad, x, w_gate, w_up, gate, up, *, mask):
            return change(list(backward(grad, x, w_gate, w_up, gate, up, mask=mask)), grad, mask)
    else:

        def new(grad, x, w, b, out, *, mask):
            return change(list(backward(grad, x, w, b, out, mask=mask)), grad, mask)

    return new


def before(change: Function) -> Function:
    """The backward of ``biased_relu`` with its incoming gradient passed through ``change``."""

    def new(grad, x, w, b, out, *, mask):
        return biased_relu_backward(change(grad), x, w, b, out, mask=mask)

    return new


def saved_bias(x, w, b, *, save):
    out = biased_relu(x, w, b)
    return (out, (out,)) if save else (out + b, ())


wrong_joint(
    "gate and up swapped",
    gated_pair,
    GATED,
    forward=lambda x, w_gate, w_up, *, save: gated_pair_forward(x, w_up, w_gate, save=save),
)
wrong_joint(
    "gradients of two weights swapped",
    gated_pair,
    GATED,
    backward=changed(gated_pair_backward, lambda g, *_: [g[0], g[2], g[1]]),
    differs="gradient of w_gate has relative error",
)
wrong_joint(
    "gradient of x from one branch",
    gated_pair,
    GATED,
    backward=lambda grad, x, w_gate, w_up, gate, up, *, mask: (
        (grad * F.silu(gate)) @ w_up,
        *gated_pair_backward(grad, x, w_gate, w_up, gate, up, mask=mask)[1:],
    ),
    differs="gradient of x has relative error",
)
wrong_joint(
    "mask taken for a list of results",
    biased_relu,
    RELU,
    backward=changed(biased_relu_backward, lambda g, _grad, mask: [t for t, m in zip(g, mask, strict=True) if m]),
    differs="returned 1 gradients for 3",
)
wrong_joint(
    "mask ignored",
    biased_relu,
    RELU,
    backward=changed(biased_relu_backward, lambda g, _grad, mask: g if mask[0] else [None, None, g[2]]),
    differs="gradient of w is NoneType",
)
wrong_joint(
    "wrong without the bias",
    biased_relu,
    RELU,
    backward=changed(biased_relu_backward, lambda g, _grad, mask: g if mask[2] or sum(mask) == 1 else [g[0], 2 * g[1], None]),
    differs="gradient of w has relative error",
)
wrong_joint(
    "mean for a bias gradient",
    biased_relu,
    RELU,
    backward=changed(biased_relu_backward, lambda g, grad, _mask: [g[0], g[1], g[2] / len(grad)]),
    differs="gradient of b has relative error",
)
wrong_joint(
    "bias gradient of another shape",
    biased_relu,
    RELU,
    backward=changed(biased_relu_backward, lambda g, *_: [g[0], g[1], g[2][None]]),
    differs=r"gradient of b is \(1, 8\)",
)
wrong_joint(
    "gradient of another dtype",
    biased_relu,
    RELU,
    backward=changed(biased_relu_backward, lambda g, *_: [g[0], g[1].to(torch.promote_types(g[1].dtype, torch.float32)), g[2]]),
    differs=r"gradient of w is .*float32, the pattern's .*bfloat16",
)
wrong_joint(
    "incoming gradient taken for one",
    biased_relu,
    RELU,
    backward=before(torch.ones_like),
    differs="gradient of x has relative error",
)
wrong_joint(
    "incoming gradient changed in place",
    biased_relu,
    RELU,
    backward=before(lambda grad: grad.mul_(2).div(2)),
    differs="changes the gradient that it is given",
)
wrong_joint(
    "incoming gradient taken for contiguous",
    biased_relu,
    RELU,
    backward=before(lambda grad: torch.as_strided(grad, grad.shape, (grad.shape[1], 1))),
    differs="gradient of x .*transposed",
)
wrong_joint(
    "NaN of the incoming gradient swallowed", biased_relu, RELU, backward=before(torch.nan_to_num), differs="NaN at other places"
)
wrong_joint("wrong unless it saves", biased_relu, RELU, forward=saved_bias, differs="output 0 with save=False has relative error")
wrong("detached", biased_relu, lambda x, w, b: biased_relu(x, w.detach(), b), side="joint", differs="gradient of w is NoneType")
wrong(
    "straight-through gradient",
    biased_relu,
    lambda x, w, b: F.linear(x, w, b) + (biased_relu(x, w, b) - F.linear(x, w, b)).detach(),
    side="joint",
    differs="gradient of x has relative error",
)
