"""``verify``: a fused plan is run beside its unfused form; where they differ the right result is returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxfuse

Tensor = torch.Tensor


def block(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def arguments() -> list[Tensor]:
    return [torch.randn(4, 16).requires_grad_(), torch.randn(32, 16).requires_grad_(), torch.randn(32).requires_grad_()]


def compiled(verify: str, **options: Any) -> Any:
    return torch.compile(block, backend="fxfuse", options={"lower": "eager", "verify": verify, **options})


def wrong_forward() -> None:
    @fxfuse.register_forward_backward_fusion(check_on_register=False, prepend=True)
    def wrong(x, w, b):
        return F.gelu(F.linear(x, w, b))

    @wrong.rewrite
    def _(x, w, b):
        return F.gelu(F.linear(x, w, b), approximate="tanh")


def wrong_backward() -> None:
    @fxfuse.register_forward_backward_fusion(check_on_register=False, prepend=True)
    def wrong(x, w, b):
        return F.gelu(F.linear(x, w, b))

    @wrong.forward
    def _(x, w, b, *, save):
        pre = F.linear(x, w, b)
        return F.gelu(pre), (pre,)

    @wrong.backward
    def _(grad, x, w, b, pre, *, mask):
        d = torch.ops.aten.gelu_backward(grad, pre)
        return d @ w, d.t() @ x * 1.01, d.sum(0)


@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("plant", [wrong_forward, wrong_backward])
def test_a_wrong_fusion_gives_the_right_result_and_one_warning(verify: str, plant: Any) -> None:
    plant()
    args = arguments()
    with pytest.warns(fxfuse.FxfuseWarning, match="differs from its unfused form") as caught:
        function = compiled(verify)
        for _ in range(3):
            out = function(*args)
            got = torch.autograd.grad(out.square().sum(), args)
    want = torch.autograd.grad(block(*args).square().sum(), args)
    torch.testing.assert_close(got, want)
    assert sum(issubclass(w.category, fxfuse.FxfuseWarning) for w in caught) == 1
    assert any(f.stage == "verify" for r in fxfuse.reports() for f in r.failures)


def test_without_verify_the_wrong_result_goes_through() -> None:
    """The planted fusion is really wrong: what the tests above catch is not caught by accident."""
    wrong_forward()
    args = arguments()
    assert not torch.allclose(compiled("off")(*args), block(*args), atol=1e-6)


def test_strict_raises() -> None:
    wrong_forward()
    with pytest.raises(fxfuse.LoweringError, match="differs from its unfused form"):
        compiled("first", strict=True)(*arguments())


def test_right_fusions_stay_and_dropout_draws_the_same_masks() -> None:
    def with_dropout(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.dropout(F.gelu(F.linear(x, w, b)), 0.5)

    function = torch.compile(with_dropout, backend="fxfuse", options={"lower": "eager", "verify": "always"})
    args = arguments()
    torch.manual_seed(3)
    out = function(*args)
    torch.manual_seed(3)
    torch.testing.assert_close(out, with_dropout(*args))
    assert all(not r.failures for r in fxfuse.reports())


def test_arguments_that_are_changed_in_place_are_changed_once() -> None:
    def step(x: Tensor, w: Tensor, b: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return F.gelu(F.linear(x, w, b))

    count = torch.zeros(())
    function = torch.compile(step, backend="fxfuse", options={"lower": "eager", "verify": "always"})
    for _ in range(3):
        function(*arguments(), count)
    assert count.item() == 3
