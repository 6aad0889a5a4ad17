"""What fxfuse costs at run time, against Inductor in the same process.

    python benchmarks/overhead.py

dispatch    microseconds of what Dynamo calls, against the plan that it runs: our choice of a plan alone
switch      microseconds that entering and leaving another recipe adds to two calls, for each of the two switches
block       microseconds of the host until a call of the Qwen3-30B-A3B block returns, the GPU being idle, and how many of them are
            spent in the code of the compiled graph; the rest is Dynamo's, AOTAutograd's and autograd's; on a GPU alone
launch      microseconds of the host until a function of our kernels returns, the GPU being idle; on a GPU alone
call        microseconds of one call of a tiny compiled function, Dynamo and AOTAutograd included
step        one training step of the demo model; the two are run in turn and compared round by round
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT), str(ROOT / "patterns")]

from language_model import LanguageModel  # noqa: E402
from record import record  # noqa: E402  (imports fxfuse: without an installation, that is what registers the backend)

import fxfuse  # noqa: E402
from fxfuse import dispatch, kernels  # noqa: E402

BACKENDS = ("inductor", "fxfuse")


def compiled_with(backend: str, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    return torch.compile(make(), backend=backend, options={"fallback_random": True})


def added(times: dict[str, list[float]], backend: str) -> float:
    """Median over the rounds of the difference to Inductor in the same round: what else the machine did hits both."""
    return statistics.median(t - base for t, base in zip(times[backend], times["inductor"], strict=True))


def ratio(times: dict[str, list[float]], backend: str) -> float:
    """Median over the rounds of the ratio to Inductor in the same round."""
    return statistics.median(t / base for t, base in zip(times[backend], times["inductor"], strict=True))


def tiny_function() -> Callable[[torch.Tensor], torch.Tensor]:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    return double


def call_table(rounds: int) -> list[dict[str, Any]]:
    x = torch.randn(8)
    timers = {}
    for backend in BACKENDS:
        function = compiled_with(backend, tiny_function)
        torch.testing.assert_close(function(x), x + x)
        timers[backend] = Timer("f(x)", globals={"f": function, "x": x})
    us: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for i in range(rounds):
        for backend in BACKENDS if i % 2 else reversed(BACKENDS):
            us[backend].append(timers[backend].blocked_autorange(min_run_time=0.3).median * 1e6)
    return [
        {"backend": b, "median us a call": statistics.median(us[b]), "least us": min(us[b]), "added us": added(us, b)}
        for b in BACKENDS
    ]


def dispatch_table(rounds: int) -> list[dict[str, Any]]:
    """The closure that chooses a plan around a plan that does next to nothing."""
    before = set(dispatch._live)
    x = torch.randn(8)
    compiled_with("fxfuse", tiny_function)(x)
    (made,) = set(dispatch._live) - before
    plan = made.now.plan
    assert plan is not None
    kept, plan.run = plan.run, lambda *args: args
    timers = {name: Timer("f(x)", globals={"f": f, "x": x}) for name, f in (("plan", plan.run), ("dispatch", made.callable()))}
    us: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            us[name].append(timer.blocked_autorange(min_run_time=0.2).median * 1e6)
    plan.run = kept
    return [
        {
            "what": n,
            "median us a call": statistics.median(t),
            "added us": statistics.median(a - b for a, b in zip(t, us["plan"], strict=True)),
        }
        for n, t in us.items()
    ]


def switch_table(rounds: int) -> list[dict[str, Any]]:
    """Two calls of the closure that chooses a plan, the first of them under another recipe, against both under one."""
    torch.compiler.reset()  # another table may have compiled the function
    before = set(dispatch._live)
    x = torch.randn(8)
    function, strict = compiled_with("fxfuse", tiny_function), fxfuse.Recipe(numerics="strict")
    function(x)
    with fxfuse.use_recipe(strict):
        function(x)
    (made,) = set(dispatch._live) - before
    kept = [(plan, plan.run) for plan in made.plans.values()]
    for plan, _ in kept:
        plan.run = lambda *args: args
    call = made.callable()

    def switching() -> None:
        with fxfuse.use_recipe(strict):
            call(x)
        call(x)

    def staying() -> None:
        call(x)
        call(x)

    timers = {name: Timer("f()", globals={"f": f}) for name, f in (("staying", staying), ("switching", switching))}
    us: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            us[name].append(timer.blocked_autorange(min_run_time=0.2).median * 1e6)
    for plan, run in kept:
        plan.run = run
    added = [(a - b) / 2 for a, b in zip(us["switching"], us["staying"], strict=True)]
    return [{"what": "one switch", "added us": statistics.median(added), "least us": min(added)}]


def launch_table(tokens: int = 64) -> list[dict[str, Any]]:
    """Every function of each path of kernels, at sizes of Qwen3-30B-A3B: the second call on, whose launches are prepared."""
    from moe import BLOCKS, host_microseconds
    from moe_kernels import Operands, functions

    operands = Operands(BLOCKS["Qwen3-30B-A3B"], tokens, "cuda")
    rows = []
    for path in kernels.PATHS:
        for name, call in functions(kernels.path(path), operands).items():
            call()
            us = statistics.median(host_microseconds(lambda _, call=call: call(), lambda: None, 30))
            rows.append({"path": path, "function": name, "median us": us})
    return rows


def block_table(tokens: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Ten calls of each in turn, a round; medians."""
    import moe
    from torch._inductor.output_code import CompiledFxGraph  # what runs a compiled graph in torch 2.11 to 2.14

    inside: list[float] = []
    run = CompiledFxGraph.__call__

    def timed(self: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        start = time.perf_counter()
        results = run(self, inputs)
        inside.append((time.perf_counter() - start) * 1e6)
        return results

    rows = []
    with mock.patch.object(CompiledFxGraph, "__call__", timed):
        for count, mode in itertools.product(tokens, moe.MODES):
            train, both = mode != "inference", mode == "forward+backward"
            args, ids = moe.arguments(moe.BLOCKS["Qwen3-30B-A3B"], count, "even", "cuda")
            inputs, grad = [a.requires_grad_(train) for a in args], torch.randn_like(args[0]) if train else None
            torch._dynamo.reset()
            fxfuse.reset()  # no time of an earlier row counts against measuring here
            with torch.set_grad_enabled(train):
                ways = {b: moe.Contender(b, inputs, ids, True, grad) for b in BACKENDS}
                for way in [*ways.values()] * 4:
                    way.step()
                us: dict[str, list[float]] = {b: [] for b in BACKENDS}
                graph: dict[str, list[float]] = {b: [] for b in BACKENDS}
                for b in [b for i in range(rounds) for b in (BACKENDS if i % 2 else reversed(BACKENDS))]:
                    inside.clear()
                    us[b] += moe.host(ways[b], both, 10)
                    graph[b] += inside[1::2] if both else inside  # a forward comes before each backward
            for b in BACKENDS:
                found = {"backend": b, "us": statistics.median(us[b]), "graph us": statistics.median(graph[b])}
                base = {"to Inductor": ratio(us, b), "graph to Inductor": ratio(graph, b)}
                rows.append({"tokens": count, "mode": "backward" if both else mode} | found | base)
    return rows


def new_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel().to("cuda" if torch.cuda.is_available() else "cpu")


def train_step(model: Callable[..., Any], tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    torch.manual_seed(1)
    start = time.perf_counter()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    loss.item()  # waits for the GPU
    return time.perf_counter() - start


def step_table(rounds: int) -> list[dict[str, Any]]:
    models = {backend: new_model() for backend in BACKENDS}
    compiled = {backend: compiled_with(backend, lambda m=model: m) for backend, model in models.items()}
    device = next(models["fxfuse"].parameters()).device
    tokens, targets = torch.randint(256, (2, 32, 64), device=device)
    for _ in range(3):
        for backend in BACKENDS:
            train_step(compiled[backend], tokens, targets)
    ms: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for i in range(rounds):
        for backend in BACKENDS if i % 2 else reversed(BACKENDS):
            ms[backend].append(train_step(compiled[backend], tokens, targets) * 1e3)
    # Same seed, same weights, same sum of gradients: a wrong contender gets no time.
    for a, b in zip(models["inductor"].parameters(), models["fxfuse"].parameters(), strict=True):
        error = (a.grad - b.grad).norm() / a.grad.norm()
        assert error < 1e-4, f"gradients differ by {error:.1e}"
    return [
        {"backend": b, "median ms": statistics.median(ms[b]), "least ms": min(ms[b]), "to Inductor": ratio(ms, b)}
        for b in BACKENDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = ["dispatch", "switch", "call", "step", *(["launch", "block"] if torch.cuda.is_available() else [])]
    parser.add_argument("tables", nargs="*", default=tables, help=f"{', '.join(tables)} (all)")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    if "dispatch" in args.tables:
        record("overhead_dispatch", "choosing the plan of a call, CPU", dispatch_table(max(4, args.rounds // 4)))
    if "switch" in args.tables:
        record("overhead_switch", "choosing another recipe's plan, CPU", switch_table(max(4, args.rounds // 4)))
    if {"launch", "block"} & {*args.tables} and not torch.cuda.is_available():
        raise SystemExit("benchmarks/overhead.py launch and block measure launches on a GPU and there is no GPU here")
    if "block" in args.tables:
        record(
            "overhead_block", "host time of the Qwen3-30B-A3B block, GPU idle", block_table((64, 8192), max(4, args.rounds // 4))
        )
    if "launch" in args.tables:
        record("overhead_launch", "a function of our kernels until it returns, GPU idle", launch_table())
    if "call" in args.tables:
        record("overhead_call", "one call of a tiny function, CPU", call_table(max(4, args.rounds // 4)))
    if "step" in args.tables:
        record("overhead_step", f"one training step of the demo model, {args.rounds} rounds in turn", step_table(args.rounds))


if __name__ == "__main__":
    main()
