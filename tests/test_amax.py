"""DelayedScaling: the history of largest magnitudes, step by step, and in a state dict."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse
from fxfuse import amax
from fxfuse.ops.quantize import E4M3, E5M2

LENGTH = 4
RECIPE = fxfuse.DelayedScaling(amax_history_len=LENGTH)


class Linear(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def compiled(function: Any, lower: str = "eager", **options: Any) -> Any:
    return torch.compile(function, backend="fxfuse", fullgraph=True, options={"lower": lower, **options})


def histories(model: nn.Module) -> list[Tensor]:
    return [h.tensor for p in model.parameters() for h in amax._histories.get(p, {}).values()]


class ByHand:
    """One quantised operand: TransformerEngine's recipe in plain Python."""

    def __init__(self, recipe: fxfuse.DelayedScaling, dtype: torch.dtype) -> None:
        self.recipe, self.dtype, self.largest = recipe, dtype, torch.finfo(dtype).max
        self.past: list[float] = []
        self.multiplier = 1.0

    def begin_step(self) -> None:
        recent = self.past[-self.recipe.amax_history_len - 1 :]
        found = max(recent, default=0.0) if self.recipe.amax_compute_algo == "max" else (recent or [0.0])[-1]
        if found > 0:
            self.multiplier = self.largest / found * 2.0**-self.recipe.margin

    def __call__(self, t: Tensor) -> Tensor:
        """The numbers that are computed with."""
        self.past.append(t.abs().max().item())
        multiplier = torch.tensor(self.multiplier, dtype=torch.float32)
        return (t * multiplier).clamp(-self.largest, self.largest).to(self.dtype).float() / multiplier


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        fxfuse.DelayedScaling(amax_history_len=1),
        fxfuse.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
        fxfuse.DelayedScaling(amax_history_len=3, margin=2, fp8_format="E4M3"),
    ],
)
def test_step_by_step(recipe: fxfuse.DelayedScaling) -> None:
    """Magnitudes rise and fall over the steps: saturated, then scaled, then forgotten."""
    model = Linear()
    run = compiled(model)
    gradient = E5M2 if recipe.fp8_format == "HYBRID" else E4M3
    of_x, of_w, of_g = ByHand(recipe, E4M3), ByHand(recipe, E4M3), ByHand(recipe, gradient)
    for size in (1.0, 1000.0, 10.0, 0.0, 1.0, 1.0, 1.0, 1.0, 100.0):
        x, g = (torch.randn(8, 16) * size).requires_grad_(), torch.randn(8, 32) * size
        with fxfuse.use_recipe(recipe):
            out = run(x)
        got = [out.detach(), *torch.autograd.grad(out, (x, model.weight), g)]
        for operand in (of_x, of_w, of_g):
            operand.begin_step()
        xq, wq, gq = of_x(x.detach()), of_w(model.weight.detach()), of_g(g)
        for a, b in zip(got, (xq @ wq.t(), gq @ wq, gq.t() @ xq), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * max(size, 1e-3) ** 2)
    assert fxfuse.plan_info().builds == 1


def test_infinities_and_nan_are_not_remembered() -> None:
    model, x = Linear(), torch.ones(8, 16)
    run = compiled(model)
    for value in (1.0, math.nan, math.inf, 1.0):
        x[0, 0] = value
        with fxfuse.use_recipe(RECIPE):
            out = run(x)
        assert out[1:].isfinite().all() and out[0].isfinite().all() == math.isfinite(value)
        (history,) = histories(model)
        assert history.isfinite().all()


def test_no_rows() -> None:
    model = Linear()
    with fxfuse.use_recipe(RECIPE):
        out = compiled(model)(torch.empty(0, 16))
    out.sum().backward()
    assert out.shape == (0, 32) and not model.weight.grad.any()


def test_inference_reads_and_does_not_write() -> None:
    model, x = Linear(), torch.randn(8, 16)
    run = compiled(model)
    with fxfuse.use_recipe(RECIPE):
        for _ in range(2):
            run(x).sum().backward()
        before = [h.clone() for h in histories(model)]
        with torch.no_grad():
            run(x * 1000)
            got = run(x)
        assert all(torch.equal(a, b) for a, b in zip(before, histories(model), strict=True))
        torch.testing.assert_close(got, run(x))
    assert (got - model(x)).norm() <= 0.1 * got.norm()  # with the scales of training


