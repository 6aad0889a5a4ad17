"""Window fusions: chains of operators handed to a static method, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxfuse
from fxfuse import testing

Tensor = torch.Tensor


def leaf(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.5).requires_grad_()


def names(ops: list[fxfuse.Op]) -> list[str]:
    return [op.name for op in ops]


def linear_scale_add(side: str = "forward") -> Any:
    class LinearScaleAdd(fxfuse.WindowFusion):
        window = 3

        @staticmethod
        def fuse(ops: list[fxfuse.Op], *, recipe: fxfuse.Recipe) -> list[fxfuse.Op] | None:
            if names(ops) != ["linear", "scale", "add"]:
                return None
            linear, scale, add = ops

            def fused(x: Tensor, w: Tensor, b: Tensor | None, k: float, r: Tensor) -> Tensor:
                return fxfuse.ops.linear_scale(x, w, b, k, r)

            return [fxfuse.Op("linear_scale_add", fused, (*linear.args, *scale.args, *add.args))]

    return fxfuse.register_forward_fusion(LinearScaleAdd)


ONLY = {"fusions": {"only": ["LinearScaleAdd"]}}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", ["residual first", "residual last"])
@pytest.mark.parametrize("train", [True, False])
def test_a_chain_of_three_is_replaced(bias: bool, order: str, train: bool) -> None:
    linear_scale_add()
    args = [leaf(2, 4, 16), leaf(32, 16), leaf(2, 4, 32), *([leaf(32)] if bias else [])]

    def block(x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None) -> Tensor:
        y = F.linear(x, w, b) * 0.3
        return r + y if order == "residual first" else y + r

    report = testing.assert_matches_eager(block, args, train=train, options=ONLY)
    assert report.count("LinearScaleAdd") == 1
    assert "linear_scale.default" in report.graphs[0].after


def test_an_interior_value_with_another_user_ends_the_chain() -> None:
    linear_scale_add()

    def block(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = F.linear(x, w)
        return y * 0.3 + r, y.sin()

    report = testing.assert_matches_eager(block, [leaf(4, 16), leaf(32, 16), leaf(4, 32)], options=ONLY)
    assert report.count("LinearScaleAdd") == 0


def test_the_backward_pass_is_handed_over_in_forward_order() -> None:
    seen: list[list[str]] = []

    class ScaledDgrad(fxfuse.WindowFusion):
        window = 2

        @staticmethod
        def fuse(ops: list[fxfuse.Op], *, recipe: fxfuse.Recipe) -> list[fxfuse.Op] | None:
            seen.append(names(ops))
            if names(ops) != ["linear", "scale"]:
                return None
            linear, scale = ops
            return [fxfuse.Op("dgrad", lambda dy, k, w: fxfuse.ops.matmul_scale(dy, w.t(), k), (scale.args[0], linear.args[0]))]

    fxfuse.register_backward_fusion(ScaledDgrad)
    report = testing.assert_matches_eager(
        lambda x, w: F.linear(x, w) * 0.3,
        [leaf(2, 4, 16), leaf(32, 16).detach()],
        options={"fusions": {"only": ["ScaledDgrad"]}},
    )
    assert report.count("ScaledDgrad", "backward") == 1
    assert ["linear", "scale"] in seen


def test_a_wrong_replacement_shape_is_refused_with_the_reason() -> None:
    class Halved(fxfuse.WindowFusion):
        window = 2

        @staticmethod
        def fuse(ops: list[fxfuse.Op], *, recipe: fxfuse.Recipe) -> list[fxfuse.Op] | None:
            if names(ops) != ["linear", "gelu"]:
                return None
            return [fxfuse.Op("half", lambda x, w, b: F.gelu(F.linear(x, w))[..., ::2], ops[0].args)]

    fxfuse.register_forward_fusion(Halved)
    report = testing.assert_matches_eager(
        lambda x, w: F.gelu(F.linear(x, w)), [leaf(4, 16), leaf(32, 16)], train=False, options={"fusions": {"only": ["Halved"]}}
    )
    assert report.count("Halved") == 0
    assert "the replaced value [4, 32]" in report.missed[0].reason


def test_what_fuse_returns_is_checked() -> None:
    class Nonsense(fxfuse.WindowFusion):
        window = 1

        @staticmethod
        def fuse(ops: list[fxfuse.Op], *, recipe: fxfuse.Recipe) -> Any:
            return ["not an op"]

    fxfuse.register_forward_fusion(Nonsense)
    with pytest.warns(fxfuse.FxfuseWarning, match=r"Nonsense.*fuse must return a list of fxfuse.Op"):
        testing.assert_matches_eager(lambda x: x.sin(), [leaf(4)], options={"fusions": {"only": ["Nonsense"]}})


def test_registration_checks_the_class() -> None:
    class NoFuse(fxfuse.WindowFusion):
        window = 2

    with pytest.raises(fxfuse.PatternError, match="defines no fuse"):
        fxfuse.register_forward_fusion(NoFuse)

    class BadWindow(fxfuse.WindowFusion):
        window = 0

        @staticmethod
        def fuse(ops: list[fxfuse.Op], *, recipe: fxfuse.Recipe) -> None:
            return None

    with pytest.raises(fxfuse.PatternError, match="window is 0"):
        fxfuse.register_forward_fusion(BadWindow)
    assert not {"NoFuse", "BadWindow"} & {f.name for f in fxfuse.list_fusions()}
