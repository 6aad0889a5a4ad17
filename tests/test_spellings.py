"""One pattern, written once, is found however a model spells it; what computes something else is not.

The fusions are identities (the pattern is put back), so every difference to eager comes from matching or splicing, and
where the model's spelling is the pattern's own the result has the bits of the unfused graph.
"""

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

BF16, FP64 = torch.bfloat16, torch.float64


def linear_gelu(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gate_up(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def relu_squared(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)).square()


def masked_linear(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return F.linear(x, w).masked_fill(mask, 0.0)


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def doubled_linear_gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w) * 2.0)


@pytest.fixture(scope="module", autouse=True)
def identities() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(
        *(local_fusions.identity(p) for p in (linear_gelu, gate_up, relu_squared, masked_linear, swiglu_mlp, doubled_linear_gelu))
    ):
        yield


def table(pattern: Callable[..., Tensor]) -> cases.Table:
    name = f"identity_{pattern.__name__}"
    return cases.Table(only=(name,), fuses={name: 1})


def silu_by_hand(t: Tensor) -> Tensor:
    return t * torch.sigmoid(t)


# ---------------------------------------------------------------- linear + GELU
linear = table(linear_gelu)


def biased(*x: int, **options: object) -> cases.Inputs:
    return normal(x, (32, 16), (32,), **options)


def mixed(x: cases.Inputs, y: cases.Inputs) -> cases.Inputs:
    return lambda: [*x(), *y()]


for name, shape in {"matrix": (8, 16), "batch": (2, 4, 16), "four_dims": (2, 2, 2, 16), "vector": (16,)}.items():
    linear.case(biased(*shape), bit_equal=True, name=f"f_linear_{name}")(linear_gelu)
linear.case(normal((8, 16), (32, 16)), bit_equal=True, name="f_linear_matrix_without_bias")(linear_gelu)
linear.case(normal((2, 4, 16), (32, 16)), bit_equal=True, name="f_linear_batch_without_bias")(linear_gelu)
linear.case(biased(2, 4, 16), autocast=BF16, tolerance=2e-2, bit_equal=True, name="f_linear_under_autocast")(linear_gelu)


@linear.case(biased(8, 16), bit_equal=True)
def torch_addmm(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t()))


def matmul_plus_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w.t() + b)


linear.case(biased(8, 16), name="matmul_plus_bias_matrix")(matmul_plus_bias)
linear.case(biased(2, 4, 16), name="matmul_plus_bias_batch")(matmul_plus_bias)
linear.case(biased(16), name="matmul_plus_bias_vector")(matmul_plus_bias)
linear.case(biased(8, 16, frozen=(2,)), name="matmul_plus_frozen_bias")(matmul_plus_bias)
linear.case(biased(8, 16, frozen=(0,)), name="matmul_of_frozen_input")(matmul_plus_bias)
linear.case(biased(2, 4, 16), dynamic=True, other_inputs=(biased(3, 5, 16),), name="dynamic_matmul_plus_bias")(matmul_plus_bias)
linear.case(biased(8, 16, dtype=BF16), tolerance=2e-2, name="bfloat16_matmul_plus_bias")(matmul_plus_bias)


@linear.case(biased(8, 16))
def bias_plus_matmul(x, w, b):
    return F.gelu(b + x @ w.t())


@linear.case(biased(2, 2, 2, 16))
def bias_plus_matmul_of_four_dims(x, w, b):
    return F.gelu(b + torch.matmul(x, w.mT))


@linear.case(biased(2, 4, 16))
def einsum(x, w, b):
    return F.gelu(torch.einsum("bsk,mk->bsm", x, w) + b)


def transposed_input(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x.transpose(0, 1), w, b))


