"""``experts_implementation="fxfuse"``: transformers' models on ``fxfuse.ops.grouped_mlp``, equal to their eager experts."""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from torch import Tensor, nn

import fxfuse

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

DECODER = {
    **{"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 16, "use_cache": False, "num_experts_per_tok": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3MoeConfig", {"moe_intermediate_size": 24, "num_experts": 4, "head_dim": 8, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 8, "swiglu_limit": 0.5}),  # so low that it clamps
    "nemotron": (
        "NemotronHConfig",
        {
            **{"hybrid_override_pattern": "E*", "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24},
            **{"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "head_dim": 8},
        },
    ),
}
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def registered() -> None:
    fxfuse.experts.register_transformers()


def build(name: str, implementation: str, **sizes: Any) -> nn.Module:
    """A tiny model, random in every parameter: transformers starts biases at zero."""
    config, own = MODELS[name]
    chosen = getattr(transformers, config)(**{**DECODER, **own, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(chosen, experts_implementation=implementation)
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.train()


def step(model: Callable[..., Any], owner: nn.Module) -> compare.Run:
    """Logits of two sequences of seven tokens, and every parameter's gradient of their mean square."""
    owner.zero_grad()
    tokens = torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=tokens).logits
    logits.square().mean().backward()
    return compare.Run(outputs=(logits.detach(),), grads=tuple(p.grad for p in owner.parameters()), inputs=())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of every call of ``fxfuse.ops.grouped_mlp`` from here on."""
    calls: list[dict[str, Any]] = []
    original = fxfuse.ops.grouped_mlp

    def grouped_mlp(*args: Any, **kinds: Any) -> Tensor:
        calls.append(kinds)
        return original(*args, **kinds)

    monkeypatch.setattr(fxfuse.ops, "grouped_mlp", grouped_mlp)
    return calls


@models
def test_equals_eager_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = build(name, "fxfuse"), build(name, "eager")
    calls = counted(monkeypatch)
    got, want = step(ours, ours), step(theirs, theirs)
    assert len(calls) == sum(p.endswith("experts.down_proj") for p, _ in ours.named_parameters())
    compare.assert_same(got, want, 1e-5)
    assert all(
        g is None or g.abs().sum() > 0 for p, g in zip(ours.named_parameters(), got.grads, strict=True) if "experts" in p[0]
    )


@pytest.mark.parametrize(
    "act", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"]
)
def test_activation_is_the_modules_own(act: str) -> None:
    ours, theirs = (build("qwen3", i, hidden_act=act) for i in ("fxfuse", "eager"))
    compare.assert_same(step(ours, ours), step(theirs, theirs), 1e-5)


def test_switched_to_and_back() -> None:
    model = build("qwen3", "eager")
    eager = step(model, model)
    model.set_experts_implementation("fxfuse")
    compare.assert_same(step(model, model), eager, 1e-5)
    model.set_experts_implementation("eager")
    compare.assert_bit_equal(step(model, model), eager)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
@models
def test_compiles_into_one_graph(name: str) -> None:
    model = build(name, "fxfuse")
    exact = copy.deepcopy(model)
    compiled = torch.compile(model, backend="fxfuse", fullgraph=True, options={"lower": "eager"})
    compare.assert_same(step(compiled, model), step(exact, exact), 1e-5)
    assert not fxfuse.last_report().failures


def test_expert_ids_of_another_rank_contribute_nothing() -> None:
    """Expert parallelism marks them with ids past the last expert."""
    experts = build("qwen3", "fxfuse").model.layers[0].mlp.experts
    x, weights = torch.randn(3, 32), torch.rand(3, 2)
    here = experts(x, torch.tensor([[0, 3], [1, 2], [2, 0]]), weights * torch.tensor([[1, 0], [0, 0], [1, 1]]))
    torch.testing.assert_close(experts(x, torch.tensor([[0, 4], [4, 4], [2, 0]]), weights), here)


def test_mixed_dtypes_follow_the_weights() -> None:
    """As under autocast: fp32 rows at bf16 weights."""
    experts = build("qwen3", "fxfuse").model.layers[0].mlp.experts.bfloat16()
    x, ids, weights = torch.randn(3, 32), torch.tensor([[0, 3], [1, 2], [2, 0]]), torch.rand(3, 2)
    out = experts(x, ids, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out, experts(x.bfloat16(), ids, weights).float())


# ------------------------------------------------------------------------------------------------ clamped gates

SIZES = {
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["intermediate_size", "moe_intermediate_size", "expert_hidden_size"], 24),
    **{"hidden_size": 32, "hidden_act": "silu", "swiglu_limit": 0.5, "swiglu_alpha": 1.3},  # so low that it clamps
}
clamped = pytest.mark.parametrize("name", fxfuse.experts.CLAMPED)


def clamping_experts(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The experts of one model alone, random in every parameter."""
    module, _, cls = name.rpartition(".")
    kind = getattr(pytest.importorskip(f"transformers.models.{module}"), cls)
    experts = kind(types.SimpleNamespace(**SIZES, _experts_implementation=implementation))
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.4)
    return experts.to(dtype)


def routed(experts: nn.Module, dtype: torch.dtype = torch.float32) -> compare.Run:
    """Output and gradients of 64 tokens."""
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_() for shape in ((64, 32), (64, 2)))
    ids = torch.rand(64, 4, generator=generator).argsort(-1)[:, :2]
    out = experts(x, ids, weights)
    out.square().sum().backward()
    grads = (x.grad, weights.grad, *[p.grad for p in experts.parameters()])
    return compare.Run(outputs=(out.detach(),), grads=grads, inputs=())


@clamped
def test_clamped_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = clamping_experts(name, "fxfuse"), clamping_experts(name, "eager")
    calls = counted(monkeypatch)
    compare.assert_same(routed(ours), routed(theirs), 1e-5)
    (options,) = calls
    assert options["limit"] == 0.5 and options["alpha"] == (1.3 if fxfuse.experts.CLAMPED[name].alpha else None)
    unclamped = clamping_experts(name, "eager")
    for attribute in ("limit", "swiglu_limit"):
        setattr(unclamped, attribute, 100.0)
    assert compare.relative_error(routed(ours).outputs[0], routed(unclamped).outputs[0]) > 1e-2, "nothing is clamped"


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")  # in transformers
@clamped
def test_clamped_gate_is_recognised_in_a_graph(name: str) -> None:
    """With ``backend="fxfuse"`` and transformers' own implementation."""
    experts = clamping_experts(name, "grouped_mm", torch.bfloat16)
    exact, eager = copy.deepcopy(experts).double(), copy.deepcopy(experts)
    exact.config = types.SimpleNamespace(**SIZES, _experts_implementation="eager")
    got = routed(torch.compile(experts, backend="fxfuse", dynamic=False, options={"lower": "eager"}), torch.bfloat16)
    assert fxfuse.last_report().count("grouped_mlp", "backward") == 1, fxfuse.last_report().why_not("grouped_mlp")
    compare.assert_as_near_to_fp64(got, routed(eager, torch.bfloat16), routed(exact, torch.float64))


@pytest.mark.parametrize("name", ["gpt_oss.modeling_gpt_oss.GptOssExperts"])
def test_gate_of_a_subclass(name: str) -> None:
    ours, theirs = clamping_experts(name, "fxfuse"), clamping_experts(name, "eager")
    for experts in (ours, theirs):
        experts.__class__ = type("OwnExperts", (type(experts),), {})
    compare.assert_same(routed(ours), routed(theirs), 1e-5)


def test_gate_that_somebody_else_put_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = clamping_experts("gpt_oss.modeling_gpt_oss.GptOssExperts", "fxfuse")
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, gate_up: gate_up[..., ::2])
    with pytest.raises(fxfuse.FxfuseError, match="a gate of its own"):
        routed(experts)


