"""Quantised matrices: what the numbers are, against definitions written out value by value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fxfuse
from fxfuse.ops.quantize import LARGEST, Scheme, _to_e2m1, amax, dequantize, quantize, schemes

RECIPES = {
    "current": fxfuse.Float8CurrentScaling(),
    "current, powers of 2": fxfuse.Float8CurrentScaling(use_power_2_scales=True),
    "block": fxfuse.Float8BlockScaling(),
    "block, fp32 scales": fxfuse.Float8BlockScaling(use_f32_scales=True),
    "block, hybrid": fxfuse.Float8BlockScaling(fp8_format="HYBRID"),
    "block, lines of weights": fxfuse.Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": fxfuse.MXFP8BlockScaling(emulate=True),
    "nvfp4": fxfuse.NVFP4BlockScaling(emulate=True),
    "nvfp4, lines of weights": fxfuse.NVFP4BlockScaling(emulate=True, disable_2d_quantization=True),
}
SCHEMES = {f"{name}: {role}": s for name, r in RECIPES.items() for role, s in zip("xwg", schemes(r), strict=True)}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-2}
"""Half of the distance between neighbouring numbers, relative to the smaller of them, where exponents suffice."""
LEAST = {"e4m3": 2.0**-10, "e5m2": 2.0**-17, "e2m1": 0.25}
"""Half of the least number above zero."""


def random(rows: int, columns: int, dtype: torch.dtype = torch.float32, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp2(torch.randn(rows, columns, generator=generator) * spread)).to(dtype)


def blocks_of(x: Tensor, block: tuple[int, ...]) -> list[tuple[slice, slice]]:
    rows, columns = block or (max(x.shape[0], 1), max(x.shape[1], 1))
    return [
        (slice(i, i + rows), slice(j, j + columns)) for i in range(0, x.shape[0], rows) for j in range(0, x.shape[1], columns)
    ]


@every_scheme
@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 33), (128, 128), (130, 257), (0, 16), (16, 384)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_as_near_as_the_format_allows(scheme: Scheme, rows: int, columns: int, dtype: torch.dtype) -> None:
    x = random(rows, columns, dtype, spread=0.5)
    q = quantize(x, scheme)
    back = dequantize(q, scheme.block)
    assert back.shape == x.shape and q.scale.dtype is back.dtype is torch.float32
    assert q.values.dtype is (torch.float8_e5m2 if scheme.format == "e5m2" else torch.float8_e4m3fn)
    for place in blocks_of(x, scheme.block):
        true, got = x[place].double(), back[place].double()
        if not true.numel():
            continue
        slack = 1 + 2.0**-20 + (0.07 if scheme.format == "e2m1" else 0)  # an nvfp4 block's own scale has three bits
        scale = true.abs().max().item() / LARGEST[scheme.format] * (2 if scheme.power_of_2 else 1)
        allowed = torch.maximum(true.abs() * STEP[scheme.format], torch.tensor(LEAST[scheme.format] * scale).double()) * slack
        if scheme.format == "e2m1":
            allowed = allowed + true.abs() * 2.0**-4  # what the rounded scale makes the largest values overflow by
        assert ((true - got).abs() <= allowed).all()


@every_scheme
def test_the_largest_value_uses_the_format(scheme: Scheme) -> None:
    x = random(256, 256)
    values = quantize(x, scheme).values.float().abs()
    for place in blocks_of(x, scheme.block):
        largest = values[place].max().item()
        assert LARGEST[scheme.format] / (2.2 if scheme.power_of_2 or scheme.format == "e2m1" else 1.01) <= largest
        assert largest <= LARGEST[scheme.format]


@every_scheme
def test_powers_of_2(scheme: Scheme) -> None:
    scale = quantize(random(256, 256), scheme).scale
    assert bool((torch.frexp(scale).mantissa == 0.5).all()) == (scheme.power_of_2 or scale.numel() == 0)


@every_scheme
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_made_finite(scheme: Scheme, value: float) -> None:
    x = random(130, 257)
    x[5, 7] = value
    back = dequantize(quantize(x, scheme), scheme.block)
    assert not back[5, 7].isfinite()
    assert back.isfinite().sum() == back.numel() - 1  # and nothing else is touched
    if scheme.block:
        far = dequantize(quantize(x.clone().fill_(0.5), scheme), scheme.block)
        assert torch.equal(far, torch.full_like(far, 0.5))


@every_scheme
def test_zeros_and_tiny_numbers(scheme: Scheme) -> None:
    zeros = quantize(torch.zeros(3, 40), scheme)
    assert not zeros.values.float().any() and zeros.scale.isfinite().all()
    assert torch.equal(dequantize(zeros, scheme.block), torch.zeros(3, 40))
    tiny = dequantize(quantize(torch.full((3, 40), 1e-42), scheme), scheme.block)
    assert tiny.isfinite().all() and (tiny <= 2e-42).all()


@every_scheme
def test_transposed_matrix_of_a_symmetric_scheme(scheme: Scheme) -> None:
    x = random(130, 257)
    assert scheme.symmetric == (scheme.block == () or scheme.block[0] == scheme.block[1])
    if scheme.symmetric:
        turned, again = quantize(x, scheme).t(), quantize(x.t(), scheme)
        assert torch.equal(turned.values.float(), again.values.float()) and torch.equal(turned.scale, again.scale)


def test_e2m1_rounds_to_the_nearest_of_its_numbers_ties_to_even() -> None:
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.arange(-768, 769) / 128
    values = _to_e2m1(x)
    distance = (x.abs()[:, None] - numbers).abs()
    nearest = distance == distance.min(1, keepdim=True).values
    even = nearest & (torch.arange(8) % 2 == 0)
    want = torch.where(nearest.sum(1) > 1, even.int().argmax(1), nearest.int().argmax(1))
    assert torch.equal(values.abs(), numbers[want])
    assert torch.equal(values.sign() * (values != 0), x.sign() * (values != 0))
    as_e4m3 = torch.tensor(numbers.tolist()).to(torch.float8_e4m3fn)
    assert torch.equal(as_e4m3.float(), numbers)  # so they can be kept as that


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_scale_of_any_tensor_is_its_largest_magnitude_over_the_formats(values: list[float], power_of_2: bool) -> None:
    x = torch.tensor([values])
    scale = quantize(x, Scheme("e4m3", (), power_of_2)).scale.double().item()
    exact = x.abs().max().double().item() / 448
    if exact < 2.0**-126:
        return
    assert exact * (1 - 1e-6) <= scale <= exact * ((2 if power_of_2 else 1) + 1e-6)


def test_amax_of_no_rows_is_zero() -> None:
    assert amax(torch.empty(0, 7)).item() == 0 and amax(torch.tensor([[-3.0, 2.0]])).item() == 3
