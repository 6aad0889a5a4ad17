"""Opaque ops that stand for kernels: a test can find them in a graph and count their calls at run time.

They compute with plain torch, so a replacement made of them differs from its pattern by rounding at most. None has a
derivative: a fusion that uses them says itself what its backward is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("fxfuse_test", "DEF")
calls: list[str] = []
"""The ops that ran, in order; tests clear it."""


def _op(schema: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))

    def counted(*args: Any) -> Any:
        calls.append(name)
        return compute(*args)

    _library.impl(name, counted, "CPU")
    _library.impl(name, compute, "Meta")
    return getattr(torch.ops.fxfuse_test, name)


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


def _if(wanted: bool, value: Tensor) -> Tensor:
    return value.clone() if wanted else value.new_empty(0)


def _column_sum(t: Tensor) -> Tensor:
    return _rows(t).sum(0)


def _linear_gelu(x: Tensor, w: Tensor, b: Tensor | None, save: bool) -> tuple[Tensor, Tensor]:
    pre = F.linear(x, w, b)
    return F.gelu(pre), _if(save, pre)


def _linear_gelu_backward(dy: Tensor, x: Tensor, w: Tensor, pre: Tensor, mask: Sequence[bool]) -> tuple[Tensor, ...]:
    d = torch.ops.aten.gelu_backward(dy, pre)
    dx, dw, db = (_rows(d) @ w).reshape(x.shape), _rows(d).t() @ _rows(x), _column_sum(d)
    return _if(mask[0], dx), _if(mask[1], dw), _if(mask[2], db)


def _swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = F.linear(x, w_gate), F.linear(x, w_up)
    return F.linear(F.silu(gate) * up, w_down), _if(save, gate), _if(save, up)


def _swiglu_mlp_backward(
    dy: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, gate: Tensor, up: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, ...]:
    rows, dy, gate, up = _rows(x), _rows(dy), _rows(gate), _rows(up)
    active, d_hidden = F.silu(gate), dy @ w_down
    d_up, d_gate = d_hidden * active, torch.ops.aten.silu_backward(d_hidden * up, gate)
    dx = (d_gate @ w_gate + d_up @ w_up).reshape(x.shape)
    grads = dx, d_gate.t() @ rows, d_up.t() @ rows, dy.t() @ (active * up)
    return tuple(_if(wanted, grad) for wanted, grad in zip(mask, grads, strict=True))


def _gelu_backward_bias(dy: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    d = torch.ops.aten.gelu_backward(dy, pre)
    return d, d.sum(tuple(range(d.dim() - 1)))


linear_gelu = _op("linear_gelu(Tensor x, Tensor w, Tensor? b, bool save) -> (Tensor, Tensor)", _linear_gelu)
linear_gelu_backward = _op(
    "linear_gelu_backward(Tensor dy, Tensor x, Tensor w, Tensor pre, bool[] mask) -> (Tensor, Tensor, Tensor)",
    _linear_gelu_backward,
)
swiglu_mlp = _op(
    "swiglu_mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, bool save) -> (Tensor, Tensor, Tensor)", _swiglu_mlp
)
swiglu_mlp_backward = _op(
    "swiglu_mlp_backward(Tensor dy, Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor gate, Tensor up, bool[] mask)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _swiglu_mlp_backward,
)
dgrad_add = _op("dgrad_add(Tensor dy, Tensor w, Tensor dx) -> Tensor", lambda dy, w, dx: dy @ w + dx)
gelu_backward_bias = _op("gelu_backward_bias(Tensor dy, Tensor pre) -> (Tensor, Tensor)", _gelu_backward_bias)
scaled_dgrad = _op("scaled_dgrad(Tensor dy, Tensor w, float s) -> Tensor", lambda dy, w, s: (s * dy) @ w)
