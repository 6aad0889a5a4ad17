"""Mixture-of-experts blocks in the situations that users put them into: one op forward, one backward, and eager's values.

Three blocks, each spelled as a library spells it (``moe_blocks``). ``_grouped_mm`` is traced in bfloat16 only.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cases
import compare
import moe_blocks
import pytest
import torch
import torch.nn.functional as F
from moe_blocks import EXPERTS, INNER, TOKENS, WIDTH, K, swiglu
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxfuse

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = 4e-2
GONE = ("_grouped_mm", "index_put", "index", "where", "silu", "silu_backward", "scatter_add")
"""aten ops of the blocks; none is left, forward or backward. Sorting and counting may be: others read the results."""
ROWS = TOKENS * K


@dataclasses.dataclass(frozen=True)
class Block:
    """A block as people write it: arguments (x, ids, p, *weights)."""

    fn: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    """The same sum without routing, for double precision."""
    counts: Callable[[Tensor], Tensor]
    """Rows per expert, as the block counts them."""
    weights: tuple[tuple[int, ...], ...]
    p: torch.dtype
    """The router weights' dtype."""
    kept: tuple[tuple[int, ...], ...]
    """Shapes of what the region keeps: ``ends``, the order, its inverse, and the linears' outputs before the activation."""

    def __call__(self, *args: Any) -> Tensor:
        return self.fn(*args)

    def inputs(self, tokens: int = TOKENS, p: torch.dtype | None = None, sets: int = 1) -> list[Tensor]:
        """x, ids, p and ``sets`` sets of weights, all of them trained."""
        shapes = (*self.weights * sets,)
        return [
            normal(tokens, WIDTH, scale=1),
            routing(tokens),
            normal(tokens, K, scale=1, dtype=p or self.p),
            *[normal(*shape) for shape in shapes],
        ]


def normal(*shape: int, scale: float = 0.2, dtype: torch.dtype = BF16) -> Tensor:
    """Normal values that need a gradient."""
    return (torch.randn(*shape) * scale).to(dtype).requires_grad_()


def routing(tokens: int = TOKENS) -> Tensor:
    """K experts a token, no expert twice; (T, K)."""
    return torch.rand(tokens, EXPERTS).argsort(-1)[:, :K].contiguous()


def frozen(args: Sequence[Tensor], *positions: int) -> list[Tensor]:
    """The arguments, without gradients at these positions."""
    return [a.detach() if i in positions else a for i, a in enumerate(args)]


PACKED = ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
SEPARATE = ((EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, INNER, WIDTH))
ORDER = ((EXPERTS,), (ROWS,), (ROWS,))


def sorted_counts(ids: Tensor) -> Tensor:
    return moe_blocks.sort_by_expert(ids)[2]


BLOCKS = {
    "masked": Block(moe_blocks.masked, moe_blocks.dense_packed, sorted_counts, PACKED, BF16, (*ORDER, (ROWS, 2 * INNER))),
    "unmasked": Block(moe_blocks.unmasked, moe_blocks.dense_packed, sorted_counts, PACKED, BF16, (*ORDER, (ROWS, 2 * INNER))),
    "scattered": Block(
        moe_blocks.scattered, moe_blocks.dense_separate, moe_blocks.count_by_mask, SEPARATE, FP32, (*ORDER, *[(ROWS, INNER)] * 2)
    ),
}
blocks = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
harder = pytest.mark.parametrize("block", [BLOCKS["masked"], BLOCKS["scattered"]], ids=["masked", "scattered"])
"""Unmasked blocks are masked ones with less to find."""
packed = pytest.mark.parametrize("block", [BLOCKS["masked"], BLOCKS["unmasked"]], ids=["masked", "unmasked"])


