"""Experts whose products have quantised operands, as the current recipe says.

Operands are rounded to the numbers that the recipe's format and scales can say, and multiplied in their own dtype with fp32
accumulation: with scales that are powers of two (``Float8BlockScaling`` by default) a 16-bit float holds every such number, so
this is the quantised product; other scales are rounded to the dtype once more. One scale serves all experts where the recipe has
one a tensor. In a weight's gradient, blocks of rows do not end where an expert's rows do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fp8_recipes import DelayedScaling, QuantizedRecipe
from ..recipe import Recipe, current_recipe
from .grouped_experts import Experts
from .grouped_mm import used
from .quantize import Scheme, dequantize, quantize, schemes


def scaled_experts_refusal(recipe: Recipe, hidden: Any, inner: Any) -> str | None:
    """Why experts of these widths cannot be quantised as ``recipe`` says, or None."""
    if not isinstance(recipe, QuantizedRecipe):
        return f"{recipe!r} does not quantise"
    if isinstance(recipe, DelayedScaling):
        return "DelayedScaling is for dense linears; the experts stay in high precision"
    for name, size in (("hidden width", hidden), ("intermediate width", inner)):
        if not isinstance(size, int) or size % recipe.alignment or size == 0:
            return f"{name} {size} is not a multiple of {recipe.alignment}, as {type(recipe).__name__} needs"
    return None


class ScaledExperts(Experts):
    """``Experts`` under a recipe that quantises. Its products are traced, not called as operators."""

    __slots__ = ()

    def product(self, rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        of_x, of_w, _ = self._schemes()
        return super().product(_rounded(_defined(rows, ends), of_x), _rounded_weight(w, of_w), ends)

    def dgrad(self, d: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        _, of_w, of_g = self._schemes()
        if self._override == "high_precision":
            return super().dgrad(d, w, ends)
        if self._override == "dequantized":
            return super().dgrad(d, _rounded_weight(w, of_w), ends)
        turned = _rounded_weight(w.transpose(1, 2), of_w).transpose(1, 2)
        return super().dgrad(_rounded(_defined(d, ends), of_g), turned, ends)

    def wgrad(self, d: Tensor, rows: Tensor, ends: Tensor, w: Tensor) -> Tensor:
        of_x, _, of_g = self._schemes()
        if self._override == "high_precision":
            return super().wgrad(d, rows, ends, w)
        rows = _defined(rows, ends)
        if self._override == "dequantized":
            return super().wgrad(d, _rounded(rows, of_x), ends, w)
        along = _rounded(_defined(d, ends).t(), of_g).t(), _rounded(rows.t(), of_x).t()
        return super().wgrad(*along, ends, w)

    @staticmethod
    def _schemes() -> tuple[Scheme, Scheme, Scheme]:
        recipe = current_recipe()
        assert isinstance(recipe, QuantizedRecipe)
        return schemes(recipe)

    @property
    def _override(self) -> str | None:
        return current_recipe().backward_override


def _defined(rows: Tensor, ends: Tensor) -> Tensor:
    """Rows (S, M) with zeros past ``ends[-1]``: what lies there must not scale the others."""
    return torch.where(used(ends, torch.arange(rows.shape[0], device=rows.device)), rows, 0)


def _rounded(t: Tensor, scheme: Scheme) -> Tensor:
    """Numbers that the format can say, in blocks along the columns of t (R, C)."""
    return dequantize(quantize(t, scheme), scheme.block).to(t.dtype)


def _rounded_weight(w: Tensor, scheme: Scheme) -> Tensor:
    """The same of each expert's matrix; blocks do not reach across experts, as widths are multiples of a block's."""
    return _rounded(w.flatten(0, 1), scheme).view(w.shape)
