"""What is left of a mixture-of-experts block that is not recognised as a whole: scatters that add become gathers, and Llama-4's
experts, which all see a share of the rows, a batched gated MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import cases
import compare
import moe_blocks
import pytest
import torch
import torch.nn.functional as F
from moe_blocks import EXPERTS, INNER, TOKENS, WIDTH, K
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxfuse

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOLERANCE = {FP64: 1e-12, FP32: 1e-6, BF16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp64", "fp32", "bf16"])
SCATTERS = ("scatter_inverse", "scatter_permutation", "scatter_tokens")
COMBINE = "combine_rows"
ALL = dict.fromkeys(SCATTERS, 1)


def draw(*shape: int, scale: float = 0.3, dtype: torch.dtype = BF16) -> Tensor:
    """Normal values that need a gradient."""
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def distinct(tokens: int = TOKENS, k: int = K) -> Tensor:
    """k experts a token, none twice."""
    return torch.rand(tokens, max(EXPERTS, k)).argsort(-1)[:, :k].contiguous()


def mish(gate: Tensor, up: Tensor) -> Tensor:
    """An activation that no fusion knows."""
    return F.mish(gate) * up


# ------------------------------------------------------------------------------------------------ whole blocks

PACKED = ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
SEPARATE = ((EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH))
BLOCKS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], torch.dtype, dict[str, int], dict[str, int]]] = {
    "masked": (moe_blocks.masked, PACKED, BF16, ALL, {}),
    "unmasked": (moe_blocks.unmasked, PACKED, BF16, ALL, {}),
    "scattered": (moe_blocks.scattered, SEPARATE, FP32, {COMBINE: 1, SCATTERS[1]: 1, SCATTERS[2]: 1}, {COMBINE: 1}),
}
"""By name: the block, its weights, its router weights' dtype, what fires in training and in inference."""


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", BLOCKS)
def test_block_with_an_activation_of_no_fusion(name: str, train: bool) -> None:
    block, weights, p, training, inference = BLOCKS[name]
    args = [draw(TOKENS, WIDTH, scale=1), distinct(), draw(TOKENS, K, scale=1, dtype=p), *[draw(*w) for w in weights]]
    case = cases.Case(
        name=name,
        fn=lambda *a: block(*a, mish),
        inputs=lambda: args,
        only=("grouped_mlp", *SCATTERS, COMBINE),
        fuses={},
        train=train,
        tolerance=2e-2,
    )
    report = cases.check(dataclasses.replace(case, fuses=training if train else inference))
    assert not report.failures


# ------------------------------------------------------------------------------------------------ routing alone


def by_sort(ids: Tensor) -> Tensor:
    return torch.sort(ids.reshape(-1))[1]


def by_stable_sort(ids: Tensor) -> Tensor:
    return torch.sort(ids.reshape(-1), stable=True)[1]


def by_argsort(ids: Tensor) -> Tensor:
    return ids.flatten().argsort()


def by_stable_argsort(ids: Tensor) -> Tensor:
    return torch.argsort(ids.view(-1), stable=True)


ORDERS = (by_sort, by_stable_sort, by_argsort, by_stable_argsort)
Order = Callable[[Tensor], Tensor]


