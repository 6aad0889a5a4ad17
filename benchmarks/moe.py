"""Mixture-of-experts blocks: eager, Inductor and fxfuse on the same tensors in one process.

    python benchmarks/moe.py [--blocks NAME ...] [--tokens N ...] [--forms masked sorted] [--routing NAME ...] [--rounds N]
    python benchmarks/moe.py --blocks tiny --tokens 64                     the same on a CPU, to see that it works
    python benchmarks/moe.py --compile                                     our pass by number of layers, on a CPU

The block is what transformers runs as ``grouped_mm``: ``masked`` as in 5.17, which zeroes rows after each step, ``sorted`` as
in 5.24. bf16, random data, gradients of x, weights, biases and the router weights. GPT-OSS has biases, clamps and weights that
are stored (in, out), its gates and ups alternating; DeepSeek's block is one rank's of eight.

routing       even: every expert as likely as any other; zipf: the r-th with odds r^-1.2; idle: one expert without tokens;
              one: each token takes the same experts

ms            median over rounds in random order with idle gaps (CUDA events, L2 flushed)
speed-up      time of Inductor over this time, in the same run
error         the worst relative error (in norm) of output and gradients to fp64; a contender that is further off than
              1.5 times eager in any of them gets no time
saved MiB     what autograd holds between forward and backward: the storages of all saved tensors, the arguments left out
same bits     whether two runs give the same output and gradients, bit for bit
host us       until the call returns, the GPU being idle: of the forward, or in forward+backward of the backward alone
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.benchmark import Timer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "patterns")]

from record import record  # noqa: E402

import fxfuse  # noqa: E402
from fxfuse import rewrite  # noqa: E402

Tensor = torch.Tensor
Values = Sequence[Tensor]
CONTENDERS = ("eager", "inductor", "fxfuse")
MODES = ("inference", "forward", "forward+backward")
IDLE_SECONDS = 0.1


class Block(NamedTuple):
    """Widths of a block, the dtype of its router weights, and whether it is GPT-OSS's kind."""

    experts: int
    hidden: int
    inner: int
    chosen: int
    router: torch.dtype = torch.bfloat16
    oss: bool = False


BLOCKS = {
    "Qwen3-30B-A3B": Block(128, 2048, 768, 8),
    "OLMoE": Block(64, 2048, 1024, 8),
    "Mixtral": Block(8, 4096, 14336, 2, torch.float32),
    "GPT-OSS-20B": Block(32, 2880, 2880, 4, oss=True),
    "DeepSeek-V3 EP8": Block(32, 7168, 2048, 8),
    "tiny": Block(4, 64, 48, 2),
    "tiny OSS": Block(4, 64, 48, 2, oss=True),
}
LIMIT, ALPHA = 7.0, 1.702


# ------------------------------------------------------------------------------------------------ the block


