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


class Known(NamedTuple):
    """What transformers calls the gates and activations that ``grouped_mlp`` has."""

    halves: Callable[..., Tensor]
    """``act(gate) * up`` of the two halves: the gate of experts that have none of their own."""
    clamped: Callable[..., Tensor]
    """GPT-OSS's: alternating columns, both clamped, ``g sigmoid(alpha g) (u + 1)``."""
    activations: dict[type, str]


def register_transformers() -> None:
    """Make ``experts_implementation="fxfuse"`` known to transformers; calling it again changes nothing.

    ::

        fxfuse.experts.register_transformers()
        model = AutoModelForCausalLM.from_config(config, experts_implementation="fxfuse")

    or, for a model that exists, ``model.set_experts_implementation("fxfuse")``. Its experts then call
    ``fxfuse.ops.grouped_mlp``, eager or compiled with any backend. With ``backend="fxfuse"`` none of this is needed: the
    default implementation is recognised in the graph.

    Experts with a norm after them, with a gate of their own other than GPT-OSS's, or with an activation that
    ``grouped_mlp`` does not have raise a ``FxfuseError`` when they are called.

    Raises:
        FxfuseError: transformers is not installed, or has no such implementations (5.24 has them).
    """
    try:
        from transformers.activations import ACT2FN
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    except ImportError as error:
        raise FxfuseError(f"register_transformers: needs transformers and its experts implementations ({error})") from error
    activations = {type(ACT2FN[theirs]): ours for theirs, ours in ACTIVATIONS.items()}
    known = Known(_default_apply_gate, vars(GptOssExperts)["_apply_gate"], activations)
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
        if gate is known.clamped:
            return Gate("silu", "interleaved", experts.limit, experts.alpha)
        if gate is not known.halves:
            raise _unsupported(experts, "a gate of its own (_apply_gate)")
    act = experts.act_fn
    if type(act) not in known.activations:
        name = type(act).__name__ if isinstance(act, nn.Module) else repr(act)
        there = ", ".join(sorted(set(known.activations.values())))
        raise _unsupported(experts, f"the activation {name} (there are {there})")
    return Gate(known.activations[type(act)])


def _unsupported(experts: Any, what: str) -> FxfuseError:
    return FxfuseError(
        f'experts_implementation="{NAME}": {type(experts).__name__} has {what}, which fxfuse.ops.grouped_mlp does not do; '
        'use experts_implementation="grouped_mm" for this model'
    )
