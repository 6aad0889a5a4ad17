"""Dense fusions on a GPU: through Inductor and Triton, in CUDA graphs, on the device that the tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxfuse

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", scale: float = 0.3) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()


def packed(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


BLOCKS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], str]] = {
    "gelu": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(4, 33, 64), (96, 64), (96,)], "linear_gelu"),
    "gelu_tanh": (
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        [(4, 33, 64), (96, 64), (96,)],
        "linear_gelu_tanh",
    ),
    "relu": (lambda x, w, b: F.relu(F.linear(x, w, b)), [(128, 64), (96, 64), (96,)], "linear_relu"),
    "swiglu": (lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u), [(4, 33, 64), (96, 64), (96, 64)], "gated_mlp_silu"),
    "packed": (packed, [(4, 33, 64), (192, 64)], "gated_mlp_packed_silu"),
    "add": (lambda x, w, b, r: r + F.linear(x, w, b), [(4, 33, 64), (96, 64), (96,), (4, 33, 96)], "linear_add"),
    "layer scale": (
        lambda x, w, b, s, r: r + s * F.linear(x, w, b),
        [(4, 33, 64), (96, 64), (96,), (96,), (4, 33, 96)],
        "linear_scale_tensor_add",
    ),
}


def gradients(function: Callable[..., Tensor], args: list[Tensor]) -> list[Tensor]:
    out = function(*args)
    weights = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), args)]


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_training_is_as_near_to_fp64_as_eager(name: str, dtype: torch.dtype) -> None:
    function, shapes, fusion = BLOCKS[name]
    args = [leaf(*s, dtype=dtype) for s in shapes]
    exact = gradients(function, [a.detach().double().requires_grad_() for a in args])
    ours = errors(gradients(torch.compile(function, backend="fxfuse"), args), exact)
    theirs = errors(gradients(function, args), exact)
    assert fxfuse.last_report().count(fusion) == 1
    assert all(a <= 1.5 * b + 1e-6 for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_of_inductor_work(mode: str) -> None:
    function, shapes, fusion = BLOCKS["gelu_tanh"]
    args = [leaf(*s) for s in shapes]
    compiled = torch.compile(function, backend="fxfuse", mode=mode)
    with torch.no_grad():
        for _ in range(4):
            args[0] = leaf(*shapes[0])
            torch.testing.assert_close(compiled(*args).clone(), function(*args), rtol=2e-2, atol=2e-2)
    assert fxfuse.last_report().count(fusion) == 1


def test_vendor_epilogue_is_legal_where_it_is_taken() -> None:
    """Whatever the chooser picks for a large inference GEMM, the result is right and the report names the kernel."""
    args = [leaf(4096, 1024, scale=1.0), leaf(4096, 1024, scale=0.03), leaf(4096)]
    function = BLOCKS["gelu_tanh"][0]
    with torch.no_grad():
        out = torch.compile(function, backend="fxfuse")(*args)
        exact = function(*[a.double() for a in args])
        own = function(*args)
    assert errors([out], [exact])[0] <= 1.5 * errors([own], [exact])[0]
    assert fxfuse.last_report().fused[0].kernel in ("inline", "extern")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_second_gpu_while_the_first_is_current() -> None:
    function, shapes, _ = BLOCKS["gelu"]
    args: list[Any] = [leaf(*s, device="cuda:1") for s in shapes]
    got = gradients(torch.compile(function, backend="fxfuse"), args)
    assert torch.cuda.current_device() == 0
    assert all(t.device.index == 1 for t in got)
