"""FP8 on a GPU: the vendor's product is the definition's, no slower than bf16 where it is large, and trains as bf16 does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import test_scaled_experts as experts
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse
from fxfuse.ops import define
from fxfuse.ops.quantize import Quantized, Scheme, dequantize, quantize, schemes
from fxfuse.ops.scaled_mm import (
    LINE,
    SQUARE,
    _laid_out,
    _no_vendor_product,
    _scaled_mm,
    _scaled_mm_extern,
)

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = {
    "current": fxfuse.Float8CurrentScaling(),
    "current, e4m3": fxfuse.Float8CurrentScaling(fp8_format="E4M3", fp8_gemm_fprop=fxfuse.MMParams()),
    "block": fxfuse.Float8BlockScaling(),
    "delayed": fxfuse.DelayedScaling(amax_history_len=4),
}
QUICK = [n for n in RECIPES if n != "delayed"]


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.rand(shape, device="cuda").to(torch.float8_e4m3fn).to(dtype).requires_grad_()


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="fxfuse", fullgraph=True, dynamic=False, options=options)


ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24}


def accumulation(terms: int, fast: bool) -> float:
    """What a vendor's product may lose to the tensor cores' adders, relative in norm.

    Hopper's add in about 14 bits. Without ``fast``, and with scales for blocks, 128 terms at a time, and these in fp32: 1.4e-4
    was measured on an H200. With ``fast`` all of them, 32 at a time: 3.1e-3 was measured for 16384 terms.
    """
    return 2.0**-12 * (math.sqrt(max(terms / 32, 1)) if fast else 1)


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.fixture
def loud() -> Iterator[None]:
    """A vendor's product that raises fails the test with the vendor's words, and does not become the definition."""

    def tell(name: str, text: str) -> None:
        raise AssertionError(f"fxfuse::{name}: {text}")

    define.forget_failed_launches()
    token = define.watcher.set(tell)
    yield
    define.watcher.reset(token)


def operands(m: int, n: int, k: int, dtype: torch.dtype, one: Scheme, other: Scheme) -> tuple[list[Any], Tensor]:
    """Arguments of the product but ``fast``, and what it should be in fp64. A bias as large as the product cannot be missed."""
    torch.manual_seed(0)
    a, b = quantize(torch.randn(m, k, device="cuda"), one), quantize(torch.randn(n, k, device="cuda"), other)
    bias = (torch.randn(n, device="cuda") * k**0.5).to(dtype) if dtype is not FP32 else None
    want = dequantize(a, one.block).double() @ dequantize(b, other.block).double().t()
    arguments = [a.values, a.scale, b.values, b.scale, bias, list(one.block), list(other.block), dtype]
    return arguments, want if bias is None else want + bias.double()


def is_the_definition(arguments: Sequence[Any], want: Tensor, *, fast: bool) -> None:
    dtype, terms = arguments[-1], arguments[0].shape[1]
    got, defined = _scaled_mm_extern(*arguments, fast), _scaled_mm.reference(*arguments, fast)
    assert got.dtype is defined.dtype is dtype
    assert off(defined, want) <= ROUNDOFF[dtype] + 2.0**-18
    assert off(got, want) <= ROUNDOFF[dtype] + accumulation(terms, fast)
    assert torch.equal(got, _scaled_mm_extern(*arguments, fast))


@pytest.mark.parametrize("m", [1, 3, 71, 128, 4096])
@pytest.mark.parametrize("n, k", [(128, 128), (2880, 768), (4096, 16384)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("gradient", [False, True])
def test_vendor_product_is_the_definition(m: int, n: int, k: int, dtype: torch.dtype, gradient: bool) -> None:
    """And no further from fp64 than torch's own product of the same quantised operands, being that product."""
    of_x, of_w, of_g = schemes(fxfuse.Float8CurrentScaling())
    arguments, want = operands(m, n, k, dtype, of_g if gradient else of_x, of_w)
    for fast in (False, True):
        is_the_definition(arguments, want, fast=fast)


