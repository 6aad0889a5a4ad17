"""``experts_implementation="fxfuse"`` for the mixture-of-experts models of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import ops
from .errors import FxfuseError

__all__ = ["register_transformers"]

NAME = "fxfuse"
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Names in transformers' ``ACT2FN``, and ours."""


class Gate(NamedTuple):
    """What lies between an expert's two linears, as ``grouped_mlp`` names it."""

    activation: str
    layout: str = "concat"
    limit: float | None = None
    alpha: float | None = None


class Clamped(NamedTuple):
    """A gate that clamps both halves before the activation, by the attributes of its module that it reads."""

    limit: str
    alpha: str | None = None
    """With it ``g sigmoid(alpha g) (u + 1)``, as GPT-OSS's."""
    activation: str | None = "silu"
    """None: the module's ``act_fn``."""
    layout: str = "concat"


CLAMPED = {
    "gpt_oss.modeling_gpt_oss.GptOssExperts": Clamped("limit", "alpha", layout="interleaved"),
    "openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts": Clamped("limit", "alpha"),
    "minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts": Clamped("swiglu_limit", "swiglu_alpha"),
    "deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts": Clamped("limit", activation=None),
    "glm5_next.modeling_glm5_next.Glm5NextTextExperts": Clamped("swiglu_limit"),
    "hy_v4.modeling_hy_v4.HYV4Experts": Clamped("swiglu_limit"),
    "hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts": Clamped("swiglu_limit"),
}
"""By class within ``transformers.models``: the gates of transformers' own that are ``grouped_mlp``'s."""


class Known(NamedTuple):
    """What transformers calls the gates and activations that ``grouped_mlp`` has."""

    halves: Callable[..., Tensor]
    """``act(gate) * up`` of the two halves: the gate of experts that have none of their own."""
    activations: dict[type, str]


def register_transformers() -> None:
    """Make ``experts_implementation="fxfuse"`` known to transformers; calling it again changes nothing.

    ::

        fxfuse.experts.register_transformers()
        model = AutoModelForCausalLM.from_config(config, experts_implementation="fxfuse")

    or, for a model that exists, ``model.set_experts_implementation("fxfuse")``. Its experts then call
    ``fxfuse.ops.grouped_mlp``, eager or compiled with any backend. With ``backend="fxfuse"`` none of this is needed: the
    default implementation is recognised in the graph.

    Experts with a norm after them, with a gate of their own other than a clamped one of ``CLAMPED``, or with an activation
    that ``grouped_mlp`` does not have raise a ``FxfuseError`` when they are called.

    Raises:
        FxfuseError: transformers is not installed, or has no such implementations (5.24 has them).
    """
    try:
        from transformers.activations import ACT2FN
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
    except ImportError as error:
        raise FxfuseError(f"register_transformers: needs transformers and its experts implementations ({error})") from error
    activations = {type(ACT2FN[theirs]): ours for theirs, ours in ACTIVATIONS.items()}
    known = Known(_default_apply_gate, activations)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward(known))


def _experts_forward(known: Known) -> Callable[..., Tensor]:
    def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate = _gate(self, known)
        up = "gate_up_proj" if self.has_gate else "up_proj"
        w_up, w_down = getattr(self, up), self.down_proj
        if self.is_transposed:
            w_up, w_down = w_up.transpose(1, 2), w_down.transpose(1, 2)
        out = ops.grouped_mlp(
            hidden_states.to(w_up.dtype),  # under autocast the two may differ
            w_up,
            w_down,
            top_k_index,
            top_k_weights,
            bias_gate_up=getattr(self, f"{up}_bias") if self.has_bias else None,
            bias_down=self.down_proj_bias if self.has_bias else None,
            gated=self.has_gate,
            **gate._asdict(),
        )
        return out.to(hidden_states.dtype)

    return experts_forward


def _gate(experts: Any, known: Known) -> Gate:
    if getattr(experts, "has_post_expert_norm", False):
        raise _unsupported(experts, "a norm after each expert (has_post_expert_norm)")
    if experts.has_gate:
        gate = getattr(experts._apply_gate, "__func__", experts._apply_gate)
        clamped = _clamped(experts, gate)
        if clamped is not None:
            alpha = None if clamped.alpha is None else getattr(experts, clamped.alpha)
            act = clamped.activation or _activation(experts, known)
            return Gate(act, clamped.layout, getattr(experts, clamped.limit), alpha)
        if gate is not known.halves:
            raise _unsupported(experts, "a gate of its own (_apply_gate)")
    return Gate(_activation(experts, known))


def _clamped(experts: Any, gate: Callable[..., Tensor]) -> Clamped | None:
    """A clamped gate by the class that it comes from; one that was put there by somebody else comes from elsewhere."""
    for cls in type(experts).__mro__:
        known = CLAMPED.get(f"{cls.__module__}.{cls.__qualname__}".removeprefix("transformers.models."))
        if known is not None and cls._apply_gate is gate and gate.__module__ == cls.__module__:
            return known
    return None


def _activation(experts: Any, known: Known) -> str:
    act = experts.act_fn
    if type(act) not in known.activations:
        name = type(act).__name__ if isinstance(act, nn.Module) else repr(act)
        there = ", ".join(sorted(set(known.activations.values())))
        raise _unsupported(experts, f"the activation {name} (there are {there})")
    return known.activations[type(act)]


def _unsupported(experts: Any, what: str) -> FxfuseError:
    return FxfuseError(
        f'experts_implementation="{NAME}": {type(experts).__name__} has {what}, which fxfuse.ops.grouped_mlp does not do; '
        'use experts_implementation="grouped_mm" for this model'
    )
