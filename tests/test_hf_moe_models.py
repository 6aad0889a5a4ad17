"""Mixture-of-experts models of Hugging Face as they come, two tiny layers in bfloat16: every expert block is one fused op.

Random weights make routers that hesitate, and a rounding then sends a token to another expert. So inputs are drawn until
every choice is clear, and the double-precision models that judge both sides choose what eager chose.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import compare
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fxfuse

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")  # in transformers

VOCABULARY, LAYERS, STEPS = 64, 2, 20
CLEAR = 0.02
"""A choice is clear when the best score left out differs from the worst one taken by this part of their sizes."""
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
    "initializer_range": 0.2,  # of such narrow layers; with the default the experts hardly count
}
GROUPED = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


@dataclasses.dataclass(frozen=True)
class Model:
    """A configuration class and the sizes that are its own."""

    config: str
    sizes: Mapping[str, Any]
    around: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Other fusions and how often they fire: the shared expert's."""

    def build(self) -> nn.Module:
        """Random weights in bfloat16, in training mode."""
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**{**SIZES, **self.sizes})
        return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()


MODELS = {
    "qwen3_moe": Model(
        "Qwen3MoeConfig", {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    ),
    "qwen2_moe": Model(
        "Qwen2MoeConfig",
        {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4, "num_experts_per_tok": 2},
        {"gated_mlp_silu": LAYERS},
    ),
    "olmoe": Model("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "mixtral": Model("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": Model(
        "DeepseekV3Config",
        {**GROUPED, **LATENT, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 0},
        {"gated_mlp_silu": LAYERS},
    ),
    "glm4_moe": Model(
        "Glm4MoeConfig",
        {**GROUPED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "head_dim": 8},
        {"gated_mlp_silu": LAYERS},
    ),
    "gpt_oss": Model("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "nemotron_h": Model(
        "NemotronHConfig",
        {
            **{**GROUPED, "n_group": 1, "topk_group": 1, "head_dim": 8},
            **{"hybrid_override_pattern": "E" * LAYERS, "moe_shared_expert_intermediate_size": 24},
        },
        {"linear_relu2": LAYERS},
    ),
}
LLAMA4 = Model(
    "Llama4TextConfig",
    {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8},
)


# ------------------------------------------------------------------------------------------------ choices


class Choices(TorchFunctionMode):
    """Records what ``topk`` chooses and how clearly; given earlier choices, makes it choose those."""

    def __init__(self, given: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.margin = 1.0
        """The smallest, as ``CLEAR`` measures it."""
        self._given = None if given is None else iter(given)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.topk:
            return func(*args, **(kwargs or {}))
        if self._given is not None:
            chosen = next(self._given)
            return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
        found = func(*args, **(kwargs or {}))
        self.made.append(found[1])
        self.margin = min(self.margin, _margin(args[0].detach().double(), found[1]))
        return found


def _margin(scores: Tensor, chosen: Tensor) -> float:
    taken = scores.gather(-1, chosen).amin(-1)
    left = scores.scatter(-1, chosen, float("-inf")).amax(-1)
    gaps = ((taken - left) / (taken.abs() + left.abs()))[left.isfinite()]
    return gaps.min().item() if gaps.numel() else 1.0


def tokens(seed: int, length: int = 7) -> Tensor:
    """Two sequences."""
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def clear_tokens(model: nn.Module) -> Tensor:
    """The first sequences of which every token's experts are clear."""
    for seed in range(100):
        with Choices() as choices, torch.no_grad():
            model(input_ids=tokens(seed))
        if choices.margin > CLEAR:
            return tokens(seed)
    raise AssertionError("every batch has a token whose experts are not clear")


# ------------------------------------------------------------------------------------------------ training


def compiled(model: nn.Module, dynamic: bool = False) -> Callable[..., Any]:
    """The model through fxfuse, run by torch itself."""
    return torch.compile(model, backend="fxfuse", fullgraph=True, dynamic=dynamic, options={"lower": "eager"})


def in_fp64(model: nn.Module) -> nn.Module:
    """The model in double precision, its experts one after another."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")
    return exact


def step(call: Callable[..., Any], owner: nn.Module, ids: Tensor) -> compare.Run:
    """Logits, and every parameter's gradient of their mean square."""
    owner.zero_grad()
    logits = call(input_ids=ids).logits
    logits.double().square().mean().backward()
    grads = tuple(None if p.grad is None else p.grad.clone() for p in owner.parameters())
    return compare.Run(outputs=(logits.detach(),), grads=grads, inputs=())


def assert_as_near_to_fp64(got: compare.Run, want: compare.Run, truth: compare.Run) -> None:
    """Logits, and the root mean square over all gradients, are at most 1.5 times as far from fp64 as eager's own.

    A single parameter's error is chance, since roundings made elsewhere reach it too: three times eager's at most.
    """
    compare.assert_as_near_to_fp64(*(dataclasses.replace(r, grads=()) for r in (got, want, truth)))
    compare.assert_as_near_to_fp64(got, want, truth, factor=3)
    assert [g is None for g in got.grads] == [w is None for w in want.grads]
    mine, eager = _rms_error(got.grads, truth.grads), _rms_error(want.grads, truth.grads)
    assert mine <= 1.5 * eager, f"gradients: {mine:.1e} from fp64, eager {eager:.1e}"


def _rms_error(grads: Sequence[Tensor | None], truth: Sequence[Tensor | None]) -> float:
    errors = [compare.relative_error(g, t) for g, t in zip(grads, truth, strict=True) if g is not None and t is not None]
    return (sum(e * e for e in errors) / len(errors)) ** 0.5


def losses(call: Callable[..., Any], owner: nn.Module, ids: Tensor) -> Tensor:
    """The losses of some steps of gradient descent on one batch."""
    descent = torch.optim.SGD(owner.parameters(), lr=0.02)
    found = []
    for _ in range(STEPS):
        descent.zero_grad()
        logits = call(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        descent.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    spec = MODELS[name]
    model = spec.build()
    exact, eager, run, ids = in_fp64(model), copy.deepcopy(model), compiled(model), clear_tokens(model)
    with Choices() as choices:
        want = step(eager, eager, ids)
    with Choices(choices.made):
        truth = step(exact, exact, ids)
    got, report = step(run, model, ids), fxfuse.last_report()

    counts = report.count("grouped_mlp", "forward"), report.count("grouped_mlp", "backward")
    assert counts == (LAYERS, LAYERS), report.why_not("grouped_mlp")
    assert {other: report.count(other) for other in spec.around} == spec.around
    assert "_grouped_mm" not in report.graphs[0].after
    assert not report.failures
    assert_as_near_to_fp64(got, want, truth)

    ours, theirs, exactly = losses(run, model, ids), losses(eager, eager, ids), losses(exact, exact, ids)
    assert theirs[-1] < 0.5 * theirs[0], "it does not learn"
    assert (ours - theirs).abs().mean() <= 0.02 * theirs[0]
    assert (ours - exactly).abs().mean() <= 1.5 * (theirs - exactly).abs().mean()
    assert fxfuse.plan_info().builds == 1


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "nemotron_h"])
def test_inference(name: str) -> None:
    model = MODELS[name].build().eval()
    ids = clear_tokens(model)
    with torch.no_grad():
        got, want = compiled(model)(input_ids=ids).logits, model(input_ids=ids).logits
    report = fxfuse.last_report()
    assert (report.count("grouped_mlp"), report.count("grouped_mlp", "backward")) == (LAYERS, 0), report.why_not("grouped_mlp")
    assert not report.failures
    assert compare.relative_error(got, want) <= 2e-2


@pytest.mark.parametrize("specialize", [False, True])
def test_floats_of_experts_under_dynamic_true(specialize: bool) -> None:
    """Dynamo makes GPT-OSS's ``alpha`` an input of the graph, and no number."""
    model = MODELS["gpt_oss"].build().eval()
    ids = tokens(0)
    with torch.no_grad(), torch._dynamo.config.patch(specialize_float=specialize):
        got, want = compiled(model, dynamic=True)(input_ids=ids).logits, model(input_ids=ids).logits
    report = fxfuse.last_report()
    assert report.count("grouped_mlp") == (LAYERS if specialize else 0), report.why_not("grouped_mlp")
    assert specialize or "specialize_float = True" in report.why_not("grouped_mlp")
    assert compare.relative_error(got, want) <= 2e-2


def test_experts_that_all_see_every_token_are_a_batched_mlp() -> None:
    model = LLAMA4.build()
    ids, eager = tokens(0), copy.deepcopy(model)
    with Choices() as choices:
        want = step(eager, eager, ids)
    got, report = step(compiled(model), model, ids), fxfuse.last_report()
    exact = in_fp64(model)
    with Choices(choices.made):
        assert_as_near_to_fp64(got, want, step(exact, exact, ids))
    assert not report.failures
    fused = [f for f in report.fused if f.name == "gated_mlp_batched_silu"]
    assert [f.layer.endswith(f"layers.{i}.feed_forward.experts") for i, f in enumerate(fused)] == [True] * LAYERS
    assert all(f.directions == ("forward", "backward") for f in fused)


# ------------------------------------------------------------------------------------------------ generation


def continued(model: nn.Module, prompt: Tensor) -> Any:
    """The most likely tokens after the prompt, and the logits that they were taken from."""
    return model.generate(prompt, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)


def clear_continuation(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The first prompts on whose continuation all choices are clear, of experts and of tokens; with that continuation."""
    for seed in range(200):
        prompt = tokens(seed, length=4)
        with Choices() as choices:
            found = continued(model, prompt)
        margins = [_margin(logits.double(), logits.argmax(-1, keepdim=True)) for logits in found.logits]
        if min(choices.margin, *margins) > CLEAR:
            return prompt, found.sequences
    raise AssertionError("no prompt has a clear continuation")


def test_greedy_generation_gives_eagers_tokens() -> None:
    model = MODELS["qwen3_moe"].build().eval()
    prompt, want = clear_continuation(model)
    model.forward = compiled(model.forward, dynamic=True)
    assert torch.equal(continued(model, prompt).sequences, want)
    report = fxfuse.last_report()
    assert report.count("grouped_mlp", "forward") == LAYERS, report.why_not("grouped_mlp")
    assert fxfuse.plan_info().builds == 1
