"""Inputs that a model holds with their dimensions in another order than a pattern: a weight stored (K, N), experts' (E, K, N).

The replacement is given a permuted view, and its gradient goes back through the inverse order; that of ``own_in_turn`` is
another order than its own inverse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cases
import compare
import local_fusions
import moe_blocks
import pytest
import torch
import torch.nn.functional as F
from cases import normal
from moe_blocks import EXPERTS, INNER, TOKENS, WIDTH, K
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxfuse

FP64, BF16 = torch.float64, torch.bfloat16
Shape = tuple[int, ...]


@pytest.fixture(scope="module", autouse=True)
def own_fusions() -> Iterator[None]:
    """``local_linear_gelu`` says what its backward is, ``own_experts`` and the identity are differentiated."""

    @fxfuse.register_forward_backward_fusion(name="own_experts", example={"x": "e m k", "w": "e n k"}, check_on_register=False)
    def experts(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.bmm(x, w.transpose(1, 2)))

    @experts.rewrite
    def _(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("emk,enk->emn", x, w))

    @fxfuse.register_forward_backward_fusion(name="own_in_turn", example={"x": "e m k", "w": "n e k"}, check_on_register=False)
    def in_turn(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(torch.bmm(x, w.permute(1, 2, 0)))

    @in_turn.rewrite
    def _(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(torch.einsum("emk,nek->emn", x, w))

    made = (experts, in_turn, local_fusions.linear_gelu(), local_fusions.identity(linear_gelu), local_fusions.swiglu_mlp())
    with local_fusions.unregistered_at_exit(*made):
        yield


def linear_gelu(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def squares(outputs: tuple[Tensor, ...]) -> Tensor:
    """``compare.weighted_squares`` in the outputs' own precision."""
    return sum((o * torch.linspace(0.5, 1.5, o.shape[-1], dtype=o.dtype)).square().sum() for o in outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelling:
    """A function whose inputs are stored in another order than its fusion sees them."""

    fn: Callable[..., Tensor]
    shapes: Callable[[int], Sequence[Shape]]
    """Of its inputs, for a number of rows."""
    rows: tuple[tuple[int, int], ...] = ((0, 0),)
    """(input, dimension) pairs that count the rows."""
    fusion: str
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5

    def case(self, *, frozen: Sequence[int] = (), **fields: Any) -> cases.Case:
        """The case with 6 rows, in which the fusion fires once."""
        given = {
            "name": self.fusion,
            "fn": self.fn,
            "inputs": self.inputs(6, frozen),
            "only": (self.fusion,),
            "fuses": {self.fusion: 1},
            "loss": squares,
            "tolerance": self.tolerance,
        }
        return cases.Case(**{**given, **fields})

    def inputs(self, rows: int, frozen: Sequence[int] = ()) -> cases.Inputs:
        return normal(*self.shapes(rows), dtype=self.dtype, frozen=frozen)


def spelling(fusion: str, fn: Callable[..., Tensor], *shapes: Shape, x: Shape = (-1, 16), **more: Any) -> Spelling:
    """x (its -1 is the number of rows) and then ``shapes``, in which -1 is the number of rows too."""
    everything = (x, *shapes)
    places = tuple((i, s.index(-1)) for i, s in enumerate(everything) if -1 in s)
    return Spelling(
        fn=fn,
        shapes=lambda rows: [tuple(rows if n == -1 else n for n in s) for s in everything],
        rows=places,
        fusion=fusion,
        **more,
    )


def own(fusion: str, fn: Callable[..., Tensor], *shapes: Shape, **more: Any) -> Spelling:
    """The same in double precision."""
    return spelling(fusion, fn, *shapes, dtype=FP64, tolerance=1e-12, **more)


def packed(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return F.gelu(gate) * up


W, B, RESIDUAL = (16, 32), (32,), (-1, 32)
BUILT_IN = {
    "matmul_silu": spelling("linear_silu", lambda x, w: F.silu(x @ w), W),
    "addmm_gelu": spelling("linear_gelu", lambda x, w, b: F.gelu(torch.addmm(b, x, w)), W, B),
    "matmul_bias_relu_3d": spelling("linear_relu", lambda x, w, b: F.relu(x @ w + b), W, B, x=(2, -1, 16)),
    "einsum_tanh_3d": spelling("linear_tanh", lambda x, w: torch.tanh(torch.einsum("bsk,kn->bsn", x, w)), W, x=(2, -1, 16)),
    "input_transposed": spelling("linear_gelu", lambda x, w, b: F.gelu(F.linear(x.t(), w, b)), (32, 16), B, x=(16, -1)),
    "both_transposed": spelling("linear_relu2", lambda x, w: F.relu(x.t() @ w) ** 2, W, x=(16, -1)),
    "matmul_add": spelling("linear_add", lambda x, w, r: x @ w + r, W, RESIDUAL),
    "addmm_add": spelling("linear_add", lambda x, w, b, r: r + torch.addmm(b, x, w), W, B, RESIDUAL),
    "residual_transposed": spelling("linear_add", lambda x, w, r: x @ w + r.t(), W, (32, -1)),
    "matmul_scale": spelling("linear_scale", lambda x, w: (x @ w) * 2.5, W),
    "addmm_scale_add": spelling("linear_scale_add", lambda x, w, b, r: torch.addmm(b, x, w) * 2.5 + r, W, B, RESIDUAL),
    "scale_per_channel": spelling("linear_scale_tensor", lambda x, w, s: (x @ w) * s, W, B),
    "scale_per_channel_add": spelling("linear_scale_tensor_add", lambda x, w, s, r: (x @ w) * s + r, W, B, RESIDUAL),
    "gated": spelling("gated_mlp_silu", lambda x, g, u: F.silu(x @ g) * (x @ u), W, W),
    "gated_only_up_transposed": spelling("gated_mlp_silu", lambda x, g, u: F.silu(F.linear(x, g)) * (x @ u), (32, 16), W),
    "gated_packed": spelling("gated_mlp_packed_gelu", packed, (16, 64)),
}
OWN = {
    "own_matmul": own("local_linear_gelu", lambda x, w: F.gelu(x @ w), W),
    "own_addmm": own("local_linear_gelu", lambda x, w, b: F.gelu(torch.addmm(b, x, w)), W, B),
    "own_swiglu_mlp": own("local_swiglu_mlp", lambda x, g, u, d: (F.silu(x @ g) * (x @ u)) @ d, W, W, (32, 16)),
    "own_experts_ekn": own("own_experts", lambda x, w: torch.tanh(torch.bmm(x, w)), (4, 16, 12), x=(4, -1, 16)),
    "own_in_turn": own("own_in_turn", lambda x, w: torch.sigmoid(torch.bmm(x, w)), (4, 16, 12), x=(4, -1, 16)),
    "own_experts_x_kem": own(
        "own_experts", lambda x, w: torch.tanh(x.permute(1, 2, 0) @ w.transpose(1, 2)), (4, 12, 16), x=(16, 4, -1)
    ),
}
SPELLINGS = {**BUILT_IN, **OWN}
every = pytest.mark.parametrize("s", SPELLINGS.values(), ids=SPELLINGS)
PLAIN = ("addmm_gelu", "residual_transposed", "scale_per_channel", "gated_only_up_transposed")
"""Those that go through every situation, besides the own ones: the others have the same inputs."""
VARIED = {name: s for name, s in SPELLINGS.items() if name in (*PLAIN, *OWN)}
varied = pytest.mark.parametrize("s", VARIED.values(), ids=VARIED)


def is_given_a_permuted_view(report: fxfuse.Report) -> bool:
    """Whether the fusion put a permutation in front of itself."""
    (fused,) = report.fused
    return fused.after[0].startswith("permute")


# ------------------------------------------------------------------------------------------------ one region


@every
def test_training(s: Spelling) -> None:
    cases.check(s.case())


INPUTS = {f"{name}-{i}": (s, i) for name, s in VARIED.items() for i in range(len(s.shapes(1)))}


@pytest.mark.parametrize(("s", "position"), INPUTS.values(), ids=INPUTS)
def test_one_input_frozen(s: Spelling, position: int) -> None:
    cases.check(s.case(frozen=[position]))


@pytest.mark.parametrize(("s", "position"), [v for k, v in INPUTS.items() if k.startswith("own")], ids=lambda v: str(v)[:1])
def test_only_one_input_trains(s: Spelling, position: int) -> None:
    cases.check(s.case(frozen=[i for i in range(len(s.shapes(1))) if i != position]))


@varied
def test_under_no_grad(s: Spelling) -> None:
    cases.check(s.case(train=False))


@varied
def test_number_of_rows_changes(s: Spelling) -> None:
    cases.check(s.case(dynamic_dims=s.rows, other_inputs=(s.inputs(3), s.inputs(11))))


@pytest.mark.parametrize("name", ["addmm_gelu", "gated", "own_in_turn", "own_experts_x_kem"])
def test_every_size_is_dynamic(name: str) -> None:
    s = SPELLINGS[name]
    cases.check(s.case(dynamic=True, other_inputs=(s.inputs(3), s.inputs(11))))


@varied
def test_checkpointed(s: Spelling) -> None:
    cases.check(s.case(fn=lambda *args: checkpoint(s.fn, *args, use_reentrant=False)))


@varied
def test_expanded_cotangent(s: Spelling) -> None:
    cases.check(s.case(loss=compare.total))


@pytest.mark.parametrize("name", OWN)
def test_retained_graph(name: str) -> None:
    cases.check(SPELLINGS[name].case(retain_graph=True))


@pytest.mark.parametrize("name", ["matmul_silu", "gated", "own_matmul", "own_experts_ekn", "own_in_turn"])
def test_the_fusion_is_given_a_permuted_view(name: str) -> None:
    assert is_given_a_permuted_view(cases.check(SPELLINGS[name].case()))


def test_an_input_in_the_patterns_own_order_is_not_permuted() -> None:
    s = own("own_experts", lambda x, w: torch.tanh(x @ w.transpose(1, 2)), (4, 12, 16), x=(4, -1, 16))
    assert not is_given_a_permuted_view(cases.check(s.case()))


IN_TURN = {
    "ken": own("own_experts", lambda x, w: torch.tanh(x @ w.permute(1, 0, 2)), (16, 4, 12), x=(4, -1, 16)),
    "nke": own("own_experts", lambda x, w: torch.tanh(x @ w.permute(2, 1, 0)), (12, 16, 4), x=(4, -1, 16)),
}


@pytest.mark.parametrize("s", IN_TURN.values(), ids=IN_TURN)
def test_dimensions_stored_in_turn(s: Spelling) -> None:
    cases.check(s.case())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["addmm_gelu", "addmm_add", "gated", "gated_packed"])
def test_in_16_bits_it_is_as_near_to_fp64_as_eager(name: str, dtype: torch.dtype) -> None:
    s = dataclasses.replace(SPELLINGS[name], dtype=dtype)
    args = s.inputs(6)()
    got = compare.run(cases.compiled(s.fn, only=[s.fusion]), args)
    assert fxfuse.last_report().count(s.fusion) == 1
    compare.assert_as_near_to_fp64(got, compare.run(s.fn, args), compare.run(s.fn, compare.in_fp64(args)), slack=1e-3)


# ------------------------------------------------------------------------------------------------ weights used again

several = cases.Table(only=("local_linear_gelu",), loss=squares, tolerance=1e-12)


def fp64(*shapes: Shape) -> cases.Inputs:
    return normal(*shapes, dtype=FP64)


TWICE, ONCE = {"local_linear_gelu": 2}, {"local_linear_gelu": 1}
X, SQUARE = (6, 16), (16, 16)


@several.case(fp64(X, W), fuses=TWICE)
def weight_twice(x, w):
    return F.gelu(x @ w) + F.gelu((x * 0.5) @ w)


@several.case(fp64(X, W), fuses=TWICE)
def twins_of_different_cotangents(x, w):
    return F.gelu(x @ w) * 2 + F.gelu(x @ w).sin()


@several.case(fp64(X, W, (32,), (16,)), fuses=TWICE)
def tied_in_both_layouts(x, w, b, c):
    return F.gelu(F.linear(F.gelu(torch.addmm(b, x, w)), w, c))


@several.case(fp64(X, W, (32,), (16,)), fuses=TWICE)
def tied_in_both_layouts_the_other_way_round(x, w, b, c):
    return F.gelu(F.gelu(F.linear(x @ w, w, c)) @ w + b)


@several.case(fp64(X, SQUARE), fuses=TWICE)
def square_weight_in_both_layouts_of_one_input(x, w):
    return F.gelu(x @ w) + F.gelu(F.linear(x, w)).sin()


@several.case(fp64(X, W), fuses=ONCE)
def tied_to_a_plain_linear(x, w):
    return F.linear(F.gelu(x @ w), w)


@several.case(fp64(X, W), fuses=ONCE)
def weight_elsewhere_in_its_own_layout(x, w):
    return F.gelu(x @ w) + w.sin().sum(0)


@several.case(fp64(X, W), fuses=ONCE)
def weight_elsewhere_in_the_patterns_layout(x, w):
    return F.gelu(x @ w), w.t().sin()


@several.case(fp64(X, SQUARE, (16,)), fuses={"local_linear_gelu": 4})
def four_layers_of_one_weight(x, w, b):
    for _ in range(4):
        x = x + F.gelu(torch.addmm(b, x, w))
    return x


@several.case(fp64(SQUARE), fuses=ONCE)
def input_and_weight_are_one_tensor(w):
    return F.gelu(w @ w)


@several.case(fp64(SQUARE), fuses=ONCE)
def input_and_weight_are_one_tensor_transposed(w):
    return F.gelu(w.t() @ w)


@several.case(fp64((2, *SQUARE), X), fuses=TWICE)
def slices_of_one_parameter(w, x):
    return F.gelu(F.gelu(x @ w[0]) @ w[1])


@several.case(fp64(W, X), fuses=ONCE)
def weight_made_by_an_upstream_op(w, x):
    return F.gelu(x @ torch.sin(w))


@several.parametrize()
def test_weight_used_again(case: cases.Case) -> None:
    cases.check(case)


@pytest.mark.parametrize("case", several[:5], ids=lambda c: c.name)
def test_weight_used_again_with_inputs_frozen(case: cases.Case) -> None:
    for i in range(len(case.inputs()) if len(case.inputs()) > 1 else 0):

        def frozen(i: int = i) -> Sequence[Any]:
            return [a.detach() if j == i else a for j, a in enumerate(case.inputs())]

        cases.check(dataclasses.replace(case, inputs=frozen))


def test_experts_weights_used_in_both_layouts() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(torch.bmm(x, w)) @ w.transpose(1, 2))

    s = own("own_experts", fn, (4, 16, 12), x=(4, -1, 16))
    cases.check(s.case(fuses={"own_experts": 2}))