def check(
    fn: Callable[..., Any],
    args: Sequence[Tensor],
    fused: int = 1,
    *,
    backward: int | None = None,
    gone: Iterable[str] = GONE,
    train: bool = True,
    dynamic: bool | None = None,
    dynamic_tokens: bool = False,
    others: Iterable[Sequence[Tensor]] = (),
    forward_tolerance: float | None = None,
    exact: Callable[..., Any] | None = None,
    **how: Any,
) -> fxfuse.Report:
    """Compile ``fn`` with every fusion there is, compare outputs and all gradients with eager, count what fused.

    Args:
        fused: how many blocks become one op in the forward, and in the backward too unless ``backward`` says otherwise.
        others: arguments of other sizes, which must run without another compilation.
        exact: the same function of the sum without routing: in double precision it is the truth from which output and
            gradients may be at most 1.5 times as far as eager's own.
        how: as for ``compare.run``.
    """
    run = functools.partial(compare.run, train=train, **how)
    compiled = cases.compiled(fn, dynamic=dynamic)
    got = run(marked(compiled) if dynamic_tokens else compiled, args)
    report = fxfuse.last_report()
    want = run(fn, args)
    compare.assert_same(got, want, TOLERANCE, forward_tolerance)
    if exact is not None:
        compare.assert_as_near_to_fp64(got, want, run(exact, compare.in_fp64(args)))
    whole = [f for f in report.fused if f.name.startswith("grouped_mlp[") and not f.name.startswith("grouped_mlp[experts,")]
    counts = tuple(sum(direction in f.directions for f in whole) for direction in ("forward", "backward"))
    assert counts == (fused, (fused if train else 0) if backward is None else backward), report.why_not("grouped_mlp")
    assert not report.failures
    left = [op for op in gone if fused and cases.holds_op(report, op)]
    assert not left, f"left in the rewritten graph: {left}"
    for other in others:
        with torch._dynamo.config.patch(error_on_recompile=True):
            again = run(compiled, other)
        compare.assert_same(again, run(fn, other), TOLERANCE, forward_tolerance)
    return report


def marked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The number of tokens may change."""

    def call(*args: Tensor) -> Any:
        for a in args:
            if a.size(0) == TOKENS:
                torch._dynamo.mark_dynamic(a, 0)
        return fn(*args)

    return call


def refuse(fn: Callable[..., Any], args: Sequence[Tensor], reason: str) -> None:
    """Nothing of the block is fused, the values are eager's, and some miss of the family gives this reason."""
    report = check(fn, args, fused=0)
    assert report.count("grouped_mlp") == 0, "a part of it is fused"
    misses = [m for m in report.missed if m.name.startswith("grouped_mlp[")]
    assert any(reason in m.reason for m in misses), [(m.progress, m.reason) for m in misses]


def shape_of(report: fxfuse.Report, node: str) -> tuple[int, ...]:
    """The shape of a node of the rewritten graph, as its code states it."""
    found = re.search(rf'\b{node}: "\w+\[([\d, ]*)\]"', report.graphs[0].after)
    assert found, f"no node {node}"
    return tuple(int(n) for n in found[1].split(","))


# ------------------------------------------------------------------------------------------------ the block alone


@blocks
def test_training(block: Block) -> None:
    report = check(block, block.inputs(), gone=(*GONE, "mul", "cat", "sort"), exact=block.exact)
    (fused,) = report.fused
    assert fused.directions == ("forward", "backward")
    shapes = [shape_of(report, name) for name in fused.saved]
    assert sorted(shapes) == sorted(block.kept if block.counts is sorted_counts else block.kept[1:])  # others count outside it


@blocks
def test_inference_keeps_nothing(block: Block) -> None:
    (fused,) = check(block, block.inputs(), train=False).fused
    assert (fused.directions, fused.saved) == (("forward",), ())


@harder
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_autograd_keeps_h_and_the_order_and_nothing_else(block: Block, dynamic: bool) -> None:
    compiled = cases.compiled(of_one_length(block))
    kept = compare.run(marked(compiled) if dynamic else compiled, block.inputs()).kept
    assert sorted(kept) == sorted(block.kept)


@harder
def test_autograd_keeps_only_the_order_where_activations_are_recomputed(block: Block) -> None:
    args = block.inputs()
    got = compare.run(cases.compiled(block, recipe=fxfuse.Recipe(activation_memory="recompute")), args)
    assert sorted(got.kept) == sorted(ORDER)
    compare.assert_same(got, compare.run(block, args), TOLERANCE)


@blocks
def test_a_checkpointed_block_keeps_nothing(block: Block) -> None:
    compiled = cases.compiled(lambda *args: checkpoint(block, *args, use_reentrant=False))
    assert compare.run(compiled, block.inputs()).kept == ()


def of_one_length(block: Block) -> Callable[..., Tensor]:
    """The block of a caller who knows that x, ids and p have as many rows, as every router does."""

    def fn(x: Tensor, ids: Tensor, p: Tensor, *weights: Tensor) -> Tensor:
        torch._check(ids.size(0) == x.size(0))
        torch._check(p.size(0) == x.size(0))
        return block(x, ids, p, *weights)

    return fn