def experts(x: Tensor, p: Tensor, w_up: Tensor, w_down: Tensor, *rest: Any) -> Tensor:
    """Rows (T, H) through the K experts ``ids`` of each, weighted with ``p`` (T, K): transformers' ``grouped_mm``.

    ``rest``: in GPT-OSS's kind both biases, then ids, and whether rows are zeroed after each step.
    """
    *biases, ids, masked = rest
    count, (tokens, chosen) = len(w_up), ids.shape
    expert, order = torch.sort(ids.reshape(-1))
    countable = expert.int() if x.is_cuda else expert.float()
    ends = torch.cumsum(torch.histc(countable, bins=count, min=0, max=count - 1), 0, dtype=torch.int32)
    outside = (expert >= count).unsqueeze(-1)

    def cut(rows: Tensor) -> Tensor:
        return rows.masked_fill(outside, 0.0) if masked else rows

    rows = cut(x[order // chosen])
    if biases:
        of_rows = expert.clamp(max=count - 1) if masked else expert
        a = clamped_gate(cut(F.grouped_mm(rows, w_up, offs=ends) + biases[0][of_rows]))
        y = cut(F.grouped_mm(a, w_down, offs=ends) + biases[1][of_rows])
    else:
        gate, up = cut(F.grouped_mm(rows, w_up.transpose(-2, -1), offs=ends)).chunk(2, dim=-1)
        y = cut(F.grouped_mm(F.silu(gate) * up, w_down.transpose(-2, -1), offs=ends))
    y = y * p.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=x.device)
    return y[inverse].view(tokens, chosen, x.size(-1)).sum(dim=1).to(x.dtype)


def clamped_gate(h: Tensor) -> Tensor:
    """GPT-OSS's activation of (S, 2 I), gates at even columns."""
    gate, up = h[..., ::2].clamp(max=LIMIT), h[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(gate * ALPHA) * (up + 1)


def one_by_one(x: Tensor, p: Tensor, w_up: Tensor, w_down: Tensor, *rest: Tensor) -> Tensor:
    """The same, expert after expert: the reference."""
    *biases, ids = rest
    out = torch.zeros_like(x)
    for e, (up_rows, down_rows) in enumerate(zip(w_up.unbind(), w_down.unbind(), strict=True)):
        token, k = torch.where(ids == e)
        if biases:
            y = clamped_gate(x[token] @ up_rows + biases[0][e]) @ down_rows + biases[1][e]
        else:
            gate, up = (x[token] @ up_rows.T).chunk(2, dim=-1)
            y = (F.silu(gate) * up) @ down_rows.T
        out = out.index_add(0, token, y * p[token, k, None])
    return out


def arguments(block: Block, tokens: int, routing: str, device: str) -> tuple[list[Tensor], Tensor]:
    """x, router weights, both weights and biases; and the expert ids."""
    torch.manual_seed(0)
    odds = torch.zeros(block.experts, device=device)
    if routing == "zipf":
        odds = -1.2 * torch.arange(1, block.experts + 1, device=device).log()
    elif routing == "idle":
        odds[block.experts // 2] = float("-inf")
    elif routing == "one":
        odds[: block.chosen] = 1e4
    noise = torch.rand(tokens, block.experts, device=device).clamp_(1e-7, 1 - 1e-7)
    ids = (odds - noise.log_().neg_().log_()).topk(block.chosen).indices
    p = torch.rand(tokens, block.chosen, device=device)
    wide = [(2 * block.inner, block.hidden), (block.hidden, block.inner)]
    weights = [torch.randn(block.experts, *w, device=device, dtype=torch.bfloat16).mul_(w[1] ** -0.5) for w in wide]
    biases: list[Tensor] = []
    if block.oss:
        weights = [w.transpose(1, 2).contiguous() for w in weights]
        biases = [torch.randn(block.experts, n, device=device, dtype=torch.bfloat16) for n, _ in wide]
    x = torch.randn(tokens, block.hidden, device=device).bfloat16()
    return [x, (p / p.sum(-1, keepdim=True)).to(block.router), *weights, *biases], ids


# ------------------------------------------------------------------------------------------------ what is measured of a call


def milliseconds(call: Callable[[], Any], device: str) -> float:
    time.sleep(IDLE_SECONDS)
    if device == "cpu":
        return Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.05).median * 1e3
    from triton.testing import do_bench

    return do_bench(call, warmup=10, rep=60, return_mode="median")


def host_microseconds(call: Callable[[Any], Any], prepare: Callable[[], Any], times: int) -> list[float]:
    """``call(prepare())`` until it returns, with nothing left for the GPU to do before."""
    found = []
    for _ in range(times):
        ready = prepare()
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = call(ready)
        found.append((time.perf_counter() - start) * 1e6)
        del result, ready
    return found


def host(way: Contender, backward: bool, times: int) -> list[float]:
    """Of the forward, or of the backward alone."""
    if backward:
        return host_microseconds(way.backward, way.forward, times)
    return host_microseconds(lambda _: way.forward(), lambda: None, times)


def saved_mib(forward: Callable[[], Tensor], own: Values) -> float:
    arguments = {t.untyped_storage().data_ptr() for t in own}
    sizes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in arguments:
            sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = forward()
    del out
    return sum(sizes.values()) / 2**20


def errors(got: Values, exact: Values) -> list[float]:
    """Relative errors in norm."""
    return [((g.double() - e).norm() / e.norm()).item() for g, e in zip(got, exact, strict=True)]


# ------------------------------------------------------------------------------------------------ contenders against each other


class Contender:
    """One way to run the block, in one grad mode."""

    def __init__(self, name: str, args: list[Tensor], ids: Tensor, masked: bool, grad: Tensor | None) -> None:
        function = experts if name == "eager" else torch.compile(experts, backend=name, fullgraph=True, dynamic=False)
        self.args, self.own, self.grad = args, [*args, ids], grad
        self.forward = lambda: function(*args, ids, masked)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.args, self.grad)

    def step(self) -> tuple[Tensor, ...]:
        """Output, and in training gradients."""
        out = self.forward()
        return (out,) if self.grad is None else (out.detach(), *self.backward(out))

    def has_same_bits(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.step(), self.step(), strict=True))