# ------------------------------------------------------------------------------------------------ what it does not do


def experts_like(base: type[nn.Module], members: dict[str, Any], **flags: Any) -> nn.Module:
    """An experts module as transformers declares one, with ``members`` of its own."""
    kind = moe.use_experts_implementation(type("OddExperts", (base,), members), **flags)
    return kind(build("qwen3", "fxfuse").config)


def call(experts: nn.Module) -> Tensor:
    return experts(torch.randn(3, 32), torch.tensor([[0, 3], [1, 2], [2, 0]]), torch.rand(3, 2))


def refusal(experts: nn.Module) -> str:
    with pytest.raises(fxfuse.FxfuseError) as caught:
        call(experts)
    return str(caught.value)


@pytest.fixture
def base() -> type[nn.Module]:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return Qwen3MoeExperts


def test_unknown_activation_is_named(base: type[nn.Module]) -> None:
    experts = experts_like(base, {})
    experts.act_fn = nn.Mish()
    message = refusal(experts)
    assert "OddExperts has the activation Mish" in message and "quick_gelu" in message
    del experts.act_fn
    experts.act_fn = torch.sin
    assert "sin" in refusal(experts)


def test_gate_of_its_own_is_named(base: type[nn.Module]) -> None:
    def bilinear(self: nn.Module, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return gate * up

    assert "OddExperts has a gate of its own (_apply_gate)" in refusal(experts_like(base, {"_apply_gate": bilinear}))


def test_norm_after_experts_is_named(base: type[nn.Module]) -> None:
    message = refusal(experts_like(base, {"post_expert_norm": nn.Identity()}, has_post_expert_norm=True))
    assert "has_post_expert_norm" in message and 'experts_implementation="grouped_mm"' in message


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(fxfuse.FxfuseError, match="register_transformers: needs transformers"):
        fxfuse.experts.register_transformers()


def test_transformers_is_not_imported_before_it_is_asked_for() -> None:
    root = Path(__file__).parents[1]
    code = "import sys, fxfuse; fxfuse.experts; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
