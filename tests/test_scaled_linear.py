"""Linears with quantised operands: as an operator and fused, forward and gradients, against fp64 and bit for bit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from patterns.te import INPUTS, filled
from torch import Tensor, nn

import fxfuse
from fxfuse.ops.quantize import dequantize, quantize, schemes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = {
    "current": fxfuse.Float8CurrentScaling(),
    "current, powers of 2": fxfuse.Float8CurrentScaling(use_power_2_scales=True, fp8_format="E4M3"),
    "block": fxfuse.Float8BlockScaling(),
    "block, lines of weights": fxfuse.Float8BlockScaling(w_block_scaling_dim=1, use_f32_scales=True),
    "mxfp8": fxfuse.MXFP8BlockScaling(emulate=True),
    "nvfp4": fxfuse.NVFP4BlockScaling(emulate=True),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
TOLERANCE = dict(rtol=0.125, atol=0.0675)
"""TransformerEngine's, for e4m3."""
OVERRIDES = ("high_precision", "dequantized")


def tolerance(recipe: fxfuse.Recipe) -> dict[str, float]:
    return dict(rtol=0.25, atol=0.125) if isinstance(recipe, fxfuse.NVFP4BlockScaling) else TOLERANCE


def leaves(m: Sequence[int], n: int, k: int, dtype: torch.dtype, bias: bool = True, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        """As TransformerEngine draws them: numbers that e4m3 holds."""
        t = torch.rand(shape, generator=generator)
        return t.to(torch.float8_e4m3fn).to(dtype).requires_grad_()

    return [uniform(*m, k), uniform(n, k), uniform(n) if bias else None]


def gradients(out: Tensor, inputs: Sequence[Any], cotangent: Tensor | None = None) -> list[Any]:
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if cotangent is None:
        cotangent = torch.linspace(0.25, 1, max(out.numel(), 1))[: out.numel()].view(out.shape).to(torch.float8_e4m3fn)
    return [out.detach(), *torch.autograd.grad(out, wanted, cotangent.to(out.dtype))]


def exact(inputs: Sequence[Any], cotangent: Tensor | None = None) -> list[Any]:
    doubles = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    return gradients(F.linear(*doubles), doubles, cotangent)


def compiled(function: Callable[..., Any], **settings: Any) -> Any:
    options = {"lower": settings.pop("lower", "eager"), **settings.pop("options", {})}
    return torch.compile(function, backend="fxfuse", fullgraph=True, options=options, **settings)


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b)


# ------------------------------------------------------------------------------------------------ the operator


@every_recipe
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("n, k", [(128, 128), (256, 384)])
@pytest.mark.parametrize("shape", INPUTS)
def test_operator_on_transformer_engines_matrix(
    recipe: fxfuse.Recipe, dtype: torch.dtype, n: int, k: int, shape: Sequence[int]
) -> None:
    for bias in (True, False):
        inputs = leaves(filled(shape, k)[:-1], n, k, dtype, bias)
        got = gradients(fxfuse.ops.scaled_linear(*inputs, recipe=recipe), inputs)
        for a, true in zip(got, exact(inputs), strict=True):
            assert a.dtype is dtype
            torch.testing.assert_close(a.double(), true, **tolerance(recipe))


@every_recipe
@pytest.mark.parametrize("rows", [0, 1, 3, 71, 127, 1024])
def test_operator_takes_any_number_of_rows(recipe: fxfuse.Recipe, rows: int) -> None:
    torch.manual_seed(rows)
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((rows, 128), (256, 128), (256,)))
    got = gradients(fxfuse.ops.scaled_linear(x, w, b, recipe), (x, w, b))
    allowed = {"NVFP4BlockScaling": 0.25}.get(type(recipe).__name__, 0.08)
    for a, true in zip(got, exact((x, w, b)), strict=True):
        assert a.shape == true.shape
        assert (a.double() - true).norm() <= allowed * true.norm()


