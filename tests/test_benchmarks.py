"""Benchmarks at tiny sizes on a CPU: that they run, and that what they say beside a time is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def moe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """``benchmarks/moe.py``, its results going to a folder of the test's own."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import moe
    import record

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(moe, "IDLE_SECONDS", 0.0)
    return moe


@pytest.mark.parametrize("routing", ["even", "zipf", "idle", "one"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["tiny", "tiny OSS"])
def test_moe_block_computes_its_reference(moe: ModuleType, name: str, masked: bool, routing: str) -> None:
    args, ids = moe.arguments(moe.BLOCKS[name], 13, routing, "cpu")
    if routing in ("idle", "one"):
        assert len(ids.unique()) == {"idle": 3, "one": 2}[routing]
    args = [a.float().requires_grad_() for a in args]
    grad = torch.randn(13, moe.BLOCKS["tiny"].hidden)
    exact = moe.truth(args, ids, grad)
    way = moe.Contender("eager", args, ids, masked, grad)
    assert max(moe.errors(way.step(), exact)) < 1e-5
    assert min(moe.errors([2 * g for g in way.step()], exact)) > 0.9


def test_moe_wrong_contender_gets_no_time(moe: ModuleType) -> None:
    args, ids = moe.arguments(moe.BLOCKS["tiny"], 13, "even", "cpu")
    args = [a.requires_grad_() for a in args]
    ways = {c: moe.Contender("eager", args, ids, False, torch.randn_like(args[0])) for c in moe.CONTENDERS}
    off = {"eager": [1e-3, 4e-3], "inductor": [1e-3, 5e-3], "fxfuse": [1e-3, 7e-3]}
    eager, inductor, fxfuse = moe._rows(ways, "forward+backward", off, {"fxfuse"}, 1, "cpu")
    assert fxfuse["ms"] == "WRONG" and fxfuse["error"] == "7.0e-03" and inductor["ms"] > 0
    assert inductor["speed-up"] == 1 and eager["same bits"] == "yes"
    assert eager["saved MiB"] > 0


def test_moe_refuses_large_blocks_on_a_cpu(moe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--blocks tiny runs on a CPU"):
        moe.main([])


def test_moe_counts_the_pass_by_layers(moe: ModuleType) -> None:
    row = moe.rewriting(2, "sorted")
    assert row["expert blocks"] == row["layers"] == 2
    assert row["first ms"] > 0 and row["warm ms a layer"] > 0


@pytest.fixture
def kernels(moe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``benchmarks/moe_kernels.py``."""
    import moe_kernels

    monkeypatch.setattr(moe_kernels, "IDLE_SECONDS", 0.0)
    return moe_kernels


@pytest.mark.parametrize("block", ["tiny", "tiny OSS"])
def test_kernels_on_a_cpu(block: str, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["moe_kernels.py"])
    kernels.main(["--blocks", block, "--tokens", "33", "--rounds", "1"])
    rows = json.loads((tmp_path / "kernels_cpu.json").read_text())["rows"]
    assert [r["kernel"] for r in rows] == list(kernels.costs(kernels.Operands(kernels.BLOCKS[block], 33, "cpu")))
    assert all(r["ms"] != "WRONG" and r["by"] == "twin" and float(r["error"]) < kernels.RIGHT for r in rows)


@pytest.mark.parametrize("block", ["tiny", "tiny OSS"])
def test_kernels_vendor_computes_the_same_products(block: str, kernels: ModuleType) -> None:
    operands = kernels.Operands(kernels.BLOCKS[block], 33, "cpu")
    exact = kernels.functions(kernels.reference, kernels.in_fp64(operands))
    for name, call in kernels.vendor(operands).items():
        if name in kernels.MORE:
            continue
        assert kernels.error(call(), exact[name]()) < kernels.RIGHT, name


def test_kernels_wrong_kernel_gets_no_time(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.ones(33, 64)
    wrong = torch.full_like(exact, float("nan"))
    work = kernels.Work("combine", 0.0, 1.0, lambda: (exact,), {"twin": lambda: (wrong,)})
    monkeypatch.setattr(kernels, "works", lambda *_: [work])
    (row,) = kernels.compare("tiny", 33, ["twin"], 1, kernels.Rates(1.0, 1.0), "cpu")
    assert row["ms"] == "WRONG" and row["share"] == "-"


@pytest.mark.inductor
@pytest.mark.slow
def test_moe_on_a_cpu(moe: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["moe.py"])
    moe.main(["--blocks", "tiny", "--tokens", "257", "--forms", "sorted", "--rounds", "1"])
    rows = json.loads((tmp_path / "moe_cpu.json").read_text())["rows"]
    assert [(r["mode"], r["contender"]) for r in rows] == [(m, c) for m in moe.MODES for c in moe.CONTENDERS]
    for row in rows:
        assert row["ms"] != "WRONG" and row["same bits"] == "yes"
        if row["contender"] == "fxfuse":
            assert row["fused"].startswith("grouped_mlp")
    saved = {r["contender"]: r["saved MiB"] for r in rows if r["mode"] == "forward"}
    assert saved["fxfuse"] < saved["inductor"]