def restored(x: Tensor, ids: Tensor, p: Tensor, order_of: Order = by_sort) -> Tensor:
    """transformers' routing around a MLP that is only an activation."""
    order = order_of(ids)
    weighted = F.mish(x[order // ids.shape[1]]) * p.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return weighted[inverse].view(*ids.shape, x.shape[1]).sum(1)


def scattered(x: Tensor, ids: Tensor, p: Tensor, order_of: Order = by_stable_argsort) -> Tensor:
    """torchtitan's."""
    order = order_of(ids)
    rows = F.mish(x[order // ids.shape[1]]) * p.reshape(-1)[order].unsqueeze(-1)
    tokens = (order // ids.shape[1]).reshape(-1, 1).expand(-1, x.shape[1])
    return torch.zeros_like(x).scatter_add(0, tokens, rows)


def dense(x: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """Both without routing."""
    return F.mish(x) * p.sum(1, keepdim=True)


def routed(dtype: torch.dtype = FP32, ids: Tensor | None = None) -> list[Tensor]:
    """x, ids, router weights."""
    ids = distinct() if ids is None else ids
    return [draw(ids.shape[0], WIDTH, scale=1, dtype=dtype), ids, draw(*ids.shape, scale=1, dtype=dtype)]


def check(fn: Callable[..., Any], args: Sequence[Any], fuses: dict[str, int], **fields: Any) -> fxfuse.Report:
    """Those fire and no other of these families; the values are eager's."""
    tolerance = fields.pop("tolerance", TOLERANCE[args[0].dtype])
    only = (*SCATTERS, COMBINE)
    report = cases.check(cases.Case(name="", fn=fn, inputs=lambda: args, only=only, fuses=fuses, tolerance=tolerance, **fields))
    assert not report.failures
    return report


@dtypes
def test_scatters_of_the_backward_are_gathers(dtype: torch.dtype) -> None:
    report = check(restored, routed(dtype), ALL)
    assert all(f.directions == ("backward",) for f in report.fused)
    assert not holds_adding_scatter(report)


@dtypes
def test_adding_rows_to_their_tokens_is_a_gather(dtype: torch.dtype) -> None:
    report = check(scattered, [a.detach() for a in routed(dtype)], {COMBINE: 1}, train=False)
    assert not holds_adding_scatter(report)


def holds_adding_scatter(report: fxfuse.Report) -> bool:
    """Whether rows are still added by index: index_put's last argument is True."""
    lines = report.graphs[0].after.splitlines()
    return cases.holds_op(report, "scatter_add") or any("aten.index_put.default" in line and "True)" in line for line in lines)


@pytest.mark.parametrize("order_of", ORDERS, ids=lambda f: f.__name__)
def test_every_spelling_of_the_order_in_the_backward(order_of: Order) -> None:
    check(lambda x, ids, p: restored(x, ids, p, order_of), routed(), ALL)


@pytest.mark.parametrize("order_of", ORDERS, ids=lambda f: f.__name__)
def test_every_spelling_of_the_order_in_the_forward(order_of: Order) -> None:
    check(lambda x, ids, p: scattered(x, ids, p, order_of), [a.detach() for a in routed()], {COMBINE: 1}, train=False)


def test_torchtitans_routing_in_training() -> None:
    check(scattered, routed(), {COMBINE: 1, SCATTERS[1]: 1, SCATTERS[2]: 1})


IDS: dict[str, Callable[[], Tensor]] = {
    "duplicates": lambda: torch.randint(0, 2, (TOKENS, K)),
    "all one expert": lambda: torch.full((TOKENS, K), 3),
    "one a token": lambda: distinct(k=1),
    "five a token": lambda: torch.randint(0, EXPERTS, (TOKENS, 5)),
    "one token": lambda: distinct(1),
    "one row": lambda: distinct(1, 1),
    "negative and large": lambda: torch.tensor([[-(2**63), 2**63 - 1], [0, -1], [5, 5]]),
    "int32": lambda: distinct().int(),
    "already sorted": lambda: torch.arange(TOKENS * K).view(TOKENS, K),
}


@pytest.mark.parametrize("fn", [restored, scattered], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", IDS)
def test_any_ids(name: str, fn: Callable[..., Tensor]) -> None:
    args = routed(FP64, IDS[name]())
    got = compare.run(cases.compiled(fn, only=(*SCATTERS, COMBINE)), args)
    report = fxfuse.last_report()
    assert report.count(COMBINE) if fn is scattered else report.count("scatter_*") >= 2  # of one row or token less is left
    assert not report.failures
    compare.assert_same(got, compare.run(fn, args), TOLERANCE[FP64])
    compare.assert_same(got, compare.run(dense, args), TOLERANCE[FP64])


@pytest.mark.parametrize("fn", [restored, scattered], ids=lambda f: f.__name__)  # only index_put rounds after each row
def test_sums_are_nearer_to_fp64_than_eagers(fn: Callable[..., Tensor]) -> None:
    args = routed(BF16, torch.randint(0, EXPERTS, (64, 8)))
    got, eager = compare.run(cases.compiled(fn, only=(*SCATTERS, COMBINE)), args), compare.run(fn, args)
    truth = compare.run(dense, compare.in_fp64(args))
    value = (lambda r: r.grads[0]) if fn is restored else (lambda r: r.outputs[0])
    mine, theirs = (compare.relative_error(value(r), value(truth)) for r in (got, eager))
    assert mine < 0.9 * theirs if fn is restored else mine <= theirs
    compare.assert_as_near_to_fp64(got, eager, truth)


@pytest.mark.parametrize(("position", "absent"), [(0, SCATTERS[2]), (2, SCATTERS[1])], ids=["x", "p"])
def test_with_one_input_frozen(position: int, absent: str) -> None:
    args = [a.detach() if i == position else a for i, a in enumerate(routed())]
    check(restored, args, {name: n for name, n in ALL.items() if name != absent})


@pytest.mark.parametrize("fn", [restored, scattered], ids=lambda f: f.__name__)
def test_any_number_of_tokens(fn: Callable[..., Tensor]) -> None:
    def of_one_length(x: Tensor, ids: Tensor, p: Tensor) -> Tensor:
        torch._check(ids.size(0) == x.size(0))
        torch._check(p.size(0) == x.size(0))
        return fn(x, ids, p)

    others = tuple(lambda n=n: routed(ids=distinct(n)) for n in (7, 33))
    dims = ((0, 0), (1, 0), (2, 0))
    args = routed()
    train = fn is restored
    check(
        of_one_length, args, ALL if train else {COMBINE: 1}, train=train, dynamic_dims=dims, other_inputs=others, tolerance=1e-5
    )


def test_checkpointed() -> None:
    check(lambda *args: checkpoint(restored, *args, use_reentrant=False), routed(), ALL)


def test_an_unknown_number_of_rows_a_token_is_refused() -> None:
    got = compare.run(cases.compiled(scattered, only=[COMBINE], dynamic=True), args := routed(), train=False)
    compare.assert_same(got, compare.run(scattered, args, train=False), TOLERANCE[FP32])
    report = fxfuse.last_report()
    assert report.count(COMBINE) == 0 and "must be known" in report.why_not(COMBINE) and not report.failures


def test_strict_numerics_keeps_what_only_moves_rows() -> None:
    report = check(restored, routed(BF16), {SCATTERS[0]: 1, SCATTERS[1]: 1}, recipe="strict")
    assert "numerics is strict" in report.why_not(SCATTERS[2])


def test_strict_numerics_refuses_another_rounding() -> None:
    report = check(scattered, [a.detach() for a in routed(BF16)], {}, train=False, recipe="strict")
    assert "numerics is strict" in report.why_not(COMBINE)


# ------------------------------------------------------------------------------------------------ no permutation of a sort


class _InBackward(torch.autograd.Function):
    """Its gradient is ``scatter(grad, index)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, scatter: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.scatter = scatter
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.scatter(grads[0], *ctx.saved_tensors), None, None


def zeros(g: Tensor) -> Tensor:
    return torch.zeros_like(g)


def inverse_of(order: Tensor) -> Tensor:
    return torch.empty_like(order).index_put((order,), torch.arange(order.shape[0]))


def tokens_of(g: Tensor, ids: Tensor, k: int = K) -> Tensor:
    return torch.sort(ids)[1] // k


SCATTERED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "permutation": (lambda g, ids: zeros(g).index_put((torch.sort(ids)[1],), g, accumulate=True), SCATTERS[1]),
    "inverse": (lambda g, ids: zeros(g).index_put((inverse_of(torch.sort(ids)[1]),), g, accumulate=True), SCATTERS[0]),
}
NOT_SCATTERED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index of an input": lambda g, ids: zeros(g).index_put((ids,), g, accumulate=True),
    "sorted values": lambda g, ids: zeros(g).index_put((torch.sort(ids)[0],), g, accumulate=True),
    "inverse of an input": lambda g, ids: zeros(g).index_put((inverse_of(ids),), g, accumulate=True),
    "inverse of sorted values": lambda g, ids: zeros(g).index_put((inverse_of(torch.sort(ids)[0]),), g, accumulate=True),
    "not added": lambda g, ids: zeros(g).index_put((torch.sort(ids)[1],), g, accumulate=False),
    "added to ones": lambda g, ids: torch.ones_like(g).index_put((torch.sort(ids)[1],), g, accumulate=True),
    "added to itself": lambda g, ids: g.index_put((torch.sort(ids)[1],), g, accumulate=True),
    "descending": lambda g, ids: zeros(g).index_put((torch.sort(ids, descending=True)[1],), g, accumulate=True),
    "every other row": lambda g, ids: zeros(g).index_put((torch.sort(ids)[1][::2],), g[::2], accumulate=True),
    "first rows": lambda g, ids: zeros(g).index_put((torch.sort(ids)[1][:7],), g[:7], accumulate=True),
    "sorted by parts": lambda g, ids: zeros(g).index_put((torch.sort(ids.view(4, -1))[1].view(-1),), g, accumulate=True),
    "tokens of another K": lambda g, ids: zeros(g).index_put((tokens_of(g, ids, 4),), g, accumulate=True),
    "place among a token's": lambda g, ids: zeros(g).index_put((torch.sort(ids)[1] % K,), g, accumulate=True),
    "tokens, not added": lambda g, ids: zeros(g).index_put((tokens_of(g, ids),), g, accumulate=False),
    "order twice": lambda g, ids: zeros(g).index_put((torch.sort(ids)[1][torch.sort(ids)[1]],), g, accumulate=True),
}


def in_backward(scatter: Callable[[Tensor, Tensor], Tensor]) -> tuple[compare.Run, compare.Run, fxfuse.Report]:
    """Compiled and eager, and the report."""
    args = [draw(TOKENS, WIDTH, scale=1, dtype=FP64), torch.randperm(TOKENS)]

    def fn(x: Tensor, index: Tensor) -> Tensor:
        return _InBackward.apply(x, index, scatter)

    got = compare.run(cases.compiled(fn, only=SCATTERS), args)
    return got, compare.run(fn, args), fxfuse.last_report()


dynamo_makes_functions = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@dynamo_makes_functions
@pytest.mark.parametrize(("scatter", "name"), SCATTERED.values(), ids=SCATTERED)
def test_a_scatter_in_the_backward_of_an_autograd_function(scatter: Any, name: str) -> None:
    got, want, report = in_backward(scatter)
    compare.assert_same(got, want, TOLERANCE[FP64])
    assert [f.name.partition("[")[0] for f in report.fused] == [name]


@dynamo_makes_functions
@pytest.mark.parametrize("scatter", NOT_SCATTERED.values(), ids=NOT_SCATTERED)
def test_no_permutation_of_a_sort_is_left_alone(scatter: Any) -> None:
    got, want, report = in_backward(scatter)
    compare.assert_same(got, want, TOLERANCE[FP64])
    assert not report.fused and not report.failures


def tokens_by_row(x: Tensor, order: Tensor, k: int = K) -> Tensor:
    return (order // k).reshape(-1, 1).expand(-1, x.shape[1])


NOT_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index of an input": lambda y, ids: y.new_zeros(TOKENS, WIDTH).scatter_add(0, ids.view(-1, 1).expand(-1, WIDTH), y),
    "sorted values": lambda y, ids: y.new_zeros(TOKENS, WIDTH).scatter_add(
        0, tokens_by_row(y, ids.view(-1).sort(stable=True)[0]), y
    ),
    "added to ones": lambda y, ids: y.new_ones(TOKENS, WIDTH).scatter_add(0, tokens_by_row(y, by_stable_argsort(ids)), y),
    "another K": lambda y, ids: y.new_zeros(TOKENS, WIDTH).scatter_add(0, tokens_by_row(y, by_stable_argsort(ids), 4), y),
    "not divided": lambda y, ids: y.new_zeros(TOKENS * K, WIDTH).scatter_add(0, tokens_by_row(y, by_stable_argsort(ids), 1), y),
    "along the rows": lambda y, ids: y.new_zeros(TOKENS * K, WIDTH).scatter_add(1, tokens_by_row(y, by_stable_argsort(ids)), y),
    "more rows than tokens": lambda y, ids: y.new_zeros(TOKENS + 5, WIDTH).scatter_add(
        0, tokens_by_row(y, by_stable_argsort(ids)), y
    ),
    "not added": lambda y, ids: y.new_zeros(TOKENS, WIDTH).scatter(0, tokens_by_row(y, by_stable_argsort(ids)), y),
    "descending": lambda y, ids: y.new_zeros(TOKENS, WIDTH).scatter_add(
        0, tokens_by_row(y, torch.argsort(ids.view(-1), stable=True, descending=True)), y
    ),
    "every other row": lambda y, ids: y.new_zeros(TOKENS, WIDTH).scatter_add(
        0, tokens_by_row(y, by_stable_argsort(ids))[::2], y[::2]
    ),
}


@pytest.mark.parametrize("combine", NOT_COMBINED.values(), ids=NOT_COMBINED)
def test_no_sum_of_a_tokens_rows_is_left_alone(combine: Any) -> None:
    ids = torch.randint(0, TOKENS, (TOKENS, K))
    if combine is NOT_COMBINED["along the rows"]:
        ids = ids.clamp(max=EXPERTS)
    check(combine, [torch.randn(TOKENS * K, max(WIDTH, TOKENS), dtype=FP64), ids], {}, train=False)


# ------------------------------------------------------------------------------------------------ batched gated MLP

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
}
kinds = pytest.mark.parametrize("kind", ACTIVATIONS)
BATCHED = tuple(f"gated_mlp_batched_{kind}" for kind in ACTIVATIONS)


def half(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """x (E, M, H), w (E, H, 2I): the gated half of every expert."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        gate, up = torch.bmm(x, w).chunk(2, -1)
        return up * ACTIVATIONS[kind](gate)

    return fn


def llama4(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """Llama-4's experts: every expert sees its share of (E M, H) rows."""
    x = x.view(w_gate_up.shape[0], -1, w_gate_up.shape[1])
    gate, up = torch.bmm(x, w_gate_up).chunk(2, dim=-1)
    return torch.bmm(up * F.silu(gate), w_down).view(-1, w_gate_up.shape[1])


def batch(dtype: torch.dtype = FP32, rows: int = 6) -> list[Tensor]:
    """x and one weight."""
    return [draw(EXPERTS, rows, WIDTH, dtype=dtype), draw(EXPERTS, WIDTH, 2 * INNER, dtype=dtype)]


def check_batched(fn: Callable[..., Any], args: Sequence[Tensor], fuses: dict[str, int], **fields: Any) -> fxfuse.Report:
    """Those of the family fire, no other; the values are eager's."""
    tolerance = fields.pop("tolerance", {FP64: 1e-7, FP32: 1e-5, BF16: 2e-2}[args[0].dtype])
    case = cases.Case(name="", fn=fn, inputs=lambda: args, only=BATCHED, fuses=fuses, tolerance=tolerance, **fields)
    return cases.check(case)


@kinds
@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_batched_gated_mlp(kind: str, train: bool) -> None:
    report = check_batched(half(kind), batch(), {f"gated_mlp_batched_{kind}": 1}, train=train)
    assert report.fused[0].directions == (("forward", "backward") if train else ("forward",))
    assert bool(report.fused[0].saved) == train


SILU = {"gated_mlp_batched_silu": 1}


@dtypes
def test_llama4s_experts(dtype: torch.dtype) -> None:
    x, w_gate_up = batch(dtype)
    args = [x.detach().reshape(-1, WIDTH).requires_grad_(), w_gate_up, draw(EXPERTS, INNER, WIDTH, dtype=dtype)]
    check_batched(llama4, args, SILU)
    for position in range(3):
        check_batched(llama4, [a.detach() if i == position else a for i, a in enumerate(args)], SILU)


@pytest.mark.parametrize("position", [0, 1])
@kinds
def test_batched_gated_mlp_with_one_input_frozen(kind: str, position: int) -> None:
    args = [a.detach() if i == position else a for i, a in enumerate(batch())]
    check_batched(half(kind), args, {f"gated_mlp_batched_{kind}": 1})


def test_batched_gated_mlp_with_any_number_of_rows() -> None:
    others = tuple(lambda n=n: batch(rows=n) for n in (3, 11))
    check_batched(half("silu"), batch(), SILU, dynamic_dims=((0, 1),), other_inputs=others)


@kinds
def test_batched_gated_mlp_is_as_near_to_fp64_as_eager(kind: str) -> None:
    fn, args = half(kind), batch(BF16)
    got = compare.run(cases.compiled(fn, only=BATCHED), args)
    compare.assert_as_near_to_fp64(got, compare.run(fn, args), compare.run(fn, compare.in_fp64(args)), slack=1e-4)


SURROUNDED: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "checkpointed": (lambda x, w: checkpoint(half("silu"), x, w, use_reentrant=False), SILU),
    "weight stored transposed": (lambda x, w: half("silu")(x, w.transpose(1, 2).contiguous().transpose(1, 2)), SILU),
    "one x for all": (lambda x, w: half("silu")(x[:1].expand(EXPERTS, -1, -1), w), SILU),
    "weight twice": (lambda x, w: half("silu")(x, w) + half("silu")(x * 0.5, w), {"gated_mlp_batched_silu": 2}),
    "residual": (lambda x, w: half("silu")(x, w) + x[..., :INNER], SILU),
    "summed": (lambda x, w: half("silu")(x, w).sum(0), SILU),
    "sliced halves": (lambda x, w: F.silu((x @ w)[..., :INNER]) * (x @ w)[..., INNER:], {}),
    "sliced halves of one product": (lambda x, w: (lambda h: F.silu(h[..., :INNER]) * h[..., INNER:])(x @ w), SILU),
}


@pytest.mark.parametrize(("fn", "fuses"), SURROUNDED.values(), ids=SURROUNDED)
def test_batched_gated_mlp_among_others(fn: Callable[..., Any], fuses: dict[str, int]) -> None:
    if not fuses:  # two products of the same operands: one or two regions, the values count
        compare.assert_same(compare.run(cases.compiled(fn), args := batch()), compare.run(fn, args), 1e-5)
    else:
        check_batched(fn, batch(), fuses)


def test_batched_gated_mlp_of_weights_stored_out_in() -> None:
    x, w = batch()
    stored = w.detach().transpose(1, 2).contiguous().requires_grad_()
    check_batched(lambda x, w: half("silu")(x, w.transpose(1, 2)), [x, stored], SILU)


def split(h: Tensor, at: int) -> tuple[Tensor, Tensor]:
    return h[..., :at], h[..., at : 2 * at]


NOT_BATCHED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "halves swapped": lambda x, w: (lambda h: h[..., :INNER] * F.silu(h[..., INNER:]))(torch.bmm(x, w)),
    "interleaved": lambda x, w: (lambda h: F.silu(h[..., ::2]) * h[..., 1::2])(torch.bmm(x, w)),
    "quarters": lambda x, w: (lambda a, b: F.silu(a) * b)(*split(torch.bmm(x, w), INNER // 2)),
    "sum": lambda x, w: (lambda a, b: F.silu(a) + b)(*torch.bmm(x, w).chunk(2, -1)),
    "scaled inside": lambda x, w: (lambda a, b: F.silu(a * 1.5) * b)(*torch.bmm(x, w).chunk(2, -1)),
    "other activation": lambda x, w: (lambda a, b: F.mish(a) * b)(*torch.bmm(x, w).chunk(2, -1)),
    "halves of the rows": lambda x, w: (lambda a, b: F.silu(a) * b)(*torch.bmm(x, w).chunk(2, 1)),
    "gate alone": lambda x, w: (lambda a, b: F.silu(a) * a)(*torch.bmm(x, w).chunk(2, -1)),
    "added to the product": lambda x, w: (lambda a, b: F.silu(a) * b)(*torch.baddbmm(x[..., :1], x, w).chunk(2, -1)),
    "product used outside": lambda x, w: (lambda h: (F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1], h))(torch.bmm(x, w)),
}


@pytest.mark.parametrize("fn", NOT_BATCHED.values(), ids=NOT_BATCHED)
@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_what_is_no_batched_gated_mlp_is_left_alone(fn: Callable[..., Any], train: bool) -> None:
    check_batched(fn, batch(), {}, train=train)


def test_swapped_halves_give_their_reason() -> None:
    report = check_batched(NOT_BATCHED["halves swapped"], batch(), {}, reason="differs|slice|pattern wants")
    assert report.why_not("gated_mlp_batched_silu").startswith("gated_mlp_batched_silu did not fire")
