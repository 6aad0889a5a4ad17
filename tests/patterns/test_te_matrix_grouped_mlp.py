"""TransformerEngine's grouped MLP: 4 groups whose sizes are a shuffle of 256 times 0, 1, 2 and 3, by the operator and in a
compiled block of plain PyTorch.

Beyond its matrix: any number of rows, none, all in one group; frozen experts; only the router's weights trained. In bf16 the
error to fp64 is at most 1.5 times eager's own; in fp32 TransformerEngine's tolerance holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import cases
import compare
import moe_blocks
import pytest
import reference_moe
import te
import torch
import torch.nn.functional as F
from moe_checks import SLACK, joined
from te import BF16, FP32
from torch import Tensor

import fxfuse

GROUPS, WIDTH = 4, 128
SPLITS = (512, 0, 768, 256)
assert sorted(SPLITS) == [256 * n for n in range(GROUPS)]
TOTALS = (1, 3, 71, 127)
NAMES = ("x", "p", "w_gate_up", "w_down", "bias_gate_up", "bias_down")
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo instantiates ``autograd.Function``."""


@dataclasses.dataclass(frozen=True)
class Activation:
    """What lies between the linears: options of ``grouped_mlp``, the same in plain PyTorch, and the fusion's form."""

    options: dict[str, Any]
    plain: Callable[[Tensor], Tensor]
    form: str

    @property
    def gated(self) -> bool:
        return self.options.get("gated", True)


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped(limit: float, alpha: float) -> Activation:
    """TransformerEngine's clamped QGeGLU with offset 1, GPT-OSS's: gate and up alternate."""

    def plain(h: Tensor) -> Tensor:
        gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(min=-limit, max=limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return Activation({"limit": limit, "alpha": alpha, "layout": "interleaved"}, plain, "clamped")


def clamped_halves(limit: float, alpha: float | None) -> Activation:
    """The same of two halves, and with SiLU in its place."""

    def plain(h: Tensor) -> Tensor:
        gate, up = h.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return F.silu(gate) * up if alpha is None else (up + 1) * (gate * torch.sigmoid(gate * alpha))

    options = {"limit": limit} if alpha is None else {"limit": limit, "alpha": alpha}
    return Activation(options, plain, "clamped packed silu" if alpha is None else "clamped halves")


ACTIVATIONS = {
    "swiglu": Activation({}, swiglu, "packed silu"),
    "clamped": clamped(7.0, 1.702),
    "clamped_5": clamped(5.0, 1.5),
    "clamped_tightly": clamped(0.3, 1.702),
    "clamped_halves": clamped_halves(0.3, 1.702),
    "clamped_silu": clamped_halves(0.3, None),
    "relu2": Activation({"activation": "relu2", "gated": False}, lambda h: F.relu(h).square(), "plain relu2"),
}
activations = pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
biases = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])


def ids_of(splits: Sequence[int]) -> Tensor:
    """Ids (S, 1) in random order: each group as often as ``splits`` says."""
    ids = torch.repeat_interleave(torch.arange(len(splits)), torch.tensor(splits))
    return ids[torch.randperm(len(ids))].view(-1, 1)


