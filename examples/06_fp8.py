"""Train one compiled model under several recipes: full precision, FP8 with a scale a tensor, FP8 with a scale a block.

    python examples/06_fp8.py [--steps 40]

The model is compiled once; each recipe is another plan of the same graph. Without a GPU the FP8 products are computed from their
definition, in fp32: their numbers are FP8's, their speed is not.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import shutil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse

quickstart = importlib.import_module("01_quickstart")

RECIPES: dict[str, fxfuse.Recipe] = {
    "full precision": fxfuse.Recipe(),
    "Float8CurrentScaling": fxfuse.Float8CurrentScaling(),
    "Float8BlockScaling": fxfuse.Float8BlockScaling(),
    "... gradients not": fxfuse.Float8BlockScaling(backward_override="high_precision"),
}


class ByteModel(nn.Module):
    """A language model over bytes without attention: each byte sees the 8 before it. Plain PyTorch but for one line."""

    def __init__(self, dim: int = 128, context: int = 8) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(256, dim)
        self.mix = nn.Linear(context * dim, 2 * dim)
        self.up, self.down = nn.Linear(2 * dim, 4 * dim), nn.Linear(4 * dim, 2 * dim)
        self.head = nn.Linear(2 * dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        windows = F.pad(self.embed(tokens), (0, 0, self.context - 1, 0)).unfold(1, self.context, 1).flatten(2)
        x = F.gelu(self.mix(windows))
        x = x + self.down(F.gelu(self.up(x)))
        with fxfuse.recipe_region("default"):  # the logits stay in full precision, whatever recipe is active
            return self.head(x)


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], recipe: fxfuse.Recipe, device: str) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for tokens, targets in data:
        with fxfuse.use_recipe(recipe):
            logits = model(tokens.to(device))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
        loss.backward()  # the backward uses the recipe of its forward
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--report", default="report_fp8.html", help="where the report is written")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {}
    if device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("no C++ compiler here: fxfuse rewrites the graphs, torch itself runs them (lower='eager')")
        options["lower"] = "eager"

    data = quickstart.batches(quickstart.text_bytes(), args.steps, args.batch, 64)
    torch.manual_seed(0)
    model = ByteModel().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    start = copy.deepcopy(model.state_dict())
    model.compile(backend="fxfuse", options=options)

    found = {}
    for name, recipe in RECIPES.items():
        model.load_state_dict(start)
        found[name] = train(model, data, recipe, device)
    baseline = torch.tensor(found["full precision"])
    print(f"{'recipe':22} {'first loss':>10} {'last loss':>10} {'mean distance to full precision':>32}")
    for name, losses in found.items():
        distance = (torch.tensor(losses) - baseline).abs().mean().item()
        print(f"{name:22} {losses[0]:10.4f} {losses[-1]:10.4f} {distance:32.4f}")

    info = fxfuse.plan_info()
    print(f"\n{info.builds} plans were built for {len(RECIPES)} recipes; {info.hits} calls found theirs")
    for plan in info.plans:
        kept = (plan.saved_bytes or 0) / 2**20
        print(f"  {plan.calls:4} calls  {plan.fused} fused  {kept:5.2f} MiB kept for the backward  {plan.recipe}")

    report = fxfuse.last_report()
    print(f"\nlinears quantised: {report.count('scaled_linear', 'forward')} in the forward, of 4 in the model\n")
    print(report)
    report.save(args.report)
    print(f"\nthe report, with the graphs before and after: {args.report}")


if __name__ == "__main__":
    main()
