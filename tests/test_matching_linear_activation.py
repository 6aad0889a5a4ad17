"""Where linear + activation, gated MLP halves and linear + residual are found, and where they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cases
import local_fusions
import pytest
import torch
import torch.nn.functional as F
from cases import normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu2": lambda t: F.relu(t).square(),
    "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
}
LINEAR_ACTIVATIONS = tuple(f"linear_{name}" for name in ACTIVATIONS)
FOUND = {"linear_gelu": 1}
BF16 = torch.bfloat16


def inputs(*x: int, **options: object) -> cases.Inputs:
    """x of this shape, a weight (32, 16) and a bias (32,)."""
    return normal(x, (32, 16), (32,), **options)


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


# ---------------------------------------------------------------- linear + activation
linear_act = cases.Table(only=(*LINEAR_ACTIVATIONS, "gated_mlp_silu", "linear_add"), fuses=FOUND)
for name, shape in {
    "matrix": (8, 16),
    "batch": (2, 4, 16),
    "four_dims": (2, 2, 2, 16),
    "vector": (16,),
    "one_row": (1, 16),
}.items():
    linear_act.case(inputs(*shape), name=f"{name}_input")(linear_gelu)
linear_act.case(inputs(0, 16), name="empty_input")(linear_gelu)
linear_act.case(inputs(2, 8, 16), autocast=BF16, tolerance=2e-2, name="under_autocast")(linear_gelu)
linear_act.case(inputs(6, 3, 16), dynamic_dims=((0, 0), (0, 1)), other_inputs=(inputs(5, 7, 16),), name="dynamic_batch")(
    linear_gelu
)
linear_act.case(inputs(8, 16, frozen=(1, 2)), name="frozen_weights")(linear_gelu)
linear_act.case(inputs(8, 16), train=False, name="inference")(linear_gelu)
linear_act.case(inputs(8, 4, 16), train=False, dynamic=True, other_inputs=(inputs(3, 5, 16),), name="dynamic_inference")(
    linear_gelu
)

for name, act in ACTIVATIONS.items():

    def activated(x: Tensor, w: Tensor, b: Tensor, act: Callable[[Tensor], Tensor] = act) -> Tensor:
        return act(F.linear(x, w, b))

    def activated_without_bias(x: Tensor, w: Tensor, act: Callable[[Tensor], Tensor] = act) -> Tensor:
        return act(F.linear(x, w))

    linear_act.case(inputs(2, 4, 16), fuses={f"linear_{name}": 1}, name=f"{name}_with_bias")(activated)
    linear_act.case(normal((2, 4, 16), (32, 16)), fuses={f"linear_{name}": 1}, name=f"{name}_without_bias")(
        activated_without_bias
    )


@linear_act.case(normal((16, 8), (32, 16), (32,)))
def transposed_matrix_input(x, w, b):
    return linear_gelu(x.t(), w, b)


@linear_act.case(inputs(4, 2, 16))
def transposed_batch_input(x, w, b):
    return linear_gelu(x.transpose(0, 1), w, b)


@linear_act.case(inputs(1, 8, 16))
def expanded_input(x, w, b):
    return linear_gelu(x.expand(4, 8, 16), w, b)


@linear_act.case(inputs(8, 16))
def weight_tied_to_the_next_linear(x, w, b):
    return F.linear(linear_gelu(x, w, b), w.t())


@linear_act.case(inputs(8, 16))
def the_same_linear_again_outside(x, w, b):
    return linear_gelu(x, w, b) * F.linear(x, w, b)


@linear_act.case(inputs(8, 16))
def output_changed_in_place(x, w, b):
    return linear_gelu(x, w, b).add_(1)


@linear_act.case(inputs(8, 16))
def matmul_plus_bias(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear_act.case(inputs(2, 4, 16))
def bias_plus_batched_matmul(x, w, b):
    return F.gelu(b + x @ w.t())


@linear_act.case(inputs(2, 4, 16))
def checkpointed_linear_gelu(x, w, b):
    return checkpoint(linear_gelu, x, w, b, use_reentrant=False)


@linear_act.case(inputs(8, 16), fuses={})
def preactivation_changed_in_place_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b).mul_(2))


@linear_act.case(inputs(8, 16), fuses={})
def addmm_with_alpha_is_not_fused(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t(), alpha=2))


@linear_act.case(inputs(8, 16), fuses={})
def addmm_with_beta_is_not_fused(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t(), beta=0.5))


@linear_act.case(inputs(8, 16), only=LINEAR_ACTIVATIONS, fuses={})
def addmm_with_a_matrix_for_bias_is_not_fused(x, w, b):
    return F.gelu(torch.addmm(x @ w.t(), x, w.t()))


@linear_act.case(normal((8, 16), (16, 32), (32,)))
def weight_stored_untransposed(x, w, b):
    return F.gelu(torch.addmm(b, x, w))


@linear_act.case(inputs(8, 16), fuses={})
def bias_added_twice_over_is_not_fused(x, w, b):
    return F.gelu(torch.add(x @ w.t(), b, alpha=2))


@linear_act.case(inputs(8, 16), tolerance=2e-2, fuses={})
def activation_in_another_dtype_is_not_fused(x, w, b):
    return F.gelu(F.linear(x.bfloat16(), w.bfloat16(), b.bfloat16()).float())


@linear_act.case(inputs(8, 16), fuses={})
def view_in_between_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b).view(2, 4, 4, 8))


@linear_act.case(inputs(8, 16), fuses={})
def transpose_in_between_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b).t())


# ---------------------------------------------------------------- gated MLP halves
def gated(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def gated_inputs(*x: int, **options: object) -> cases.Inputs:
    return normal(x, (32, 16), (32, 16), (16, 32), **options)


gated_mlp = cases.Table(only=(*LINEAR_ACTIVATIONS, "gated_mlp_silu", "linear_add"), fuses={"gated_mlp_silu": 1})
gated_mlp.case(gated_inputs(2, 4, 16), name="batch_input")(gated)
gated_mlp.case(gated_inputs(2, 4, 16), train=False, name="inference")(gated)
gated_mlp.case(gated_inputs(2, 4, 16, dtype=BF16), tolerance=2e-2, name="bfloat16")(gated)
gated_mlp.case(gated_inputs(5, 4, 16), dynamic_dims=((0, 0),), other_inputs=(gated_inputs(3, 4, 16),), name="dynamic_batch")(
    gated
)


@gated_mlp.case(gated_inputs(8, 16))
def commuted_product(x, w_gate, w_up, w_down):
    return F.linear(F.linear(x, w_up) * F.silu(F.linear(x, w_gate)), w_down)


@gated_mlp.case(gated_inputs(2, 4, 16))
def checkpointed_gated_mlp(x, w_gate, w_up, w_down):
    return checkpoint(gated, x, w_gate, w_up, w_down, use_reentrant=False)


# ---------------------------------------------------------------- linear + residual
def residual_inputs(*residual: int) -> cases.Inputs:
    return normal((2, 4, 16), (32, 16), (32,), residual, frozen=(3,))


linear_add = cases.Table(only=(*LINEAR_ACTIVATIONS, "gated_mlp_silu", "linear_add"), fuses={"linear_add": 1})


@linear_add.case(residual_inputs(2, 4, 32))
def residual_plus_linear(x, w, b, r):
    return r + F.linear(x, w, b)


@linear_add.case(residual_inputs(2, 4, 32))
def linear_plus_residual(x, w, b, r):
    return F.linear(x, w, b) + r


@linear_add.case(residual_inputs(2, 4, 32), fuses={})
def residual_add_with_alpha_is_not_fused(x, w, b, r):
    return torch.add(r, F.linear(x, w, b), alpha=2)


@linear_add.case(residual_inputs(1, 4, 32), fuses={})
def broadcast_residual_is_not_fused(x, w, b, r):
    return r + F.linear(x, w, b)


@linear_add.case(residual_inputs(2, 4, 32), fuses={})
def promoting_residual_is_not_fused(x, w, b, r):
    return r.double() + F.linear(x, w, b)


# ---------------------------------------------------------------- values that leave the region
escapes = cases.Table(only=("local_linear_gelu_and_pre",), fuses={"local_linear_gelu_and_pre": 1})


@escapes.case(inputs(2, 4, 16))
def preactivation_used_outside(x, w, b):
    pre = F.linear(x, w, b)
    return F.gelu(pre) + pre


@escapes.case(inputs(8, 16))
def one_preactivation_and_two_activations(x, w, b):
    pre = F.linear(x, w, b)
    return F.gelu(pre) + F.gelu(pre)


@escapes.case(inputs(8, 16))
def preactivation_kept_for_the_backward_only(x, w, b):
    return linear_gelu(x, w, b)


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(local_fusions.linear_gelu_and_pre()):
        yield


@linear_act.parametrize()
def test_linear_activation(case: cases.Case) -> None:
    cases.check(case)


@gated_mlp.parametrize()
def test_gated_mlp(case: cases.Case) -> None:
    cases.check(case)


@linear_add.parametrize()
def test_linear_add(case: cases.Case) -> None:
    cases.check(case)


@escapes.parametrize()
def test_interior_value_that_is_an_extra_output(case: cases.Case) -> None:
    cases.check(case)
