"""Under a recipe that quantises, every linear with sizes that the recipe takes; what is around it is left to Inductor."""

from __future__ import annotations

import torch.nn.functional as F

import fxfuse


@fxfuse.register_forward_backward_fusion(
    example={"x": "m k", "w": "n k", "b": "n"}, recipes=["quantized"], check_on_register=False
)
def scaled_linear(x, w, b=None):
    return F.linear(x, w, b)


@scaled_linear.check
def _(m):
    refused = fxfuse.ops.scaled_linear_refusal(m.x, m.w, m.recipe)
    return m.reject(refused) if refused else None


@scaled_linear.forward
def _(x, w, b, *, save):
    return fxfuse.ops.scaled_linear_forward(x, w, b, save=save)


@scaled_linear.backward
def _(grad, x, w, b, *saved, mask):
    return fxfuse.ops.scaled_linear_backward(grad, x, w, b, saved, mask)
