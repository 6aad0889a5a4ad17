"""Every kernel of the portable path against its twin, by Triton's interpreter; ``test_interpreted`` runs this file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import contract
import interpreter  # its process was started with TRITON_INTERPRET=1
import pytest
import torch
from contract import BF16, ENDS, F16, F32, LAYOUTS, STORED, VARIANTS, Case

from fxfuse.kernels import path, plans
from fxfuse.ops import grouped_kernels, grouped_mm
from fxfuse.ops.grouped_mlp import _grouped_mlp, _grouped_mlp_backward

PORTABLE = path("portable")


dtypes = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
every_end = pytest.mark.parametrize("ends", ENDS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
stored = pytest.mark.parametrize("stored", STORED)
OVER_A_TILE = {"hidden": 136, "inner": 72}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=[contextlib.nullcontext, interpreter.last_program_first], ids=["first program first", "last first"])
def either_order(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@dtypes
@layouts
@stored
def test_up_layouts(dtype: torch.dtype, layout: str, stored: str) -> None:
    contract.check_up(PORTABLE, Case(dtype=dtype, layout=layout, stored=stored))


@every_end
@pytest.mark.usefixtures("either_order")
def test_up_rows(ends: str) -> None:
    contract.check_up(PORTABLE, Case(ends=ends, dtype=F16, gathers=False, save=False))
    contract.check_up(PORTABLE, Case(ends=ends, **OVER_A_TILE))


@layouts
@pytest.mark.usefixtures("either_order")
def test_up_with_large_tiles(layout: str) -> None:
    contract.check_up(PORTABLE, Case(ends="many rows an expert", dtype=F16, layout=layout, hidden=70, inner=140))


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
@pytest.mark.usefixtures("either_order")
def test_matmul_rows(ends: str) -> None:
    contract.check_matmul(PORTABLE, Case(ends=ends, dtype=F16, biases=False), True)
    contract.check_matmul(PORTABLE, Case(ends=ends, **OVER_A_TILE), False)


@dtypes
@layouts
@stored
def test_dh_layouts(dtype: torch.dtype, layout: str, stored: str) -> None:
    contract.check_dh(PORTABLE, Case(dtype=dtype, layout=layout, stored=stored))


@every_end
@pytest.mark.usefixtures("either_order")
def test_dh_rows(ends: str) -> None:
    contract.check_dh(PORTABLE, Case(ends=ends, dtype=F16, gathers=False, weights=False))
    contract.check_dh(PORTABLE, Case(ends=ends, **OVER_A_TILE))


@layouts
@pytest.mark.parametrize("variant", VARIANTS)
def test_dh_activations(layout: str, variant: str) -> None:
    contract.check_dh(PORTABLE, Case(layout=layout, ends="one token", **VARIANTS[variant]))


@layouts
@pytest.mark.usefixtures("either_order")
def test_dh_with_large_tiles(layout: str) -> None:
    contract.check_dh(PORTABLE, Case(ends="many rows an expert", dtype=F16, layout=layout, hidden=70, inner=140))


@dtypes
@every_end
def test_wgrad(dtype: torch.dtype, ends: str) -> None:
    contract.check_wgrad(PORTABLE, Case(ends=ends, dtype=dtype))
    contract.check_wgrad(PORTABLE, Case(ends=ends, dtype=dtype, gathers=False))


@every_end
@pytest.mark.usefixtures("either_order")
def test_wgrad_tiles_side_by_side(ends: str) -> None:
    contract.check_wgrad(PORTABLE, Case(ends=ends, dtype=F16, hidden=300))
    contract.check_wgrad(PORTABLE, Case(ends=ends, dtype=F16, hidden=1100))  # in two sweeps, of which the second has a tile less


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


@pytest.mark.usefixtures("either_order")
@pytest.mark.parametrize(("blocks", "cells"), [(2, 8192), (8, 64)], ids=["several steps a block", "several blocks a step"])
def test_route_of_many_pairs(blocks: int, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuse.kernels.routing.BLOCKS", blocks)
    monkeypatch.setattr("fxfuse.kernels.routing.CELLS", cells)
    for pairs, experts in ((700, 5), (1500, 32), (1024, 33)):
        plans.forget()
        contract.check_route(PORTABLE, contract.random_ids(pairs, 1, experts), experts)
    plans.forget()


@dtypes
@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (5, 0), (1, 1), (300, 3)])
def test_pairs(tokens: int, chosen: int, dtype: torch.dtype) -> None:
    p = torch.rand(chosen, tokens).to(dtype)
    contract.check_pairs(PORTABLE, contract.random_ids(tokens, chosen, 5), p.t(), 5)
    contract.check_pairs(PORTABLE, contract.random_ids(tokens, chosen, 5), p.t().contiguous(), 5)


@dtypes
@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (2, 0), (1, 1), (3, 1), (3, 8)])
def test_spread(tokens: int, chosen: int, dtype: torch.dtype) -> None:
    contract.check_spread(PORTABLE, Case(dtype=dtype), tokens, chosen, None)
    contract.check_spread(PORTABLE, Case(dtype=dtype, hidden=1, inner=600), tokens, chosen, BF16)
    contract.check_spread(PORTABLE, Case(dtype=dtype, hidden=1030, inner=64), tokens, chosen, F32)


@pytest.mark.usefixtures("either_order")
def test_spread_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuse.kernels.pairs.LINES", ((4, 64, 1), (99, 128, 2)))
    for tokens in (4, 5):
        plans.forget()
        contract.check_spread(PORTABLE, Case(hidden=130, inner=300), tokens, 2, BF16)
    plans.forget()


@dtypes
@pytest.mark.parametrize("weights", [None, F32, BF16], ids=["unweighted", "fp32 weights", "bf16 weights"])
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(0, 2, 3), (1, 1, 1), (7, 3, 5), (2, 0, 3)])
def test_combine(dtype: torch.dtype, weights: torch.dtype | None, tokens: int, chosen: int, experts: int) -> None:
    contract.check_combine(PORTABLE, Case(dtype=dtype), tokens, chosen, experts, weights)
    contract.check_combine(PORTABLE, Case(dtype=dtype, biases=False, hidden=1030), tokens, chosen, experts, weights)


# ------------------------------------------------------------------------------------------------ all of them together


@pytest.mark.parametrize("first", [False, True], ids=["weights after", "weights first"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_block_of_kernels(layout: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates with the kernels themselves, forward and backward, against the references in fp64."""
    monkeypatch.setattr(grouped_kernels, "_functions", lambda path, like: PORTABLE)
    tokens, chosen, experts, hidden, inner = 12, 2, 4, 40, 9
    wide = 2 * inner if layout in ("concat", "interleaved") else inner
    ids = contract.random_ids(tokens, chosen, experts)
    x, p, w = torch.randn(tokens, hidden), torch.rand(tokens, chosen), torch.randn(experts, wide, hidden) / 6
    w_up = torch.randn(experts, inner, hidden) / 6 if layout == "separate" else None
    w_down = torch.randn(experts, inner, hidden).transpose(1, 2)
    b = torch.randn(experts, wide) if layout != "separate" else None
    weights, kind = (w, w_up, w_down, b, torch.randn(experts, hidden)), ("silu", layout, 0.8, None, first)
    args = (x, ids, p, None, *weights, *kind, True)
    passes = {op.overload: lambda *args, f=f, r=r: grouped_kernels.whole(f, r, args, "portable")
              for op, f, r in grouped_kernels.PASSES}  # fmt: skip
    got, want = passes[_grouped_mlp.overload](*args), _grouped_mlp.reference(*contract.exact(args))
    again = passes[_grouped_mlp.overload](*args)  # with the plans of the first pass
    assert all(torch.equal(g, a) for g, a in zip(got, again, strict=True))
    assert contract.error(got[0], want[0]) < 1e-6
    assert all(torch.equal(g, v) for g, v in zip(got[3:], want[3:], strict=True))
    mask = [t is not None for t in (x, p, *weights)]
    saved = (got[1], got[2] if layout == "separate" else None, *got[3:])
    args = (torch.randn_like(x), x, ids, p, *weights, *saved, *kind, mask)
    got, want = passes[_grouped_mlp_backward.overload](*args), _grouped_mlp_backward.reference(*contract.exact(args))
    again = passes[_grouped_mlp_backward.overload](*args)
    assert all(torch.equal(g, a) for g, a in zip(got, again, strict=True))
    assert all(contract.error(g, v) < 1e-5 for g, v in zip(got, want, strict=True))


def test_grouped_products_of_other_dtypes_than_bf16() -> None:
    """What the loops over experts are replaced by."""
    a, w, ends = torch.randn(9, 6), torch.randn(3, 6, 5), torch.tensor([2, 2, 7], dtype=torch.int32)
    d = torch.randn(9, 5)
    for args in ((a, w, ends), (a.t(), d, ends)):
        got, want = grouped_mm._grouped_mm_kernel(*args), grouped_mm.reference_grouped_mm(*contract.exact(args))
        assert got.is_contiguous() and contract.error(got, want) < 1e-6
    assert contract.error(PORTABLE.bias_gradient(d, ends), grouped_mm._grouped_sum_loop(d.double(), ends)) < 1e-6
