"""``fxfuse.ops.grouped_linear`` as an ordinary differentiable function, against one linear a group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import cases
import compare
import pytest
import reference_moe
import torch
from moe_checks import EXACT, assert_equals_definition, assert_near_fp64, fixed_cotangent, run
from reference_moe import BF16, F16, F32, F64, Args
from torch import Tensor

import fxfuse
from fxfuse.ops import grouped_linear

ENDS = {
    "even": [4, 8, 12],
    "uneven": [1, 11, 12],
    "empty_groups": [0, 5, 5, 12, 12],
    "one_group": [12],
    "rows_left_over": [3, 3, 7],
    "no_row_in_a_group": [0, 0, 0],
    "one_takes_all": [0, 12, 12],
}
ALIGNED, ODD = (32, 16), (9, 7)
"""Columns of x and of the result: bf16 operands of the first kind go to ``torch._grouped_mm``."""
ends = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
biases = pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
both = pytest.mark.parametrize(("dtype", "width"), [(F64, ODD), (BF16, ALIGNED)], ids=["fp64", "bf16"])
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo instantiates ``autograd.Function``."""


def inputs(ends: list[int], width: tuple[int, int], dtype: torch.dtype, bias: bool = True, rows: int = 12) -> Args:
    """x, w, offs, b."""
    k, n, groups = *width, len(ends)
    x, w, b = cases.normal((rows, k), (groups, n, k), (groups, n), dtype=dtype)()
    return [x, w, torch.tensor(ends, dtype=torch.int32), b if bias else None]


def check(args: Args, of: Callable[..., Callable[..., Tensor]] = lambda f: f, **loss: compare.Loss) -> None:
    assert args[0] is not None
    if args[0].dtype is F64:
        assert_equals_definition(of(grouped_linear), of(reference_moe.grouped_linear), args, **loss)
    else:
        assert_near_fp64(of(grouped_linear), of(reference_moe.grouped_linear), [args], **loss)


@ends
@biases
@pytest.mark.parametrize("width", [ALIGNED, ODD, (1, 1), (40, 9)])
def test_equals_one_linear_a_group(ends: list[int], bias: bool, width: tuple[int, int]) -> None:
    check(inputs(ends, width, F64, bias))


