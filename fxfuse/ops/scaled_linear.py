"""A linear whose operands are quantised as the current recipe says, forward and backward.

Shapes: x (..., K); w (N, K); b (N,) or None. In the forward both operands are quantised; in the backward the gradient too, and
``backward_override`` says otherwise: ``"high_precision"`` computes the gradients from x and w themselves, ``"dequantized"`` from
the numbers that the forward computed with, both with the gradient as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import RecipeError
from ..fp8_recipes import QuantizedRecipe
from ..recipe import Recipe, as_recipe, current_recipe, in_force
from .dense import check_linear, rows
from .quantize import Quantized, Scheme, dequantize, quantize, schemes
from .scaled_mm import scaled_mm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _recipe() -> QuantizedRecipe:
    recipe = current_recipe()
    if not isinstance(recipe, QuantizedRecipe):
        raise RecipeError(f"scaled_linear: {recipe!r} does not quantise; enter fxfuse.use_recipe(fxfuse.Float8CurrentScaling())")
    return recipe


def scaled_linear_refusal(x: Tensor, w: Tensor, recipe: Recipe) -> str | None:
    """Why a linear cannot be quantised as ``recipe`` says, or None."""
    if not isinstance(recipe, QuantizedRecipe):
        return f"{recipe!r} does not quantise"
    if x.dtype not in DTYPES or x.dtype != w.dtype:
        return f"x is {x.dtype} and w {w.dtype}; it takes bf16, fp16 or fp32, one dtype for both"
    for name, size in (("out_features", w.shape[0]), ("in_features", w.shape[1])):
        if not isinstance(size, int):
            return f"{name} is dynamic; {type(recipe).__name__} needs to know that it is a multiple of {recipe.alignment}"
        if size % recipe.alignment or size == 0:
            return f"{name} {size} is not a multiple of {recipe.alignment}, as {type(recipe).__name__} needs"
    return None


def scaled_linear_forward(x: Tensor, w: Tensor, b: Tensor | None, *, save: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The forward of a fusion: (..., N), and what ``scaled_linear_backward`` wants to have kept if ``save``."""
    recipe = _recipe()
    of_x, of_w, _ = schemes(recipe)
    flat = rows(x)
    xq, wq = quantize(flat, of_x), quantize(w, of_w)
    out = scaled_mm(xq, wq, of_x, of_w, x.dtype, b, _fast(recipe, "fprop")).view(*x.shape[:-1], w.shape[0])
    if not save or recipe.activation_memory == "recompute" or recipe.backward_override == "high_precision":
        return out, ()
    if recipe.backward_override == "dequantized":
        return out, (*xq, *wq)
    return out, (*_turned(flat, of_x, xq), *_turned(w, of_w, wq))


def _turned(x: Tensor, scheme: Scheme, q: Quantized | None = None) -> Quantized:
    """x^T quantised, from x quantised (q, if it is there) where the scheme is symmetric: else its blocks lie the other way."""
    if not scheme.symmetric:
        return quantize(x.t(), scheme)
    return (quantize(x, scheme) if q is None else q).t()


def scaled_linear_backward(
    grad: Tensor, x: Tensor, w: Tensor, b: Tensor | None, saved: Sequence[Tensor], mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of (x, w, b) for those in ``mask``; ``saved`` as the forward returned it."""
    recipe = _recipe()
    if recipe.activation_memory == "recompute":
        # Another spelling of the same numbers: quantising them again would else be a common subexpression with the forward's, and
        # the partitioner would keep that.
        x, w = x.neg().neg(), w.neg().neg()
    flat, g = rows(x), rows(grad)
    db = g.sum(0) if len(mask) > 2 and mask[2] else None
    if recipe.backward_override == "high_precision":
        dx, dw = g @ w if mask[0] else None, g.t() @ flat if mask[1] else None
    elif recipe.backward_override == "dequantized":
        of_x, of_w, _ = schemes(recipe)
        xq = Quantized(*saved[:2]) if saved else quantize(flat, of_x)
        wq = Quantized(*saved[2:]) if saved else quantize(w, of_w)
        dx = g @ dequantize(wq, of_w.block).to(w.dtype) if mask[0] else None
        dw = g.t() @ dequantize(xq, of_x.block).to(x.dtype) if mask[1] else None
    else:
        dx, dw = _quantized_gradients(g, flat, w, saved, mask, recipe)
    return None if dx is None else dx.view(x.shape), dw, db


def _quantized_gradients(
    g: Tensor, x: Tensor, w: Tensor, saved: Sequence[Tensor], mask: Sequence[bool], recipe: QuantizedRecipe
) -> tuple[Tensor | None, Tensor | None]:
    of_x, of_w, of_g = schemes(recipe)
    gq = quantize(g, of_g)
    dx = dw = None
    if mask[0]:
        wt = Quantized(*saved[2:]) if saved else _turned(w, of_w)
        dx = scaled_mm(gq, wt, of_g, of_w, x.dtype, None, _fast(recipe, "dgrad"))
    if mask[1]:
        xt = Quantized(*saved[:2]) if saved else _turned(x, of_x)
        dw = scaled_mm(_turned(g, of_g, gq), xt, of_g, of_x, w.dtype, None, _fast(recipe, "wgrad"))
    return dx, dw


def _fast(recipe: QuantizedRecipe, product: str) -> bool:
    """Whether a GPU may add up less exactly; recipes without such a field allow it in the forward, as TransformerEngine does."""
    params = getattr(recipe, f"fp8_gemm_{product}", None)
    return product == "fprop" if params is None else not params.use_split_accumulator


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, recipe: Recipe) -> Tensor:
        with in_force(recipe):
            out, saved = scaled_linear_forward(x, w, b, save=True)
        ctx.recipe = recipe
        ctx.save_for_backward(x, w, b, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w, b, *saved = ctx.saved_tensors
        with in_force(ctx.recipe):
            return (*scaled_linear_backward(grads[0], x, w, b, saved, ctx.needs_input_grad[:3]), None)


def scaled_linear(x: Tensor, w: Tensor, b: Tensor | None = None, recipe: Recipe | str | None = None) -> Tensor:
    """``x w^T + b`` with operands quantised; differentiable.

    Args:
        x, w, b: (..., K), (N, K), (N,) or None; bf16, fp16 or fp32, one dtype.
        recipe: how; the current recipe by default.

    Returns:
        (..., N) in x's dtype.

    Raises:
        RecipeError: the recipe does not quantise, or cannot take these dtypes or sizes.
        ValueError: shapes that do not fit.
    """
    check_linear("scaled_linear", x, w, b)
    chosen = current_recipe() if recipe is None else as_recipe(recipe, "scaled_linear")
    refused = scaled_linear_refusal(x, w, chosen)
    if refused is not None:
        raise RecipeError(f"scaled_linear: {refused}")
    return _ScaledLinear.apply(x, w, b, chosen)
