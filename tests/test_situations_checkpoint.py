"""Activation checkpointing of every kind, inside and around the compiled call; higher-order operators and their bodies."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, check, compiled, frames, rows, step
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxfuse

reentrant = pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non_reentrant"])


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    torch._dynamo.utils.counters.clear()


class Checkpointed(Block):
    """The whole block is computed again in the backward."""

    use_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


class TwoBlocks(nn.Module):
    """Two blocks, each in a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Checkpointed(), Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


# ---------------------------------------------------------------- inside the compiled function
def test_checkpoint_inside() -> None:
    check(Checkpointed(), rows())


@reentrant
def test_checkpoint_inside_of_either_kind(use_reentrant: bool) -> None:
    model = Checkpointed()
    model.use_reentrant = use_reentrant
    x = rows()
    assert_same(step(compiled(model, fullgraph=False), model, x), step(model, model, x))
    assert fxfuse.Report.merge(fxfuse.reports()).count("linear_gelu") >= 1


def test_two_checkpoints_are_fused_apart() -> None:
    report = check(TwoBlocks(), rows(), {"linear_gelu": 2, "linear_add": 2})
    assert sorted(f.layer.split(".")[0] for f in report.fused) == ["first", "first", "second", "second"]


def test_checkpointed_region_is_computed_again_in_the_backward() -> None:
    counts = {}
    for name, model in (("plain", Block()), ("checkpointed", Checkpointed())):
        backward: list[str] = []
        torch._dynamo.reset()
        x = rows()
        out = compiled(model)(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out.sum().backward()
        backward = [e.name for e in profile.events()]
        counts[name] = sum("fxfuse::linear_act" in e for e in backward)
    assert counts == {"plain": 0, "checkpointed": 1}


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpoint() -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)

    class Selective(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    check(Selective(), rows())


def test_checkpoint_with_dropout_draws_the_same_mask_again() -> None:
    class Dropped(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: self.down(F.dropout(F.gelu(self.up(t)), 0.5, True)) + t, x, use_reentrant=False)

    check(Dropped(), rows(), fallback_random=True)


# ---------------------------------------------------------------- around the compiled function
@reentrant
def test_checkpoint_around_a_compiled_call(use_reentrant: bool) -> None:
    model = Block()
    eager, run = copy.deepcopy(model), compiled(model)
    for _ in range(3):
        x = rows()
        got = step(lambda t: checkpoint(run, t, use_reentrant=use_reentrant), model, x)
        assert_same(got, step(lambda t: checkpoint(eager, t, use_reentrant=use_reentrant), eager, x))
    plans = 2 if use_reentrant else 1  # reentrant: without gradients first, with them when it is computed again
    assert (fxfuse.plan_info().builds, frames()) == (plans, plans)
    assert all(p.calls >= 3 for p in fxfuse.plan_info().plans)


@reentrant
def test_layers_compiled_one_by_one_under_a_checkpoint(use_reentrant: bool) -> None:
    model = nn.ModuleList([Block(), Block()])
    eager = copy.deepcopy(model)
    runs = [compiled(m) for m in model]

    def forward(blocks: list[Callable[..., Tensor]], x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    for _ in range(2):
        x = rows()
        got = step(functools.partial(forward, runs), model, x)
        assert_same(got, step(functools.partial(forward, list(eager)), eager, x))
    assert fxfuse.plan_info().builds <= 4 and frames() <= 4


# ---------------------------------------------------------------- higher-order operators
class Conditional(nn.Module):
    """torch.cond with a fusible body in each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.other = Block(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.block(t), lambda t: torch.relu(self.other(t)), (x,))


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_cond_bodies(train: bool) -> None:
    model = Conditional().requires_grad_(train)
    run = compiled(model)
    for sign in (1, -1, 1):
        x = (torch.rand(6, 16) * sign).requires_grad_(train)
        assert_same(step(run, model, x), step(model, model, x))
    report = fxfuse.Report.merge(fxfuse.reports())
    assert not report.failures
    if not train:
        assert (report.count("linear_gelu"), report.count("linear_relu")) == (1, 1)


@torch.compiler.nested_compile_region
def shared_body(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


class Repeated(nn.Module):
    """One region, compiled once, called for every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = shared_body(x, layer.weight, layer.bias) + x
        return x


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
def test_nested_compile_region(train: bool) -> None:
    model = Repeated().requires_grad_(train)
    x = rows(6, 16, grad=train)
    assert_same(step(compiled(model), model, x), step(model, model, x))
    report = fxfuse.Report.merge(fxfuse.reports())
    assert report.count("linear_gelu", graph="forward") >= 1, [(g.kind, g.nodes) for g in report.graphs]
    assert not report.failures


def test_scan_body() -> None:
    from torch._higher_order_ops.scan import scan

    def fn(x: Tensor, w: Tensor) -> Tensor:
        carry, _ = scan(lambda c, t: (F.gelu(F.linear(c, w)) + t, c.clone()), torch.zeros(4, 16), x)
        return carry

    x, w = torch.randn(3, 4, 16), torch.randn(16, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(fn)(x, w), fn(x, w))
    assert not fxfuse.last_report().failures


def test_map_over_layers_by_vmap() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.vmap(lambda t, v: F.gelu(F.linear(t, v)))(x, w)

    x, w = torch.randn(3, 4, 16), torch.randn(3, 8, 16)
    torch.testing.assert_close(compiled(fn)(x, w), fn(x, w))
    assert_fused(fxfuse.last_report(), {})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_autograd_function_beside_a_fused_region() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 0.5

    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return Halved.apply(super().forward(Halved.apply(x)))

    check(Model(), rows(), FUSED)  # the scaled gradient is needed by the residual too
