"""The comparison that the other tests rest on can fail: each difference that a user could see is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import compare
import pytest
import torch
from compare import Run
from torch import Tensor


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def args() -> list[Tensor]:
    return [torch.randn(4, 3).requires_grad_(), torch.randn(3, 5).requires_grad_()]


@pytest.fixture
def want() -> Run:
    return compare.run(product, args())


def first(values: tuple[Tensor, ...], change: Callable[[Tensor], Tensor | None]) -> tuple[Tensor | None, ...]:
    return (change(values[0]), *values[1:])


def with_nan(t: Tensor) -> Tensor:
    return torch.where(torch.arange(t.numel()).reshape(t.shape) == 0, torch.nan, t)


DIFFERENCES: dict[str, Callable[[Run], Run]] = {
    "a wrong output": lambda r: dataclasses.replace(r, outputs=first(r.outputs, lambda t: t * 1.01)),
    "an output of NaN": lambda r: dataclasses.replace(r, outputs=first(r.outputs, with_nan)),
    "another output dtype": lambda r: dataclasses.replace(r, outputs=first(r.outputs, Tensor.double)),
    "another output stride": lambda r: dataclasses.replace(r, outputs=first(r.outputs, lambda t: t.t().contiguous().t())),
    "a wrong gradient": lambda r: dataclasses.replace(r, grads=first(r.grads, lambda t: t * 1.01)),
    "a gradient of NaN": lambda r: dataclasses.replace(r, grads=first(r.grads, with_nan)),
    "a missing gradient": lambda r: dataclasses.replace(r, grads=first(r.grads, lambda t: None)),
    "an input changed in place": lambda r: dataclasses.replace(r, inputs=first(r.inputs, lambda t: t + 1)),
}


@pytest.mark.parametrize("change", DIFFERENCES.values(), ids=DIFFERENCES)
def test_difference_is_found(want: Run, change: Callable[[Run], Run]) -> None:
    with pytest.raises(AssertionError):
        compare.assert_same(change(want), want, tolerance=1e-5)


def test_nan_is_never_close() -> None:
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    errors = [compare.relative_error(a, b) for a, b in ((zero, nan), (nan, zero), (nan, nan), (torch.ones(3), nan))]
    assert not any(error <= 1e30 for error in errors)


def test_equal_runs_are_the_same(want: Run) -> None:
    compare.assert_same(want, want, tolerance=0.0)
    compare.assert_bit_equal(want, want)


def test_one_bit_is_found(want: Run) -> None:
    flipped = dataclasses.replace(want, outputs=first(want.outputs, lambda t: torch.nextafter(t, torch.full_like(t, torch.inf))))
    with pytest.raises(AssertionError):
        compare.assert_bit_equal(flipped, want)


def test_worse_than_eager_is_found(want: Run) -> None:
    drawn = args()
    eager, truth = compare.run(product, drawn), compare.run(product, compare.in_fp64(drawn))
    compare.assert_as_near_to_fp64(eager, eager, truth)
    worse = dataclasses.replace(eager, grads=first(eager.grads, lambda t: t * 1.001))
    with pytest.raises(AssertionError):
        compare.assert_as_near_to_fp64(worse, eager, truth)


def test_runs_do_not_share_storage() -> None:
    drawn = args()
    compare.run(lambda x, w: x.detach().add_(1) @ w, drawn)
    assert torch.equal(compare.run(product, drawn).inputs[0], drawn[0])


def test_a_tensor_passed_twice_stays_one_tensor() -> None:
    x = torch.randn(3, 3).requires_grad_()
    run = compare.run(product, [x, x])
    assert run.grads[0] is run.grads[1]