linear.case(biased(2, 4, 16), name="transposed_batch")(transposed_input)
linear.case(biased(2, 4, 16), train=False, name="transposed_batch_inference_is_a_bmm")(transposed_input)
linear.case(biased(2, 4, 16, frozen=(1, 2)), name="transposed_batch_frozen_weights_is_a_bmm")(transposed_input)
linear.case(biased(2, 3, 4, 16), train=False, name="transposed_four_dims_inference")(transposed_input)
linear.case(normal((2, 4, 16), (32, 16)), name="transposed_batch_without_bias")(transposed_input)


@linear.case(biased(1, 8, 16))
def expanded_input(x, w, b):
    return F.gelu(F.linear(x.expand(4, 8, 16), w, b))


@linear.case(biased(2, 4, 16), bit_equal=True)
def flattened_and_unflattened_around(x, w, b):
    return F.gelu(F.linear(x.flatten(0, 1), w, b)).unflatten(0, (2, 4))


@linear.case(biased(2, 4, 16))
def flattened_and_unflattened_before_the_activation(x, w, b):
    return F.gelu(F.linear(x.flatten(0, 1), w, b).unflatten(0, (2, 4)))


@linear.case(biased(2, 4, 16), autocast=BF16, tolerance=2e-2, fuses={})
def matmul_plus_fp32_bias_under_autocast_is_not_fused(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear.case(biased(2, 4, 16))
def checkpointed_matmul_plus_bias(x, w, b):
    return checkpoint(matmul_plus_bias, x, w, b, use_reentrant=False)


@linear.case(biased(2, 4, 16))
def input_used_elsewhere(x, w, b):
    return F.gelu(x @ w.t() + b), x.sin()


@linear.case(biased(2, 4, 16), fuses={"identity_linear_gelu": 2})
def two_spellings_in_one_model(x, w, b):
    return F.gelu(x @ w.t() + b) * F.gelu(F.linear(x.sin(), w, b))


@linear.case(biased(2, 4, 16))
def weight_used_again_untransposed(x, w, b):
    return F.gelu(x @ w.t() + b) @ w


@linear.case(biased(8, 16), fuses={})
def addmm_with_alpha_is_not_fused(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t(), alpha=2))


@linear.case(biased(2, 4, 16), fuses={})
def bias_add_with_alpha_is_not_fused(x, w, b):
    return F.gelu(torch.add(x @ w.t(), b, alpha=2))


@linear.case(biased(2, 4, 16), fuses={})
def tanh_gelu_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


@linear.case(normal((8, 16), (32, 16), (8, 32)), fuses={})
def addmm_of_a_matrix_is_not_fused(x, w, r):
    return F.gelu(torch.addmm(r, x, w.t()))


@linear.case(normal((8, 16), (32, 16), (8, 32)), fuses={})
def residual_is_not_a_bias(x, w, r):
    return F.gelu(x @ w.t() + r)