@every_recipe
def test_operator_takes_any_strides(recipe: fxfuse.Recipe) -> None:
    x, w, b = leaves((6, 5), 128, 256, FP32)
    want = gradients(fxfuse.ops.scaled_linear(x, w, b, recipe), (x, w, b))
    strided = [
        x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(),
        w.detach().t().contiguous().t().requires_grad_(),
        torch.stack([b.detach(), b.detach()], 1)[:, 0].requires_grad_(),
    ]
    same(gradients(fxfuse.ops.scaled_linear(*strided, recipe=recipe), strided), want)
    expanded = x.detach()[:1].expand(6, 5, 256)
    same(
        [fxfuse.ops.scaled_linear(expanded, w, b, recipe)],
        [fxfuse.ops.scaled_linear(expanded.contiguous(), w, b, recipe)],
    )


@every_recipe
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", range(3))
def test_what_is_not_finite_stays_so(recipe: fxfuse.Recipe, value: float, which: int) -> None:
    inputs = leaves((8,), 128, 256, FP32)
    with torch.no_grad():
        inputs[which].view(-1)[3] = value
    got = gradients(fxfuse.ops.scaled_linear(*inputs, recipe=recipe), inputs)
    for a, true in zip(got, exact(inputs), strict=True):
        assert not a[~true.isfinite()].isfinite().any()


@every_recipe
@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3))[:-1])
def test_only_the_gradients_that_are_needed(recipe: fxfuse.Recipe, needs: Sequence[bool]) -> None:
    inputs = leaves((8,), 128, 256, BF16)
    want = gradients(fxfuse.ops.scaled_linear(*inputs, recipe=recipe), inputs)
    some = [t.detach().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
    out = fxfuse.ops.scaled_linear(*some, recipe=recipe)
    same(gradients(out, some), [want[0], *[g for g, n in zip(want[1:], needs, strict=True) if n]])


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: (torch.rand(4, 20), torch.rand(16, 20)), "in_features 20 is not a multiple of 16"),
        (lambda: (torch.rand(4, 16), torch.rand(20, 16)), "out_features 20 is not a multiple of 16"),
        (lambda: (torch.rand(4, 16).double(), torch.rand(16, 16).double()), "it takes bf16, fp16 or fp32"),
        (lambda: (torch.rand(4, 16), torch.rand(16, 16).bfloat16()), "one dtype for both"),
    ],
)
def test_operator_refuses_what_the_recipe_cannot_take(make: Any, text: str) -> None:
    with pytest.raises(fxfuse.RecipeError, match=f"scaled_linear: .*{text}"):
        fxfuse.ops.scaled_linear(*make(), recipe="fp8_current")


def test_operator_names_what_is_wrong() -> None:
    x, w = torch.rand(4, 16), torch.rand(16, 16)
    with pytest.raises(fxfuse.RecipeError, match=r"Recipe\(\) does not quantise"):
        fxfuse.ops.scaled_linear(x, w)
    with pytest.raises(ValueError, match=r"scaled_linear: x is \(4, 16\) and w \(16, 32\)"):
        fxfuse.ops.scaled_linear(x, torch.rand(16, 32), recipe="fp8_current")
    with pytest.raises(fxfuse.RecipeError, match="keeps its history with a compiled model"):
        fxfuse.ops.scaled_linear(x, w, recipe="fp8_delayed")
    with pytest.raises(fxfuse.RecipeError, match="out_features 16 is not a multiple of 128, as Float8BlockScaling needs"):
        fxfuse.ops.scaled_linear(x, w, recipe="fp8_block")


# ------------------------------------------------------------------------------------------------ backward_override


def overridden(x: Tensor, w: Tensor, b: Any, recipe: Any, cotangent: Tensor) -> list[Any]:
    """What the definition says: the forward is the quantised one, the gradients are those of a plain linear."""
    of_x, of_w, _ = schemes(recipe)
    out = fxfuse.ops.scaled_linear(x.detach(), w.detach(), None if b is None else b.detach(), recipe)
    if recipe.backward_override == "dequantized":
        x = dequantize(quantize(x.detach().flatten(0, -2), of_x), of_x.block).to(x.dtype).view(x.shape).requires_grad_()
        w = dequantize(quantize(w.detach(), of_w), of_w.block).to(w.dtype).requires_grad_()
    return [out, *gradients(F.linear(x, w, b), (x, w, b), cotangent)[1:]]


