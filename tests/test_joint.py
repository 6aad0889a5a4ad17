"""Joint fusions: a forward region and the backward that autograd derived from it are replaced together.

Every situation is run for three blocks: linear + GELU and a whole gated MLP as fusions that state their forward and
backward over opaque ops, and the built-in linear + GELU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import cases
import compare
import local_fusions
import pytest
import torch
import torch.nn.functional as F
from cases import Case, normal
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxfuse

BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Block:
    """A pattern as users write it, and the fusion that replaces it."""

    fusion: str
    fn: Callable[..., Tensor]
    weights: tuple[tuple[int, ...], ...]
    gone: tuple[str, ...]
    """aten ops of which none is left, forward or backward."""
    kept: int | None
    """How many values the region keeps for its backward; None: the fusion's own affair."""

    def inputs(self, *x: int, copies: int = 1, **options: Any) -> cases.Inputs:
        """x of this shape (default (2, 8, 16)) and the weights, ``copies`` sets of them."""
        return normal(x or (2, 8, 16), *self.weights * copies, **{"dtype": BF16, **options})

    def case(self, fn: Callable[..., Any] | None = None, count: int = 1, **fields: Any) -> Case:
        """``fn`` (default: the block alone), in which the fusion fires ``count`` times."""
        defaults = {"inputs": self.inputs(), "tolerance": 4e-2, "gone": self.gone, "fuses": {self.fusion: count}}
        return Case(**{"name": "", "fn": fn or self.fn, "only": (self.fusion,), **defaults, **fields})


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


LINEAR, MLP = ((32, 16), (32,)), ((32, 16), (32, 16), (16, 32))
BLOCKS = {
    "linear_gelu": Block("local_linear_gelu", linear_gelu, LINEAR, gone=("addmm", "mm", "gelu", "gelu_backward"), kept=1),
    "swiglu_mlp": Block("local_swiglu_mlp", swiglu_mlp, MLP, gone=("mm", "silu", "silu_backward"), kept=2),
    "built_in_linear_gelu": Block("linear_gelu", linear_gelu, LINEAR, gone=(), kept=None),
}
blocks = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
Situation = Callable[[Block], Case]
SITUATIONS: dict[str, Situation] = {}


def situation(make: Situation) -> Situation:
    """Collect a situation that every block must get through."""
    SITUATIONS[make.__name__] = make
    return make


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(local_fusions.linear_gelu(), local_fusions.swiglu_mlp()):
        yield


# ---------------------------------------------------------------- the block alone
@situation
def inference(block: Block) -> Case:
    return block.case(train=False)


@situation
def dynamic_batch(block: Block) -> Case:
    sizes = block.inputs(3, 5, 16), block.inputs(7, 9, 16)
    return block.case(dynamic_dims=((0, 0), (0, 1)), other_inputs=sizes)


@situation
def dynamic_batch_inference(block: Block) -> Case:
    sizes = block.inputs(3, 5, 16), block.inputs(7, 9, 16)
    return block.case(train=False, dynamic_dims=((0, 0), (0, 1)), other_inputs=sizes)


@situation
def every_size_dynamic(block: Block) -> Case:
    return block.case(dynamic=True)


@situation
def matrix_input(block: Block) -> Case:
    return block.case(inputs=block.inputs(8, 16))


@situation
def four_dims(block: Block) -> Case:
    return block.case(inputs=block.inputs(2, 3, 4, 16))


@situation
def float32(block: Block) -> Case:
    return block.case(inputs=block.inputs(dtype=torch.float32), tolerance=1e-5)


@situation
def autocast(block: Block) -> Case:
    return block.case(inputs=block.inputs(dtype=torch.float32), autocast=BF16)


@situation
def retained_graph(block: Block) -> Case:
    return block.case(retain_graph=True)


# ---------------------------------------------------------------- what trains
@situation
def only_the_last_weight_trains(block: Block) -> Case:
    return block.case(inputs=block.inputs(frozen=range(len(block.weights))))


@situation
def only_the_input_trains(block: Block) -> Case:
    return block.case(inputs=block.inputs(frozen=range(1, len(block.weights) + 1)))


@situation
def nothing_in_the_region_trains(block: Block) -> Case:
    def fn(scale: Tensor, *args: Tensor) -> Tensor:
        return block.fn(*args) * scale

    frozen = block.inputs(frozen=range(len(block.weights) + 1))
    return block.case(fn, inputs=lambda: [torch.randn(1, dtype=BF16).requires_grad_(), *frozen()])


@situation
def under_no_grad_inside_training(block: Block) -> Case:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        with torch.no_grad():
            out = block.fn(x, *weights)
        return out * x.sum()

    return block.case(fn)


@situation
def output_detached(block: Block) -> Case:
    return block.case(lambda x, *weights: x * block.fn(x, *weights).detach().sum())


# ---------------------------------------------------------------- what surrounds it
@situation
def input_used_again(block: Block) -> Case:
    return block.case(lambda x, *weights: x.square().sum(-1, keepdim=True) + block.fn(x, *weights) * x.sum())


@situation
def input_multiplies_the_output(block: Block) -> Case:
    return block.case(lambda x, *weights: block.fn(x, *weights)[..., :16] * x)


@situation
def input_from_an_upstream_op(block: Block) -> Case:
    return block.case(lambda x, *weights: block.fn(torch.sin(x), *weights))


