"""New tensors are what torch would make."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fxfuse.kernels.fresh import fresh
from fxfuse.kernels.plans import Operand

SHAPES = [(), (0,), (7,), (3, 0), (0, 3), (2, 5), (3, 0, 5), (2, 3, 4)]


def operand(device: str, dtype: torch.dtype = torch.bfloat16) -> Operand:
    return Operand((1,), (1,), dtype, torch.device(device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_it_makes(device: str) -> None:
    for shape, dtype in itertools.product(SHAPES, (None, torch.float32, torch.int64)):
        make, want = fresh(shape, operand(device), dtype), torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
        got, other = make(), make()
        assert (got.shape, got.stride(), got.dtype, got.device) == (want.shape, want.stride(), want.dtype, want.device)
        assert got is not other and (got.numel() == 0 or device == "meta" or got.data_ptr() != other.data_ptr())
    assert fresh((5, 3), operand(device), stride=(1, 5))().stride() == (1, 5)


def test_a_device_that_is_not_current(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def noted(name: str) -> Any:
        return lambda *args, **options: made.append(name)

    current = [0]
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", noted("fast"))
    monkeypatch.setattr(torch, "empty_strided", noted("ordinary"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    make = fresh((2,), operand("cuda:1"))
    for current[0] in (0, 1):
        make()
    assert made == ["ordinary", "fast"]


def test_a_torch_that_has_no_such_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu")
    assert fresh((2, 3), operand("cpu"))().shape == (2, 3)
