"""What comes near to a fusion is left alone, with the reason in the report, and computes what eager computes."""

from __future__ import annotations

import re

import cases
import compare
import pytest
import torch
import torch.nn.functional as F
from cases import normal
from near_misses import FAMILIES, NearMiss, Sizes, generate

import fxfuse

GENERATED = generate(FAMILIES, count=200, seed=0)
WHOLE = [family.unbroken(act, Sizes(batch=(2, 4), k=8, n=16)) for family in FAMILIES for act in family.activations]

# ---------------------------------------------------------------- the reason that the report gives
LINEAR = normal((2, 4, 16), (32, 16), (32,))
reasons = cases.Table(only=("linear_gelu",), fuses={})


@reasons.case(LINEAR, reason="used by")
def another_user_of_an_interior_value(x, w, b):
    pre = F.linear(x, w, b)
    return F.gelu(pre) + pre.sin()


@reasons.case(normal((8, 16), (32, 16), (32,)), reason="alpha")
def addmm_with_alpha(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t(), alpha=2))


@reasons.case(lambda: [*normal((8, 16), (32, 16))(), *normal((32,), dtype=torch.float64)()], reason="float64.*bias must be")
def bias_of_another_dtype(x, w, b):
    return F.gelu(x @ w.t() + b)


@reasons.case(LINEAR, reason="tanh")
def tanh_for_erf(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


@reasons.case(normal((8, 16), (32, 16), (32,)), reason="permute lies in between")
def transpose_in_between(x, w, b):
    return F.gelu(F.linear(x, w, b).t())


@reasons.case(normal((8, 16), (32, 16), (8, 32)), reason=r"bias must be \[32\]")
def matrix_for_bias(x, w, r):
    return F.gelu(x @ w.t() + r)


@reasons.case(LINEAR, reason="view lies in between")
def view_in_between(x, w, b):
    return F.gelu(F.linear(x, w, b).view(2, 4, 4, 8))


@reasons.case(LINEAR, reason="not proven|used by")
def hook_on_an_interior_value(x, w, b):
    pre = F.linear(x, w, b)
    pre.register_hook(lambda g: g * 3)
    return F.gelu(pre)


@reasons.case(LINEAR, reason="scale lies in between")
def scale_in_between(x, w, b):
    return F.gelu(F.linear(x, w, b) * 1.5)


@reasons.case(normal((2, 4, 16), (64, 16)), only=("gated_mlp_packed_silu",), reason="differs")
def gate_and_up_swapped(x, w):
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(up) * gate


@reasons.parametrize()
def test_report_names_the_condition_that_failed(case: cases.Case) -> None:
    report = cases.check(case)
    (fusion,) = case.only
    (missed, *_) = [m for m in report.missed if m.name == fusion]
    assert re.search(case.reason or "", missed.reason), missed
    assert missed.reason in report.why_not(fusion)
    assert 0 < missed.matched <= missed.total
    assert "test_near_misses.py" in missed.source


# ---------------------------------------------------------------- one condition broken at a time
@pytest.mark.parametrize("miss", GENERATED, ids=[m.name for m in GENERATED])
def test_broken_condition_is_not_fused(miss: NearMiss) -> None:
    args = miss.inputs()
    want = compare.run(miss.fn, args)
    compare.assert_same(compare.run(cases.compiled(miss.fn, only=[miss.fusion]), args), want, tolerance=1e-5)
    assert fxfuse.last_report().count(miss.fusion) == 0
    compare.assert_same(compare.run(cases.compiled(miss.fn), args), want, tolerance=1e-4)


INFERENCE = [m for m in GENERATED if not m.training_only]


# A backward that does not fit refuses a joint fusion too: without gradients the forward has to be told apart by itself.
@pytest.mark.parametrize("miss", INFERENCE, ids=[m.name for m in INFERENCE])
def test_broken_condition_is_not_fused_in_inference(miss: NearMiss) -> None:
    args = miss.inputs()
    got = compare.run(cases.compiled(miss.fn, only=[miss.fusion]), args, train=False)
    assert fxfuse.last_report().count(miss.fusion) == 0
    compare.assert_same(got, compare.run(miss.fn, args, train=False), tolerance=1e-5)


@pytest.mark.parametrize("whole", WHOLE, ids=[w.fusion for w in WHOLE])
def test_unbroken_form_is_fused(whole: NearMiss) -> None:
    args = whole.inputs()
    got = compare.run(cases.compiled(whole.fn, only=[whole.fusion]), args)
    assert fxfuse.last_report().count(whole.fusion) == 1, fxfuse.last_report().missed
    compare.assert_same(got, compare.run(whole.fn, args), tolerance=1e-5)


def test_two_hundred_near_misses_cover_every_condition() -> None:
    assert len(GENERATED) == 200
    conditions = {(f.fusion(a), c) for f in FAMILIES for c in f.broken_forms for a in f.activations}
    covered = {(m.fusion, m.broken) for m in GENERATED}
    assert covered <= conditions
    for family in FAMILIES:
        for condition in family.broken_forms:
            assert any((family.fusion(a), condition) in covered for a in family.activations), (family.name, condition)
