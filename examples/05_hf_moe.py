"""A mixture-of-experts model of Hugging Face transformers, untouched: trained and sampled with ``backend="fxfuse"``.

    python examples/05_hf_moe.py [--steps 30]        (needs: pip install transformers)

``Qwen3MoeForCausalLM`` with small widths and random weights: nothing is downloaded. Its experts are found in the graph as
transformers wrote them, in training and in generation, and computed as one operator each.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import warnings
from typing import Any

import torch
from torch import Tensor, nn

import fxfuse

try:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
except ImportError as error:
    raise SystemExit(
        f"examples/05_hf_moe.py shows a model of Hugging Face transformers: pip install transformers ({error})"
    ) from None

warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # in transformers, and harmless
quickstart = importlib.import_module("01_quickstart")

CONFIG = Qwen3MoeConfig(
    vocab_size=256,  # one symbol a byte
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    moe_intermediate_size=64,
    max_position_embeddings=128,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)


def new_model(device: str) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(CONFIG).to(device, torch.bfloat16)


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], device: str) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for tokens, _ in data:
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def write(model: Any, start: bytes, length: int, device: str) -> bytes:
    """``start`` and the ``length`` bytes that are likeliest after it."""
    prompt = torch.tensor([list(start)], device=device)
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False)
    return bytes(written[0].tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sample", type=int, default=40, help="how many bytes the trained model writes")
    parser.add_argument("--report", default="report_hf_moe.html", help="where the report is written")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {}
    if device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        print("no C++ compiler here: fxfuse rewrites the graphs, torch itself runs them (lower='eager')")
        options["lower"] = "eager"

    data = quickstart.batches(quickstart.text_bytes(), args.steps, args.batch, 64)
    model = new_model(device)
    model.compile(backend="fxfuse", options=options)

    eager, fused = train(new_model(device), data, device), train(model, data, device)
    differences = [abs(a - b) / abs(a) for a, b in zip(eager, fused, strict=True)]
    print(f"loss after {args.steps} steps: {eager[-1]:.4f} in eager, {fused[-1]:.4f} with fxfuse")
    print(f"largest relative difference of the loss in {args.steps} steps: {max(differences):.1e}\n")
    report = fxfuse.last_report()
    forward, backward = (report.count("grouped_mlp", graph) for graph in ("forward", "backward"))
    print(f"expert blocks fused: {forward} in the forward, {backward} in the backward, of {CONFIG.num_hidden_layers} layers\n")
    print(report)
    report.save(args.report)
    print(f"\nthe report, with the graphs before and after: {args.report}")

    before = len(fxfuse.reports())
    model.eval()
    fused_text = write(model, b"The statement ", args.sample, device)
    with torch.compiler.set_stance("force_eager"):
        eager_text = write(model, b"The statement ", args.sample, device)
    same = sum(a == b for a, b in zip(fused_text, eager_text, strict=True))
    print(
        f"\nwritten with fxfuse: {fused_text.decode(errors='replace')!r}; {same} of {len(eager_text)} bytes are those of eager"
    )  # in bf16 a near tie may fall either way
    graphs = [f"{r.count('grouped_mlp')} of {CONFIG.num_hidden_layers}" for r in fxfuse.reports()[before:]]
    print(f"expert blocks fused in the graphs of generation (one length, then any): {', '.join(graphs)}")


if __name__ == "__main__":
    main()