@situation
def input_transposed(block: Block) -> Case:
    return block.case(lambda x, *weights: block.fn(x.transpose(0, 1), *weights))


@situation
def output_used_twice(block: Block) -> Case:
    def fn(*args: Tensor) -> tuple[Tensor, Tensor]:
        out = block.fn(*args)
        return out * out.sin(), out + 1

    return block.case(fn)


@situation
def output_transposed(block: Block) -> Case:
    return block.case(lambda *args: block.fn(*args).transpose(0, 1) * 2)


@situation
def output_summed(block: Block) -> Case:
    # the sum nearly cancels in bfloat16, the gradients do not
    return block.case(lambda *args: block.fn(*args).float().sum(), loss=compare.total, forward_tolerance=0.5)


@situation
def output_changed_in_place(block: Block) -> Case:
    return block.case(lambda *args: block.fn(*args).mul_(2))


@situation
def flattened_by_hand(block: Block) -> Case:
    return block.case(lambda x, *weights: block.fn(x.view(-1, 16), *weights).view(2, 8, -1))


# ---------------------------------------------------------------- several of them
@situation
def two_of_separate_weights(block: Block) -> Case:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        n = len(block.weights)
        return block.fn(x, *weights[:n]) + block.fn(x.tanh(), *weights[n:])

    return block.case(fn, count=2, inputs=block.inputs(copies=2))


@situation
def two_of_one_input_and_one_cotangent(block: Block) -> Case:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        n = len(block.weights)
        return block.fn(x, *weights[:n]) + block.fn(x, *weights[n:])

    return block.case(fn, count=2, inputs=block.inputs(copies=2))


@situation
def two_of_shared_weights(block: Block) -> Case:
    return block.case(lambda x, *weights: block.fn(x, *weights) + block.fn(x * 0.5, *weights), count=2)


@situation
def identical_twins(block: Block) -> Case:
    return block.case(lambda *args: block.fn(*args) + block.fn(*args), count=2)


@situation
def twins_of_different_cotangents(block: Block) -> Case:
    return block.case(lambda *args: block.fn(*args) * 2 + block.fn(*args).sin(), count=2)


# ---------------------------------------------------------------- checkpoints and hooks
@situation
def checkpointed(block: Block) -> Case:
    return block.case(lambda *args: checkpoint(block.fn, *args, use_reentrant=False))


@situation
def checkpointed_with_more(block: Block) -> Case:
    def more(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.tanh(block.fn(x.sin(), *weights))

    return block.case(lambda *args: checkpoint(more, *args, use_reentrant=False))


@situation
def hook_on_the_output(block: Block) -> Case:
    def fn(*args: Tensor) -> Tensor:
        out = block.fn(*args)
        out.register_hook(lambda g: g * 3)
        return out

    return block.case(fn)


@situation
def hook_on_the_input(block: Block) -> Case:
    def fn(x: Tensor, *weights: Tensor) -> Tensor:
        x = x * 1
        x.register_hook(lambda g: g * 3)
        return block.fn(x, *weights)

    return block.case(fn)


@blocks
@pytest.mark.parametrize("make", SITUATIONS.values(), ids=SITUATIONS)
def test_is_fused_and_equals_eager(block: Block, make: Situation) -> None:
    cases.check(make(block))


FROZEN = {f"{name}-{i}": (block, i) for name, block in BLOCKS.items() for i in range(len(block.weights) + 1)}


@pytest.mark.parametrize(("block", "frozen"), FROZEN.values(), ids=FROZEN)
def test_with_one_input_frozen(block: Block, frozen: int) -> None:
    cases.check(block.case(inputs=block.inputs(frozen=(frozen,))))


@blocks
@pytest.mark.parametrize("dims", [(), ((0, 0), (0, 1))], ids=["static", "dynamic"])
def test_keeps_for_the_backward_what_the_fusion_says(block: Block, dims: tuple[tuple[int, int], ...]) -> None:
    report = cases.check(block.case(dynamic_dims=dims))
    (fused,) = report.fused
    if block.kept is not None:
        assert len(fused.saved) == block.kept, fused.saved


@blocks
def test_autograd_keeps_nothing_else(block: Block) -> None:
    case = block.case()
    kept = compare.run(cases.compiled(case.fn, only=case.only), case.inputs()).kept
    hidden = [shape for shape in kept if shape[-1] == 32]
    assert len(kept) == len(hidden) == (block.kept or 1), kept


@blocks
def test_inference_keeps_nothing(block: Block) -> None:
    (fused,) = cases.check(block.case(train=False)).fused
    assert fused.saved == ()
    assert fused.directions == ("forward",)


@blocks
def test_is_as_near_to_fp64_as_eager(block: Block) -> None:
    case = block.case()
    args = case.inputs()
    got, want = compare.run(cases.compiled(case.fn, only=case.only), args), compare.run(case.fn, args)
    truth = compare.run(case.fn, compare.in_fp64(args))
    compare.assert_as_near_to_fp64(got, want, truth, slack=1e-3)


@pytest.mark.inductor
@blocks
def test_runs_through_inductor(block: Block) -> None:
    case = block.case(inputs=block.inputs(dtype=torch.float32))
    args = case.inputs()
    got = compare.run(cases.compiled(case.fn, only=case.only, lower="auto"), args)
    compare.assert_same(got, compare.run(case.fn, args), tolerance=1e-5)
    assert fxfuse.last_report().count(block.fusion) == 1