def truth(args: list[Tensor], ids: Tensor, grad: Tensor) -> Values:
    """Output and gradients in fp64."""
    doubles = [a.detach().double().requires_grad_() for a in args]
    out = one_by_one(*doubles, ids)
    return (out.detach(), *torch.autograd.grad(out, doubles, grad.double()))


def compare(name: str, tokens: int, routing: str, forms: Sequence[str], rounds: int, device: str) -> list[dict[str, Any]]:
    """A row for each form, mode and contender."""
    args, ids = arguments(BLOCKS[name], tokens, routing, device)
    grad = torch.randn_like(args[0])
    exact = truth(args, ids, grad)
    rows = []
    for form in forms:
        for train in (False, True):
            torch._dynamo.reset()
            fxfuse.reset()  # no time of an earlier row counts against measuring here
            with torch.set_grad_enabled(train):
                inputs = [a.detach().requires_grad_(train) for a in args]
                ways = {c: Contender(c, inputs, ids, form == "masked", grad if train else None) for c in CONTENDERS}
                off = {c: errors(way.step(), exact[: None if train else 1]) for c, way in ways.items()}
                fused = ", ".join(f"{f.name}: {f.kernel}" for f in fxfuse.last_report().fused) or "none"
                wrong = {c for c in CONTENDERS if any(not g <= 1.5 * e + 1e-6 for g, e in zip(off[c], off["eager"], strict=True))}
                for mode in MODES[1:] if train else MODES[:1]:
                    key = {"block": name, "tokens": tokens, "routing": routing, "form": form, "mode": mode}
                    for found in _rows(ways, mode, off, wrong, rounds, device):
                        rows.append(key | found | {"fused": fused if found["contender"] == "fxfuse" else "-"})
                        print(rows[-1], flush=True)
    return rows


def _rows(
    ways: dict[str, Contender], mode: str, off: dict[str, list[float]], wrong: set[str], rounds: int, device: str
) -> Iterator[dict[str, Any]]:
    train, both = mode != "inference", mode == "forward+backward"
    times: dict[str, list[float]] = {c: [] for c in ways}
    for _ in range(rounds):
        for c in random.sample(list(ways), len(ways)):
            times[c].append(milliseconds(ways[c].step if both else ways[c].forward, device))
    ms = {c: statistics.median(t) for c, t in times.items()}
    us = _host(ways, both) if device != "cpu" else {}
    for c, way in ways.items():
        yield {
            "contender": c,
            "ms": "WRONG" if c in wrong else round(ms[c], 4),
            "speed-up": round(ms["inductor"] / ms[c], 3),
            "error": f"{max(off[c]) if both else off[c][0]:.1e}",
            "saved MiB": round(saved_mib(way.forward, way.own), 2) if train else "-",
            "same bits": "yes" if way.has_same_bits() else "no",
            "host us": "-" if device == "cpu" else round(us[c], 1),
        }


def _host(ways: dict[str, Contender], backward: bool) -> dict[str, float]:
    """Medians over rounds in random order: the processor's clock and caches change between them."""
    found: dict[str, list[float]] = {c: [] for c in ways}
    for _ in range(8):
        for c in random.sample(list(ways), len(ways)):
            found[c] += host(ways[c], backward, 10)
    return {c: statistics.median(times) for c, times in found.items()}


# ------------------------------------------------------------------------------------------------ our pass by number of layers


