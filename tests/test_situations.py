"""One block in the situations that users put it into: grad modes, autocast, sizes, aliasing, mutation, randomness, threads."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import situations
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


# ---------------------------------------------------------------- autograd
def test_retained_graph_gives_the_same_gradients_twice() -> None:
    model, x = Block(), rows()
    out = compiled(model)(x)
    first = torch.autograd.grad(out.sum(), [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(out.sum(), [x, *model.parameters()])
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    assert_fused(fxfuse.last_report(), FUSED)


def test_double_backward_raises_torchs_own_error() -> None:
    model, x = Block(), rows()
    (gradient,) = torch.autograd.grad(compiled(model)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


def test_only_one_of_two_outputs_is_differentiated() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.gelu(self.up(x))
            return self.down(hidden) + x, hidden

    model, x = Model(), rows()
    for i in (0, 1):
        torch._dynamo.reset()
        leaves = [x, *model.parameters()]
        got = torch.autograd.grad(compiled(model)(x)[i].square().sum(), leaves, allow_unused=True, materialize_grads=True)
        want = torch.autograd.grad(model(x)[i].square().sum(), leaves, allow_unused=True, materialize_grads=True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_hooks_on_parameters_and_inputs_run_once() -> None:
    model, x = Block(), rows()
    seen: list[str] = []
    model.up.weight.register_hook(lambda g: seen.append("weight"))
    x.register_hook(lambda g: seen.append("x"))
    compiled(model)(x).sum().backward()
    assert sorted(seen) == ["weight", "x"]
    assert_fused(fxfuse.last_report(), FUSED)


def test_tied_weights_accumulate_both_gradients() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
            self.down.weight = self.up.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x))) + x

    check(Tied(), rows(), {**FUSED, "dgrad_add": 1})


def test_one_layer_applied_twice() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    check(Twice(), rows(), {"linear_gelu": 2, "linear_add": 2, "dgrad_add": 1})


def test_deep_copy_of_a_compiled_module_is_independent() -> None:
    run = torch.compile(Block(), backend="fxfuse", options={"lower": "eager"})
    x = rows()
    run(x).sum().backward()
    other = copy.deepcopy(run)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    torch.testing.assert_close(other(x), other._orig_mod(x))
    torch.testing.assert_close(run(x), run._orig_mod(x))
    assert not torch.equal(run(x), other(x))


def test_optimiser_trajectory_and_reload_are_eagers() -> None:
    model, x = Block(), rows()
    eager, run = copy.deepcopy(model), compiled(model)
    saved: dict[str, Any] = {}
    losses: dict[str, list[float]] = {"eager": [], "fxfuse": []}
    for name, m, call in (("eager", eager, eager), ("fxfuse", model, run)):
        optimiser = torch.optim.SGD(m.parameters(), lr=0.25)
        for i in range(4):
            if i == 2:
                saved = copy.deepcopy(m.state_dict())
            optimiser.zero_grad()
            loss = call(x).square().mean()
            loss.backward()
            optimiser.step()
            losses[name].append(loss.item())
    torch.testing.assert_close(torch.tensor(losses["fxfuse"]), torch.tensor(losses["eager"]), rtol=1e-5, atol=1e-6)
    model.load_state_dict(saved)
    assert run(x).square().mean().item() == losses["fxfuse"][2]  # bit for bit
    assert fxfuse.plan_info().builds == 1


# ---------------------------------------------------------------- mutation and aliasing
MUTATIONS: dict[str, Callable[[Block, Tensor], Any]] = {
    "input_before": lambda m, x: m(x.add_(1)),
    "input_after": lambda m, x: (m(x), x.mul_(2))[0],
    "input_between": lambda m, x: F.gelu(m.up(x)) + m.up(x.mul_(2)),
    "returned_input": lambda m, x: (m(x), x),
    "view_of_input": lambda m, x: (m(x), x[:, 1:], x.t()),
    "activation_in_place": lambda m, x: m.down(F.silu(m.up(x), inplace=True)) + x,
    "residual_in_place": lambda m, x: m.down(F.gelu(m.up(x))).add_(x),
    "slice_of_the_output": lambda m, x: m(x)[:, ::2],
}


WHAT_AUTOGRAD_NEEDS = ("input_after", "input_between")  # eager itself refuses to change that


@pytest.mark.parametrize(("name", "train"), [(n, t) for n in MUTATIONS for t in (True, False) if not t or n not in WHAT_AUTOGRAD_NEEDS])
def test_mutated_and_aliased_inputs(name: str, train: bool) -> None:
    block = Block()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Any:
            return MUTATIONS[name](self.block, x)

    fxfuse.testing.assert_matches_eager(Model(), [rows(6, 16, grad=False)], train=train)
    assert not fxfuse.last_report().failures


def test_buffers_are_updated_once_a_call() -> None:
    class Model(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(self.norm(x))

    model = Model()
    eager, run = copy.deepcopy(model), compiled(model)
    for _ in range(3):
        x = rows()
        assert_same(step(run, model, x), step(eager, eager, x), 1e-4)
    for (name, got), want in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(got, want, msg=name)
    assert model.calls == 3


def test_one_tensor_as_two_arguments() -> None:
    fxfuse.testing.assert_matches_eager(lambda x, w, r: F.linear(x, w) + r, [t := rows(16, 16), t, t])
    assert fxfuse.last_report().count("linear_add") == 1


# ---------------------------------------------------------------- random numbers
class Dropped(Block):
    """Dropout between the activation and the second linear."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training)) + x


