"""Every kernel of the portable path against its twin, by Triton's interpreter; ``test_interpreted`` runs this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import contract
import interpreter  # noqa: F401  (its process was started with TRITON_INTERPRET=1)
import pytest
import torch
from contract import BF16, ENDS, F16, F32, LAYOUTS, STORED, VARIANTS, Case

from fxfuse.kernels import path

PORTABLE = path("portable")
dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
every_end = pytest.mark.parametrize("ends", ENDS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
stored = pytest.mark.parametrize("stored", STORED)
OVER_A_TILE = {"hidden": 136, "inner": 72}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dtypes
@layouts
@stored
def test_up_layouts(dtype: torch.dtype, layout: str, stored: str) -> None:
    contract.check_up(PORTABLE, Case(dtype=dtype, layout=layout, stored=stored))


@every_end
def test_up_rows(ends: str) -> None:
    contract.check_up(PORTABLE, Case(ends=ends, dtype=F16, gathers=False, save=False))
    contract.check_up(PORTABLE, Case(ends=ends, **OVER_A_TILE))


@layouts
@pytest.mark.parametrize("variant", VARIANTS)
def test_up_activations(layout: str, variant: str) -> None:
    contract.check_up(PORTABLE, Case(layout=layout, ends="one token", save=False, **VARIANTS[variant]))


@dtypes
@stored
@pytest.mark.parametrize("transposed", [True, False])
def test_matmul_layouts(dtype: torch.dtype, stored: str, transposed: bool) -> None:
    contract.check_matmul(PORTABLE, Case(dtype=dtype, stored=stored), transposed)


@every_end
def test_matmul_rows(ends: str) -> None:
    contract.check_matmul(PORTABLE, Case(ends=ends, dtype=F16, biases=False), True)
    contract.check_matmul(PORTABLE, Case(ends=ends, **OVER_A_TILE), False)


@dtypes
@layouts
@stored
def test_dh_layouts(dtype: torch.dtype, layout: str, stored: str) -> None:
    contract.check_dh(PORTABLE, Case(dtype=dtype, layout=layout, stored=stored))


@every_end
def test_dh_rows(ends: str) -> None:
    contract.check_dh(PORTABLE, Case(ends=ends, dtype=F16, gathers=False, weights=False))
    contract.check_dh(PORTABLE, Case(ends=ends, **OVER_A_TILE))


@layouts
@pytest.mark.parametrize("variant", VARIANTS)
def test_dh_activations(layout: str, variant: str) -> None:
    contract.check_dh(PORTABLE, Case(layout=layout, ends="one token", **VARIANTS[variant]))


@layouts
def test_dh_with_large_tiles(layout: str) -> None:
    contract.check_dh(PORTABLE, Case(ends="many rows an expert", dtype=F16, layout=layout, hidden=70, inner=140))


@dtypes
@every_end
def test_wgrad(dtype: torch.dtype, ends: str) -> None:
    contract.check_wgrad(PORTABLE, Case(ends=ends, dtype=dtype))
    contract.check_wgrad(PORTABLE, Case(ends=ends, dtype=dtype, gathers=False))


@dtypes
@every_end
def test_bias_gradient(dtype: torch.dtype, ends: str) -> None:
    contract.check_bias(PORTABLE, Case(ends=ends, dtype=dtype))
    contract.check_bias(PORTABLE, Case(ends=ends, dtype=dtype, gathers=False, weights=False, inner=72))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts"), [(0, 2, 3), (5, 0, 3), (1, 1, 1), (71, 3, 5), (150, 2, 128), (9, 2, 1024)]
)
def test_route(tokens: int, chosen: int, experts: int, dtype: torch.dtype) -> None:
    ids = contract.random_ids(tokens, chosen, experts, dtype=dtype)
    contract.check_route(PORTABLE, ids, experts)
    contract.check_route(PORTABLE, contract.random_ids(chosen, tokens, experts, dtype=dtype).t(), experts)


def test_route_with_blocks_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuse.kernels.routing.BLOCKS", 2)
    contract.check_route(PORTABLE, contract.random_ids(700, 1, 5), 5)


@dtypes
@pytest.mark.parametrize("weights", [None, F32, BF16], ids=["unweighted", "fp32 weights", "bf16 weights"])
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(0, 2, 3), (1, 1, 1), (7, 3, 5), (2, 0, 3)])
def test_combine(dtype: torch.dtype, weights: torch.dtype | None, tokens: int, chosen: int, experts: int) -> None:
    contract.check_combine(PORTABLE, Case(dtype=dtype), tokens, chosen, experts, weights)
    contract.check_combine(PORTABLE, Case(dtype=dtype, biases=False, hidden=1030), tokens, chosen, experts, weights)
