"""The product of quantised matrices: its definition, and the vendor's product as far as a CPU goes: legality and layouts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

import fxfuse
from fxfuse import choose, fp8_recipes
from fxfuse.ops import scaled_mm as products
from fxfuse.ops.quantize import Quantized, Scheme, dequantize, quantize, schemes
from fxfuse.ops.scaled_mm import LINE, SQUARE, scaled_mm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = {
    "current": fxfuse.Float8CurrentScaling(),
    "block": fxfuse.Float8BlockScaling(),
    "block, fp32 scales": fxfuse.Float8BlockScaling(use_f32_scales=True),
    "block, hybrid": fxfuse.Float8BlockScaling(fp8_format="HYBRID"),
    "block, lines of weights": fxfuse.Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": fxfuse.MXFP8BlockScaling(emulate=True),
    "nvfp4": fxfuse.NVFP4BlockScaling(emulate=True),
    "nvfp4, lines of weights": fxfuse.NVFP4BlockScaling(emulate=True, disable_2d_quantization=True),
}


def random(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=generator)
    return x * torch.exp2(torch.randn(rows, columns, generator=generator) * 3)


def exact(q: Quantized, scheme: Scheme) -> Tensor:
    """The numbers in fp64, each value times the scale of its block."""
    rows, columns = scheme.block or (max(q.values.shape[0], 1), max(q.values.shape[1], 1))
    scale = q.scale.view(1, 1) if not scheme.block else q.scale
    spread = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return q.values.double() * spread[: q.values.shape[0], : q.values.shape[1]]


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert (got.double() - want.double()).norm() <= tolerance * want.double().norm()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("m, n, k", [(1, 16, 128), (130, 144, 257), (0, 16, 32), (64, 128, 384)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_product_is_the_quantised_operands(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    of_x, of_w, _ = schemes(RECIPES[name])
    a, b, bias = quantize(random(m, k), of_x), quantize(random(n, k), of_w), random(1, n)[0].to(dtype)
    got = scaled_mm(a, b, of_x, of_w, dtype, bias)
    terms = exact(a, of_x), exact(b, of_w)
    want = terms[0] @ terms[1].t() + bias.double()
    size = terms[0].abs() @ terms[1].abs().t() + bias.double().abs()
    step = {FP32: 2.0**-18, BF16: 2.0**-8}[dtype]
    assert got.dtype is dtype and ((got.double() - want).abs() <= step * want.abs() + 2.0**-18 * size).all()


@pytest.mark.parametrize("gradient", [False, True])
def test_product_is_at_least_as_exact_as_torchs_own(gradient: bool) -> None:
    of_x, of_w, of_g = schemes(fxfuse.Float8CurrentScaling())
    one = of_g if gradient else of_x
    a, b = quantize(random(64, 256), one), quantize(random(48, 256), of_w)
    want = exact(a, one) @ exact(b, of_w).t()
    mine = (scaled_mm(a, b, one, of_w, FP32).double() - want).norm()
    try:
        theirs = torch.ops.aten._scaled_mm(a.values, b.values.t(), a.scale, b.scale, out_dtype=FP32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"torch has no such product here: {error}")
    assert mine <= (theirs.double() - want).norm() + 1e-6 * want.norm()


# ------------------------------------------------------------------------------------------------ the vendor's: where it is legal


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_recipes, "capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def refusal(
    name: str, dtype: torch.dtype = BF16, *, bias: bool = False, gradient: bool = False, n: int = 128, w: Any = None
) -> str | None:
    of_x, of_w, of_g = schemes(fxfuse.Float8BlockScaling(**w) if w else RECIPES[name])
    one = of_g if gradient else of_x
    a, b = quantize(random(8, 128), one), quantize(random(n, 128), of_w)
    return products._no_vendor_product(
        a=a.values,
        b=b.values,
        bias=torch.zeros(n) if bias else None,
        a_block=one.block,
        b_block=of_w.block,
        dtype=dtype,
        fast=False,
    )


@pytest.mark.usefixtures("hopper")
def test_what_the_vendors_product_takes() -> None:
    for name in ("current", "block", "block, fp32 scales", "block, lines of weights"):
        for dtype in (BF16, FP16, FP32):
            for gradient in (False, True):
                assert refusal(name, dtype, gradient=gradient) is None
        assert refusal(name, BF16, bias=True) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "name, how, text",
    [
        ("block", dict(dtype=FP32, bias=True), "adds no bias to an fp32 result"),
        ("current", dict(n=120), "width is not a multiple of 16"),
        ("mxfp8", {}, "does not multiply blocks of 1x32 with blocks of 1x32"),
        ("nvfp4", {}, "does not multiply blocks of 1x16 with blocks of 16x16"),
        ("block", dict(gradient=True, w=dict(fp8_format="HYBRID")), "takes e4m3 only"),
    ],
)
def test_what_it_refuses(name: str, how: dict[str, Any], text: str) -> None:
    assert text in (refusal(name, **how) or "")


@pytest.mark.parametrize(
    "capability, cuda, text",
    [
        (None, "13.0", "on Hopper GPUs only"),
        ((8, 9), "13.0", "on Hopper GPUs only"),
        ((10, 0), "13.0", "on Hopper GPUs only"),
        ((9, 0), "12.8", "since CUDA 12.9, this torch was built with 12.8"),
        ((9, 0), None, "since CUDA 12.9, this torch was built with None"),
    ],
)
def test_what_the_machine_refuses(capability: Any, cuda: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_recipes, "capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert text in (refusal("block") or "")
    assert refusal("current") is None


def test_torch_still_has_the_products_that_are_called() -> None:
    """``_scaled_mm`` is private: a torch in which it changed must fail here, not on a user's GPU."""
    names = [a.name for a in torch.ops.aten._scaled_mm.default._schema.arguments]
    assert names == ["self", "mat2", "scale_a", "scale_b", "bias", "scale_result", "out_dtype", "use_fast_accum"]
    public = list(inspect.signature(F.scaled_mm).parameters)
    assert public[:6] == ["mat_a", "mat_b", "scale_a", "scale_recipe_a", "scale_b", "scale_recipe_b"]
    assert {"bias", "output_dtype", "use_fast_accum"} <= set(public)