def divided(total: int) -> tuple[int, ...]:
    """This many rows over all groups but the second."""
    parts = [total // 3, 0, (total + 1) // 3, 0]
    return (*parts[:3], total - sum(parts))


@dataclasses.dataclass(frozen=True)
class Mlp:
    """One grouped MLP with TransformerEngine's data."""

    act: Activation
    bias: bool
    dtype: torch.dtype
    splits: tuple[int, ...] = SPLITS
    width: int = WIDTH
    router: torch.dtype | None = None
    trains: tuple[str, ...] = NAMES

    @functools.cached_property
    def ids(self) -> Tensor:
        return ids_of(self.splits)

    @functools.cached_property
    def args(self) -> list[Tensor | None]:
        """The tensors of ``NAMES``."""
        rows = 2 * self.width if self.act.gated else self.width
        shapes = {
            "x": (sum(self.splits), self.width),
            "w_gate_up": (GROUPS, rows, self.width),
            "w_down": (GROUPS, self.width, self.width),
        }
        lines = {"bias_gate_up": (GROUPS, rows), "bias_down": (GROUPS, self.width)} if self.bias else {}
        made = {name: (torch.rand(shape) - 0.5) / 2 for name, shape in shapes.items()}
        made |= {name: torch.rand(shape) - 0.5 for name, shape in lines.items()}
        made = {name: t.to(self.dtype) for name, t in made.items()}
        made["p"] = torch.rand(self.ids.shape).to(self.router or self.dtype)
        return [made[n].requires_grad_(n in self.trains) if n in made else None for n in NAMES]

    def op(self, x: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor, *lines: Tensor | None) -> Tensor:
        return fxfuse.ops.grouped_mlp(x, w_gate_up, w_down, self.ids, p, **self._lines(*lines), **self.act.options)

    def reference(self, x: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor, *lines: Tensor | None) -> Tensor:
        """One matrix product a group."""
        return reference_moe.per_expert(x, w_gate_up, w_down, self.ids, p, **self._lines(*lines), **self.act.options)

    def block(
        self,
        x: Tensor,
        p: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        b_gate_up: Tensor | None = None,
        b_down: Tensor | None = None,
    ) -> Tensor:
        """As transformers writes it."""
        sorted_ids, order, counts = moe_blocks.sort_by_expert(self.ids)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)

        def linear(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            y = F.grouped_mm(rows, w.transpose(-2, -1), offs=ends)
            return y if b is None else y + b[sorted_ids]

        h = linear(x[order // self.ids.size(-1)], w_gate_up, b_gate_up)
        return moe_blocks.restore(linear(self.act.plain(h), w_down, b_down), x, p, order)

    def _lines(self, *lines: Tensor | None) -> dict[str, Tensor | None]:
        return dict(zip(("bias_gate_up", "bias_down"), lines, strict=False))


def cotangent(outputs: tuple[Tensor, ...]) -> Tensor:
    """A loss whose cotangent is normal, and the same in every dtype."""
    generator = torch.Generator().manual_seed(1)
    return sum((o * torch.randn(o.shape, generator=generator).bfloat16().to(o.dtype)).sum() for o in outputs)


def check(mlp: Mlp, function: str, call: Callable[..., Tensor] | None = None) -> None:
    """Output and every gradient against fp64, measured by plain PyTorch in the same dtype.

    Args:
        function: ``"op"`` or ``"block"``: which of the two.
        call: the compiled block; else the function itself is compared with ``reference``.
    """
    draws = [dataclasses.replace(mlp) for _ in range(32 // sum(mlp.splits) + 1)] if call is None else [mlp]
    got = joined([compare.run(call or getattr(d, function), d.args, loss=cotangent) for d in draws])
    plain = joined([compare.run(d.reference if call is None else d.block, d.args, loss=cotangent) for d in draws])
    truth = joined([compare.run(d.reference, compare.in_fp64(d.args), loss=cotangent) for d in draws])
    for kind in ("outputs", "grads"):
        for g, w in zip(getattr(got, kind), getattr(plain, kind), strict=True):
            assert (g is None) == (w is None)
            assert g is None or (g.dtype, g.shape) == (w.dtype, w.shape)
    if mlp.dtype is not FP32:
        few = len(draws) * sum(mlp.splits) < 256  # the relative error of few numbers is a matter of luck
        slack = SLACK[mlp.dtype] if few else 1e-6
        if mlp.act.options.get("limit", 1.0) < 1.0:  # many values lie near it, and rounding moves some to the other side
            slack = 3e-2
        compare.assert_as_near_to_fp64(got, plain, truth, slack=slack)
        return
    for g, w, t in zip((*got.outputs, *got.grads), (*plain.outputs, *plain.grads), (*truth.outputs, *truth.grads), strict=True):
        if g is not None and w is not None and t is not None:
            assert te.excess(g, t, FP32) <= max(1.0, 1.5 * te.excess(w, t, FP32))


def check_op(mlp: Mlp) -> None:
    """The operator."""
    check(mlp, "op")


def check_compiled(mlp: Mlp) -> None:
    """The block becomes one region in both passes."""
    check(mlp, "block", cases.compiled(mlp.block, only=["grouped_mlp"]))
    report = fxfuse.last_report()
    assert [(f.name, f.directions) for f in report.fused] == [
        (f"grouped_mlp[sorted, {mlp.act.form}]", ("forward", "backward"))
    ], report.why_not("grouped_mlp")


# ------------------------------------------------------------------------------------------------ the matrix


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@biases
@activations
def test_operator(act: Activation, bias: bool, dtype: torch.dtype) -> None:
    check_op(Mlp(act, bias, dtype))


@biases
@activations
def test_compiled(act: Activation, bias: bool) -> None:
    check_compiled(Mlp(act, bias, BF16, router=FP32))


@pytest.mark.parametrize("splits", [(0, 256, 512, 768), (768, 512, 256, 0), (256, 768, 0, 512)], ids=str)
def test_other_orders_of_the_sizes(splits: tuple[int, ...]) -> None:
    check_op(Mlp(ACTIVATIONS["swiglu"], True, BF16, splits))


@pytest.mark.parametrize("act", [ACTIVATIONS["swiglu"], ACTIVATIONS["relu2"]], ids=["swiglu", "relu2"])
def test_twice_as_wide(act: Activation) -> None:
    mlp = Mlp(act, True, BF16, tuple(s // 2 for s in SPLITS), 2 * WIDTH)
    check_op(mlp)
    check_compiled(mlp)


@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_fp16(name: str) -> None:
    check_op(Mlp(ACTIVATIONS[name], True, te.FP16))


# ------------------------------------------------------------------------------------------------ sizes


@activations
@pytest.mark.parametrize("total", TOTALS)
def test_operator_with_any_number_of_rows(total: int, act: Activation) -> None:
    check_op(Mlp(act, True, BF16, divided(total)))


@pytest.mark.parametrize("total", TOTALS)
def test_operator_with_any_number_of_rows_in_fp32(total: int) -> None:
    check_op(Mlp(ACTIVATIONS["swiglu"], True, FP32, divided(total)))


@pytest.mark.parametrize("total", TOTALS)
def test_compiled_with_any_number_of_rows(total: int) -> None:
    check_compiled(Mlp(ACTIVATIONS["swiglu"], True, BF16, divided(total)))


@biases
@activations
def test_all_rows_in_one_group(act: Activation, bias: bool) -> None:
    check_op(Mlp(act, bias, BF16, (0, 0, 256, 0)))


@pytest.mark.parametrize("name", ["swiglu", "clamped", "relu2"])
def test_compiled_with_all_rows_in_one_group(name: str) -> None:
    check_compiled(Mlp(ACTIVATIONS[name], True, BF16, (0, 0, 256, 0)))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@biases
@activations
def test_no_rows(act: Activation, bias: bool, dtype: torch.dtype) -> None:
    mlp = Mlp(act, bias, dtype, (0, 0, 0, 0))
    got = compare.run(mlp.op, mlp.args)
    assert got.outputs[0].shape == (0, WIDTH) and got.outputs[0].dtype is dtype
    tensors = [a for a in mlp.args if a is not None]
    for a, g in zip(tensors, got.grads, strict=True):
        assert g is not None and g.shape == a.shape and g.dtype is a.dtype and not g.any()


@pytest.mark.parametrize("train", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", ["swiglu", "clamped", "relu2"])
def test_compiled_with_no_rows(name: str, train: bool) -> None:
    mlp = Mlp(ACTIVATIONS[name], True, BF16, (0, 0, 0, 0))
    got = compare.run(cases.compiled(mlp.block, only=["grouped_mlp"]), mlp.args, train=train)
    report = fxfuse.last_report()
    compare.assert_same(got, compare.run(mlp.block, mlp.args, train=train), 0.0)
    assert not report.failures


def test_compiled_once_for_every_number_of_rows() -> None:
    def fn(x: Tensor, ids: Tensor, p: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        torch._check(ids.size(0) == x.size(0))
        torch._check(p.size(0) == x.size(0))
        return moe_blocks.unmasked(x, ids, p, w_gate_up, w_down)

    compiled = cases.compiled(fn, only=["grouped_mlp"])
    for i, total in enumerate((*TOTALS[::-1], 1536, 71)):
        mlp = Mlp(ACTIVATIONS["swiglu"], False, BF16, divided(total) if total != 1536 else SPLITS)
        x, p, *weights = [a for a in mlp.args if a is not None]
        args = [x, mlp.ids, p, *weights]
        if i == 0:
            for a in args[:3]:
                torch._dynamo.mark_dynamic(a, 0)
            compiled(*args)
            assert fxfuse.last_report().count("grouped_mlp") == 1
        with torch._dynamo.config.patch(error_on_recompile=total > 1):  # one row is a size of its own to Dynamo
            got = compare.run(compiled, args, loss=cotangent)
        compare.assert_same(got, compare.run(fn, args, loss=cotangent), 4e-2)


# ------------------------------------------------------------------------------------------------ what trains

TRAINED = {
    "frozen_experts": ("x", "p"),
    "only_router_weights": ("p",),
    "only_input": ("x",),
    "only_first_weight": ("w_gate_up",),
    "only_second_weight": ("w_down",),
    "only_weights": ("w_gate_up", "w_down"),
    "only_biases": ("bias_gate_up", "bias_down"),
    "all_but_router_weights": tuple(n for n in NAMES if n != "p"),
}
trained = pytest.mark.parametrize("trains", TRAINED.values(), ids=TRAINED)
SMALL = (43, 0, 71, 13)


@trained
@pytest.mark.parametrize("name", ["swiglu", "clamped", "relu2"])
def test_operator_with_some_tensors_frozen(name: str, trains: tuple[str, ...]) -> None:
    check_op(Mlp(ACTIVATIONS[name], True, BF16, SMALL, trains=trains))


@trained
def test_compiled_with_some_tensors_frozen(trains: tuple[str, ...]) -> None:
    check_compiled(Mlp(ACTIVATIONS["clamped"], True, BF16, SMALL, trains=trains))


@biases
@activations
def test_inference(act: Activation, bias: bool) -> None:
    mlp = Mlp(act, bias, BF16, SMALL)
    truth = compare.run(mlp.reference, compare.in_fp64(mlp.args), train=False)
    compare.assert_as_near_to_fp64(
        compare.run(mlp.op, mlp.args, train=False), compare.run(mlp.reference, mlp.args, train=False), truth
    )


def test_evaluation_and_training_in_turn() -> None:
    mlp = Mlp(ACTIVATIONS["swiglu"], True, BF16, SMALL)
    compiled = cases.compiled(mlp.block, only=["grouped_mlp"])
    for train in (False, True, False, True):
        got = compare.run(compiled, mlp.args, train=train, loss=cotangent)
        compare.assert_same(got, compare.run(mlp.block, mlp.args, train=train, loss=cotangent), 4e-2)
    assert fxfuse.plan_info().builds == 2
