"""TransformerEngine's linear + bias + add: either order, every shape, dtype and requires_grad subset; what is no residual."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import te
import torch
import torch.nn.functional as F
from te import BF16, DTYPES, FP32, INPUTS, WEIGHTS, Site, filled
from torch import Tensor

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def after(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
    return F.linear(x, w, b) + r


def before(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
    return r + F.linear(x, w, b)


def torch_add(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
    return torch.add(F.linear(x, w, b), r, alpha=1)


def layer(
    fn: Callable[..., Tensor], dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, int], bias: bool, **more: object
) -> Site:
    """A linear with a residual of its own shape."""
    shapes = [filled(x, w[1]), w, filled(x, w[0])] + [(w[0],)] * bias
    fuses = () if len(x) == 1 and not bias else ("linear_add",)  # a vector added to a vector's linear is its bias
    return te.site(f"{fn.__name__} {dtype} {shapes} {more}", fn, shapes, dtype, *fuses, **more)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@dtypes
def test_shapes_forward_and_gradients(dtype: torch.dtype, bias: bool) -> None:
    te.check([layer((after, before, torch_add)[i % 3], dtype, x, w, bias) for i, w in enumerate(WEIGHTS) for x in INPUTS])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@dtypes
def test_one_product_in_either_order(dtype: torch.dtype, bias: bool) -> None:
    report = te.check([layer(fn, dtype, (32, -1), (32, 32), bias) for fn in (after, before, torch_add)])
    assert [f.directions for f in report.fused] == [("forward",)] * 3
    assert all(f.ops.count("aten.add.Tensor") == 1 for f in report.fused)


@pytest.mark.parametrize(("bias", "dtype"), [(True, FP32), (False, BF16)], ids=["bias", "no_bias"])
def test_every_subset_of_gradients(bias: bool, dtype: torch.dtype) -> None:
    te.check([layer(after, dtype, (5, 1, -1), (64, 32), bias, grads=g) for g in te.subsets(3 + bias)])


@dtypes
def test_inference(dtype: torch.dtype) -> None:
    te.check([layer(after, dtype, x, w, bias) for w in WEIGHTS for x in INPUTS for bias in (True, False)], train=False)


def test_addmm_with_a_full_matrix_is_a_residual() -> None:
    te.check([te.site("addmm", lambda r, x, w: torch.addmm(r, x, w.t()), [(16, 8), (16, 32), (8, 32)], BF16, "linear_add")])


NO_RESIDUAL = {
    "row": (lambda x, w, r: F.linear(x, w) + r, [(16, 32), (8, 32), (16, 1)]),
    "broadcast_over_rows": (lambda x, w, r: F.linear(x, w) + r, [(16, 32), (8, 32), (1, 8)]),
    "scalar": (lambda x, w, r: F.linear(x, w) + r, [(16, 32), (8, 32), ()]),
    "raises_the_rank": (lambda x, w, r: F.linear(x, w) + r, [(16, 32), (8, 32), (3, 16, 8)]),
    "alpha": (lambda x, w, r: torch.add(F.linear(x, w), r, alpha=2), [(16, 32), (8, 32), (16, 8)]),
    "subtraction": (lambda x, w, r: F.linear(x, w) - r, [(16, 32), (8, 32), (16, 8)]),
    "beta": (lambda x, w, r: torch.addmm(r, x, w.t(), beta=0.5), [(16, 32), (8, 32), (16, 8)]),
    "minus_one": (lambda x, w, r: torch.add(F.linear(x, w), r, alpha=-1), [(16, 32), (8, 32), (16, 8)]),
    "number": (lambda x, w, r: (F.linear(x, w) + 1.5).relu() + r, [(16, 32), (8, 32), (16, 8)]),
}


@pytest.mark.parametrize("name", NO_RESIDUAL)
def test_what_is_no_residual_is_not_fused(name: str) -> None:
    fn, shapes = NO_RESIDUAL[name]
    te.check([te.site(name, fn, shapes, FP32)])


def test_broadcast_residual_is_a_near_miss_with_its_shape() -> None:
    report = te.check([te.site("", lambda x, w, r: F.linear(x, w) + r, [(16, 32), (8, 32), (16, 1)], FP32)])
    assert [m.reason for m in report.missed if m.name == "linear_add"] == [
        "the residual is (16, 1) torch.float32, the linear (16, 8) torch.float32"
    ]


def test_activation_takes_the_linear_and_the_residual_stays() -> None:
    shapes = [(16, 32), (8, 32), (16, 8), (8,)]
    te.check([te.site("gelu", lambda x, w, r, b: F.gelu(F.linear(x, w, b)) + r, shapes, BF16, "linear_gelu")])
