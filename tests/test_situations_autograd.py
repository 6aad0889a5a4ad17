"""One block and autograd: retained graphs, hooks, tied weights; mutation and aliasing; random numbers; threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from situations import FUSED, Block, assert_fused, assert_same, check, compiled, rows, step
from torch import Tensor, nn

import fxfuse
from fxfuse.dispatch import Dispatch


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


@pytest.mark.parametrize(
    ("name", "train"), [(n, t) for n in MUTATIONS for t in (True, False) if not t or n not in WHAT_AUTOGRAD_NEEDS]
)
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


@pytest.mark.parametrize("recipe", ["default", "strict"])
def test_a_thread_calls_while_another_compiles(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while that one traces, which a flag of the whole process says. The recipe's plan is the first one or a late one."""
    if not hasattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag"):
        pytest.skip("no flag of the whole process says so in this torch")
    model, x = Block(), rows()
    run, other = compiled(model), compiled(Block())
    want = model(x)
    run(x)
    other(x)
    build, busily = Dispatch._build, []

    def busy(self: Dispatch, *args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
            (got,) = in_threads(lambda: run(x))
        torch.testing.assert_close(got, want)
        busily.append(got)
        return build(self, *args, **options)

    monkeypatch.setattr(Dispatch, "_build", busy)
    with fxfuse.use_recipe(recipe):
        (compiled(nn.Softplus()) if recipe == "default" else other)(x)
    assert busily


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


def test_a_call_while_another_thread_traces_a_late_plan() -> None:
    tracing, go_on, builder = threading.Event(), threading.Event(), "late-builder"
    seen: list[Tensor] = []

    @torch.library.custom_op("fxfuse_tests::paused", mutates_args=())
    def paused(x: Tensor) -> Tensor:
        return x.clone()

    @paused.register_fake
    def _(x: Tensor) -> Tensor:
        if threading.current_thread().name == builder:
            seen.append(x)
            if len(seen) == 2:  # the first is AOTAutograd's analysis, the second the trace itself
                tracing.set()
                go_on.wait(60)
        return torch.empty_like(x)

    class Model(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(paused(x))

    model, x = Model(), rows().detach()
    with torch.no_grad():
        want = model(x)
    run = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(run(x), want)
    late: list[Any] = []

    def build() -> None:
        with torch.no_grad(), fxfuse.use_recipe("strict"):
            late.append(run(x))

    thread = threading.Thread(target=build, name=builder)
    thread.start()
    try:
        assert tracing.wait(60)
        with torch.no_grad():
            torch.testing.assert_close(run(x), want)  # neither refused nor kept waiting
    finally:
        go_on.set()
        thread.join(60)
    torch.testing.assert_close(late[0], want)
    assert fxfuse.plan_info().builds == 2
