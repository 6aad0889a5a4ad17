"""Where a joint fusion must stop: values that leave the region, hooks inside it, checkpoints that cut it, other maths."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import cases
import compare
import local_fusions
import pytest
import reference_ops
import torch
import torch.nn.functional as F
from cases import normal
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxfuse

BF16 = torch.bfloat16
LINEAR = normal((2, 8, 16), (32, 16), (32,), dtype=BF16)
MLP = normal((2, 8, 16), (32, 16), (32, 16), (16, 32), dtype=BF16)


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    with local_fusions.unregistered_at_exit(local_fusions.linear_gelu(), local_fusions.swiglu_mlp()):
        yield


BOTH = ("local_linear_gelu", "local_swiglu_mlp")
LINEAR_FUSED, MLP_FUSED = {BOTH[0]: 1}, {BOTH[1]: 1}
refused = cases.Table(only=BOTH, fuses={}, tolerance=4e-2)
fused = cases.Table(only=BOTH, tolerance=4e-2)


# ---------------------------------------------------------------- must not be fused
@refused.case(LINEAR, reason="used by")
def preactivation_used_outside(x, w, b):
    pre = F.linear(x, w, b)
    return F.gelu(pre) + pre


@refused.case(LINEAR, reason="used by")
def preactivation_returned_detached(x, w, b):
    pre = F.linear(x, w, b)
    return F.gelu(pre), pre.detach()


@refused.case(MLP, reason="used by")
def activated_gate_used_outside(x, w_gate, w_up, w_down):
    gate = F.silu(F.linear(x, w_gate))
    return F.linear(gate * F.linear(x, w_up), w_down) + gate.sum()


@refused.case(LINEAR, reason="not proven|used by")
def hook_on_the_preactivation(x, w, b):
    pre = F.linear(x, w, b)
    pre.register_hook(lambda g: g * 3)
    return F.gelu(pre)


@refused.case(LINEAR, reason="AC region|checkpoint")
def region_split_across_two_checkpoints(x, w, b):
    return checkpoint(F.gelu, checkpoint(F.linear, x, w, b, use_reentrant=False), use_reentrant=False)


@refused.case(LINEAR, reason="tanh")
def tanh_gelu(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


@refused.case(normal((8, 16), (32, 16), (32,), dtype=BF16), reason="alpha")
def addmm_with_alpha(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t(), alpha=2))


@refused.case(MLP, reason="scale")
def scale_inside_the_mlp(x, w_gate, w_up, w_down):
    return F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up) * 1.5, w_down)


# ---------------------------------------------------------------- must be fused all the same
@fused.case(MLP, fuses=MLP_FUSED)
def commuted_product(x, w_gate, w_up, w_down):
    return F.linear(F.linear(x, w_up) * F.silu(F.linear(x, w_gate)), w_down)


@fused.case(normal((2, 8, 16), (32, 16), (16, 32), dtype=BF16), fuses=MLP_FUSED)
def gate_and_up_tied(x, w, w_down):
    return swiglu_mlp(x, w, w, w_down)


@fused.case(normal((8, 16), (32, 16), (32, 16), dtype=BF16), fuses=MLP_FUSED)
def down_tied_to_gate_transposed(x, w_gate, w_up):
    return swiglu_mlp(x, w_gate, w_up, w_gate.t())


@fused.case(MLP, fuses=MLP_FUSED)
def flattened_and_unflattened_inside(x, w_gate, w_up, w_down):
    rows = x.view(-1, 16)
    return F.linear((F.silu(F.linear(rows, w_gate)) * F.linear(rows, w_up)).view(2, 8, 32), w_down)


@fused.case(normal((2, 8, 16), (32, 16), (32,), (16, 32), (16,), dtype=BF16), fuses={BOTH[0]: 2})
def stacked(x, w, b, v, c):
    return linear_gelu(linear_gelu(x, w, b), v, c)


@fused.case(MLP, fuses=MLP_FUSED, loss=compare.total, forward_tolerance=0.5)
def output_times_input_summed(x, w_gate, w_up, w_down):
    return (swiglu_mlp(x, w_gate, w_up, w_down) * x).sum()


@refused.parametrize()
def test_is_refused_with_its_reason(case: cases.Case) -> None:
    cases.check(case)


@fused.parametrize()
def test_is_still_fused(case: cases.Case) -> None:
    cases.check(case)


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("selective", "calls"), [(True, 1), (False, 2)], ids=["must_save", "recompute_all"])
def test_selective_checkpoint_decides_whether_the_replacement_runs_again(selective: bool, calls: int) -> None:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)

    def fn(*args: Tensor) -> Tensor:
        more = {"context_fn": contexts} if selective else {}
        return checkpoint(linear_gelu, *args, use_reentrant=False, **more)

    reference_ops.calls.clear()
    cases.check(cases.Case(name="", fn=fn, inputs=LINEAR, only=BOTH, fuses=LINEAR_FUSED, tolerance=4e-2))
    assert reference_ops.calls.count("linear_gelu") == calls
    assert reference_ops.calls.count("linear_gelu_backward") == 1


def branching_on_a_size() -> fxfuse.Fusion:
    @fxfuse.register_forward_backward_fusion(name="local_branching", check_on_register=False)
    def fusion(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    @fusion.forward
    def _(x: Tensor, w: Tensor, b: Tensor, *, save: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, pre = reference_ops.linear_gelu(x if x.shape[0] > 5 else x * 1, w, b, save)
        return out, ((pre,) if save else ())

    @fusion.backward
    def _(grad: Tensor, x: Tensor, w: Tensor, b: Tensor, pre: Tensor, *, mask: Sequence[bool]) -> Sequence[Tensor]:
        return reference_ops.linear_gelu_backward(grad, x, w, pre, list(mask))

    return fusion


def test_replacement_that_branches_on_a_dynamic_size_is_refused() -> None:
    branching_on_a_size()
    sizes = normal((7, 8, 16), (32, 16), (32,)), normal((3, 8, 16), (32, 16), (32,))
    cases.check(
        cases.Case(
            name="", fn=linear_gelu, inputs=sizes[0], dynamic=True, only=("local_branching",), fuses={}, other_inputs=sizes[1:]
        )
    )


def test_replacement_that_branches_on_a_static_size_is_fused() -> None:
    branching_on_a_size()
    inputs = normal((7, 8, 16), (32, 16), (32,))
    cases.check(cases.Case(name="", fn=linear_gelu, inputs=inputs, only=("local_branching",), fuses={"local_branching": 1}))
