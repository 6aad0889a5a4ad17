"""The registration check of a rewrite that is allowed for some inputs only."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

import fxfuse


@pytest.mark.parametrize("multiple", [2, 8, 16, 32])
def test_rewrite_for_aligned_sizes_is_checked_on_aligned_sizes(multiple: int) -> None:
    calls: list[tuple[int, ...]] = []

    @fxfuse.register_forward_fusion
    def aligned(x, w, b):
        return F.relu(F.linear(x, w, b)) ** 2

    @aligned.check
    def _(m: fxfuse.Match):
        if m.x.shape[-1] % multiple:
            return m.reject(f"in_features {m.x.shape[-1]} is not a multiple of {multiple}")

    @aligned.rewrite
    def _(x, w, b):
        calls.append(tuple(x.shape))
        return F.relu(F.linear(x, w, b)).square()

    assert calls and all(shape[-1] % multiple == 0 for shape in calls)


def test_rewrite_that_is_wrong_for_aligned_sizes_only_is_refused() -> None:
    @fxfuse.register_forward_fusion
    def aligned(x, w, b):
        return F.relu(F.linear(x, w, b)) ** 2

    aligned.check(lambda m: m.reject("not a multiple of 16") if m.x.shape[-1] % 16 else None)
    with pytest.raises(fxfuse.PatternError, match="output 0 has relative error"):
        aligned.rewrite(lambda x, w, b: F.relu(F.linear(x, w)) ** 2)
