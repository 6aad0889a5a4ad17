"""TransformerEngine's linear + scale (+ add), with its constants, and beyond it 0-d and per-channel tensors as scales."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import te
import torch
import torch.nn.functional as F
from te import BF16, DTYPES, FP32, INPUTS, SCALES, WEIGHTS, Site, filled
from torch import Tensor

import fxfuse

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
scales = pytest.mark.parametrize("scale", SCALES)


def scaled(scale: float, dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, int], bias: bool = True, **more: object) -> Site:
    """``linear * scale``: in training the backward's scale goes into dgrad, wgrad and the bias gradient as well."""
    shapes = [filled(x, w[1]), w, (w[0],)][: 3 if bias else 2]
    grads = more.get("grads", (True,) * len(shapes))
    return te.site(
        f"{scale} {shapes} {grads}", lambda *t: F.linear(*t) * scale, shapes, dtype, *_fused_backward(scale, bias, *grads), **more
    )


def _fused_backward(scale: float, bias: bool, x: bool, w: bool, b: bool = False) -> tuple[str, ...]:
    if scale == 1.0:
        return ()  # no scale at all
    backward = {(True, True, True): "dgrad_wgrad_bias_scale", (True, True, False): "dgrad_wgrad_scale"}
    alone = {(True, False, False): "dgrad_scale", (False, True, False): "wgrad_scale"}
    name = {**backward, **alone}.get((x, w, b))
    return ("linear_scale", name) if name else ("linear_scale",)


def scaled_and_added(scale: float, dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, int], bias: bool) -> Site:
    """``linear * scale + residual``."""
    shapes = [filled(x, w[1]), w, filled(x, w[0]), (w[0],)][: 4 if bias else 3]
    forward, *backward = _fused_backward(scale, bias, True, True, bias) or ("linear",)
    return te.site(
        f"{scale} {shapes}", lambda x, w, r, b=None: F.linear(x, w, b) * scale + r, shapes, dtype, f"{forward}_add", *backward
    )


@scales
@dtypes
def test_constant_scale(dtype: torch.dtype, scale: float) -> None:
    te.check([scaled(scale, dtype, x, w) for x, w in ((INPUTS[1], WEIGHTS[1]), (INPUTS[2], WEIGHTS[0]), (INPUTS[3], WEIGHTS[2]))])


@scales
@dtypes
def test_constant_scale_and_residual(dtype: torch.dtype, scale: float) -> None:
    te.check([scaled_and_added(scale, dtype, x, (32, 32), bias) for x in ((32, -1), (4, 2, 4, -1)) for bias in (True, False)])


@pytest.mark.parametrize("scale", [-2.5, 0.0])
def test_every_subset_of_gradients(scale: float) -> None:
    biased = [scaled(scale, FP32, (4, 2, 4, -1), (64, 32), grads=g) for g in te.subsets(3)]
    te.check([*biased, *[scaled(scale, BF16, (4, 2, 4, -1), (64, 32), bias=False, grads=g) for g in te.subsets(2)]])


@dtypes
def test_inference(dtype: torch.dtype) -> None:
    def alone(scale: float) -> Site:
        names = () if scale == 1.0 else ("linear_scale",)
        return te.site(f"{scale}", lambda *t: F.linear(*t) * scale, [(5, 1, 32), (64, 32), (64,)], dtype, *names)

    def added(scale: float) -> Site:
        name = "linear_add" if scale == 1.0 else "linear_scale_add"
        shapes = [(5, 1, 32), (64, 32), (5, 1, 64), (64,)]
        return te.site(f"{scale}", lambda x, w, r, b: r + scale * F.linear(x, w, b), shapes, dtype, name)

    te.check([make(s) for s in SCALES for make in (alone, added)], train=False)


TENSOR_SCALES: dict[str, tuple[int, ...]] = {"zero_dim": (), "per_channel": (64,)}


@pytest.mark.parametrize("shape", TENSOR_SCALES.values(), ids=TENSOR_SCALES)
@dtypes
def test_tensor_scale_with_every_subset_of_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def alone(grads: tuple[bool, ...]) -> Site:
        shapes = [(5, 1, 32), (64, 32), shape, (64,)]
        return te.site(f"{grads}", lambda x, w, s, b: F.linear(x, w, b) * s, shapes, dtype, "linear_scale_tensor", grads=grads)

    te.check([alone(g) for g in te.subsets(4)])


@pytest.mark.parametrize("shape", TENSOR_SCALES.values(), ids=TENSOR_SCALES)
def test_tensor_scale_and_residual(shape: tuple[int, ...]) -> None:
    def added(dtype: torch.dtype, grads: tuple[bool, ...]) -> Site:
        shapes = [(5, 1, 32), (64, 32), shape, (5, 1, 64)]
        fn: Callable[..., Tensor] = lambda x, w, s, r: F.linear(x, w) * s + r  # noqa: E731
        return te.site(f"{dtype} {grads}", fn, shapes, dtype, "linear_scale_tensor_add", grads=grads)

    te.check([added(dtype, g) for dtype in (FP32, BF16) for g in te.subsets(4)])


def test_unscaled_output_is_an_extra_output_only_where_the_scale_is_trained() -> None:
    def fn(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return F.linear(x, w) * s

    shapes = [(16, 32), (64, 32), (64,)]
    for trained in (True, False):
        torch._dynamo.reset()
        report = te.check([te.site("", fn, shapes, FP32, "linear_scale_tensor", grads=(True, True, trained))])
        assert (", True)" in report.graphs[0].after) == trained  # the operator's last argument: keep the unscaled output


def test_scale_zero_keeps_nan_and_infinity() -> None:
    x = torch.ones(4, 8)
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
    w = torch.rand(3, 8)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w) * 0.0

    report = fxfuse.testing.assert_matches_eager(fn, [x, w.requires_grad_()])
    assert report.count("linear_scale") == 1


NO_SCALE = {
    "per_row": (lambda x, w, s: F.linear(x, w) * s, [(16, 32), (8, 32), (16, 1)]),
    "full_matrix": (lambda x, w, s: F.linear(x, w) * s, [(16, 32), (8, 32), (16, 8)]),
    "scales_the_input": (lambda x, w, s: F.linear(x * s, w), [(16, 32), (8, 32), (32,)]),
    "divided": (lambda x, w, s: F.linear(x, w) / s, [(16, 32), (8, 32), (8,)]),
}


@pytest.mark.parametrize("name", NO_SCALE)
def test_what_is_no_scale_is_not_fused(name: str) -> None:
    fn, shapes = NO_SCALE[name]
    te.check([te.site(name, fn, shapes, FP32)])