@ends
@biases
@pytest.mark.parametrize("width", [ALIGNED, ODD], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
def test_is_as_near_to_fp64_as_eager(ends: list[int], bias: bool, width: tuple[int, int], dtype: torch.dtype) -> None:
    check(inputs([10 * e for e in ends], width, dtype, bias, rows=120))


@both
def test_no_rows(dtype: torch.dtype, width: tuple[int, int]) -> None:
    check(inputs([0, 0], width, dtype, rows=0))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """New memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@ends
@biases
@both
def test_undefined_memory_is_never_read(ends: list[int], bias: bool, dtype: torch.dtype, width: tuple[int, int]) -> None:
    """Rows of no group are zero in the result and in x's gradient, groups without rows in the weights' gradients."""
    args = inputs(ends, width, dtype, bias)
    got = run(grouped_linear, args)
    last, empty = ends[-1], [end == start for start, end in itertools.pairwise([0, *ends])]
    assert not got.outputs[0][last:].any()
    for grad, unused in zip(got.grads, (slice(last, None), torch.tensor(empty), None, torch.tensor(empty)), strict=False):
        assert grad is None or (grad.isfinite().all() and not grad[unused].any())
    check(args)


@both
@biases
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_rows_of_no_group_may_hold_anything(dtype: torch.dtype, width: tuple[int, int], bias: bool, value: float) -> None:
    args = inputs(ENDS["rows_left_over"], width, dtype, bias)
    clean = run(grouped_linear, args)
    (x, *rest), rows = args, torch.arange(12).unsqueeze(1) >= 7
    assert x is not None
    dirty = torch.where(rows, value, x.detach()).requires_grad_()
    out = grouped_linear(dirty, *rest)
    cotangent = torch.autograd.grad(fixed_cotangent((out,)), out)[0]
    trained = [dirty, *[t for t in rest if t is not None and t.requires_grad]]
    grads = torch.autograd.grad(out, trained, torch.where(rows, value, cotangent))
    assert torch.equal(out, clean.outputs[0])
    for grad, want in zip(grads, [g for g in clean.grads if g is not None], strict=True):
        assert torch.equal(grad, want)


@both
def test_what_trains_changes_no_bit_of_the_rest(dtype: torch.dtype, width: tuple[int, int]) -> None:
    args = inputs(ENDS["rows_left_over"], width, dtype)
    everything = run(grouped_linear, args)
    for trains in itertools.product([False, True], repeat=3):
        flags = (*trains[:2], False, trains[2])
        some = [a if a is None else a.detach().requires_grad_(f) for a, f in zip(args, flags, strict=True)]
        got = run(grouped_linear, some)
        assert torch.equal(got.outputs[0], everything.outputs[0])
        for flag, grad, want in zip(flags, got.grads, everything.grads, strict=True):
            assert grad is None if not flag else grad is not None and want is not None and torch.equal(grad, want)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every_second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "first_expanded": lambda t: t[:1].expand_as(t),
    "last_expanded": lambda t: t[..., :1].expand_as(t),
}


@both
@pytest.mark.parametrize("place", [0, 1, 3], ids=["x", "w", "b"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides(dtype: torch.dtype, width: tuple[int, int], view: Callable[[Tensor], Tensor], place: int) -> None:
    def viewed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: function(*args[:place], view(args[place]), *args[place + 1 :])

    check(inputs([30, 30, 100], width, dtype, rows=120), viewed)


COTANGENTS: dict[str, compare.Loss] = {
    "expanded": compare.total,
    "transposed": lambda outputs: fixed_cotangent((outputs[0].t(),)),
    "row_expanded": lambda outputs: fixed_cotangent((outputs[0].sum(0),)),
    "column_expanded": lambda outputs: fixed_cotangent((outputs[0].sum(1),)),
}


@both
@pytest.mark.parametrize("loss", COTANGENTS.values(), ids=COTANGENTS)
def test_any_cotangent(dtype: torch.dtype, width: tuple[int, int], loss: compare.Loss) -> None:
    check(inputs([30, 30, 100], width, dtype, rows=120), loss=loss)


@both
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_weight_gradients_lie_in_memory_as_the_weights(dtype: torch.dtype, width: tuple[int, int], transposed: bool) -> None:
    x, w, offs, b = inputs(ENDS["uneven"], width, dtype)
    assert w is not None
    w = (w.detach().mT.contiguous().mT if transposed else w.detach()).requires_grad_()
    (grad,) = torch.autograd.grad(fixed_cotangent((grouped_linear(x, w, offs, b),)), w)
    assert grad.stride() == w.stride()


def test_bias_gradients_of_many_rows_are_as_accurate_as_a_sum() -> None:
    weights = torch.rand(8192, ODD[1])  # their sums are not exact
    check(inputs([8192], ODD, F32, rows=8192), loss=lambda outputs: (outputs[0] * weights.to(outputs[0].dtype)).sum())


@ends
def test_gradcheck(ends: list[int]) -> None:
    assert torch.autograd.gradcheck(grouped_linear, tuple(inputs(ends, (4, 3), F64)))


def test_second_derivatives_are_refused() -> None:
    args = inputs(ENDS["even"], ODD, F64)
    (grad,) = torch.autograd.grad(grouped_linear(*args).square().sum(), args[:1], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.square().sum(), args[:1])


@pytest.mark.parametrize("name", ["rows_left_over", "empty_groups"])
@pytest.mark.parametrize(("dtype", "width"), [(F32, ODD), (BF16, ALIGNED)], ids=["fp32", "bf16"])
def test_compiled(name: str, dtype: torch.dtype, width: tuple[int, int]) -> None:
    args = inputs(ENDS[name], width, dtype)
    compare.assert_same(run(cases.compiled(grouped_linear), args), run(grouped_linear, args), EXACT)
    assert not fxfuse.last_report().failures


@pytest.mark.parametrize(("dtype", "width"), [(F32, ODD), (BF16, ALIGNED)], ids=["fp32", "bf16"])
def test_compiled_for_any_number_of_rows(dtype: torch.dtype, width: tuple[int, int]) -> None:
    def fn(x: Tensor, *rest: Any) -> Tensor:
        return grouped_linear(x.tanh(), *rest) * 2

    compiled = cases.compiled(fn)

    def marked(x: Tensor, *rest: Any) -> Tensor:
        torch._dynamo.mark_dynamic(x, 0)
        return compiled(x, *rest)

    for rows in (12, 31, 90):
        args = inputs([3, 5, rows - 2], width, dtype, rows=rows)
        with torch._dynamo.config.patch(error_on_recompile=rows > 12):
            compare.assert_same(run(marked, args), run(fn, args), 1e-6)


@pytest.mark.inductor
def test_through_inductor() -> None:
    args = inputs(ENDS["rows_left_over"], ALIGNED, BF16)
    got, eager = run(cases.compiled(grouped_linear, lower="auto"), args), run(grouped_linear, args)
    compare.assert_as_near_to_fp64(got, eager, run(grouped_linear, compare.in_fp64(args)), slack=1e-3)
