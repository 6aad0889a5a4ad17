"""One block in the situations that users put it into: grad modes, autocast, sizes, graph breaks, resets, other callers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, check, compiled, frames, rows, step
from torch import Tensor, nn

import fxfuse

BF16 = torch.bfloat16
breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's, when it resumes


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    torch._dynamo.utils.counters.clear()


def under(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Call a function inside a context."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with context():
                return fn(*args)

        return call

    return wrap


# ---------------------------------------------------------------- grad modes
def test_training() -> None:
    report = check(Block(), rows())
    assert [f.directions for f in report.fused] == [("forward", "backward"), ("forward",)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    report = check(Block(), rows(), wrap=under(mode))
    assert [g.kind for g in report.graphs] == ["inference"]


def test_frozen_model_needs_no_backward() -> None:
    report = check(Block().requires_grad_(False), rows(6, 16, grad=False))
    assert [g.kind for g in report.graphs] == ["inference"]


def test_no_grad_inside_a_trained_function() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                hidden = F.gelu(self.up(x))
            return self.down(hidden) + x

    check(Model(), rows())


def test_detached_region_in_a_trained_function() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)).detach()) + x

    check(Model(), rows())


def test_training_and_inference_alternate_between_two_plans() -> None:
    model = Block()
    eager, run = copy.deepcopy(model), compiled(model)
    for i in range(6):
        x = rows(6, 16, grad=i % 2 == 0)
        with torch.set_grad_enabled(i % 2 == 0):
            assert_same(step(run, model, x), step(eager, eager, x))
    assert (fxfuse.plan_info().builds, frames()) == (2, 2)


def test_parameters_frozen_and_thawed_between_calls() -> None:
    model = Block()
    eager, run = copy.deepcopy(model), compiled(model)
    for frozen in ((), ("up.weight",), ("up.weight", "up.bias", "down.weight", "down.bias"), ()):
        for name, p in [*model.named_parameters(), *eager.named_parameters()]:
            p.requires_grad_(name not in frozen)
        x = rows()
        assert_same(step(run, model, x), step(eager, eager, x))


# ---------------------------------------------------------------- autocast
def autocast(enabled: bool = True) -> Any:
    """CPU autocast to bf16."""
    return torch.autocast("cpu", dtype=BF16, enabled=enabled)


def test_autocast_around_the_call() -> None:
    report = check(Block(), rows(), {"linear_gelu": 1}, wrap=under(autocast), tolerance=2e-2)
    (why,) = (m.reason for m in report.missed if m.name == "linear_add")
    assert why == "the residual is (6, 16) torch.float32, the linear (6, 16) torch.bfloat16"


def test_autocast_inside_the_function() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            with autocast():
                return super().forward(x)

    check(Model(), rows(), {"linear_gelu": 1}, tolerance=2e-2)


def test_disabled_autocast_nested_in_autocast_stays_in_fp32() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            with autocast():
                with autocast(enabled=False):
                    hidden = F.gelu(self.up(x))
                return self.down(hidden).float(), hidden

    model, x = Model(), rows()
    check(model, x, {"linear_gelu": 1}, tolerance=2e-2)
    got = compiled(model)(x)[1]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, F.gelu(model.up(x)), rtol=1e-6, atol=1e-6)


def test_cast_between_linear_and_activation_is_a_boundary() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x).to(BF16)).to(torch.float32)) + x

    report = check(Model(), rows(), {"linear_add": 1, "dgrad_add": 1}, tolerance=2e-2)
    assert "forward differs at gelu" in report.why_not("linear_gelu")


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (16,), (2, 0, 16), (2, 3, 4, 16)], ids=str)
def test_empty_single_and_many_dimensional_batches(shape: tuple[int, ...]) -> None:
    check(Block(), rows(*shape))


def test_dynamic_sizes_share_one_capture() -> None:
    model = Block()
    eager, run = copy.deepcopy(model), compiled(model, dynamic=True)
    for n in (6, 3, 11, 2):
        x = rows(n, 16)
        assert_same(step(run, model, x), step(eager, eager, x))
    assert (fxfuse.plan_info().builds, frames()) == (1, 1)
    assert_fused(fxfuse.last_report(), FUSED)


def test_automatic_dynamic_shapes_capture_twice() -> None:
    model = Block()
    eager, run = copy.deepcopy(model), compiled(model)
    for n in (6, 3, 11, 2):
        x = rows(n, 16)
        assert_same(step(run, model, x), step(eager, eager, x))
    assert frames() == 2
    assert_fused(fxfuse.last_report(), FUSED)


def test_odd_strides() -> None:
    for x in (torch.randn(16, 6).t(), torch.randn(1, 16).expand(6, 16), torch.randn(6, 40)[:, 3:35:2], torch.randn(6, 17)[:, 1:]):
        torch._dynamo.reset()
        fxfuse.testing.assert_matches_eager(Block(), [x.requires_grad_()])


# ---------------------------------------------------------------- graphs and Dynamo
@breaks
def test_graph_break_inside_a_pattern_splits_it() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            torch._dynamo.graph_break()
            return self.down(F.gelu(hidden)) + x

    check(Model(), rows(), {"linear_add": 1}, fullgraph=False)


@breaks
def test_both_sides_of_a_graph_break_are_fused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            torch._dynamo.graph_break()
            return self.second(hidden)

    report = check(Model(), rows(), {"linear_gelu": 2, "linear_add": 2}, fullgraph=False)
    assert len(fxfuse.reports()) == len(report.graphs) == 2


@pytest.mark.parametrize("reset", [torch._dynamo.reset, torch.compiler.reset, fxfuse.reset])
def test_reset_between_calls(reset: Callable[[], None]) -> None:
    model, x = Block(), rows()
    eager, run = copy.deepcopy(model), compiled(model)
    want = step(eager, eager, x)
    assert_same(step(run, model, x), want)
    reset()
    assert fxfuse.plan_info().plans == [] and fxfuse.reports() == []
    assert_same(step(run, model, x), want)
    assert fxfuse.plan_info().builds == 1
    assert_fused(fxfuse.last_report(), FUSED)


def test_stance_force_eager_builds_nothing() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    want = step(copy.deepcopy(model), model, x)
    with torch.compiler.set_stance("force_eager"):
        assert_same(step(run, model, x), step(model, model, x))
    assert fxfuse.plan_info().builds == 0 and frames() == 0
    assert_same(step(run, model, x)[:1], want[:1])
    assert fxfuse.plan_info().builds == 1


def test_stance_eager_on_recompile_leaves_other_sizes_to_torch() -> None:
    model = Block()
    run = compiled(model, dynamic=False)
    step(run, model, rows())
    with torch.compiler.set_stance("eager_on_recompile"):
        x = rows(3, 16)
        assert_same(step(run, model, x), step(model, model, x))
    assert fxfuse.plan_info().builds == 1


def test_one_backend_object_serves_every_compile() -> None:
    from fxfuse.backend import backend

    assert torch._dynamo.lookup_backend("fxfuse") is backend
    for make in (Block, lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU())):
        model, x = make(), rows()
        assert_same(step(torch.compile(model, backend=backend, options={"lower": "eager"}), model, x), step(model, model, x))
    assert [sorted({f.name for f in r.fused}) for r in fxfuse.reports()] == [["linear_add", "linear_gelu"], ["linear_relu"]]


def test_module_compile_in_place() -> None:
    model, x = Block(), rows()
    want = step(copy.deepcopy(model), model, x)
    model.compile(backend="fxfuse", options={"lower": "eager"})
    assert_same(step(model, model, x)[:1], want[:1])
    assert_fused(fxfuse.last_report(), FUSED)


def test_compiled_function_called_from_a_compiled_function() -> None:
    inner = compiled(Block())
    outer = compiled(lambda x: inner(x).sin())
    x = rows()
    torch.testing.assert_close(outer(x), inner(x).sin())
    assert_fused(fxfuse.reports()[0], FUSED)


def test_functional_call_with_parameters_as_arguments() -> None:
    model, x = Block(), rows()
    parameters = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
    run = compiled(lambda p, x: torch.func.functional_call(model, p, (x,)))
    out = run(parameters, x)
    torch.testing.assert_close(out, torch.func.functional_call(model, parameters, (x,)))
    got = torch.autograd.grad(out.square().sum(), parameters.values())
    want = torch.autograd.grad(torch.func.functional_call(model, parameters, (x,)).square().sum(), parameters.values())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
    assert_fused(fxfuse.last_report(), FUSED)