def test_dropout_draws_what_eager_draws_with_fallback_random() -> None:
    check(Dropped(), rows(), fallback_random=True)


def test_dropout_is_off_in_evaluation() -> None:
    check(Dropped().eval(), rows())


def test_dropout_mask_is_the_same_in_the_backward() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(F.gelu(F.linear(x, w)), 0.5, True)

    x, w = rows(64, 16), torch.eye(16)
    out = compiled(fn)(x, w)
    out.sum().backward()
    assert torch.equal(out == 0, x.grad == 0)
    assert_fused(fxfuse.last_report(), {"linear_gelu": 1})


def test_dropout_inside_the_pattern_is_a_boundary() -> None:
    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(F.dropout(self.up(x), 0.5, True))) + x

    check(Model(), rows(), {"linear_add": 1, "dgrad_add": 1}, fallback_random=True)


# ---------------------------------------------------------------- threads
def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Run the bodies at the same time; their results, or the first exception."""
    results: list[Any] = [None] * len(bodies)
    start = threading.Barrier(len(bodies))

    def run(i: int) -> None:
        start.wait()
        try:
            results[i] = bodies[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(bodies))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results


def test_first_call_from_two_threads() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    want = model(x)
    for got in in_threads(lambda: run(x), lambda: run(x)):
        torch.testing.assert_close(got, want)


def test_recipes_of_two_threads_do_not_mix() -> None:
    model, x = Block(), rows()
    run = compiled(model)
    run(x)

    def strict() -> list[str]:
        with fxfuse.use_recipe("strict"):
            for _ in range(20):
                run(x)
            return [fxfuse.current_recipe().numerics]

    def default() -> list[str]:
        for _ in range(20):
            run(x)
        return [fxfuse.current_recipe().numerics]

    assert in_threads(strict, default) == [["strict"], ["default"]]
    calls = {p.recipe.numerics: p.calls for p in fxfuse.plan_info().plans}
    assert calls == {"default": 21, "strict": 20}


# ---------------------------------------------------------------- Inductor's options
def test_users_joint_pass_runs_after_ours() -> None:
    seen: list[list[str]] = []

    def mine(graph: torch.fx.Graph) -> None:
        seen.append([str(n.target) for n in graph.nodes if n.op == "call_function"])

    check(Block(), rows(), joint_custom_pre_pass=mine)
    assert len(seen) == 1 and any("fxfuse.linear_act" in target for target in seen[0])


def test_users_joint_pass_in_inductors_configuration_runs_too() -> None:
    seen: list[int] = []
    with torch._inductor.config.patch(joint_custom_pre_pass=lambda graph: seen.append(len(graph.nodes))):
        check(Block(), rows())
    assert len(seen) == 1


def test_users_joint_pass_may_change_the_graph() -> None:
    def doubled(graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default

    run = torch.compile(
        lambda x, w: F.gelu(F.linear(x, w)).sin(), backend="fxfuse", options={"lower": "eager", "joint_custom_pre_pass": doubled}
    )
    x, w = rows(4, 16, grad=False), torch.randn(8, 16)
    torch.testing.assert_close(run(x, w), F.gelu(F.linear(x, w)).cos())


@pytest.mark.inductor
def test_users_post_grad_pass() -> None:
    seen: list[int] = []
    model, x = Block(), rows()
    run = torch.compile(model, backend="fxfuse", options={"post_grad_custom_post_pass": lambda graph: seen.append(1)})
    assert_same(step(run, model, x), step(model, model, x))
    assert len(seen) == 2  # forward and backward
    assert_fused(fxfuse.last_report(), FUSED)


@pytest.mark.inductor
def test_freezing() -> None:
    model, x = Block().eval(), rows(6, 16, grad=False)
    run = torch.compile(model, backend="fxfuse", options={"freezing": True})
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        torch.testing.assert_close(run(x), model(x))
    assert_fused(fxfuse.last_report(), FUSED)


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead", "default"])
def test_modes(mode: str) -> None:
    model, x = Block(), rows()
    run = torch.compile(model, backend="fxfuse", mode=mode)
    assert_same(step(run, model, x), step(model, model, x))
    assert_fused(fxfuse.last_report(), FUSED)
    assert ("max" in mode) == ("max" in fxfuse.plan_info().plans[0].key.options)


@pytest.mark.inductor
@pytest.mark.slow
def test_cpp_wrapper() -> None:
    model, x = Block(), rows()
    run = torch.compile(model, backend="fxfuse", options={"cpp_wrapper": True})
    assert_same(step(run, model, x), step(model, model, x))
    assert_fused(fxfuse.last_report(), FUSED)


@pytest.mark.inductor
def test_through_inductor_in_every_grad_mode() -> None:
    model = Block()
    run = torch.compile(model, backend="fxfuse", fullgraph=True)
    for n in (6, 3, 6):
        x = rows(n, 16)
        assert_same(step(run, model, x), step(model, model, x))
        with torch.inference_mode():
            assert_same(step(run, model, x), step(model, model, x))
    assert all(situations.FUSED.items() <= {f.name: r.count(f.name) for f in r.fused}.items() for r in fxfuse.reports())
