"""Each kernel of the grouped MLP beside ``torch._grouped_mm``, as a share of what the machine can do.

    python benchmarks/moe_kernels.py [--blocks NAME ...] [--tokens N ...] [--paths NAME ...] [--rounds N]
    python benchmarks/moe_kernels.py --blocks tiny --tokens 64            the twins on a CPU, to see that it works

bf16, random data, the blocks of ``benchmarks/moe.py`` with their activations and as their weights are stored, tokens spread
evenly over the experts.

ms        median over rounds in random order with idle gaps (CUDA events, L2 flushed)
TFLOP/s   2 S N K over ms; "-" where the kernel multiplies nothing
GB        what has to be read and written once
GB/s      that over ms
share     of the higher bound: time at the machine's matrix rate or at its memory rate, over ms. The rates are measured in the
          same run: a square product of ``--square`` columns, a copy of 1 GiB
error     relative in norm, the worst result, to fp64; a kernel off by more than rounding gets no time

``torch._grouped_mm`` stands where it computes the same product; its row ``up`` has no gather and no activation, its row ``dh``
no activation's derivative and no router gradient. It reads rows that were gathered before, as does a path whose products do not
gather, but for ``up``; bytes are counted without that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "patterns")]

from moe import ALPHA, BLOCKS, LIMIT, Block, milliseconds  # noqa: E402
from record import record  # noqa: E402

from fxfuse import kernels  # noqa: E402
from fxfuse.kernels import reference  # noqa: E402

Tensor = torch.Tensor
Call = Callable[[], Any]
BF16 = torch.bfloat16
RIGHT = 8e-3
"""The largest error of a result that was rounded twice."""
IDLE_SECONDS = 0.05
TWIN, VENDOR = "twin", "_grouped_mm"
MORE = ("up", "dh")
"""What does more than a product: the vendor's result is another one and is not compared."""


class Work(NamedTuple):
    """One kernel on one block: what it multiplies and moves, and who can do it."""

    name: str
    flops: float
    bytes: float
    exact: Call
    calls: dict[str, Call]


