"""A sample of the matrix as it ships: rewritten, inlined and compiled by Inductor."""

from __future__ import annotations

import pytest
import te
import test_te_matrix_backward as backward
import test_te_matrix_gated_mlp as gated_mlp
import test_te_matrix_linear_activation as linear_activation
import test_te_matrix_linear_add as linear_add
import test_te_matrix_linear_scale as linear_scale
from te import BF16, FP32, Site

SHAPES = [((5, 1, -1), (64, 32)), ((-1,), (3, 5)), ((128, -1), (128, 128))]


def sites(family: str) -> list[Site]:
    """A few sites of one family, in two dtypes."""
    both = [(d, x, w) for d in (FP32, BF16) for x, w in SHAPES]
    if family == "linear_activation":
        return [linear_activation.layer(name, *s) for name in linear_activation.ACTIVATIONS for s in both[::4]]
    if family == "linear_add":
        return [linear_add.layer(linear_add.before, *s, bias=True) for s in both]
    if family == "linear_scale":
        return [
            make(k, *s, True) for k in (0.0, -2.5) for s in both for make in (linear_scale.scaled, linear_scale.scaled_and_added)
        ]
    if family == "gated_mlp":
        return [
            make(kind, *both[i], False)
            for i, kind in enumerate(gated_mlp.KINDS)
            for make in (gated_mlp.separate, gated_mlp.packed)
        ]
    return [backward.biased(name, (8, 2, 2, 32), d) for name in backward.ACTIVATIONS for d in (FP32, BF16)]


@pytest.mark.inductor
@pytest.mark.parametrize("family", ["linear_activation", "linear_add", "linear_scale", "gated_mlp", "backward"])
def test_training(family: str) -> None:
    te.check(sites(family), lower="auto")


@pytest.mark.inductor
@pytest.mark.parametrize("family", ["linear_activation", "linear_add", "gated_mlp"])
def test_inference(family: str) -> None:
    te.check(sites(family), train=False, lower="auto")