@pytest.mark.usefixtures("loud")
@pytest.mark.parametrize("m", [1, 3, 71, 128, 4096])
@pytest.mark.parametrize("n, k", [(128, 128), (2944, 768), (256, 640), (144, 200), (256, 71), (4096, 16384)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    "blocks", [(LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)], ids=["lines-squares", "squares-lines", "lines"]
)
def test_vendor_product_of_blocks_is_the_definition(
    m: int, n: int, k: int, dtype: torch.dtype, blocks: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Any number of rows and of terms: they are filled up. 640 terms are 5 blocks, where squares' scales are filled up too."""
    one, other = (Scheme("e4m3", block, power_of_2=k == 768) for block in blocks)
    arguments, want = operands(m, n, k, dtype, one, other)
    is_the_definition(arguments, want, fast=False)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("fast", [False, True])
def test_tolerances_see_mistakes(dtype: torch.dtype, fast: bool) -> None:
    """A scale twice too large, an operand of other rows, a bias that is missing: each is far outside."""
    one = Scheme("e4m3", ())
    (a, a_scale, b, b_scale, bias, *rest), want = operands(128, 4096, 16384, dtype, one, one)
    for wrong in (
        (a, a_scale * 2, b, b_scale, bias),
        (a, a_scale, b.view(torch.uint8).roll(1, 0).view(b.dtype), b_scale, bias),
        (a, a_scale, b, b_scale, None),
    ):
        assert off(_scaled_mm_extern(*wrong, *rest, fast), want) > 8 * (ROUNDOFF[dtype] + accumulation(16384, fast))


def test_what_the_vendors_product_of_blocks_refuses() -> None:
    of_x, of_w, of_g = schemes(fxfuse.Float8BlockScaling(fp8_format="HYBRID"))
    g, w = (quantize(torch.randn(128, 128, device="cuda"), scheme) for scheme in (of_g, of_w))
    blocks: dict[str, Any] = dict(a_block=of_x.block, b_block=of_w.block)
    assert _no_vendor_product(w.values, w.values, None, dtype=BF16, **blocks) is None
    assert "e4m3 only" in (_no_vendor_product(g.values, w.values, None, dtype=BF16, **blocks) or "")
    assert "no bias" in (_no_vendor_product(w.values, w.values, w.scale, dtype=FP32, **blocks) or "")


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("rows", [1, 71, 128])
def test_linear_on_transformer_engines_tolerances(name: str, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    x, w, b = rand(rows, 256, dtype=dtype), rand(128, 256, dtype=dtype), rand(128, dtype=dtype)
    torch._dynamo.reset()
    with fxfuse.use_recipe(RECIPES[name]):
        out = compiled(F.linear)(x, w, b)
    assert fxfuse.last_report().count("scaled_linear", "backward") == 1
    g = torch.rand_like(out).to(torch.float8_e4m3fn).to(dtype)
    got = [out, *torch.autograd.grad(out, (x, w, b), g)]
    doubles = [t.detach().double().requires_grad_() for t in (x, w, b)]
    true = F.linear(*doubles)
    for a, t in zip(got, [true, *torch.autograd.grad(true, doubles, g.double())], strict=True):
        torch.testing.assert_close(a.double(), t, rtol=0.125, atol=0.0675)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_vendor_product_is_chosen_where_it_is_large(recipe: str) -> None:
    x, w = rand(8192, 4096), rand(16384, 4096)
    with fxfuse.use_recipe(recipe):
        compiled(F.linear)(x, w).sum().backward()
    assert {f.kernel for f in fxfuse.last_report().fused} == {"extern"}


def milliseconds(call: Any, rounds: int = 20) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
@pytest.mark.parametrize("training", [False, True])
def test_fp8_is_not_slower_than_bf16(recipe: str, training: bool) -> None:
    x, w = rand(8192, 4096), rand(16384, 4096)
    g = torch.randn(8192, 16384, device="cuda", dtype=BF16)
    torch._dynamo.reset()
    run = compiled(F.linear)

    def step() -> None:
        if training:
            torch.autograd.grad(run(x, w), (x, w), g)
        else:
            with torch.no_grad():
                run(x, w)

    bf16 = milliseconds(step)
    with fxfuse.use_recipe(recipe):
        fp8 = milliseconds(step)
        kernels = [f.kernel for f in fxfuse.last_report().fused]
    print(f"\n{recipe}, training={training}: bf16 {bf16:.3f} ms, fp8 {fp8:.3f} ms, {kernels}")
    assert fp8 <= bf16


def test_quantising_takes_little_of_the_time() -> None:
    """Lines are quantised in one kernel, which reads its matrix once. With -s it prints where the time of fp8_block goes."""
    from torch._inductor import metrics

    x, w, g = (torch.randn(s, device="cuda", dtype=BF16) for s in ((8192, 4096), (16384, 4096), (8192, 16384)))
    lines, squares = Scheme("e4m3", LINE, True), Scheme("e4m3", SQUARE, True)

    def of_lines(t: Tensor) -> tuple[Tensor, Tensor]:
        q = quantize(t, lines)
        return q.values.contiguous(), _laid_out(q.scale, False)

    def of_squares(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = quantize(t, squares)
        return q.values, q.values.t().contiguous(), _laid_out(q.scale, True)

    parts: dict[str, tuple[Tensor, Any, int]] = {  # and the bytes that must be moved for each number
        "x": (x, of_lines, 3),
        "x^T": (x, lambda t: of_lines(t.t()), 3),
        "w and w^T": (w, of_squares, 4),
        "dy": (g, of_lines, 3),
        "dy^T": (g, lambda t: of_lines(t.t()), 3),
    }
    spent, kernels = {}, {}
    print()
    for name, (t, part, moved) in parts.items():
        torch._dynamo.reset()
        run = torch.compile(part, fullgraph=True, dynamic=False)
        metrics.reset()
        run(t)
        kernels[name] = metrics.generated_kernel_count
        spent[name] = milliseconds(lambda run=run, t=t: run(t))
        rate = moved * t.numel() / spent[name] / 1e6
        print(f"{name}: {spent[name]:.3f} ms, {kernels[name]} kernels, {rate:.0f} GB/s of what must be moved")
    products = {"fprop": (x, w, squares), "dgrad": (g, w.t(), squares), "wgrad": (g.t(), x.t(), lines)}
    for name, (one, other, scheme) in products.items():
        a, b = quantize(one.contiguous(), lines), quantize(other.contiguous(), scheme)
        square = scheme is squares
        laid = (a.values, _laid_out(a.scale, False), b.values, _laid_out(b.scale, square), None, False, square, BF16)
        spent[name] = milliseconds(lambda laid=laid: torch.ops.fxfuse.block_mm(*laid))
        bf16 = milliseconds(lambda one=one, other=other: one @ other.t())
        print(f"{name}: {spent[name]:.3f} ms, {2e-9 * 8192 * 4096 * 16384 / spent[name]:.0f} TFLOPS; bf16 {bf16:.3f} ms")
    assert kernels["x"] == kernels["dy"] == 1
    assert spent["x"] + spent["w and w^T"] <= 0.5 * spent["fprop"]


@pytest.mark.parametrize("name", RECIPES)
def test_training_follows_bf16(name: str) -> None:
    """200 steps: the losses stay as near to bf16's as two seeds of fp64 are to each other."""

    def losses(recipe: Any, seed: int, dtype: torch.dtype) -> Tensor:
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        generator = torch.Generator("cuda").manual_seed(7)
        teacher = torch.randn(256, 256, generator=generator, device="cuda", dtype=torch.float64)
        run, found = compiled(model), []
        for _ in range(200):
            x = torch.randn(512, 256, generator=generator, device="cuda", dtype=torch.float64)
            with fxfuse.use_recipe(recipe):
                loss = F.mse_loss(run(x.to(dtype)).double(), torch.tanh(x @ teacher / 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found)

    true, other = (losses("default", seed, torch.float64) for seed in (0, 1))
    gap = (true - other).abs().mean()
    assert (losses(RECIPES[name], 0, BF16) - losses("default", 0, BF16)).abs().mean() <= gap


def test_recipes_on_a_side_stream_and_twice_the_same() -> None:
    x, w = rand(128, 256), rand(128, 256)
    run = compiled(F.linear)
    with fxfuse.use_recipe("fp8_current"):
        want = run(x, w)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = run(x, w)
        torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(want, again)


def test_quantised_matrix_is_the_cpus() -> None:
    torch.manual_seed(0)
    x = torch.randn(130, 257)
    for recipe in (*RECIPES.values(), fxfuse.MXFP8BlockScaling(emulate=True), fxfuse.NVFP4BlockScaling(emulate=True)):
        for scheme in schemes(recipe):
            if scheme.delayed:
                continue
            here, there = quantize(x, scheme), quantize(x.cuda(), scheme)
            assert torch.equal(here.values.float(), there.values.float().cpu()) and torch.equal(here.scale, there.scale.cpu())
            assert torch.equal(dequantize(here, scheme.block), dequantize(Quantized(*there), scheme.block).cpu())


# ------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("tokens", [80, 1000])
def test_experts_are_as_near_to_fp64_as_the_cpus_definition(name: str, tokens: int) -> None:
    args, ids = experts.tensors("masked", tokens), torch.rand(tokens, experts.EXPERTS).topk(experts.CHOSEN).indices
    recipe = experts.RECIPES[name]

    def exact(x: Tensor, ids: Tensor, p: Tensor, w: Tensor, w_down: Tensor) -> Tensor:
        return experts.reference_moe.per_expert(x, w, w_down, ids, p)

    true = experts.step(exact, [a.double() for a in args], ids)
    torch._dynamo.reset()
    here = experts.fused("masked", args, ids, recipe)
    torch._dynamo.reset()
    there = experts.fused("masked", [a.cuda() for a in args], ids.cuda(), recipe, lower="auto")
    for cpu, gpu, want in zip(here, there, true, strict=True):
        mine, definition = off(gpu.cpu(), want), off(cpu, want)
        print(f"{name}, {tokens} tokens: {mine:.2e} off, the CPU's definition {definition:.2e}")
        assert mine <= 1.1 * definition + 1e-3
