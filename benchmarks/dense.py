"""Dense blocks on a GPU: eager, Inductor and fxfuse on the same tensors in one process.

    python benchmarks/dense.py [--quick]

Medians over CUDA events, random bf16 data, the contenders in turn over several rounds; beside each time its relative error to
fp64. The point of the table is its worst ratio.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "patterns")]

from record import record  # noqa: E402

import fxfuse  # noqa: E402

Tensor = torch.Tensor
SIZES = {"ViT-L": (1024, 4096), "GPT-2 XL": (1600, 6400), "Llama-3-8B": (4096, 14336)}
ROWS = (16, 1024, 8192)
CONTENDERS = ("eager", "inductor", "fxfuse")


def gelu_tanh(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def relu(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def gelu_mlp(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w, b)), w2)


def residual(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    return x + F.linear(F.relu(F.linear(x, w, b)), w2)


def swiglu(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    gate, up = F.linear(x, w, b).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w2[:, : up.shape[-1]])


BLOCKS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "linear+gelu_tanh infer": (gelu_tanh, False),
    "linear+relu infer": (relu, False),
    "linear+relu train": (relu, True),
    "gelu mlp train": (gelu_mlp, True),
    "residual mlp infer": (residual, False),
    "swiglu mlp train": (swiglu, True),
}


def inputs(rows: int, width: int, hidden: int, train: bool) -> list[Tensor]:
    shapes = [(rows, width), (hidden, width), (hidden,), (width, hidden)]
    scales = [1.0, width**-0.5, 0.1, hidden**-0.5]
    return [(torch.randn(s, device="cuda") * k).bfloat16().requires_grad_(train) for s, k in zip(shapes, scales, strict=True)]


def step(function: Callable[..., Tensor], args: list[Tensor], grad: Tensor | None) -> Callable[[], Any]:
    """One call; in training with the gradients of every argument that the block uses."""

    def run() -> Any:
        out = function(*args)
        return out if grad is None else (out, *torch.autograd.grad(out, args, grad, allow_unused=True))

    return run


def error(got: Any, exact: Any) -> float:
    """The worst relative error (in norm) of output and gradients."""
    pairs = zip(got, exact, strict=True) if isinstance(got, tuple) else [(got, exact)]
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs if a is not None)


def compare(name: str, size: str, rows: int, rounds: int) -> dict[str, Any]:
    from triton.testing import do_bench

    function, train = BLOCKS[name]
    torch.manual_seed(0)
    args = inputs(rows, *SIZES[size], train)
    torch._dynamo.reset()
    fxfuse.reset()  # no time of an earlier row counts against measuring here
    with torch.set_grad_enabled(train):
        grad = torch.randn_like(function(*args)) if train else None
        doubles = [a.detach().double().requires_grad_(train) for a in args]
        exact = step(function, doubles, None if grad is None else grad.double())()
        calls = {c: step(function if c == "eager" else torch.compile(function, backend=c), args, grad) for c in CONTENDERS}
        errors = {c: error(call(), exact) for c, call in calls.items()}
        del exact
        report = fxfuse.last_report()
        times: dict[str, list[float]] = {c: [] for c in CONTENDERS}
        for _ in range(rounds):
            for c in random.sample(CONTENDERS, len(CONTENDERS)):
                times[c].append(do_bench(calls[c], warmup=10, rep=60, return_mode="median"))
    ms = {c: statistics.median(t) for c, t in times.items()}
    wrong = {c for c in CONTENDERS if not errors[c] <= 1.5 * errors["eager"] + 1e-6}
    kernels = ", ".join(f"{f.name}:{f.kernel}" for f in report.fused) or "none"
    return {
        "block": name,
        "size": size,
        "rows": rows,
        **{f"{c} ms": "WRONG" if c in wrong else round(ms[c], 4) for c in CONTENDERS},
        "speed-up": round(ms["inductor"] / ms["fxfuse"], 3),
        **{f"{c} error": f"{errors[c]:.1e}" for c in CONTENDERS},
        "fused": kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/dense.py measures GPU kernels; there is no GPU here")
    sizes = ["Llama-3-8B"] if args.quick else list(SIZES)
    rows = []
    for name in BLOCKS:
        for size in sizes:
            for count in ROWS:
                rows.append(compare(name, size, count, args.rounds))
                print(rows[-1], flush=True)
    worst = min(r["speed-up"] for r in rows)
    record("dense", f"dense blocks, bf16; worst ratio to Inductor {worst}", rows)


if __name__ == "__main__":
    main()
