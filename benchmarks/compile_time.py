"""How long compiling takes, and how that grows.

    python benchmarks/compile_time.py                 all three tables
    python benchmarks/compile_time.py cold --rounds 5

cold      seconds from the first call to the end of the first backward of the demo model, Inductor against fxfuse, each in a
          fresh process with empty caches, in turn
layers    seconds of our pass alone for 1, 4, 16 and 64 layers: it must grow linearly
fusions   the same for 10 and 100 registered fusions that nearly match (same root op) beside the built-in ones
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT), str(ROOT / "patterns")]

from language_model import LanguageModel  # noqa: E402

# ------------------------------------------------------------------------------------------------ measured in a child


def cold(backend: str, layers: int) -> dict[str, float]:
    """One training step, compilation included. Importing the compilers is not counted."""
    import torch._inductor.compile_fx

    import fxfuse

    torch.manual_seed(0)
    model = LanguageModel(layers=layers)
    tokens = torch.randint(256, (32, model.context))
    compiled = torch.compile(model, backend=backend, options={"fallback_random": True})
    start = time.perf_counter()
    compiled(tokens).sum().backward()
    first = time.perf_counter() - start
    start = time.perf_counter()
    compiled(tokens).sum().backward()
    found = {"seconds": first - (time.perf_counter() - start)}
    if backend == "fxfuse":
        found["pass"] = sum(g.seconds for g in fxfuse.last_report().graphs)
    return found


def rewriting(layers: int, extra: int) -> dict[str, float]:
    """Seconds of our pass over the joint graph of a small model, the first time and when its pattern traces are cached."""
    import fxfuse

    for i in range(extra):
        register_near_miss(i)
    torch.manual_seed(0)
    model = LanguageModel(layers=layers, dim=32, heads=2)
    tokens = torch.randint(256, (2, model.context))
    first = fxfuse.explain(model)(tokens)
    graphs = first.graphs
    warm = min(sum(g.seconds for g in fxfuse.explain(model)(tokens).graphs) for _ in range(3))
    return {
        "nodes": sum(g.nodes for g in graphs),
        "fused": len(first.fused),
        "first": sum(g.seconds for g in graphs),
        "warm": warm,
    }


def register_near_miss(i: int) -> None:
    """A fusion whose root op is everywhere in the model, and that is never quite there."""
    import fxfuse

    @fxfuse.register_forward_fusion(name=f"near_miss_{i}", check_on_register=False)
    def pattern(x, w, r):
        return r + F.linear(x, w) * (3.0 + i)

    @pattern.rewrite
    def _(x, w, r):
        return torch.add(r, F.linear(x, w), alpha=3.0 + i)


def in_fresh_process(what: str, *args: Any) -> dict[str, float]:
    """``what(*args)`` in a new interpreter with empty compiler caches."""
    with tempfile.TemporaryDirectory() as folder:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FXFUSE_CACHE_DIR")
        caches = {name: f"{folder}/{name.split('_')[0].lower()}" for name in names}
        command = [sys.executable, __file__, "child", what, *map(str, args)]
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------------ tables


def cold_table(rounds: int) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, float]]] = {"inductor": [], "fxfuse": []}
    for i in range(rounds):
        for backend in sorted(runs, reverse=bool(i % 2)):
            runs[backend].append(in_fresh_process("cold", backend, 6))
    medians = {backend: statistics.median(r["seconds"] for r in found) for backend, found in runs.items()}
    rows = []
    for backend, found in runs.items():
        seconds = [r["seconds"] for r in found]
        ours = statistics.median(r["pass"] for r in found) if backend == "fxfuse" else 0.0
        rows.append(
            {
                "backend": backend,
                "median s": medians[backend],
                "least s": min(seconds),
                "most s": max(seconds),
                "to Inductor": medians[backend] / medians["inductor"],
                "our pass s": ours,
                "share": ours / medians[backend],
            }
        )
    return rows


def layers_table() -> list[dict[str, Any]]:
    return [_rewriting_row({"layers": n}, in_fresh_process("rewriting", n, 0)) for n in (1, 4, 16, 64)]


def fusions_table() -> list[dict[str, Any]]:
    return [_rewriting_row({"more fusions": n}, in_fresh_process("rewriting", 16, n)) for n in (0, 10, 100)]


def _rewriting_row(key: dict[str, int], found: dict[str, float]) -> dict[str, Any]:
    nodes, fused = int(found["nodes"]), int(found["fused"])
    return key | {
        "nodes": nodes,
        "fused": fused,
        "first s": found["first"],
        "warm s": found["warm"],
        "warm ms a node": found["warm"] / nodes * 1e3,
        "warm ms a fusion": found["warm"] / max(fused, 1) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["cold", "layers", "fusions"], help="cold, layers, fusions (all)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from record import record

    if "cold" in args.tables:
        record("compile_cold", f"cold compile of the demo model, training, {args.rounds} rounds", cold_table(args.rounds))
    if "layers" in args.tables:
        record("compile_layers", "our pass by number of layers, training", layers_table())
    if "fusions" in args.tables:
        record("compile_fusions", "our pass by number of registered fusions, 16 layers, training", fusions_table())


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        what, *arguments = sys.argv[2:]
        measure = {"cold": cold, "rewriting": rewriting}[what]
        print(json.dumps(measure(*[int(a) if a.isdigit() else a for a in arguments])))  # type: ignore[operator]
    else:
        main()