@linear.case(normal((8, 16), (32, 16), (1, 32)), fuses={})
def bias_of_one_row_is_not_fused(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear.case(normal((16, 16), (16, 16), (16,)), fuses={})
def untransposed_square_weight_is_not_fused(x, w, b):
    return F.gelu(torch.addmm(b, x, w))


@linear.case(biased(2, 4, 16), fuses={})
def reshape_before_the_activation_is_not_fused(x, w, b):
    return F.gelu(F.linear(x, w, b).view(2, 4, 4, 8))


@linear.case(mixed(normal((8, 16), (32, 16)), normal((32,), dtype=FP64)), fuses={})
def promoting_bias_is_not_fused(x, w, b):
    return F.gelu(x @ w.t() + b)


@linear.case(normal((16, 8), (16, 8), (16,)), fuses={})
def bias_along_the_batch_is_not_fused(x, w, b):
    return F.gelu((x @ w.t()).t() + b)


@linear.case(biased(2, 4, 16), fuses={}, reason="used by")
def preactivation_used_elsewhere_is_not_fused(x, w, b):
    pre = x @ w.t() + b
    return F.gelu(pre), pre.sin()


# ---------------------------------------------------------------- gate and up in one linear
gate = table(gate_up)
BATCH = normal((2, 4, 16), (64, 16))


def halves(split: Callable[[Tensor], tuple[Tensor, ...]], act: Callable[[Tensor], Tensor] = F.silu) -> Callable[..., Tensor]:
    """The gated product over the two parts that ``split`` makes."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        first, second = split(F.linear(x, w))
        return act(first) * second

    return fn


def chunk(t: Tensor) -> tuple[Tensor, ...]:
    return t.chunk(2, -1)


def slices(t: Tensor) -> tuple[Tensor, ...]:
    return t[..., :32], t[..., 32:]


def slices_at_half(t: Tensor) -> tuple[Tensor, ...]:
    return t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]


def narrows(t: Tensor) -> tuple[Tensor, ...]:
    return t.narrow(-1, 0, 32), t.narrow(-1, 32, 32)


gate.case(BATCH, bit_equal=True, name="chunk")(halves(chunk))
gate.case(BATCH, bit_equal=True, name="split")(halves(lambda t: t.split(32, dim=2)))
gate.case(BATCH, name="split_with_sizes")(halves(lambda t: torch.split(t, [32, 32], -1)))
gate.case(BATCH, name="slices")(halves(slices))
gate.case(BATCH, name="narrows")(halves(narrows))
gate.case(BATCH, name="tensor_split")(halves(lambda t: torch.tensor_split(t, 2, -1)))
gate.case(BATCH, name="silu_by_hand")(halves(chunk, silu_by_hand))
gate.case(BATCH, train=False, name="narrows_and_silu_by_hand_inference")(halves(narrows, silu_by_hand))
gate.case(BATCH, dynamic_dims=((0, 0), (0, 1)), other_inputs=(normal((3, 5, 16), (64, 16)),), name="dynamic_slices")(
    halves(slices_at_half)
)
gate.case(BATCH, dynamic=True, name="every_size_dynamic_chunk")(halves(chunk))
gate.case(BATCH, dynamic=True, fuses={}, name="slices_at_half_of_an_unknown_size_are_not_a_chunk")(halves(slices_at_half))
gate.case(BATCH, fuses={}, name="sigmoid_gate_is_not_fused")(halves(chunk, torch.sigmoid))
gate.case(BATCH, fuses={}, name="overlapping_halves_are_not_fused")(halves(lambda t: (t.narrow(-1, 0, 32), t.narrow(-1, 16, 32))))
gate.case(BATCH, fuses={}, name="interleaved_halves_are_not_fused")(halves(lambda t: (t[..., ::2], t[..., 1::2])))


@gate.case(BATCH)
def commuted_product(x, w):
    first, second = F.linear(x, w).chunk(2, -1)
    return second * F.silu(first)


@gate.case(BATCH)
def everything_respelled(x, w):
    h = x @ w.mT
    return h[..., 32:] * (torch.sigmoid(h[..., :32]) * h[..., :32])


@gate.case(BATCH, fuses={}, reason="differs")
def gate_and_up_swapped_is_not_fused(x, w):
    first, second = F.linear(x, w).chunk(2, -1)
    return F.silu(second) * first


# ---------------------------------------------------------------- squares, masks, scales, a whole MLP
square = table(relu_squared)
SMALL = normal((2, 4, 16), (32, 16))
SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "torch_square": torch.square,
    "power_of_two": lambda t: t**2,
    "pow_of_a_float_two": lambda t: t.pow(2.0),
    "product_with_itself": lambda t: t * t,
}
for name, squared in SQUARES.items():
    square.case(SMALL, name=name)(lambda x, w, squared=squared: squared(F.relu(F.linear(x, w))))


@square.case(SMALL, fuses={})
def cube_is_not_fused(x, w):
    return F.relu(F.linear(x, w)) ** 3


masked = table(masked_linear)


def with_mask() -> list[Tensor]:
    return [*SMALL(), torch.rand(2, 4, 32) > 0.5]


@masked.case(with_mask)
def masked_fill(x, w, mask):
    return F.linear(x, w).masked_fill(mask, 0.0)


@masked.case(with_mask)
def masked_fill_in_place(x, w, mask):
    return F.linear(x, w).masked_fill_(mask, 0.0)


@masked.case(with_mask)
def where_mask_then_zero(x, w, mask):
    return torch.where(mask, 0.0, F.linear(x, w))


@masked.case(with_mask)
def where_not_mask_then_value(x, w, mask):
    return torch.where(~mask, F.linear(x, w), 0.0)


@masked.case(with_mask)
def where_mask_then_zeros_like(x, w, mask):
    y = F.linear(x, w)
    return torch.where(mask, torch.zeros_like(y), y)


@masked.case(with_mask, fuses={})
def inverted_mask_is_not_fused(x, w, mask):
    return torch.where(mask, F.linear(x, w), 0.0)


@masked.case(with_mask, fuses={})
def another_fill_value_is_not_fused(x, w, mask):
    return F.linear(x, w).masked_fill(mask, -1.0)


whole_mlp = table(swiglu_mlp)
MLP = normal((2, 4, 16), (32, 16), (32, 16), (16, 32))


@whole_mlp.case(MLP)
def matmuls_and_silu_by_hand(x, w_gate, w_up, w_down):
    return (silu_by_hand(x @ w_gate.t()) * (x @ w_up.t())) @ w_down.t()


@whole_mlp.case(MLP)
def mlp_of_a_transposed_batch(x, w_gate, w_up, w_down):
    return swiglu_mlp(x.transpose(0, 1), w_gate, w_up, w_down)


doubled = table(doubled_linear_gelu)


@doubled.case(SMALL)
def times_two(x, w):
    return F.gelu(F.linear(x, w) * 2)


@doubled.case(SMALL)
def added_to_itself(x, w):
    pre = F.linear(x, w)
    return F.gelu(pre + pre)


@doubled.case(SMALL)
def divided_by_a_half(x, w):
    return F.gelu(F.linear(x, w) / 0.5)


# ---------------------------------------------------------------- strict numerics keep apart what rounds differently
strict_linear, strict_gate = table(linear_gelu), table(gate_up)
strict_linear.case(biased(2, 4, 16), recipe="strict", bit_equal=True, name="strict_f_linear")(linear_gelu)
strict_linear.case(biased(2, 4, 16), recipe="strict", fuses={}, name="strict_matmul_plus_bias_is_not_fused")(matmul_plus_bias)
strict_linear.case(biased(2, 4, 16), recipe="strict", fuses={}, name="strict_transposed_batch")(transposed_input)
strict_gate.case(BATCH, recipe="strict", name="strict_slices")(halves(slices))
strict_gate.case(BATCH, recipe="strict", fuses={}, name="strict_silu_by_hand_is_not_fused")(halves(chunk, silu_by_hand))


@linear.parametrize()
def test_linear_gelu(case: cases.Case) -> None:
    cases.check(case)


@gate.parametrize()
def test_gate_up(case: cases.Case) -> None:
    cases.check(case)


@square.parametrize()
def test_square(case: cases.Case) -> None:
    cases.check(case)


@masked.parametrize()
def test_mask(case: cases.Case) -> None:
    cases.check(case)


@whole_mlp.parametrize()
def test_whole_mlp(case: cases.Case) -> None:
    cases.check(case)


@doubled.parametrize()
def test_doubled(case: cases.Case) -> None:
    cases.check(case)


@strict_linear.parametrize()
def test_strict_linear(case: cases.Case) -> None:
    cases.check(case)


@strict_gate.parametrize()
def test_strict_gate_up(case: cases.Case) -> None:
    cases.check(case)
