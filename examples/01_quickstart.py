"""Train a small language model twice, with plain eager PyTorch and with ``backend="fxfuse"``, and compare.

    python examples/01_quickstart.py [--steps 120]

Both runs start from the same weights, see the same batches and draw the same dropout masks, so their losses must agree.
The text is the language reference that CPython carries for ``help()``: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from language_model import LanguageModel, continue_text
from torch import Tensor

import fxfuse


@dataclass
class Run:
    """One training run: the loss of every step, and how long the steps took."""

    losses: list[float]
    seconds: list[float]

    @property
    def first(self) -> float:
        """The first step, which contains all compilation."""
        return self.seconds[0]

    @property
    def typical(self) -> float:
        return statistics.median(self.seconds[1:])


def text_bytes() -> Tensor:
    """The English text of CPython's language reference, every run of white space as one blank: (N,) int64."""
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    return torch.tensor(list(text.encode()))


def batches(data: Tensor, steps: int, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Random windows of the text and the same windows one byte later."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(data) - context - 1, (steps, batch), generator=generator)
    windows = data[starts[..., None] + torch.arange(context + 1)]
    return [(w[:, :-1], w[:, 1:]) for w in windows]


def train(model: LanguageModel, step: Callable[[Tensor], Tensor], data: list[tuple[Tensor, Tensor]], device: str) -> Run:
    """AdamW with a linear warm-up. ``step`` is the model itself, or the compiled model: that is the only difference."""
    torch.manual_seed(2)  # the dropout masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 30))
    run = Run([], [])
    for tokens, targets in data:
        start = time.perf_counter()
        logits = step(tokens.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        run.losses.append(loss.item())
        run.seconds.append(time.perf_counter() - start)
    return run


def new_model(device: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sample", type=int, default=300, help="how many bytes the trained model writes")
    parser.add_argument("--report", default="report.html", help="where the report is written")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    can_compile = device == "cuda" or any(map(shutil.which, ("g++", "clang++", "c++")))
    options = {"fallback_random": True}  # Inductor's own generator would draw other dropout masks than eager does
    if not can_compile:
        print("no C++ compiler here: fxfuse rewrites the graphs, torch itself runs them (lower='eager')")
        options["lower"] = "eager"

    eager_model, fused_model = new_model(device), new_model(device)
    data = batches(text_bytes(), args.steps, args.batch, eager_model.context)
    size = sum(p.numel() for p in eager_model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {args.steps} steps of {args.batch} x {eager_model.context} bytes on {device}\n")

    eager = train(eager_model, eager_model, data, device)
    fused = train(fused_model, torch.compile(fused_model, backend="fxfuse", options=options), data, device)

    differences = [abs(a - b) / abs(a) for a, b in zip(eager.losses, fused.losses, strict=True)]
    print(f"{'step':>6} {'eager loss':>12} {'fxfuse loss':>12} {'difference':>12}")
    every = max(1, args.steps // 10)
    for i in [*range(0, args.steps - 1, every), args.steps - 1]:
        print(f"{i:6d} {eager.losses[i]:12.5f} {fused.losses[i]:12.5f} {differences[i]:12.1e}")
    print(f"\nlargest relative difference of the loss in {args.steps} steps: {max(differences):.1e}")
    print(f"a step takes {eager.typical * 1e3:.1f} ms in eager, {fused.typical * 1e3:.1f} ms with fxfuse", end="")
    print(f", whose first step took {fused.first:.1f} s (compilation)")

    sample = continue_text(fused_model.eval(), b"The statement ", args.sample).decode(errors="replace")
    print("\nthe model goes on:\n" + textwrap.fill(sample, 100) + "\n")

    report = fxfuse.last_report()
    print(report)
    report.save(args.report)
    print(f"\nthe report, with the graphs before and after: {args.report}")


if __name__ == "__main__":
    main()
