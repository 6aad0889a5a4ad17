"""The Hopper kernels of the grouped MLP against ``torch._grouped_mm``, each product alone; needs an H100 or H200.

    python benchmarks/hopper.py [--blocks NAME ...] [--tokens N] [--rounds N] [--routing even|skewed]

bf16, rows gathered beforehand unless it says so. First every result is compared with fp64 on some experts; a wrong one gets no
time. All contenders are in one pool: random order each round, the same idle gap before each, medians (CUDA events, L2 flushed).

ms            with the list of tiles or the counter that a launch needs
useful TF/s   2 S N K over ms: rows of padding count nothing
error         relative, in norm, the worst of the outputs
``torch._grouped_mm`` has neither activation nor its backward: what ``up`` does besides the product is not in its time, and ``dh``
is to be compared with its product alone and the time of pointwise kernels.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "patterns")]

from record import record  # noqa: E402

from fxfuse.kernels import hopper_launch as launch  # noqa: E402
from fxfuse.kernels import reference  # noqa: E402

Tensor = torch.Tensor
BLOCKS = {
    "Qwen3-30B-A3B": (128, 2048, 768, 8),
    "OLMoE": (64, 2048, 1024, 8),
    "Mixtral": (8, 4096, 14336, 2),
    "GPT-OSS": (32, 2880, 2880, 4),
}
"""Experts, hidden, inner, chosen."""
IDLE_SECONDS, WATCHDOG_SECONDS, CHECKED = 0.06, 60.0, 4
_began = [time.monotonic()]


def _watch() -> None:
    while True:
        time.sleep(1)
        if time.monotonic() - _began[0] > WATCHDOG_SECONDS:
            print("no progress: a kernel waits forever", file=sys.stderr, flush=True)
            os._exit(9)


class Product:
    """One product: who computes it, how, and what is right."""

    def __init__(self, name: str, flops: float, ways: dict[str, Callable[[], Any]], exact: Callable[[slice, int], Any]) -> None:
        self.name, self.flops, self.ways, self.exact = name, flops, ways, exact


def products(experts: int, hidden: int, inner: int, chosen: int, tokens: int, routing: str) -> tuple[list[Product], Tensor]:
    """The products of a block's forward and backward; and ``ends``."""
    torch.manual_seed(0)
    rows = tokens * chosen
    odds = torch.randn(tokens, experts, device="cuda")
    odds = odds + 1.5 * torch.randn(experts, device="cuda") if routing == "skewed" else odds
    order, *_, ends = reference.route(odds.topk(chosen).indices, experts)
    gather = order // chosen
    lines = torch.randn(tokens, hidden, device="cuda").bfloat16()
    x = lines[gather]
    grad = torch.randn(tokens, hidden, device="cuda").bfloat16()[order // chosen]
    w1 = (torch.randn(experts, 2 * inner, hidden, device="cuda") * hidden**-0.5).bfloat16()
    w2 = (torch.randn(experts, hidden, inner, device="cuda") * inner**-0.5).bfloat16()
    p = torch.rand(rows, device="cuda")
    kind = ("silu", "concat", None, None)
    a, h, _ = launch.up(x, None, w1, None, None, ends, *kind, True)
    d = launch.dh(grad, None, w2, p, h, None, ends, *kind)[0]
    one, gmm = 2.0 * rows * hidden * inner, torch.ops.aten._grouped_mm

    def some(function: Callable[..., Any], *args: Any) -> Callable[[slice, int], Any]:
        """The reference on one expert: its rows and its weight."""

        def exact(at: slice, e: int) -> Any:
            mine = [t[at].double() if t.shape[0] == rows else t[e : e + 1].double() for t in args]
            return function(*mine, torch.tensor([at.stop - at.start], dtype=torch.int32, device="cuda"))

        return exact

    def gathered(in_kernel: bool) -> Any:
        where = (lines, gather) if in_kernel else (lines[gather], None)
        return launch.up(*where, w1, None, None, ends, *kind, True)[:2]

    up = lambda save: lambda: launch.up(x, None, w1, None, None, ends, *kind, save)[: 2 if save else 1]  # noqa: E731
    return [
        Product(
            "up, h saved",
            2 * one,
            {"hopper": up(True), "grouped_mm": lambda: (None, gmm(x, w1.transpose(1, 2), ends))},
            some(lambda x, w, e: reference.up(x, None, w, None, None, e, *kind, True)[:2], x, w1),
        ),
        Product(
            "up",
            2 * one,
            {"hopper": up(False)},
            some(lambda x, w, e: reference.up(x, None, w, None, None, e, *kind, False)[:1], x, w1),
        ),
        Product(
            "gather and up, h saved",
            2 * one,
            {"hopper": lambda: gathered(False), "hopper, in the kernel": lambda: gathered(True)},
            some(lambda x, w, e: reference.up(x, None, w, None, None, e, *kind, True)[:2], x, w1),
        ),
        Product(
            "down",
            one,
            {
                "hopper": lambda: (launch.matmul(a, w2, ends, transposed=True),),
                "grouped_mm": lambda: (gmm(a, w2.transpose(1, 2), ends),),
            },
            some(lambda a, w, e: (reference.matmul(a, w, e, transposed=True),), a, w2),
        ),
        Product(
            "dh",
            one,
            {"hopper": lambda: launch.dh(grad, None, w2, p, h, None, ends, *kind)},
            some(lambda g, w, p, h, e: reference.dh(g, None, w, p, h, None, e, *kind), grad, w2, p, h),
        ),
        Product(
            "dh, product alone",
            one,
            {"hopper": lambda: (launch.matmul(grad, w2, ends, transposed=False),), "grouped_mm": lambda: (gmm(grad, w2, ends),)},
            some(lambda g, w, e: (reference.matmul(g, w, e, transposed=False),), grad, w2),
        ),
        Product(
            "dX",
            2 * one,
            {"hopper": lambda: (launch.matmul(d, w1, ends, transposed=False),), "grouped_mm": lambda: (gmm(d, w1, ends),)},
            some(lambda d, w, e: (reference.matmul(d, w, e, transposed=False),), d, w1),
        ),
        Product(
            "wgrad of up",
            2 * one,
            {"hopper": lambda: (launch.wgrad(d, x, None, None, ends),), "grouped_mm": lambda: (gmm(d.t(), x, ends),)},
            some(lambda d, x, e: (reference.wgrad(d, x, None, None, e),), d, x),
        ),
        Product(
            "wgrad of down",
            one,
            {"hopper": lambda: (launch.wgrad(grad, a, None, None, ends),), "grouped_mm": lambda: (gmm(grad.t(), a, ends),)},
            some(lambda d, x, e: (reference.wgrad(d, x, None, None, e),), grad, a),
        ),
    ], ends


def error(product: Product, way: Callable[[], Any], ends: Tensor) -> float:
    """Over the busiest, the first and the last experts, and some between."""
    stops = ends.tolist()
    spans = [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
    busiest = max(range(len(spans)), key=lambda e: spans[e].stop - spans[e].start)
    chosen = {busiest, 0, len(spans) - 1, *random.sample(range(len(spans)), min(CHECKED, len(spans)))}
    worst, outputs = 0.0, way()
    torch.cuda.synchronize()
    for e in chosen:
        for got, exact in zip(outputs, product.exact(spans[e], e), strict=False):
            if got is None or exact.numel() == 0 or spans[e].start == spans[e].stop:
                continue
            mine = got[e : e + 1] if exact.dim() == 3 else got[spans[e]]
            mine = mine if mine.shape == exact.shape else mine.double().sum(1, keepdim=True)  # dp is in parts
            worst = max(worst, ((mine.double() - exact).norm() / exact.norm()).nan_to_num(float("inf")).item())
    return worst


def compare(name: str, tokens: int, routing: str, rounds: int) -> list[dict[str, Any]]:
    from triton.testing import do_bench

    found, ends = products(*BLOCKS[name], tokens, routing)
    off, times = {}, {}
    for product in found:
        for way, run in product.ways.items():
            _began[0] = time.monotonic()
            off[product.name, way], times[product.name, way] = error(product, run, ends), []
            print(product.name, way, f"error {off[product.name, way]:.1e}", flush=True)
    pool = [(p, way) for p in found for way in p.ways if off[p.name, way] < 1e-2]
    for _ in range(rounds):
        for product, way in random.sample(pool, len(pool)):
            _began[0] = time.monotonic()
            time.sleep(IDLE_SECONDS)
            run = product.ways[way]
            times[product.name, way].append(do_bench(run, warmup=5, rep=20, return_mode="median"))
    rows = []
    for product in found:
        for way in product.ways:
            measured = times[product.name, way]
            ms = statistics.median(measured) if measured else None
            rows.append(
                {
                    "block": name,
                    "tokens": tokens,
                    "routing": routing,
                    "product": product.name,
                    "by": way,
                    "ms": "WRONG" if ms is None else round(ms, 4),
                    "useful TF/s": "-" if ms is None else round(product.flops / ms / 1e9),
                    "spread": "-" if ms is None else f"{max(measured) / min(measured) - 1:.1%}",
                    "error": f"{off[product.name, way]:.1e}",
                }
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=["Qwen3-30B-A3B"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--routing", choices=["even", "skewed"], default="even")
    args = parser.parse_args(argv)
    import triton

    reason = launch.available(torch.cuda.get_device_capability() if torch.cuda.is_available() else None, triton.__version__)
    if reason is not None:
        raise SystemExit(f"benchmarks/hopper.py: {reason}")
    threading.Thread(target=_watch, daemon=True).start()
    rows = [row for name in args.blocks for row in compare(name, args.tokens, args.routing, args.rounds)]
    record("hopper", f"products of the grouped MLP, bf16, {args.routing} routing", rows)


if __name__ == "__main__":
    main()