# ------------------------------------------------------------------------------------------------ the vendor's: what it is handed


def manual(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    a_kind: ScalingType,
    scale_b: Tensor,
    b_kind: ScalingType,
    bias: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """What torch and cuBLASLt's manual want ("Scaling factors layouts"), and the product."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    assert mat_b.shape[0] == k and m % 16 == n % 16 == k % 16 == 0  # the manual's own rule is 4 for m and n, 16 bytes a row
    assert mat_a.is_contiguous() and mat_b.t().is_contiguous() and mat_a.dtype == mat_b.dtype == torch.float8_e4m3fn
    operands = []
    for t, scale, kind in ((mat_a, scale_a, a_kind), (mat_b.t(), scale_b, b_kind)):
        blocks = -(-k // 128)
        square = kind == ScalingType.BlockWise128x128
        assert square or kind == ScalingType.BlockWise1x128
        high = 4 * -(-blocks // 4)
        assert scale.shape == ((high, -(-t.shape[0] // 128)) if square else (t.shape[0], blocks)) and scale.dtype is FP32
        assert scale.stride() == (1, scale.shape[0])
        logical = scale[:blocks].t() if square else scale
        operands.append(dequantize(Quantized(t, logical), SQUARE if square else LINE))
    product = operands[0] @ operands[1].t()
    return (product if bias is None else product + bias.float()).to(output_dtype)


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of the vendor's product, which runs in place of the operator's definition."""
    calls: list[Any] = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return manual(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_mm", spy)
    library = torch.library.Library("fxfuse", "IMPL")
    library.impl("block_mm", products._block_mm_cuda, "CPU")
    yield calls
    library._destroy()


PAIRS = [(LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)]


@pytest.mark.parametrize("m", [0, 1, 3, 71, 128, 130])
@pytest.mark.parametrize("n, k", [(128, 128), (256, 384), (128, 640), (16, 71), (144, 200)])
@pytest.mark.parametrize("blocks", PAIRS)
def test_vendor_is_handed_the_definitions_operands(
    m: int, n: int, k: int, blocks: Sequence[tuple[int, int]], vendor: list[Any]
) -> None:
    a_scheme, b_scheme = (Scheme("e4m3", block, True) for block in blocks)
    a, b, bias = quantize(random(m, k), a_scheme), quantize(random(n, k), b_scheme), random(1, n)[0].bfloat16()
    arguments = (a.values, a.scale, b.values, b.scale)
    for dtype, added in ((FP32, None), (BF16, bias)):
        got = products._scaled_mm_extern(*arguments, added, *blocks, dtype, False)
        want = products._scaled_mm.reference(*arguments, added, *blocks, dtype, False)
        near(got, want, 2.0**-16)
    assert len(vendor) == 2


@pytest.mark.parametrize("blocks", PAIRS)
def test_definition_undoes_the_layout(blocks: Sequence[tuple[int, int]]) -> None:
    """What runs where the vendor's product raises."""
    a_scheme, b_scheme = (Scheme("e4m3", block) for block in blocks)
    a, b = quantize(random(71, 200), a_scheme), quantize(random(144, 200), b_scheme)
    arguments = (a.values, a.scale, b.values, b.scale, None, *blocks, FP32, False)
    near(products._scaled_mm_extern(*arguments), products._scaled_mm.reference(*arguments), 2.0**-16)


def step(run: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients."""
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))]


@pytest.fixture
def extern(monkeypatch: pytest.MonkeyPatch, hopper: None) -> None:
    """The vendor's product is taken wherever it is legal."""
    monkeypatch.setattr(choose, "_on_gpu", lambda node: True)
    monkeypatch.setattr(choose, "_fastest", lambda node, candidates, *_: (candidates[-1], "forced"))
    torch._dynamo.reset()


@pytest.mark.inductor
@pytest.mark.usefixtures("extern")
@pytest.mark.parametrize("name", ["block", "block, lines of weights"])
@pytest.mark.parametrize("rows", [71, 128])
def test_all_three_products_through_inductor(name: str, rows: int, vendor: list[Any]) -> None:
    """As on a Hopper GPU: Inductor lays out what the operator is handed."""
    leaves = [t.bfloat16().requires_grad_() for t in (random(rows, 384), random(256, 384), random(1, 256)[0])]
    with fxfuse.use_recipe(RECIPES[name]):
        got = step(torch.compile(F.linear, backend="fxfuse", fullgraph=True, dynamic=False), leaves)
        assert {f.kernel for f in fxfuse.last_report().fused} == {"extern"} and len(vendor) == 3
        want = step(fxfuse.ops.scaled_linear, leaves)
    for mine, true in zip(got, want, strict=True):
        near(mine, true, 2.0**-7)


@pytest.mark.inductor
@pytest.mark.usefixtures("extern")
def test_any_number_of_rows_in_one_plan() -> None:
    """One scale a tensor: the weight's gradient sums over rows, whose number is filled up."""
    linear = torch.nn.Linear(128, 64, dtype=BF16)
    run = torch.compile(linear, backend="fxfuse", fullgraph=True, dynamic=True)
    with fxfuse.use_recipe("fp8_current"):
        for rows in (71, 144, 16):
            leaves = [random(rows, 128).bfloat16().requires_grad_(), linear.weight, linear.bias]
            got = step(lambda x, *_: run(x), leaves)
            assert {f.kernel for f in fxfuse.last_report().fused} == {"extern"}
            for mine, true in zip(got, step(fxfuse.ops.scaled_linear, leaves), strict=True):
                near(mine, true, 2.0**-7)