@blocks
@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_dynamic_tokens(block: Block, train: bool) -> None:
    others = [block.inputs(7), block.inputs(33)]
    check(of_one_length(block), block.inputs(), train=train, dynamic_tokens=True, others=others)


@harder
def test_dynamic_tokens_behind_a_router(block: Block) -> None:
    def others(tokens: int) -> list[Tensor]:
        return [normal(tokens, WIDTH, scale=1), *args[1:]]

    args = routed_inputs(block)
    check(routed(block), args, dynamic_tokens=True, others=[others(7), others(33)], gone=ROUTED_GONE)


@harder
def test_every_size_dynamic(block: Block) -> None:
    check(block, block.inputs(), dynamic=True)


def test_fewer_ids_than_rows_of_x() -> None:
    # the rows past the last id stay zero, which is no grouped MLP
    _, *rest = BLOCKS["scattered"].inputs()
    check(BLOCKS["scattered"], [normal(TOKENS + 5, WIDTH), *rest], fused=0)


@harder
def test_number_of_tokens_is_known_only_at_run_time(block: Block) -> None:
    def fn(keep: Tensor, x: Tensor, ids: Tensor, p: Tensor, *weights: Tensor) -> Tensor:
        kept = keep.nonzero().squeeze(-1)
        return block(x[kept], ids[kept], p[kept], *weights)

    gone = [op for op in GONE if op not in ("index", "index_put")]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(fn, [torch.rand(TOKENS) > 0.3, *block.inputs()], gone=gone)


@harder
def test_retained_graph(block: Block) -> None:
    check(block, block.inputs(), retain_graph=True)


def best(block: Block) -> list[Tensor]:
    """Inputs with one expert a token."""
    x, ids, p, *weights = block.inputs()
    return [x, ids[:, :1].contiguous(), p.detach()[:, :1].clone().requires_grad_(), *weights]


@blocks
def test_one_expert_a_token(block: Block) -> None:
    check(block, best(block))


@harder
def test_first_of_two_experts(block: Block) -> None:
    check(lambda x, ids, p, *weights: block(x, ids[:, :1], p[:, :1].contiguous(), *weights), block.inputs())


@blocks
def test_one_expert_takes_all(block: Block) -> None:
    x, ids, *rest = best(block)
    check(block, [x, torch.full_like(ids, 2), *rest])


@packed
def test_one_expert_takes_all_rows_of_every_token(block: Block) -> None:
    x, ids, *rest = block.inputs()
    check(block, [x, torch.full_like(ids, 2), *rest])


@packed
@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_router_weights_in_fp32(block: Block, train: bool) -> None:
    check(block, block.inputs(p=FP32), train=train, exact=block.exact)


# ------------------------------------------------------------------------------------------------ what trains

FROZEN = {
    f"{name}-{i}": (BLOCKS[name], i) for name in ("masked", "scattered") for i in (0, *range(2, len(BLOCKS[name].weights) + 3))
}


@pytest.mark.parametrize(("block", "position"), FROZEN.values(), ids=FROZEN)
def test_one_input_frozen(block: Block, position: int) -> None:
    check(block, frozen(block.inputs(), position))


@harder
def test_only_the_last_weight_trains(block: Block) -> None:
    args = block.inputs()
    check(block, frozen(args, *range(len(args) - 1)))


@harder
def test_only_the_input_trains(block: Block) -> None:
    args = block.inputs()
    check(block, frozen(args, *range(1, len(args))))


@harder
def test_nothing_in_the_block_trains(block: Block) -> None:
    def fn(scale: Tensor, *args: Tensor) -> Tensor:
        return block(*args) * scale

    args = block.inputs()
    check(fn, [normal(1), *frozen(args, *range(len(args)))], backward=0)


@harder
def test_under_no_grad_inside_training(block: Block) -> None:
    def fn(x: Tensor, *rest: Tensor) -> Tensor:
        with torch.no_grad():
            out = block(x, *rest)
        return out * x.sum()

    check(fn, block.inputs(), backward=0)


@harder
def test_output_detached(block: Block) -> None:
    check(lambda x, *rest: x * block(x, *rest).detach().sum(), block.inputs(), backward=0, forward_tolerance=0.5)


# ------------------------------------------------------------------------------------------------ what surrounds it