class Operands:
    """Tensors of a block; rows are sorted by expert."""

    def __init__(self, block: Block, tokens: int, device: str) -> None:
        torch.manual_seed(0)
        e, h, i, k = block.experts, block.hidden, block.inner, block.chosen
        self.sizes = e, h, i, k, tokens, tokens * k

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=device, dtype=BF16).mul_(scale)

        self.ids = torch.rand(tokens, e, device=device).topk(k).indices
        self.p = torch.rand(tokens, k, device=device)
        self.x, self.grad = normal(tokens, h), normal(tokens, h)
        self.w_gate, self.w_down = normal(e, 2 * i, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
        self.kind = ("silu", "interleaved", LIMIT, ALPHA) if block.oss else ("silu", "concat", None, None)
        if block.oss:  # stored (in, out)
            self.w_gate, self.w_down = (w.mT.contiguous().mT for w in (self.w_gate, self.w_down))
        self.order, self.gather, self.inverse, self.ends = reference.route(self.ids, e)
        self.rows, self.dy = self.x[self.gather], self.grad[self.gather]
        self.weight = self.p.flatten()[self.order]
        rows = tokens * k
        self.dp = torch.rand(rows, 3, device=device)
        self.a, self.h, self.y, self.dh = normal(rows, i), normal(rows, 2 * i), normal(rows, h), normal(rows, 2 * i)


def functions(m: Any, o: Operands, gathers: bool = True) -> dict[str, Call]:
    """Every kernel of a path (or the twins) on these operands; fp64 operands give the exact results.

    Without ``gathers`` the backward's products are given gathered rows.
    """
    rows, grads, gather = (o.x, o.grad, o.gather) if gathers else (o.rows, o.dy, None)
    return {
        "route": lambda: m.route(o.ids, o.sizes[0]),
        "up": lambda: m.up(o.x, o.gather, o.w_gate, None, None, o.ends, *o.kind, True)[:2],
        "up, inference": lambda: m.up(o.x, o.gather, o.w_gate, None, None, o.ends, *o.kind, False)[:1],
        "down": lambda: (m.matmul(o.a, o.w_down, o.ends, transposed=True, bias=None, zero_tail=False),),
        "combine": lambda: (m.combine(o.y, o.p, None, o.ids, o.inverse, o.ends, o.y),),
        "sorted pairs": lambda: m.sorted_pairs(o.order, o.p, o.ids.shape[1]),
        "spread": lambda: m.spread(o.grad, o.x, o.p, o.inverse, o.ids.shape[1]),
        "dh": lambda: m.dh(grads, gather, o.w_down, o.weight, o.h, None, o.ends, *o.kind)[::3],
        "router gradient": lambda: (m.router_gradient(o.dp, o.ids, o.inverse, o.p.dtype),),
        "wgrad down": lambda: (m.wgrad(grads, o.a, gather, None, o.ends),),
        "dx": lambda: (m.matmul(o.dh, o.w_gate, o.ends, transposed=False, bias=None, zero_tail=False),),
        "wgrad up": lambda: (m.wgrad(o.dh, rows, None, gather, o.ends),),
        "sum of dx": lambda: (m.combine(o.y, None, None, o.ids, o.inverse, o.ends, o.y),),
    }


def vendor(o: Operands) -> dict[str, Call]:
    """``torch._grouped_mm`` on rows that were gathered before."""

    def product(a: Tensor, b: Tensor) -> Call:
        return lambda: (F.grouped_mm(a, b, offs=o.ends),)

    return {
        "up": product(o.rows, o.w_gate.mT),
        "down": product(o.a, o.w_down.mT),
        "dh": product(o.dy, o.w_down),
        "wgrad down": product(o.dy.t(), o.a),
        "dx": product(o.dh, o.w_gate),
        "wgrad up": product(o.dh.t(), o.rows),
    }


def costs(o: Operands) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of each kernel, every operand and result moved once."""
    e, h, i, _, t, s = o.sizes
    busy = min(e, s)
    up, down = busy * 2 * i * h * 2, busy * h * i * 2
    index = 8 * s
    return {
        "route": (0, 8 * s + 24 * s),
        "up": (4 * s * i * h, 2 * t * h + index + up + 2 * s * 3 * i),
        "up, inference": (4 * s * i * h, 2 * t * h + index + up + 2 * s * i),
        "down": (2 * s * i * h, 2 * s * i + down + 2 * s * h),
        "combine": (0, 2 * s * h + 12 * s + 2 * t * h),
        "sorted pairs": (0, 24 * s),
        "spread": (0, 4 * t * h + 4 * s * h + 16 * s),
        "router gradient": (0, 24 * s),
        "dh": (2 * s * i * h, 2 * t * h + index + down + 2 * s * (2 * i + 2 * i + i) + 8 * s),
        "wgrad down": (2 * s * i * h, 2 * t * h + index + 2 * s * i + 2 * e * h * i),
        "dx": (4 * s * i * h, 2 * s * 2 * i + up + 2 * s * h),
        "wgrad up": (4 * s * i * h, 2 * s * 2 * i + 2 * t * h + index + 4 * e * h * i),
        "sum of dx": (0, 2 * s * h + 8 * s + 2 * t * h),
    }


def in_fp64(o: Operands) -> Operands:
    """The same operands in fp64."""
    wide = object.__new__(Operands)
    wide.__dict__.update({n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in o.__dict__.items()})
    return wide


def works(o: Operands, paths: Sequence[str]) -> Iterator[Work]:
    """Every kernel with its contenders; the exact result is computed when it is asked for."""
    exact, cost = functions(reference, in_fp64(o)), costs(o)
    ours = {p: functions(kernels.path(p), o, kernels.PATHS[p].gathers) if p != TWIN else functions(reference, o) for p in paths}
    theirs = vendor(o) if o.x.is_cuda else {}
    for name, (flops, moved) in cost.items():
        calls = {p: f[name] for p, f in ours.items()}
        yield Work(name, flops, moved, exact[name], calls | ({VENDOR: theirs[name]} if name in theirs else {}))


def error(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The worst of the results, relative in norm; of integers one or nothing."""
    found = [0.0]
    for g, e in zip(got, exact, strict=True):
        off = ((g.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)).nan_to_num(float("inf"))
        found.append(off.item() if g.is_floating_point() else float(not torch.equal(g, e)))
    return max(found)


# ------------------------------------------------------------------------------------------------ the table


class Rates(NamedTuple):
    """What the machine does at best, measured in this run."""

    flops: float
    bytes: float


def rates(device: str, square: int) -> Rates:
    a, b = (torch.randn(square, square, device=device).to(BF16) for _ in range(2))
    source = torch.empty(2**28 if device == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    product = min(milliseconds(lambda: a @ b, device) for _ in range(3))
    copy = min(milliseconds(lambda: target.copy_(source), device) for _ in range(3))
    return Rates(2 * square**3 / product * 1e3, 2 * source.nbytes / copy * 1e3)


def compare(name: str, tokens: int, paths: Sequence[str], rounds: int, top: Rates, device: str) -> list[dict[str, Any]]:
    """A row for each kernel and contender."""
    operands, rows = Operands(BLOCKS[name], tokens, device), []
    for work in works(operands, paths):
        exact = work.exact()
        alike = [c for c in work.calls if c != VENDOR or work.name not in MORE]
        off = {c: error(work.calls[c](), exact) for c in alike}
        del exact
        right = [c for c in work.calls if off.get(c, 0) <= RIGHT]
        times: dict[str, list[float]] = {c: [] for c in right}
        for _ in range(rounds):
            for c in random.sample(right, len(right)):
                time.sleep(IDLE_SECONDS)
                times[c].append(milliseconds(work.calls[c], device))
        for c in work.calls:
            ms = statistics.median(times[c]) if c in right else None
            rows.append({"block": name, "tokens": tokens, "kernel": work.name, "by": c, **_line(work, ms, off.get(c), top)})
            print(rows[-1], flush=True)
    return rows


def _line(work: Work, ms: float | None, off: float | None, top: Rates) -> dict[str, Any]:
    wrong = {"ms": "WRONG", "TFLOP/s": "-", "GB": round(work.bytes / 1e9, 4), "GB/s": "-", "share": "-"}
    right: dict[str, Any] = {}
    if ms is not None:
        bound = max(work.flops / top.flops, work.bytes / top.bytes) * 1e3
        right = {"ms": round(ms, 4), "GB/s": round(work.bytes / ms / 1e6, 1), "share": round(bound / ms, 3)}
        right["TFLOP/s"] = round(work.flops / ms / 1e9, 1) if work.flops else "-"
    return {**wrong, **right, "error": "-" if off is None else f"{off:.1e}"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=[name for name in BLOCKS if "tiny" not in name])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 8192])
    parser.add_argument("--paths", nargs="+", choices=list(kernels.PATHS), default=list(kernels.PATHS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--square", type=int, default=8192)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and any("tiny" not in name for name in args.blocks):
        raise SystemExit("benchmarks/moe_kernels.py measures GPU kernels and there is no GPU here; --blocks tiny runs the twins")
    paths, square = (args.paths, args.square) if device == "cuda" else ([TWIN], 256)
    top = rates(device, square)
    rows = [r for name in args.blocks for tokens in args.tokens for r in compare(name, tokens, paths, args.rounds, top, device)]
    title = f"kernels of the grouped MLP, bf16, {device}; {top.flops / 1e12:.1f} TFLOP/s and {top.bytes / 1e9:.0f} GB/s at best"
    record(f"kernels_{device}", title, rows)


if __name__ == "__main__":
    main()
