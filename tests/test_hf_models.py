"""Hugging Face models as they come, two tiny layers with random weights: equal to eager, and every MLP fused or explained."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import compare
import pytest
import torch
from torch import Tensor, nn

import fxfuse

transformers = pytest.importorskip("transformers")

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
DECODER = {**WIDTHS, "vocab_size": 50, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
T5 = {
    "vocab_size": 50,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "use_cache": False,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tokens() -> dict[str, Tensor]:
    """Two sequences of seven tokens."""
    return {"input_ids": torch.randint(1, 50, (2, 7))}


def pixels() -> dict[str, Tensor]:
    """Two images of sixteen by sixteen."""
    return {"pixel_values": torch.randn(2, 3, 16, 16)}


def pairs() -> dict[str, Tensor]:
    """Tokens for an encoder and a decoder."""
    return {**tokens(), "decoder_input_ids": torch.randint(1, 50, (2, 5))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model class, its size, and what fxfuse makes of it."""

    config: str
    model: str
    sizes: Mapping[str, Any]
    inputs: Callable[[], dict[str, Tensor]]
    mlps: tuple[str, ...]
    """Module paths, each of which must hold a fused region or a near miss with its reason."""
    train: Mapping[str, int]
    """How often each fusion fires in training; no other does."""
    infer: Mapping[str, int]

    def build(self) -> nn.Module:
        """A model with random weights; dropout is off, but it is in training mode."""
        sizes = {k: v for k, v in self.sizes.items() if v is not None or k in NO_TOKENS}
        config = getattr(transformers, self.config)(**sizes)
        return getattr(transformers, self.model)(config).train()