@harder
def test_residual(block: Block) -> None:
    def around(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *rest: x + f(x, *rest) + x.sin()

    check(around(block), block.inputs(), exact=around(block.exact))


@harder
def test_input_used_again(block: Block) -> None:
    def fn(x: Tensor, *rest: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True) + block(x, *rest) * x.sum()

    check(fn, block.inputs())


@harder
def test_input_from_an_upstream_op(block: Block) -> None:
    check(lambda x, *rest: block(torch.sin(x), *rest), block.inputs())


@harder
def test_output_used_twice(block: Block) -> None:
    def fn(*args: Tensor) -> tuple[Tensor, Tensor]:
        out = block(*args)
        return out * out.sin(), out + 1

    check(fn, block.inputs())


@harder
def test_output_transposed(block: Block) -> None:
    check(lambda *args: block(*args).transpose(0, 1) * 2, block.inputs())


@harder
def test_output_summed(block: Block) -> None:
    # the sum nearly cancels in bfloat16, the gradients do not
    check(lambda *args: block(*args).float().sum(), block.inputs(), loss=compare.total, forward_tolerance=0.5)


@harder
def test_output_changed_in_place(block: Block) -> None:
    check(lambda *args: block(*args).mul_(2), block.inputs())


@harder
def test_output_scaled(block: Block) -> None:
    check(lambda *args: block(*args) * 2.5, block.inputs())


# ------------------------------------------------------------------------------------------------ several of them


@harder
def test_two_blocks_of_separate_weights(block: Block) -> None:
    n = len(block.weights)

    def fn(x: Tensor, ids: Tensor, p: Tensor, *weights: Tensor) -> Tensor:
        return block(x, ids, p, *weights[:n]) + block(torch.tanh(x), ids, p, *weights[n:])

    check(fn, block.inputs(sets=2), 2)


@harder
def test_two_blocks_of_shared_weights(block: Block) -> None:
    def twice(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *rest: f(x, *rest) + f(x * 0.5, *rest)

    check(twice(block), block.inputs(), 2, exact=twice(block.exact))


@harder
def test_identical_twins(block: Block) -> None:
    def twice(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: f(*args) + f(*args)

    check(twice(block), block.inputs(), 2, exact=twice(block.exact))


@harder
def test_twins_of_different_cotangents(block: Block) -> None:
    check(lambda *args: block(*args) * 2 + block(*args).sin(), block.inputs(), 2)


# ------------------------------------------------------------------------------------------------ checkpoints, autocast


@harder
def test_checkpointed(block: Block) -> None:
    check(lambda *args: checkpoint(block, *args, use_reentrant=False), block.inputs())


@harder
def test_checkpointed_with_more(block: Block) -> None:
    def more(x: Tensor, *rest: Tensor) -> Tensor:
        return torch.tanh(block(x.sin(), *rest))

    check(lambda *args: checkpoint(more, *args, use_reentrant=False), block.inputs())


@harder
def test_autocast_around_a_router(block: Block) -> None:
    check(routed(block), routed_inputs(block), autocast=BF16, gone=ROUTED_GONE)


@blocks
def test_fp32_activations_before_bf16_experts(block: Block) -> None:
    # as a norm under autocast leaves them: the block may be fused whole, in part or not at all, but its values are eager's
    x, *rest = block.inputs()
    args = [x.detach().float().requires_grad_(), *rest]
    got = compare.run(cases.compiled(block), args)
    compare.assert_same(got, compare.run(block, args), TOLERANCE)
    assert not fxfuse.last_report().failures


# ------------------------------------------------------------------------------------------------ routers

ROUTED_GONE = [op for op in GONE if op not in ("scatter", "gather")]  # topk's own backward


def route(block: Block, x: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the experts, the K best, renormalised: ids, router weights and probabilities."""
    probabilities = F.softmax(F.linear(x, w_router).float(), -1)
    p, ids = torch.topk(probabilities, K, dim=-1)
    return ids, (p / p.sum(-1, keepdim=True)).to(block.p), probabilities


def routed(block: Block) -> Callable[..., Tensor]:
    """The block behind a router."""

    def fn(x: Tensor, w_router: Tensor, *weights: Tensor) -> Tensor:
        ids, p, _ = route(block, x, w_router)
        return block(x, ids, p, *weights)

    return fn


def routed_inputs(block: Block) -> list[Tensor]:
    """x, the router's weight, the experts' weights."""
    x, _, _, *weights = block.inputs()
    return [x, normal(EXPERTS, WIDTH, scale=0.3), *weights]


@harder
def test_live_router(block: Block) -> None:
    check(routed(block), routed_inputs(block), gone=ROUTED_GONE)


@packed
def test_live_router_whose_weights_stay_in_fp32(block: Block) -> None:
    block = dataclasses.replace(block, p=FP32)
    check(routed(block), routed_inputs(block), gone=ROUTED_GONE)


@harder
def test_router_detached(block: Block) -> None:
    def fn(x: Tensor, w_router: Tensor, *weights: Tensor) -> Tensor:
        return routed(block)(x, w_router.detach(), *weights)

    check(fn, routed_inputs(block), gone=ROUTED_GONE)


@harder
def test_auxiliary_loss_on_the_routers_probabilities(block: Block) -> None:
    def fn(x: Tensor, w_router: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ids, p, probabilities = route(block, x, w_router)
        load = F.one_hot(ids, EXPERTS).float().mean((0, 1))
        return block(x, ids, p, *weights), (load * probabilities.mean(0)).sum()[None]

    gone = [op for op in ROUTED_GONE if op != "where"]
    check(fn, routed_inputs(block), gone=gone)


@harder
def test_counts_and_permutation_used_outside(block: Block) -> None:
    def fn(load: Tensor, x: Tensor, ids: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        out = block(x, ids, *rest)
        load.add_(block.counts(ids))
        return out, torch.argsort(ids.view(-1), stable=True)

    gone = [op for op in GONE if op not in ("histc", "scatter")]
    check(fn, [torch.zeros(EXPERTS), *block.inputs()], gone=gone)


def layers(fn: Callable[..., Tensor], depth: int, p: torch.dtype) -> Callable[..., Tensor]:
    """``depth`` residual layers with a router each whose choice is fixed and whose weights are not."""

    def stack(x: Tensor, ids: Tensor, *weights: Tensor) -> Tensor:
        n = len(weights) // depth
        for w_router, *experts in (weights[i : i + n] for i in range(0, len(weights), n)):
            wide = torch.float64 if x.dtype == torch.float64 else FP32
            scores = F.softmax(F.linear(x, w_router).to(wide), -1).gather(1, ids)
            x = x + 0.1 * fn(x, ids, scores.to(torch.float64 if x.dtype == torch.float64 else p), *experts)
        return x

    return stack


def layer_inputs(block: Block, depth: int) -> list[Tensor]:
    """x, ids, and for every layer the router's and the experts' weights."""
    x, ids, _, *_ = block.inputs()
    return [x, ids, *[t for _ in range(depth) for t in (normal(EXPERTS, WIDTH, scale=0.3), *[normal(*w) for w in block.weights])]]


DEPTHS = {"masked-3": ("masked", 3), "unmasked-12": ("unmasked", 12), "scattered-3": ("scattered", 3)}


@pytest.mark.parametrize(("name", "depth"), DEPTHS.values(), ids=DEPTHS)
def test_layers_are_as_near_to_fp64_as_eager(name: str, depth: int) -> None:
    block, gone = BLOCKS[name], [op for op in GONE if op != "scatter_add"]
    exact = layers(block.exact, depth, block.p)
    check(layers(block, depth, block.p), layer_inputs(block, depth), depth, gone=gone, exact=exact)


# ------------------------------------------------------------------------------------------------ other spellings


def respelled_masked(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """``moe_blocks.masked`` with other words for every step."""
    k, pairs = ids.shape[1], ids.shape[0] * ids.shape[1]
    sorted_ids, order = ids.flatten().sort()
    ends = torch.histc(sorted_ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(-1, dtype=torch.int32)
    outside = (sorted_ids >= EXPERTS)[:, None]
    rows = x[order.div(k, rounding_mode="floor")].masked_fill(outside, 0)
    h = torch._grouped_mm(rows, w_gate_up.mT, offs=ends).masked_fill(outside, 0)
    gate, up = h.split(h.shape[-1] // 2, dim=1)
    y = torch._grouped_mm(up * F.silu(gate), w_down.transpose(2, 1), offs=ends).masked_fill(outside, 0)
    y = p.view(pairs)[order][:, None] * y
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(pairs)
    return y[inverse].unflatten(0, (-1, k)).sum(dim=-2)


def respelled_unmasked(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """``moe_blocks.unmasked`` with other words for every step."""
    k, pairs = ids.shape[1], ids.shape[0] * ids.shape[1]
    sorted_ids, order = ids.view(pairs).sort(dim=-1)
    ends = torch.histc(sorted_ids.to(FP32), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    h = torch._grouped_mm(x[order // k], w_gate_up.permute(0, 2, 1), offs=ends)
    half = h.shape[-1] // 2
    y = torch._grouped_mm(h[..., half:] * F.silu(h[..., :half]), w_down.mT, offs=ends)
    y = p.flatten()[order].view(-1, 1) * y
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(pairs)
    return y[inverse].reshape(-1, k, x.shape[-1]).sum(-2)


def respelled_scattered(x: Tensor, ids: Tensor, p: Tensor, w_gate: Tensor, w_down: Tensor, w_up: Tensor) -> Tensor:
    """``moe_blocks.scattered`` with other words for every step."""
    chosen = torch.zeros(x.shape[0], EXPERTS, dtype=torch.bool).scatter(1, ids, True)
    ends = chosen.sum(dim=-2).cumsum(-1, dtype=torch.int32)
    order = ids.flatten().sort(stable=True)[1]
    tokens = order.div(ids.shape[-1], rounding_mode="floor")
    rows = x[tokens]
    up, gate = F.grouped_mm(rows, w_up.mT, offs=ends), F.grouped_mm(rows, w_gate.permute(0, 2, 1), offs=ends)
    y = F.grouped_mm(up * F.silu(gate), w_down.mT, offs=ends)
    y = (p.flatten()[order][:, None] * y.float()).bfloat16()
    return torch.zeros_like(x).scatter_add_(-2, tokens[:, None].expand(y.shape), y)


RESPELLED = {"masked": respelled_masked, "unmasked": respelled_unmasked, "scattered": respelled_scattered}


@pytest.mark.parametrize("name", RESPELLED)
def test_respelled(name: str) -> None:
    check(RESPELLED[name], BLOCKS[name].inputs())


# ------------------------------------------------------------------------------------------------ must not be fused


def between(block: Block, gated: moe_blocks.Gated) -> Callable[..., Tensor]:
    """The block whose experts do this between their linears."""
    return lambda *args: block(*args, gated)


@packed
def test_halves_swapped(block: Block) -> None:
    refuse(between(block, lambda gate, up: gate * F.silu(up)), block.inputs(), "differs")


def test_gate_and_up_of_separate_weights_may_be_swapped() -> None:
    block = BLOCKS["scattered"]
    check(between(block, lambda gate, up: gate * F.silu(up)), block.inputs())


@blocks
def test_scale_inside(block: Block) -> None:
    refuse(between(block, lambda gate, up: swiglu(gate, up) * 1.5), block.inputs(), "scale")


@blocks
def test_activation_of_no_fusion(block: Block) -> None:
    refuse(between(block, lambda gate, up: F.mish(gate) * up), block.inputs(), "silu")


@blocks
def test_hook_on_an_interior_value(block: Block) -> None:
    def hooked(gate: Tensor, up: Tensor) -> Tensor:
        a = swiglu(gate, up)
        a.register_hook(lambda g: g * 3)
        return a

    refuse(between(block, hooked), block.inputs(), "used by")


@blocks
def test_interior_value_used_outside(block: Block) -> None:
    def fn(*args: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []

        def watched(gate: Tensor, up: Tensor) -> Tensor:
            seen.append(swiglu(gate, up))
            return seen[0]

        return block(*args, watched), seen[0]

    refuse(fn, block.inputs(), "used by")


HALVES = {
    "masked": (moe_blocks.masked_up, moe_blocks.masked_down),
    "unmasked": (moe_blocks.unmasked_up, moe_blocks.unmasked_down),
    "scattered": (moe_blocks.scattered_up, moe_blocks.scattered_down),
}


@pytest.mark.parametrize("name", HALVES)
def test_region_split_over_two_checkpoints(name: str) -> None:
    first, second = HALVES[name]

    def fn(x: Tensor, ids: Tensor, p: Tensor, w_gate: Tensor, w_down: Tensor, *w_up: Tensor) -> Tensor:
        gate, up, routing = checkpoint(first, x, ids, w_gate, *w_up, use_reentrant=False)

        def rest(gate: Tensor, up: Tensor, *more: Any) -> Tensor:
            return second(swiglu(gate, up), *more)

        return checkpoint(rest, gate, up, x, p, w_down, *routing, use_reentrant=False)

    refuse(fn, BLOCKS[name].inputs(), "checkpoint")