def several(function: Callable[..., Tensor], width: int) -> Callable[..., list[Tensor]]:
    """A model that calls ``function`` on each ``width`` of its arguments: many sites, one compilation."""

    def model(*flat: Any) -> list[Tensor]:
        return [function(*flat[i : i + width]) for i in range(0, len(flat), width)]

    return model


FORMS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda x, w, b, r: F.linear(x, w, b),
    "bias_add": lambda x, w, b, r: F.linear(x, w, b) + r,
    "scale_add": lambda x, w, b, r: F.linear(x, w, b) * 3.5 + r,
}


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("form", FORMS)
def test_backward_override_is_bit_exact(name: str, override: str, dtype: torch.dtype, form: str) -> None:
    """TransformerEngine's matrix, and the rows that it must skip: 3 and 3 x 10."""
    recipe = RECIPES[name].replace(backward_override=override)
    align = recipe.alignment
    sites = list(itertools.product([(1,), (32,), (160,), (320,), (480,), (3, 10), (3,)], [(align, align), (align, 2 * align)]))
    inputs = [[*leaves(m, n, k, dtype, seed=sum(m)), torch.rand(*m, n).to(dtype).requires_grad_()] for m, (n, k) in sites]
    with fxfuse.use_recipe(recipe):
        outs = compiled(several(FORMS[form], 4), dynamic=False)(*itertools.chain(*inputs))
    assert fxfuse.last_report().count("scaled_linear", "backward") == len(sites)
    scale = 3.5 if form == "scale_add" else 1.0
    cotangents = [torch.randn(o.shape).to(dtype) for o in outs]
    torch.autograd.backward(outs, cotangents)
    for out, (x, w, b, r), cotangent in zip(outs, inputs, cotangents, strict=True):
        want = overridden(x, w, b, recipe, cotangent * scale)
        if form != "plain":
            want[0] = want[0] * scale + r.detach()
            same([r.grad], [cotangent])
        same([out.detach(), x.grad, w.grad, b.grad], want)


def test_override_is_another_plan_and_comes_back() -> None:
    run, inputs = compiled(F.linear), leaves((32,), 128, 128, BF16)
    builds = []
    for override in (None, "high_precision", "dequantized", None, "high_precision"):
        with fxfuse.use_recipe(RECIPES["current"].replace(backward_override=override)):
            gradients(run(*inputs), inputs)
        builds.append(fxfuse.plan_info().builds)
    assert builds == [1, 2, 3, 3, 3]


# ------------------------------------------------------------------------------------------------ fused


def check_fused(
    function: Callable[..., Any], inputs: Sequence[Any], recipe: fxfuse.Recipe, count: int = 1, **settings: Any
) -> None:
    """It fires, and gives what the operator gives, bit for bit where nothing is around it."""
    run = compiled(function, **settings)
    with fxfuse.use_recipe(recipe):
        got = run(*inputs)
    assert fxfuse.last_report().count("scaled_linear") == count
    if any(t is not None and t.requires_grad for t in inputs):
        grads = gradients(got, inputs)
        for a, true in zip(grads, exact(inputs), strict=True):
            torch.testing.assert_close(a.double(), true, **tolerance(recipe))


@every_recipe
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_fused_is_the_operator(recipe: fxfuse.Recipe, dtype: torch.dtype) -> None:
    inputs = [leaves(filled(shape, 256)[:-1], 128, 256, dtype, bias) for shape in INPUTS for bias in (True, False)]
    with fxfuse.use_recipe(recipe):
        outs = compiled(several(F.linear, 3))(*itertools.chain(*inputs))
    report = fxfuse.last_report()
    assert report.count("scaled_linear", "forward") == report.count("scaled_linear", "backward") == len(inputs)
    cotangents = [torch.randn(o.shape).to(dtype) for o in outs]
    torch.autograd.backward(outs, cotangents)
    for out, given, cotangent in zip(outs, inputs, cotangents, strict=True):
        want = gradients(fxfuse.ops.scaled_linear(*given, recipe=recipe), given, cotangent)
        same([out.detach(), *[t.grad for t in given if t is not None]], want)


