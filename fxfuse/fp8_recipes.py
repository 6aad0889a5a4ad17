"""Recipes that quantise the operands of matrix products, with the names, fields and defaults of TransformerEngine's.

``fp8_format="E4M3"`` quantises everything to e4m3 (largest value 448), ``"HYBRID"`` gradients to e5m2 (57344); see
Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433. ``ops/quantize.py`` has the arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch

from .errors import RecipeError
from .recipe import Recipe

FORMATS = ("E4M3", "HYBRID")


@dataclasses.dataclass(frozen=True)
class MMParams:
    """How a matrix product of quantised operands accumulates.

    Args:
        use_split_accumulator: add up in full fp32. False allows the GPU its faster, less exact accumulation.
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        if type(self.use_split_accumulator) is not bool:
            raise RecipeError(f"MMParams(use_split_accumulator={self.use_split_accumulator!r}): it takes True or False")


@functools.cache
def capability() -> tuple[int, int] | None:
    """Compute capability of the current GPU; None on a machine without one, where references run."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QuantizedRecipe(Recipe):
    """What the quantised recipes share. Regions whose sizes a recipe cannot take stay in high precision.

    ``fp8_dpa`` and ``fp8_mha`` of TransformerEngine, attention in FP8, are there for code that is ported, and take False only.
    """

    fp8_dpa: bool = False
    fp8_mha: bool = False

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Recipe.CHOICES,
        "fp8_format": FORMATS,
        "fp8_dpa": (False,),
        "fp8_mha": (False,),
    }
    NEEDS: ClassVar[tuple[int, int]] = (8, 9)
    """Compute capability, and its name."""
    CHIP: ClassVar[str] = "an Ada or Hopper GPU"
    alignment: ClassVar[int] = 16
    """What the widths of a weight must be multiples of."""

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name.startswith("fp8_gemm_") and not isinstance(value, MMParams):
            raise self.wrong(name, value, "an MMParams")
        if name == "margin" and (type(value) is not int or not -64 <= value <= 64):
            raise self.wrong(name, value, "an integer from -64 to 64")

    @property
    def quantized(self) -> bool:
        return True

    def unsupported(self) -> str | None:
        has = capability()
        if has is None or has >= self.NEEDS:
            return None
        return f"it needs compute capability {self.NEEDS[0]}.{self.NEEDS[1]} ({self.CHIP}), this GPU has {has[0]}.{has[1]}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Float8CurrentScaling(QuantizedRecipe):
    """One scale a tensor, from its largest magnitude in this very call.

    Args:
        use_power_2_scales: round scales down to powers of two.
        fp8_format: ``"HYBRID"`` or ``"E4M3"``.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: how the forward product and those of the gradients accumulate.

    The other arguments are those of ``Recipe``.
    """

    use_power_2_scales: bool = False
    fp8_format: str = "HYBRID"
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {**QuantizedRecipe.CHOICES, "use_power_2_scales": (False, True)}
    SHORT_NAME: ClassVar[str] = "fp8_current"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Float8BlockScaling(QuantizedRecipe):
    """A scale for each 1x128 values of activations and gradients, for each 128x128 values of weights (DeepSeek-V3,
    arXiv:2412.19437, section 3.3).

    Args:
        use_f32_scales: any fp32 scale; by default scales are powers of two.
        fp8_format: ``"E4M3"`` or ``"HYBRID"``.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1x128, 2 for 128x128. Of the operands of one
            product at most one may have 2.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: must accumulate in full fp32.

    The other arguments are those of ``Recipe``.
    """

    use_f32_scales: bool = False
    fp8_format: str = "E4M3"
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **QuantizedRecipe.CHOICES,
        "use_f32_scales": (False, True),
        "x_block_scaling_dim": (1, 2),
        "w_block_scaling_dim": (1, 2),
        "grad_block_scaling_dim": (1, 2),
        **dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), (MMParams(use_split_accumulator=True),)),
    }
    SHORT_NAME: ClassVar[str] = "fp8_block"
    NEEDS: ClassVar[tuple[int, int]] = (9, 0)
    CHIP: ClassVar[str] = "a Hopper GPU"
    alignment: ClassVar[int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = {n: getattr(self, f"{n}_block_scaling_dim") for n in ("x", "w", "grad")}
        squares = [f"{n}_block_scaling_dim" for n, dim in dims.items() if dim == 2]
        if len(squares) > 1:
            raise RecipeError(f"{type(self).__name__}: {' and '.join(squares)} are 2; two 128x128 operands cannot be multiplied")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DelayedScaling(QuantizedRecipe):
    """One scale a tensor, from its largest magnitudes in earlier steps; see ``fxfuse.amax`` for the history.

    Args:
        margin: scales are divided by ``2 ** margin``.
        fp8_format: ``"HYBRID"`` or ``"E4M3"``.
        amax_history_len: how many steps are remembered.
        amax_compute_algo: ``"max"`` over the history or its ``"most_recent"`` entry. Functions are not taken: they cannot be
            compared, and a recipe is part of a plan's key.
        scaling_factor_compute_algo: None only, for the same reason.
        reduce_amax: take the largest over all ranks of ``torch.distributed``'s default group.

    The other arguments are those of ``Recipe``; ``backward_override`` must be None.
    """

    margin: int = 0
    fp8_format: str = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **QuantizedRecipe.CHOICES,
        "amax_compute_algo": ("max", "most_recent"),
        "scaling_factor_compute_algo": (None,),
        "reduce_amax": (False, True),
        "backward_override": (None,),
    }
    SHORT_NAME: ClassVar[str] = "fp8_delayed"

    def _check(self, name: str, value: Any) -> None:
        super()._check(name, value)
        if name == "amax_history_len" and (type(value) is not int or value < 1):
            raise self.wrong(name, value, "a positive integer")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _BlackwellRecipe(QuantizedRecipe):
    """A recipe for Blackwell's tensor cores; elsewhere its numbers can be emulated, without any gain in speed."""

    emulate: bool = False

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {**QuantizedRecipe.CHOICES, "emulate": (False, True)}
    NEEDS: ClassVar[tuple[int, int]] = (10, 0)
    CHIP: ClassVar[str] = "a Blackwell GPU"

    def unsupported(self) -> str | None:
        if self.emulate:
            return None
        has = capability()
        if has is not None and has >= self.NEEDS:
            return f"no kernel for it is in this version; {type(self).__name__}(emulate=True) computes its numbers"
        needs = super().unsupported() or f"it needs {self.CHIP}, this machine has no GPU"
        return f"{needs}; {type(self).__name__}(emulate=True) computes its numbers, slowly"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXFP8BlockScaling(_BlackwellRecipe):
    """A power-of-two scale for each 1x32 values (OCP Microscaling Formats, version 1.0).

    Args:
        margin: scales are divided by ``2 ** margin``.
        fp8_format: ``"E4M3"`` or ``"HYBRID"``.
        emulate: compute its numbers without the hardware.

    The other arguments are those of ``Recipe``.
    """

    margin: int = 0
    fp8_format: str = "E4M3"

    SHORT_NAME: ClassVar[str] = "mxfp8"
    alignment: ClassVar[int] = 32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NVFP4BlockScaling(_BlackwellRecipe):
    """e2m1 values with an e4m3 scale for each 16 of them and an fp32 scale a tensor; weights in 16x16 blocks by default.

    Args:
        disable_2d_quantization: blocks of 1x16 for weights too.
        disable_rht, disable_stochastic_rounding: the random Hadamard transform and stochastic rounding are not emulated: both
            take True only, which is their default here.
        emulate: compute its numbers without the hardware.

    The other arguments are those of ``Recipe``.
    """

    disable_rht: bool = True
    disable_stochastic_rounding: bool = True
    disable_2d_quantization: bool = False

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_BlackwellRecipe.CHOICES,
        "disable_rht": (True,),
        "disable_stochastic_rounding": (True,),
        "disable_2d_quantization": (False, True),
    }
    SHORT_NAME: ClassVar[str] = "nvfp4"
