"""Train a small mixture-of-experts language model with plain eager PyTorch and with ``backend="fxfuse"``, and compare.

    python examples/04_train_moe.py [--steps 60]

The experts are written as one writes them with ``F.grouped_mm``: sort by expert, gather, two grouped matrix products, weigh,
restore the order, sum. fxfuse finds that block in the graph and in its backward. Text and training are those of
01_quickstart.py. Experts compute in bf16, so that the two runs agree to about three digits.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
from collections.abc import Callable

import torch
import torch.nn.functional as F
from language_model import LanguageModel
from torch import Tensor, nn

import fxfuse

quickstart = importlib.import_module("01_quickstart")


class MixtureOfExperts(nn.Module):
    """SwiGLU experts in bf16, of which each token takes ``chosen``: (B, T, C) -> (B, T, C)."""

    def __init__(self, dim: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.router = nn.Linear(dim, experts, bias=False)
        self.gate_up = nn.Parameter(0.04 * torch.randn(experts, 2 * hidden, dim).bfloat16())
        self.down = nn.Parameter(0.04 * torch.randn(experts, dim, hidden).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(self.chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.mix(tokens.bfloat16(), ids, weights).view_as(x).to(x.dtype)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Rows (N, C), for each the ids of its experts and their weights (N, K) -> (N, C)."""
        expert, order = ids.flatten().sort()
        countable = expert.int() if x.is_cuda else expert.float()  # what histc takes
        ends = torch.histc(countable, bins=self.experts, min=0, max=self.experts - 1).cumsum(0, dtype=torch.int32)

        gate, up = F.grouped_mm(x[order // self.chosen], self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        y = y * weights.flatten()[order].unsqueeze(-1)

        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=x.device)
        return y[inverse].view(*ids.shape, -1).sum(1).to(x.dtype)


class MoELanguageModel(LanguageModel):
    """The language model of the other examples, with experts in every layer."""

    def __init__(self, layers: int = 3, dim: int = 128, hidden: int = 64, experts: int = 8, chosen: int = 2) -> None:
        super().__init__(layers, dim, dropout=0.0)
        for layer in self.layers:
            layer.mlp = MixtureOfExperts(dim, hidden, experts, chosen)


def new_model(device: str) -> MoELanguageModel:
    torch.manual_seed(0)
    return MoELanguageModel().to(device)


def kept(step: Callable[[Tensor], Tensor], model: nn.Module, tokens: Tensor) -> float:
    """MiB that one forward keeps for its backward, the parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        step(tokens)
    return sum(sizes.values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--report", default="report_moe.html", help="where the report is written")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {}
    if device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("no C++ compiler here: fxfuse rewrites the graphs, torch itself runs them (lower='eager')")
        options["lower"] = "eager"

    eager_model, fused_model = new_model(device), new_model(device)
    data = quickstart.batches(quickstart.text_bytes(), args.steps, args.batch, eager_model.context)
    size = sum(p.numel() for p in eager_model.parameters())
    print(f"{size / 1e6:.1f} M parameters, {args.steps} steps of {args.batch} x {eager_model.context} bytes on {device}\n")

    eager = quickstart.train(eager_model, eager_model, data, device)
    compiled = torch.compile(fused_model, backend="fxfuse", options=options)
    fused = quickstart.train(fused_model, compiled, data, device)

    differences = [abs(a - b) / abs(a) for a, b in zip(eager.losses, fused.losses, strict=True)]
    print(f"{'step':>6} {'eager loss':>12} {'fxfuse loss':>12} {'difference':>12}")
    every = max(1, args.steps // 10)
    for i in [*range(0, args.steps - 1, every), args.steps - 1]:
        print(f"{i:6d} {eager.losses[i]:12.5f} {fused.losses[i]:12.5f} {differences[i]:12.1e}")
    print(f"\nlargest relative difference of the loss in {args.steps} steps: {max(differences):.1e}")
    print(f"a step takes {eager.typical * 1e3:.1f} ms in eager, {fused.typical * 1e3:.1f} ms with fxfuse", end="")
    print(f", whose first step took {fused.first:.1f} s (compilation)")
    tokens = data[0][0].to(device)
    in_eager, in_fused = kept(eager_model, eager_model, tokens), kept(compiled, fused_model, tokens)
    print(f"a forward keeps {in_eager:.1f} MiB for its backward in eager, {in_fused:.1f} MiB with fxfuse\n")

    report = fxfuse.last_report()
    forward, backward = (report.count("grouped_mlp", graph) for graph in ("forward", "backward"))
    print(f"expert blocks fused: {forward} in the forward, {backward} in the backward, of {len(fused_model.layers)} layers\n")
    print(report)
    report.save(args.report)
    print(f"\nthe report, with the graphs before and after: {args.report}")


if __name__ == "__main__":
    main()