SPELLINGS: dict[str, Callable[..., Tensor]] = {
    "F.linear": F.linear,
    "matmul": lambda x, w, b: x @ w.t() + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "einsum": lambda x, w, b: torch.einsum("mk,nk->mn", x, w) + b,
    "bias first": lambda x, w, b: b + torch.matmul(x, w.T),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_of_a_linear(spelling: str) -> None:
    check_fused(SPELLINGS[spelling], leaves((6,), 128, 256, FP32), RECIPES["block"])


def test_weight_stored_the_other_way_round() -> None:
    x, w, b = leaves((6,), 128, 256, FP32)
    stored = w.detach().t().contiguous().requires_grad_()
    with fxfuse.use_recipe("fp8_block"):
        out = compiled(lambda x, w, b: torch.addmm(b, x, w))(x, stored, b)
    assert fxfuse.last_report().count("scaled_linear", "backward") == 1
    want = gradients(fxfuse.ops.scaled_linear(x, w, b, "fp8_block"), (x, w, b))
    got = gradients(out, (x, stored, b))
    same([got[0], got[1], got[2].t().contiguous(), got[3]], [want[0], want[1], want[2].contiguous(), want[3]])


class Mlp(nn.Module):
    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.odd, self.down = nn.Linear(128, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.odd(F.gelu(self.up(x)))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_model_in_training_and_inference(dynamic: bool) -> None:
    model = Mlp()
    run = compiled(model, dynamic=dynamic)
    for rows in (6, 33, 2) if dynamic else (6,):
        x = torch.randn(rows, 128, requires_grad=True)
        with fxfuse.use_recipe("fp8_current"):
            out = run(x)
            assert fxfuse.last_report().count("scaled_linear") == 3
            with torch.no_grad():
                torch.testing.assert_close(run(x), out, rtol=0, atol=0)
        got = torch.autograd.grad(out.sum(), [x, *model.parameters()])
        want = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 0.1 * b.norm()


def test_sizes_that_the_recipe_cannot_take_stay_in_high_precision_and_say_why() -> None:
    model, x = Mlp(200), torch.randn(6, 128)
    run = compiled(model)
    with fxfuse.use_recipe("fp8_block"):
        out = run(x)
    report = fxfuse.last_report()
    assert report.count("scaled_linear") == 0 and report.count("linear_gelu") == 2
    assert "out_features 200 is not a multiple of 128, as Float8BlockScaling needs" in report.why_not("scaled_linear")
    torch.testing.assert_close(out, model(x))


def test_without_a_quantising_recipe_nothing_is_looked_for() -> None:
    compiled(Mlp())(torch.randn(6, 128))
    report = fxfuse.last_report()
    assert report.count("scaled_linear") == 0 and not [m for m in report.missed if m.name == "scaled_linear"]
    assert "it runs under quantized recipes, this one is Recipe()" in report.why_not("scaled_linear")


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_what_is_kept_for_the_backward(memory: str) -> None:
    run, inputs = compiled(F.linear), leaves((64,), 128, 256, BF16)
    with fxfuse.use_recipe(fxfuse.Float8CurrentScaling(activation_memory=memory)):
        gradients(run(*inputs), inputs)
    (plan,) = fxfuse.plan_info().plans
    eight_bits = 64 * 256 + 128 * 256 + 2 * 4  # x, w and their scales
    assert plan.saved_bytes == (eight_bits if memory == "save" else 0)


def test_one_layer_of_a_model_in_fp8() -> None:
    class Mixed(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x = F.gelu(self.up(x))
            with fxfuse.recipe_region("fp8_current"):
                x = self.odd(x)
            return self.down(F.gelu(x))

    model, x = Mixed(), torch.randn(6, 128, requires_grad=True)
    out = compiled(model)(x)
    report = fxfuse.last_report()
    assert report.count("scaled_linear", "forward") == report.count("scaled_linear", "backward") == 1
    assert report.count("linear_gelu") == 1
    h = F.gelu(model.up(x))
    want = model.down(F.gelu(fxfuse.ops.scaled_linear(h, model.odd.weight, model.odd.bias, "fp8_current")))
    torch.testing.assert_close(out, want)
    got, true = (torch.autograd.grad(o.sum(), [x, *model.parameters()]) for o in (out, want))
    torch.testing.assert_close(got, true)


@pytest.mark.parametrize("inside", [True, False])
def test_checkpoint(inside: bool) -> None:
    model, x = Mlp(), torch.randn(6, 128, requires_grad=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    if inside:
        run = compiled(lambda x: checkpoint(model, x, use_reentrant=False))
    else:
        plan = compiled(model)

        def run(x: Tensor) -> Tensor:
            return checkpoint(plan, x, use_reentrant=False, context_fn=fxfuse.checkpoint_context)

    with fxfuse.use_recipe("fp8_current"):
        out = run(x)
        want = compiled(copy.deepcopy(model))(x)
    got = torch.autograd.grad(out.sum(), [x])
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), [x]), rtol=0, atol=0)


def test_autocast() -> None:
    model, x = Mlp(), torch.randn(6, 128)
    run = compiled(model)
    with fxfuse.use_recipe("fp8_current"), torch.autocast("cpu", BF16):
        out = run(x)
        assert out.dtype is BF16
        assert fxfuse.last_report().count("scaled_linear") == 3
    assert (out.float() - model(x)).norm() <= 0.1 * out.float().norm()


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
def test_through_inductor(name: str) -> None:
    model, x = Mlp().to(BF16), torch.randn(40, 128).to(BF16).requires_grad_()
    errors = {}
    true = copy.deepcopy(model).double()
    xd = x.detach().double().requires_grad_()
    want = [true(xd), *torch.autograd.grad(true(xd).sum(), [xd, *true.parameters()])]
    for lower in ("eager", "auto"):
        torch._dynamo.reset()
        run = compiled(model, lower=lower)
        with fxfuse.use_recipe(RECIPES[name]):
            out = run(x)
            assert fxfuse.last_report().count("scaled_linear") == 3
        got = [out.detach(), *torch.autograd.grad(out.sum(), [x, *model.parameters()])]
        errors[lower] = [(a.double() - b).norm() / b.norm() for a, b in zip(got, want, strict=True)]
    for mine, eager in zip(errors["auto"], errors["eager"], strict=True):  # values on the border between two codes fall elsewhere
        assert mine <= 1.3 * eager + 1e-3


def test_training_follows_full_precision() -> None:
    """200 steps: the losses stay as near to fp32's as two seeds of fp64 are to each other."""

    def losses(recipe: Any, seed: int, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(7)
        teacher = torch.randn(128, 128, generator=generator, dtype=torch.float64)
        run, found = compiled(model), []
        for _ in range(200):
            x = torch.randn(64, 128, generator=generator, dtype=torch.float64)
            target = torch.tanh(x @ teacher / 8)
            with fxfuse.use_recipe(recipe):
                loss = F.mse_loss(run(x.to(dtype)).double(), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return torch.stack(found)

    true, other = (losses("default", seed, torch.float64) for seed in (0, 1))
    gap = (true - other).abs().mean()
    for recipe in ("fp8_block", "fp8_current", "fp8_delayed"):
        assert (losses(recipe, 0, FP32) - losses("default", 0, FP32)).abs().mean() <= gap


def test_what_another_fusion_wanted_says_that_its_linear_was_quantised() -> None:
    run = compiled(Mlp(), options={"strict": True})  # and strict does not raise for it
    with fxfuse.use_recipe("fp8_current"):
        run(torch.randn(6, 128))
    assert "part of it was fused before; the place went to scaled_linear" in fxfuse.last_report().why_not("linear_gelu")


@pytest.mark.parametrize("scale, fine", [(1.0, True), (1.5, False)])
def test_registration_checks_under_the_recipes_that_a_fusion_is_for(scale: float, fine: bool) -> None:
    asked = []

    @fxfuse.register_forward_fusion(name="mine", recipes=["quantized"], example={"x": "m k", "w": "n k"})
    def mine(x, w):
        return F.linear(x, w)

    @mine.check
    def _(m):
        asked.append(m.recipe)
        refused = fxfuse.ops.scaled_linear_refusal(m.x, m.w, m.recipe)
        return m.reject(refused) if refused else None

    def rewrite(x, w):
        return fxfuse.ops.scaled_linear_forward(x, w * scale, None, save=False)[0]

    try:
        if fine:
            mine.rewrite(rewrite)
        else:
            with pytest.raises(fxfuse.PatternError, match="has relative error"):
                mine.rewrite(rewrite)
    finally:
        mine.unregister()
    assert set(asked) == {fxfuse.Float8CurrentScaling()}
