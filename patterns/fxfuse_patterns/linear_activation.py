"""Linear, bias or none, activation: one fused forward; in training the activation's backward and the bias gradient too."""

from __future__ import annotations

import torch.nn.functional as F

import fxfuse

from .activations import ACTIVATIONS, Spelling, spellings
from .linears import linear_gradients

EXAMPLE = {"x": "m k", "w": "n k", "b": "n"}


def register(kind: str, spelling: Spelling) -> None:
    """Register ``linear_<kind>``, or a form of it."""

    @fxfuse.register_forward_backward_fusion(
        name=f"linear_{kind}{spelling.form}",
        example=spelling.example(EXAMPLE),
        requires=spelling.needs,
        check_on_register=False,
    )
    def linear_activation(x, w, b=None):
        return spelling.function(F.linear(x, w, b))

    @linear_activation.forward
    def _(x, w, b, *, save):
        out, kept = fxfuse.ops.linear_act(x, w, b, kind, save)
        return out, (kept,) if save else ()

    @linear_activation.backward
    def _(grad, x, w, b, kept, *, mask):
        d, db = fxfuse.ops.act_backward(grad, kept, kind, mask[2])
        return (*linear_gradients(d, x, w, mask[:2]), db)


for _kind in ACTIVATIONS:
    for _spelling in spellings(_kind):
        register(_kind, _spelling)