LAYERS = tuple(f"layers.{i}.mlp" for i in range(2))
MODELS = {
    "gpt2": Model(
        config="GPT2Config",
        model="GPT2LMHeadModel",
        sizes={
            **{"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **NO_TOKENS},
        },
        inputs=tokens,
        mlps=("h.0.mlp", "h.1.mlp"),  # its linears keep their weights transposed
        train={"linear_gelu_tanh[written out]": 2, "linear_add": 4, "dgrad_add": 1},
        infer={"linear_gelu_tanh[written out]": 2, "linear_add": 4},
    ),
    "bert": Model(
        config="BertConfig",
        model="BertForMaskedLM",
        sizes={
            **{**WIDTHS, "vocab_size": 50, "max_position_embeddings": 16},
            **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        },
        inputs=tokens,
        mlps=("layer.0.intermediate", "layer.1.intermediate", "predictions.transform"),
        train={"linear_gelu": 3, "linear_add": 4, "dgrad_add": 7},
        infer={"linear_gelu": 3, "linear_add": 4},
    ),
    "vit": Model(
        config="ViTConfig",
        model="ViTForImageClassification",
        sizes={**WIDTHS, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        inputs=pixels,
        mlps=LAYERS,
        train={"linear_gelu": 2, "linear_add": 4, "dgrad_add": 4},
        infer={"linear_gelu": 2, "linear_add": 4},
    ),
    "llama": Model(
        config="LlamaConfig",
        model="LlamaForCausalLM",
        sizes=DECODER,
        inputs=tokens,
        mlps=LAYERS,
        train={"gated_mlp_silu": 2, "linear_add": 4, "dgrad_add": 8},
        infer={"gated_mlp_silu": 2, "linear_add": 4},
    ),
    "qwen3": Model(
        config="Qwen3Config",
        model="Qwen3ForCausalLM",
        sizes={**DECODER, "head_dim": 8},
        inputs=tokens,
        mlps=LAYERS,
        train={"gated_mlp_silu": 2, "linear_add": 4, "dgrad_add": 8},
        infer={"gated_mlp_silu": 2, "linear_add": 4},
    ),
    "gemma": Model(
        config="GemmaConfig",
        model="GemmaForCausalLM",
        sizes={**DECODER, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0},
        inputs=tokens,
        mlps=LAYERS,
        train={"gated_mlp_gelu_tanh": 2, "linear_add": 4, "dgrad_add": 9},
        infer={"gated_mlp_gelu_tanh": 2, "linear_add": 4},
    ),
    "t5": Model(
        config="T5Config",
        model="T5ForConditionalGeneration",
        sizes=T5,
        inputs=pairs,
        mlps=("encoder.block.0.layer.1", "encoder.block.1.layer.1", "decoder.block.0.layer.2", "decoder.block.1.layer.2"),
        train={"linear_relu": 4, "linear_add": 10, "dgrad_add": 23},
        infer={"linear_relu": 4, "linear_add": 10},
    ),
    "t5_gated": Model(  # T5 v1.1
        config="T5Config",
        model="T5ForConditionalGeneration",
        sizes={**T5, "num_layers": 1, "num_decoder_layers": 1, "feed_forward_proj": "gated-gelu"},
        inputs=pairs,
        mlps=("encoder.block.0.layer.1.DenseReluDense", "decoder.block.0.layer.2.DenseReluDense"),
        train={"gated_mlp_gelu_tanh[written out]": 2, "linear_add": 5, "dgrad_add": 12},
        infer={"gated_mlp_gelu_tanh[written out]": 2, "linear_add": 5},
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def step(model: Callable[..., Any], owner: nn.Module, inputs: Mapping[str, Tensor], train: bool) -> compare.Run:
    """Logits, and every parameter's gradient of their mean square."""
    owner.zero_grad()
    with torch.set_grad_enabled(train):
        logits = model(**inputs).logits
    if train:
        logits.double().square().mean().backward()
    return compare.Run(outputs=(logits.detach(),), grads=tuple(p.grad for p in owner.parameters()), inputs=())


def check(spec: Model, train: bool, dtype: torch.dtype = torch.float32) -> fxfuse.Report:
    """Compile, run, compare with eager by its distance from fp64; return the report."""
    model, inputs = spec.build().to(dtype), spec.inputs()
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="fxfuse", dynamic=False, options={"lower": "eager"})
    got = step(compiled, model, inputs, train)
    report = fxfuse.Report.merge(fxfuse.reports())
    eager = step(model, model, inputs, train)
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    compare.assert_as_near_to_fp64(got, eager, step(exact, exact, doubled, train))
    assert all((g is None) == (e is None) for g, e in zip(got.grads, eager.grads, strict=True))
    assert not report.failures
    return report


@models
def test_training(name: str) -> None:
    spec = MODELS[name]
    report = check(spec, train=True)
    assert Counter(f.name for f in report.fused) == spec.train
    _every_mlp_is_fused_or_explained(spec, report)


@models
def test_inference(name: str) -> None:
    spec = MODELS[name]
    report = check(spec, train=False)
    assert Counter(f.name for f in report.fused) == spec.infer
    _every_mlp_is_fused_or_explained(spec, report)


@pytest.mark.parametrize(("name", "dgrad_add"), [("bert", 7), ("llama", 4)])  # RMSNorm's gradient arrives in fp32
def test_training_in_bf16(name: str, dgrad_add: int) -> None:
    report = check(MODELS[name], train=True, dtype=torch.bfloat16)
    assert Counter(f.name for f in report.fused) == {**MODELS[name].train, "dgrad_add": dgrad_add}


def _every_mlp_is_fused_or_explained(spec: Model, report: fxfuse.Report) -> None:
    for mlp in spec.mlps:
        fused = [f for f in report.fused if mlp in f.layer]
        explained = [m for m in report.missed if mlp in m.layer and m.progress == 1 and m.reason]
        assert fused or explained, f"nothing is said about {mlp}"


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_training_through_inductor(name: str) -> None:
    spec = MODELS[name]
    model, inputs = spec.build(), spec.inputs()
    exact = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="fxfuse", dynamic=False, options={"expect": dict(spec.train)})
    got, eager = step(compiled, model, inputs, True), step(model, model, inputs, True)
    compare.assert_as_near_to_fp64(got, eager, step(exact, exact, inputs, True), factor=2)
