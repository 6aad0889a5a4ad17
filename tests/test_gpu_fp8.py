"""FP8 on a GPU: the vendor's product is the definition's, no slower than bf16 where it is large, and trains as bf16 does."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse
from fxfuse.ops.quantize import Quantized, _scaled_mm, _scaled_mm_extern, dequantize, quantize, schemes

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


@pytest.mark.parametrize("m", [1, 3, 71, 128, 4096])
@pytest.mark.parametrize("n, k", [(128, 128), (2880, 768), (4096, 16384)])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("gradient", [False, True])
def test_vendor_product_is_the_definition(m: int, n: int, k: int, dtype: torch.dtype, gradient: bool) -> None:
    """And no further from fp64 than torch's own product of the same quantised operands, being that product."""
    of_x, of_w, of_g = schemes(fxfuse.Float8CurrentScaling())
    one = of_g if gradient else of_x
    torch.manual_seed(0)
    a, b = quantize(torch.randn(m, k, device="cuda"), one), quantize(torch.randn(n, k, device="cuda"), of_w)
    bias = torch.randn(n, device="cuda", dtype=dtype) if dtype is not FP32 else None
    arguments = (a.values, a.scale, b.values, b.scale, bias, [], [], dtype)
    want = dequantize(a, []).double() @ dequantize(b, []).double().t()
    want = want if bias is None else want + bias.double()
    for fast in (False, True):
        got, defined = _scaled_mm_extern(*arguments, fast), _scaled_mm.reference(*arguments, fast)
        step = {BF16: 2.0**-8, FP16: 2.0**-10, FP32: 2.0**-16}[dtype] + (2.0**-9 if fast else 2.0**-13)
        for result in (got, defined):
            assert (result.double() - want).norm() <= step * want.norm()
        assert torch.equal(got, _scaled_mm_extern(*arguments, fast))


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


def test_vendor_product_is_chosen_where_it_is_large() -> None:
    x, w = rand(8192, 4096), rand(16384, 4096)
    with fxfuse.use_recipe("fp8_current"):
        compiled(F.linear)(x, w)
    assert [f.kernel for f in fxfuse.last_report().fused] == ["extern"]


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


@pytest.mark.parametrize("training", [False, True])
def test_current_scaling_is_not_slower_than_bf16(training: bool) -> None:
    x, w = rand(8192, 4096), rand(16384, 4096)
    g = torch.randn(8192, 16384, device="cuda", dtype=BF16)
    run = compiled(F.linear)

    def step() -> None:
        if training:
            torch.autograd.grad(run(x, w), (x, w), g)
        else:
            with torch.no_grad():
                run(x, w)

    bf16 = milliseconds(step)
    with fxfuse.use_recipe("fp8_current"):
        fp8 = milliseconds(step)
    print(f"training={training}: bf16 {bf16:.3f} ms, fp8 {fp8:.3f} ms")
    assert fp8 <= bf16


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