def test_shared_parameter_of_two_modules() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 32, dtype=FP64)
            self.down = nn.Linear(32, 16, dtype=FP64)
            self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x @ self.down.weight + self.up.bias) + F.gelu(self.up(x)) @ self.down.weight.t()[:, :1]

    torch.manual_seed(0)
    model = Tied()
    names = [n for n, _ in model.named_parameters()]

    def fn(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    args = [torch.randn(6, 16, dtype=FP64, requires_grad=True), *[p.detach().requires_grad_() for p in model.parameters()]]
    case = cases.Case(
        name="", fn=fn, inputs=lambda: args, only=("local_linear_gelu",), fuses=TWICE, loss=squares, tolerance=1e-12
    )
    cases.check(case)


# ------------------------------------------------------------------------------------------------ identity

exact = cases.Table(only=("identity_linear_gelu",), fuses={"identity_linear_gelu": 1}, bit_equal=True)
exact.case(normal((6, 16), W), name="matmul")(lambda x, w: F.gelu(x @ w))
exact.case(normal((6, 16), W, B), name="addmm")(lambda x, w, b: F.gelu(torch.addmm(b, x, w)))
exact.case(normal((6, 16), W, B, dtype=BF16), name="addmm_bf16", tolerance=4e-2)(lambda x, w, b: F.gelu(torch.addmm(b, x, w)))
exact.case(normal((16, 6), (32, 16), B), name="input_transposed")(lambda x, w, b: F.gelu(F.linear(x.t(), w, b)))
exact.case(normal((6, 16), W), name="weight_elsewhere")(lambda x, w: F.gelu(x @ w) + w.sum())


@exact.parametrize()
def test_identity_splice_is_bit_exact(case: cases.Case) -> None:
    cases.check(case)


# ------------------------------------------------------------------------------------------------ GPT-2


class Mlp(nn.Module):
    """GPT-2's MLP: its two linears are ``transformers.pytorch_utils.Conv1D``, with weights (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        conv = pytest.importorskip("transformers.pytorch_utils").Conv1D
        self.c_fc, self.c_proj = conv(64, 16), conv(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


GPT2 = {"linear_gelu_tanh": 1, "linear_add": 1}


def gpt2(train: bool = True, rows: Sequence[int] = (5,)) -> cases.Case:
    """The MLP as a function of its input and parameters, without dropout."""
    model = Mlp()
    names = [n for n, _ in model.named_parameters()]

    def fn(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    def inputs(n: int) -> cases.Inputs:
        return lambda: [
            torch.randn(2, n, 16).requires_grad_(),
            *[(0.3 * torch.randn(p.shape)).requires_grad_() for p in model.parameters()],
        ]

    return cases.Case(
        name="gpt2",
        fn=fn,
        inputs=inputs(rows[0]),
        only=tuple(GPT2),
        fuses=GPT2,
        train=train,
        dynamic_dims=((0, 1),) if len(rows) > 1 else (),
        other_inputs=tuple(inputs(n) for n in rows[1:]),
    )


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_mlp_of_gpt2(train: bool) -> None:
    cases.check(gpt2(train))


def test_mlp_of_gpt2_with_sequences_of_any_length() -> None:
    cases.check(gpt2(rows=(5, 3, 9)))


@pytest.mark.parametrize("position", [0, 1, 3])
def test_mlp_of_gpt2_with_one_input_frozen(position: int) -> None:
    case = gpt2()
    cases.check(
        dataclasses.replace(case, inputs=lambda: [a.detach() if i == position else a for i, a in enumerate(case.inputs())])
    )


# ------------------------------------------------------------------------------------------------ grouped MLP


def transposed_experts(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """``moe_blocks.unmasked`` with weights (E, in, out)."""
    _, order, counts = moe_blocks.sort_by_expert(ids)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[order // ids.size(-1)], w_gate_up, offs=ends).chunk(2, dim=-1)
    return moe_blocks.restore(F.grouped_mm(F.silu(gate) * up, w_down, offs=ends), x, p, order)


def gpt_oss(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor, b_gate_up: Tensor, b_down: Tensor) -> Tensor:
    """GPT-OSS: biases, gate and up alternate and are clamped, up counts from one."""
    sorted_ids, order, counts = moe_blocks.sort_by_expert(ids)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    h = F.grouped_mm(x[order // ids.size(-1)], w_gate_up, offs=ends) + b_gate_up[sorted_ids]
    gate, up = h[..., ::2].clamp(max=0.7), h[..., 1::2].clamp(min=-0.7, max=0.7)
    y = F.grouped_mm((up + 1) * (gate * torch.sigmoid(gate * 1.702)), w_down, offs=ends) + b_down[sorted_ids]
    return moe_blocks.restore(y, x, p, order)


def grouped_inputs(tokens: int = TOKENS, biases: bool = False) -> list[Tensor]:
    """x, ids, router weights, and the experts' weights stored (E, in, out); all trained."""

    def draw(*shape: int, scale: float = 0.3) -> Tensor:
        return (torch.randn(shape) * scale).to(BF16).requires_grad_()

    ids = torch.rand(tokens, EXPERTS).argsort(-1)[:, :K].contiguous()
    weights = [draw(EXPERTS, WIDTH, 2 * INNER), draw(EXPERTS, INNER, WIDTH)]
    lines = [draw(EXPERTS, 2 * INNER), draw(EXPERTS, WIDTH)] if biases else []
    return [draw(tokens, WIDTH, scale=1), ids, draw(tokens, K, scale=1), *weights, *lines]


GROUPED = {"swiglu": (transposed_experts, False), "gpt_oss": (gpt_oss, True)}
grouped = pytest.mark.parametrize(("fn", "biases"), GROUPED.values(), ids=GROUPED)


def of_one_length(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """For a caller who knows that x, ids and p have as many rows."""

    def call(x: Tensor, ids: Tensor, p: Tensor, *weights: Tensor) -> Tensor:
        torch._check(ids.size(0) == x.size(0))
        torch._check(p.size(0) == x.size(0))
        return fn(x, ids, p, *weights)

    return call


def check_grouped(fn: Callable[..., Any], args: Sequence[Tensor], fused: int = 1, **fields: Any) -> None:
    """The whole blocks are fused, and the values are eager's."""
    given = {"inputs": lambda: args, "only": ("grouped_mlp",), "fuses": {"grouped_mlp": fused}, "tolerance": 4e-2}
    report = cases.check(cases.Case(name="", fn=fn, **{**given, **fields}))
    assert not any(f.name.startswith("grouped_mlp[experts,") for f in report.fused)


@grouped
@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_transposed_experts(fn: Callable[..., Tensor], biases: bool, train: bool) -> None:
    check_grouped(fn, grouped_inputs(biases=biases), train=train)


@pytest.mark.parametrize("position", [0, 2, 3, 4, 5, 6])
def test_transposed_experts_with_one_input_frozen(position: int) -> None:
    check_grouped(gpt_oss, [a.detach() if i == position else a for i, a in enumerate(grouped_inputs(biases=True))])


@grouped
def test_transposed_experts_with_any_number_of_tokens(fn: Callable[..., Tensor], biases: bool) -> None:
    others = tuple(lambda n=n: grouped_inputs(n, biases) for n in (7, 33))
    check_grouped(of_one_length(fn), grouped_inputs(biases=biases), dynamic_dims=((0, 0), (1, 0), (2, 0)), other_inputs=others)


@grouped
def test_transposed_experts_checkpointed(fn: Callable[..., Tensor], biases: bool) -> None:
    check_grouped(lambda *args: checkpoint(fn, *args, use_reentrant=False), grouped_inputs(biases=biases))


@grouped
def test_transposed_experts_with_an_expanded_cotangent(fn: Callable[..., Tensor], biases: bool) -> None:
    check_grouped(fn, grouped_inputs(biases=biases), loss=compare.total)


@grouped
def test_transposed_experts_of_shared_weights(fn: Callable[..., Tensor], biases: bool) -> None:
    check_grouped(lambda x, *rest: fn(x, *rest) + fn(x * 0.5, *rest), grouped_inputs(biases=biases), 2, tolerance=6e-2)


def test_experts_of_one_weight_in_both_layouts() -> None:
    def fn(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        stored_out_in = moe_blocks.unmasked(x.tanh(), ids, p, w_gate_up.transpose(1, 2), w_down.transpose(1, 2))
        return transposed_experts(x, ids, p, w_gate_up, w_down) + stored_out_in

    check_grouped(fn, grouped_inputs(), 2)


@grouped
def test_transposed_experts_are_as_near_to_fp64_as_eager(fn: Callable[..., Tensor], biases: bool) -> None:
    args = grouped_inputs(biases=biases)
    got, eager = compare.run(cases.compiled(fn), args), compare.run(fn, args)
    assert fxfuse.last_report().count("grouped_mlp") == 1
    compare.assert_as_near_to_fp64(got, eager, compare.run(exactly(fn), compare.in_fp64(args)))


def exactly(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The block with one matrix product an expert, which double precision can run."""

    def call(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor, *lines: Tensor) -> Tensor:
        zeros = (w_gate_up.new_zeros(EXPERTS, 2 * INNER), w_down.new_zeros(EXPERTS, WIDTH))
        b_gate_up, b_down = lines or zeros
        h = torch.einsum("th,ehn->etn", x, w_gate_up) + b_gate_up.unsqueeze(1)
        if fn is gpt_oss:
            gate, up = h[..., ::2].clamp(max=0.7), h[..., 1::2].clamp(min=-0.7, max=0.7)
            a = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
        else:
            gate, up = h.chunk(2, -1)
            a = F.silu(gate) * up
        y = torch.einsum("eti,eih->eth", a, w_down) + b_down.unsqueeze(1)
        share = torch.zeros(ids.size(0), EXPERTS, dtype=p.dtype).scatter_add(1, ids, p)
        return torch.einsum("te,eth->th", share, y)

    return call