@pytest.mark.parametrize("lower", ["eager", pytest.param("auto", marks=pytest.mark.inductor)])
def test_forwards_before_their_backwards(lower: str) -> None:
    model = Linear()
    run = compiled(model, lower)
    with fxfuse.use_recipe(RECIPE):
        outs = [run(torch.randn(8, 16) * size) for size in (1, 2, 3)]
    for out in outs:
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    (history,) = histories(model)
    assert history.isfinite().all() and (history[:3, amax.NOW] > 0).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_no_step(reentrant: bool) -> None:
    plain, model = Linear(), Linear()
    settings: dict[str, Any] = {} if reentrant else {"context_fn": fxfuse.checkpoint_context}
    recipe = {"recipe": RECIPE} if reentrant else {}
    run, other = compiled(model, **recipe), compiled(plain, **recipe)
    for step in range(3):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with fxfuse.use_recipe(RECIPE):
            torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant, **settings).sum().backward()
            other(x).sum().backward()
        assert torch.equal(model.weight.grad, plain.weight.grad)
    assert histories(plain)[0][0, amax.MULTIPLIER] != 1


def test_checkpoint_inside() -> None:
    model, plain, x = Linear(), Linear(), torch.randn(8, 16, requires_grad=True)
    run = compiled(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    other = compiled(plain)
    for _ in range(3):
        with fxfuse.use_recipe(RECIPE):
            run(x).sum().backward()
            other(x).sum().backward()
    (a,), (b,) = histories(model), histories(plain)
    lines = min(a.shape[0], b.shape[0])
    assert torch.equal(a[:lines], b[:lines])


def test_checkpointed_layers_inside_and_results_as_large_as_the_history() -> None:
    """Many linears in a nested graph; and a result of the history's own shape, whose gradient is no history."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    plain = copy.deepcopy(layers)
    run = compiled(lambda x: torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False))
    other = compiled(plain)
    for _ in range(3):
        x = torch.randn(8, 16)
        with fxfuse.use_recipe(RECIPE):
            run(x).sum().backward()
            assert fxfuse.last_report().count("scaled_linear") == 6
            other(x).sum().backward()
    for a, b in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    (history, *_) = histories(plain)
    alike = nn.Linear(16, 16)

    def shaped(x: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        return alike(x), like * 2

    like = torch.randn(5 * 2 + 1, amax.NOW + 1 + LENGTH, requires_grad=True)
    assert history.shape[1] == like.shape[1]
    with fxfuse.use_recipe(RECIPE):
        out, twice = compiled(shaped)(torch.ones(8, 16), like)
    (out.sum() + twice.sum()).backward()
    (kept,) = histories(alike)
    assert kept[0, amax.NOW] == 1 and torch.equal(like.grad, torch.full_like(like, 2))


def test_gradients_enabled_but_not_needed_is_inference() -> None:
    model, x = Linear(), torch.randn(8, 16)
    run = compiled(model)
    with fxfuse.use_recipe(RECIPE):
        run(x).sum().backward()
        run(x).sum().backward()
        before = [h.clone() for h in histories(model)]
        model.weight.requires_grad_(False)
        for _ in range(LENGTH + 1):
            run(x)
    assert all(torch.equal(a, b) for a, b in zip(before, histories(model), strict=True))


def test_layers_that_share_a_compiled_graph_have_their_own_histories() -> None:
    a, b = Linear(0), Linear(1)
    assert (amax_of := lambda m: [h[:, amax.NOW :].amax().item() for h in histories(m)])(a) == []

    def layer(module: nn.Module, x: Tensor) -> Tensor:
        return module(x)

    run = compiled(layer)
    for _ in range(2):
        with fxfuse.use_recipe(RECIPE):
            run(a, torch.full((8, 16), 3.0)).sum().backward()
            run(b, torch.full((8, 16), 50.0)).sum().backward()
    (one,), (other,) = histories(a), histories(b)
    assert one[0, amax.NOW] == 3 and other[0, amax.NOW] == 50
    assert amax_of(a) != amax_of(b)


def test_history_dies_with_its_parameter() -> None:
    model = Linear()
    with fxfuse.use_recipe(RECIPE):
        compiled(model)(torch.randn(8, 16))
    assert len(amax._histories) == 1
    del model
    torch._dynamo.reset()
    gc.collect()
    assert len(amax._histories) == 0


def test_function_without_parameters_has_one_history() -> None:
    x, w = torch.full((8, 16), 7.0), torch.randn(32, 16, requires_grad=True)
    run = compiled(F.linear)
    with fxfuse.use_recipe(RECIPE):
        for _ in range(3):
            out = run(x, w)
    assert (out - F.linear(x, w)).norm() <= 0.1 * out.norm()


# ------------------------------------------------------------------------------------------------ state dicts


def trained(model: nn.Module, steps: range, lower: str = "eager") -> list[float]:
    run, optimizer, losses = compiled(model, lower), torch.optim.SGD(model.parameters(), 0.01), []
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)) * (step + 1)
        with fxfuse.use_recipe(RECIPE):
            loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("lower", ["eager", pytest.param("auto", marks=pytest.mark.inductor)])
def test_training_goes_on_bit_for_bit_after_a_reload(lower: str, tmp_path: Any) -> None:
    model = Linear()
    fxfuse.track_amax(model)
    trained(model, range(3), lower)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    want = trained(model, range(3, 6), lower)
    again = Linear(9)
    fxfuse.track_amax(again)
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert trained(again, range(3, 6), lower) == want
    forgetful = Linear(9)
    forgetful.load_state_dict({k: v for k, v in torch.load(tmp_path / "model.pt").items() if not k.startswith("fxfuse")})
    assert trained(forgetful, range(3, 6), lower) != want


def test_reload_before_anything_is_compiled_and_in_the_same_model() -> None:
    model = Linear()
    fxfuse.track_amax(model)
    trained(model, range(3))
    saved = copy.deepcopy(model.state_dict())
    want = trained(model, range(3, 6))
    model.load_state_dict(saved)
    assert trained(model, range(3, 6)) == want


def test_histories_of_submodules_are_in_the_whole_models_state_dict() -> None:
    model = nn.Sequential(Linear())
    fxfuse.track_amax(model)
    trained(model, range(2))
    (key,) = [k for k in model.state_dict() if k.startswith("fxfuse_amax.")]
    assert key.startswith("fxfuse_amax.0.weight|") and key.endswith(f"|{RECIPE!r}")


def saved_state() -> dict[str, Any]:
    model = Linear()
    fxfuse.track_amax(model)
    trained(model, range(2))
    return model.state_dict()


def test_restoring_a_state_dict_of_another_recipe_is_an_error() -> None:
    model = Linear()
    fxfuse.track_amax(model)
    model.load_state_dict(saved_state())
    with (
        pytest.raises(
            fxfuse.RecipeError, match=r"history of DelayedScaling\(amax_history_len=4\), this call uses DelayedScaling\(\)"
        ),
        fxfuse.use_recipe("fp8_delayed"),
    ):
        compiled(model)(torch.randn(8, 16))
    with fxfuse.use_recipe(RECIPE):
        compiled(model)(torch.randn(8, 16))


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda k, t: (k.replace("len=4", "len=5"), t), r"is \(\d+, 7\) torch.float32, not a history of Delayed.*len=5"),
        (lambda k, t: (k, t.double()), "torch.float64, not a history"),
        (lambda k, t: (k, t[0]), "not a history"),
        (lambda k, t: (k.replace(".weight|", ".bias|"), t), "the model has no parameter 'bias'"),
        (lambda k, t: (k.replace("DelayedScaling", "Delayed"), t), "is not a fxfuse.Recipe"),
        (lambda k, t: (k.rpartition("|")[0] + "|Recipe()", t), "not a history of Recipe"),
    ],
)
def test_damaged_entries_are_named_and_nothing_is_changed(change: Any, text: str) -> None:
    state = saved_state()
    (key,) = [k for k in state if k.startswith("fxfuse")]
    name, tensor = change(key, state.pop(key))
    state[name] = tensor
    model = Linear()
    fxfuse.track_amax(model)
    trained(model, range(1))
    before = [h.clone() for h in histories(model)]
    with pytest.raises(fxfuse.RecipeError, match=text):
        model.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, histories(model), strict=True))


def test_two_delayed_recipes_in_one_graph_are_an_error() -> None:
    other = fxfuse.DelayedScaling(amax_history_len=8)

    def model(x: Tensor, w: Tensor) -> Tensor:
        with fxfuse.recipe_region(other):
            x = F.linear(x, w)
        return F.linear(x, w.t())

    with pytest.raises(Exception, match="one graph cannot use both"), fxfuse.use_recipe(RECIPE):
        compiled(model)(torch.randn(8, 16), torch.randn(32, 16))


def test_cuda_graphs_are_an_error() -> None:
    run = torch.compile(Linear(), backend="fxfuse", mode="reduce-overhead", options=None)
    with pytest.raises(Exception, match="does not work with CUDA graphs"), fxfuse.use_recipe(RECIPE):
        run(torch.randn(8, 16))
