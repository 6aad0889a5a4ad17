"""Fusions that only tests register: identities, and pairs of forward and backward over opaque ops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import reference_ops
import torch.nn.functional as F
from torch import Tensor

import fxfuse


@contextlib.contextmanager
def unregistered_at_exit(*fusions: fxfuse.Fusion) -> Iterator[tuple[fxfuse.Fusion, ...]]:
    """The fusions live as long as the block."""
    try:
        yield fusions
    finally:
        for fusion in fusions:
            fusion.unregister()


def identity(pattern: Callable[..., Any], **options: Any) -> fxfuse.Fusion:
    """A joint fusion ``identity_<name>`` that puts the pattern itself back: whatever differs comes from the splice."""
    name = f"identity_{pattern.__name__}"
    fusion = fxfuse.register_forward_backward_fusion(name=name, check_on_register=False, **options)(pattern)
    fusion.rewrite(pattern)
    return fusion


def linear_gelu() -> fxfuse.Fusion:
    """``local_linear_gelu``: linear + GELU that keeps the pre-activation for its backward."""

    @fxfuse.register_forward_backward_fusion(name="local_linear_gelu", check_on_register=False)
    def fusion(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    @fusion.forward
    def _(x: Tensor, w: Tensor, b: Tensor | None = None, *, save: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, pre = reference_ops.linear_gelu(x, w, b, save)
        return out, ((pre,) if save else ())

    @fusion.backward
    def _(grad: Tensor, x: Tensor, w: Tensor, b: Tensor | None, pre: Tensor, *, mask: Sequence[bool]) -> Sequence[Tensor]:
        return reference_ops.linear_gelu_backward(grad, x, w, pre, list(mask))

    return fusion


def swiglu_mlp() -> fxfuse.Fusion:
    """``local_swiglu_mlp``: a whole gated MLP, down projection included, that keeps gate and up."""

    @fxfuse.register_forward_backward_fusion(name="local_swiglu_mlp", check_on_register=False)
    def fusion(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)

    @fusion.forward
    def _(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, *, save: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, gate, up = reference_ops.swiglu_mlp(x, w_gate, w_up, w_down, save)
        return out, ((gate, up) if save else ())

    @fusion.backward
    def _(
        grad: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, gate: Tensor, up: Tensor, *, mask: Sequence[bool]
    ) -> Sequence[Tensor]:
        return reference_ops.swiglu_mlp_backward(grad, x, w_gate, w_up, w_down, gate, up, list(mask))

    return fusion


def linear_gelu_and_pre() -> fxfuse.Fusion:
    """``local_linear_gelu_and_pre``: forward only; the pre-activation is a second output for whoever else reads it."""

    @fxfuse.register_forward_fusion(name="local_linear_gelu_and_pre", extra=1, check_on_register=False)
    def fusion(x: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        pre = F.linear(x, w, b)
        return F.gelu(pre), pre

    @fusion.rewrite
    def _(x: Tensor, w: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, pre = reference_ops.linear_gelu(x, w, b, True)
        return out, pre

    return fusion