class Layer(nn.Module):
    """Norm, router, experts, residual."""

    def __init__(self, block: Block, masked: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(block.hidden), nn.Linear(block.hidden, block.experts, bias=False)
        self.w_up = nn.Parameter(torch.randn(block.experts, 2 * block.inner, block.hidden))
        self.w_down = nn.Parameter(torch.randn(block.experts, block.hidden, block.inner))
        self.chosen, self.masked = block.chosen, masked

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        p, ids = self.router(rows).softmax(-1, dtype=torch.float32).topk(self.chosen)
        p = (p / p.sum(-1, keepdim=True)).to(x.dtype)
        return x + experts(rows, p, self.w_up, self.w_down, ids, self.masked)


def rewriting(layers: int, form: str) -> dict[str, Any]:
    """Milliseconds of our pass over the joint graph of some layers, the first time and when its pattern traces are cached.

    The expert blocks alone: from the search for them until they are replaced, all forms that are tried included.
    """
    torch.set_num_threads(1)
    fxfuse.explain(nn.Linear(8, 8))(torch.randn(2, 8))  # loads the fusions, and what torch loads when it first traces
    model = nn.Sequential(*[Layer(BLOCKS["tiny"], form == "masked") for _ in range(layers)]).bfloat16()
    x = torch.randn(16, BLOCKS["tiny"].hidden).bfloat16().requires_grad_()
    (first, blocks, report), *warm = [explained(model, x) for _ in range(4)]
    again = min(ms for ms, *_ in warm)
    return {
        "layers": layers,
        "form": form,
        "nodes": sum(g.nodes for g in report.graphs),
        "fused": len(report.fused),
        "expert blocks": report.count("grouped_mlp"),
        "first ms": round(first, 1),
        "blocks alone": round(blocks, 1),
        "warm ms": round(again, 1),
        "blocks alone, warm": round(min(ms for _, ms, _ in warm), 1),
        "warm ms a layer": round(again / layers, 1),
    }


def explained(model: nn.Module, x: Tensor) -> tuple[float, float, fxfuse.Report]:
    """Milliseconds of our pass and of its search for expert blocks; the report."""
    seconds: list[float] = []
    search = rewrite._try_fusion

    def timed(run: Any, fusion: Any) -> None:
        started = time.perf_counter()
        search(run, fusion)
        if fusion.name.startswith("grouped_mlp["):
            seconds.append(time.perf_counter() - started)

    with mock.patch.object(rewrite, "_try_fusion", timed):
        report = fxfuse.explain(model)(x)
    return sum(g.seconds for g in report.graphs) * 1e3, sum(seconds) * 1e3, report


def compile_table(layers: Sequence[int], forms: Sequence[str]) -> list[dict[str, Any]]:
    """Each row from a fresh process."""
    rows = []
    for form in forms:
        for n in layers:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
                rows.append(fresh.submit(rewriting, n, form).result())
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="+", choices=list(BLOCKS), default=[name for name in BLOCKS if "tiny" not in name])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 8192])
    parser.add_argument("--forms", nargs="+", choices=["masked", "sorted"], default=["masked", "sorted"])
    parser.add_argument("--routing", nargs="+", choices=["even", "zipf", "idle", "one"], default=["even"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="only our pass by number of layers")
    parser.add_argument("--layers", nargs="+", type=int, default=[1, 48], help="for --compile")
    args = parser.parse_args(argv)
    if args.compile:
        record("moe_compile", "our pass over mixture-of-experts layers, training", compile_table(args.layers, args.forms))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and any("tiny" not in name for name in args.blocks):
        raise SystemExit("benchmarks/moe.py measures GPU kernels and there is no GPU here; --blocks tiny runs on a CPU")
    cases = itertools.product(args.blocks, args.tokens, args.routing)
    rows = [row for case in cases for row in compare(*case, args.forms, args.rounds, device)]
    worst = min(r["speed-up"] for r in rows if r["contender"] == "fxfuse")
    record(f"moe_{device}", f"mixture-of-experts blocks, bf16, {device}; worst speed-up over Inductor {worst}", rows)


if __name__ == "__main__":
    main()
