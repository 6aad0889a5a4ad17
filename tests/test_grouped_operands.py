"""How the operands of ``torch._grouped_mm`` lie in memory when Inductor has compiled what computes them.

On a GPU the dimension along which a product's groups follow each other must not be the contiguous one: its pieces have any
length. On a CPU every layout works, so the layouts are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import test_scaled_experts
import torch
from moe_checks import ALIGNED, layouts
from reference_moe import BF16, Block
from torch import Tensor

from fxfuse.ops import grouped_mlp
from fxfuse.ops.grouped_mm import _has_aligned_strides, grouped_mm, reference_grouped_mm

pytestmark = [
    pytest.mark.inductor,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo: ``autograd.Function``
]


@pytest.fixture
def products() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The operands of every product that runs."""
    found: list[tuple[Tensor, Tensor]] = []

    def product(a: Tensor, b: Tensor, offs: Tensor, *_: Any) -> Tensor:
        found.append((a, b))
        result = reference_grouped_mm(a, b, offs)
        lines = result.new_empty(*result.shape[:-1], -(-result.shape[-1] // 8) * 8)  # as long as torch lays them out
        return lines[..., : result.shape[-1]].copy_(result)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_grouped_mm", product, "CPU")
        yield found


def assert_fit_for_a_gpu(products: list[tuple[Tensor, Tensor]]) -> None:
    for a, b in products:
        assert _has_aligned_strides(a) and _has_aligned_strides(b), (a.stride(), b.stride())
        if b.dim() == 2:
            assert a.stride(1) != 1 and b.stride(0) != 1, (a.stride(), b.stride())


@layouts
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("first", [False, True], ids=["weights after", "weights first"])
def test_of_a_block(products: list[tuple[Tensor, Tensor]], layout: dict[str, Any], columns: bool, first: bool) -> None:
    block = Block(dtype=BF16, tokens=37, weights_first=first, **ALIGNED, **layout)
    args = block.inputs()
    if columns:
        args = [a.detach().mT.contiguous().mT.requires_grad_() if a is not None and a.dim() == 3 else a for a in args]
    out = torch.compile(block.of(grouped_mlp), backend="fxfuse", dynamic=False)(*args)
    torch.autograd.grad(out, [a for a in args if a is not None and a.requires_grad], torch.randn_like(out))
    assert len(products) >= 6
    assert_fit_for_a_gpu(products)


@pytest.mark.parametrize("backend", ["none", "fxfuse"])
@pytest.mark.parametrize("d_turned", [False, True])
@pytest.mark.parametrize("x_turned", [False, True])
def test_of_sums_over_rows_in_every_layout(
    products: list[tuple[Tensor, Tensor]], x_turned: bool, d_turned: bool, backend: str
) -> None:
    """Whether an operand's rows or its columns are contiguous when the product is asked for."""

    def summed(x: Tensor, d: Tensor, ends: Tensor) -> Tensor:
        x, d = x * 2, d + 1
        x, d = x.t().contiguous().t() if x_turned else x, d.t().contiguous().t() if d_turned else d
        return grouped_mm(x.t(), d, ends)

    x, d = torch.randn(40, 48).to(BF16), torch.randn(40, 16).to(BF16)
    ends = torch.tensor([5, 5, 39], dtype=torch.int32)
    run = summed if backend == "none" else torch.compile(summed, backend=backend)
    got = run(x, d, ends)
    torch.testing.assert_close(got, reference_grouped_mm((x * 2).t(), d + 1, ends), rtol=2e-2, atol=2e-2)
    assert len(products) == 1
    assert_fit_for_a_gpu(products)


@pytest.mark.parametrize("turned", [False, True])
def test_of_operands_that_are_yet_to_be_computed(products: list[tuple[Tensor, Tensor]], turned: bool) -> None:
    """A sum over rows of pointwise results, one of them transposed; and a weight that is cast on the way."""

    def products_of(x: Tensor, d: Tensor, w: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        w = w.to(BF16)
        return grouped_mm((x * 2).t(), d + 1, ends), grouped_mm(d, w.transpose(1, 2) if turned else w, ends)

    x, d = torch.randn(37, 40).to(BF16), torch.randn(37, 16).to(BF16)
    w = torch.randn(3, 9, 16) if turned else torch.randn(3, 16, 24)
    ends = torch.tensor([5, 5, 37], dtype=torch.int32)
    got = torch.compile(products_of, backend="fxfuse")(x, d, w, ends)
    for g, e in zip(got, products_of(x, d, w, ends), strict=True):
        torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2)
    assert_fit_for_a_gpu(products)


@pytest.mark.parametrize("name", test_scaled_experts.RECIPES)
def test_of_experts_that_quantise(products: list[tuple[Tensor, Tensor]], name: str) -> None:
    """They round along the rows for the weights' gradients: what they multiply was computed transposed."""
    tokens, experts = 80, test_scaled_experts.EXPERTS
    ids = torch.rand(tokens, experts).topk(test_scaled_experts.CHOSEN).indices
    args = test_scaled_experts.tensors("masked", tokens)
    test_scaled_experts.fused("masked", args, ids, test_scaled_experts.RECIPES[name], lower="auto")
    assert len(products) == 6
    assert_fit_for_a_gpu(products)
