"""The examples, run as a newcomer runs them; a warning is a failure."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "patterns")))

SHORT = ("--steps", "3", "--batch", "2", "--sample", "1")
TORCH_ITSELF = "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
"""torch 2.13 warns about itself when Inductor is imported."""


def run_example(name: str, *args: str, folder: Path, **environment: str) -> str:
    """Run ``examples/name`` in ``folder``; what it printed."""
    command = [sys.executable, "-W", "error", "-W", TORCH_ITSELF, str(ROOT / "examples" / name), *args]
    variables = os.environ | {"PYTHONPATH": PATHS} | environment
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def largest_difference(output: str) -> float:
    found = re.search(r"largest relative difference of the loss in \d+ steps: (\S+)", output)
    assert found, output
    return float(found[1])


def test_quickstart_with_rewritten_graphs_run_by_torch(tmp_path: Path) -> None:
    printed = run_example("01_quickstart.py", *SHORT, folder=tmp_path, FXFUSE_LOWER="eager")
    assert largest_difference(printed) < 1e-4
    for layers, fusion in (("{0,3}", "linear_gelu"), ("{1,4}", "gated_mlp_silu"), ("{2,5}", "gated_mlp_packed_silu")):
        assert re.search(rf"layers\.{re.escape(layers)}\.mlp +{fusion} x2 +forward\+backward", printed), printed
    assert "\nmissed" in printed
    assert "layers." in (tmp_path / "report.html").read_text()


@pytest.mark.inductor
@pytest.mark.slow
def test_quickstart_through_inductor(tmp_path: Path) -> None:
    printed = run_example("01_quickstart.py", *SHORT, folder=tmp_path)
    assert largest_difference(printed) < 1e-4
    assert (tmp_path / "report.html").exists()


def test_write_a_fusion(tmp_path: Path) -> None:
    printed = run_example("02_write_a_fusion.py", folder=tmp_path)
    refusal = printed.splitlines()[1]
    assert "PatternError" in refusal and "squared_relu_linear_wrong" in refusal and "02_write_a_fusion.py:" in refusal
    assert "squared_relu_linear fused 2 times" in printed
    assert "in_features 24 is not a multiple of 16" in printed


def test_why_not(tmp_path: Path) -> None:
    printed = run_example("03_why_not.py", folder=tmp_path)
    answers = printed.strip().split("\n\n")
    assert len(answers) == 8
    for answer in answers:
        case, *lines = answer.splitlines()
        assert "did not fire. Nearest" in lines[0], answer
        assert "03_why_not.py:" in answer, f"{case}: no source line"


def test_train_moe_with_rewritten_graphs_run_by_torch(tmp_path: Path) -> None:
    printed = run_example("04_train_moe.py", "--steps", "3", "--batch", "2", folder=tmp_path, FXFUSE_LOWER="eager")
    assert largest_difference(printed) < 1e-2  # the experts compute in bf16
    assert "expert blocks fused: 3 in the forward, 3 in the backward, of 3 layers" in printed
    assert re.search(r"layers\.\{0,1,2\}\.mlp +grouped_mlp\S* .*x3 +forward\+backward", printed), printed
    in_eager, in_fused = map(float, re.search(r"keeps (\S+) MiB .* in eager, (\S+) MiB with fxfuse", printed).groups())
    assert in_fused < in_eager
    assert "grouped_mlp" in (tmp_path / "report_moe.html").read_text()


@pytest.mark.inductor
@pytest.mark.slow
def test_train_moe_through_inductor(tmp_path: Path) -> None:
    printed = run_example("04_train_moe.py", "--steps", "3", "--batch", "2", folder=tmp_path)
    assert largest_difference(printed) < 1e-2
    assert "expert blocks fused: 3 in the forward, 3 in the backward" in printed


@pytest.mark.slow
def test_hf_moe_with_rewritten_graphs_run_by_torch(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    arguments = ("--steps", "3", "--batch", "2", "--sample", "4")
    printed = run_example("05_hf_moe.py", *arguments, folder=tmp_path, FXFUSE_LOWER="eager")
    assert largest_difference(printed) < 1e-2
    assert "expert blocks fused: 2 in the forward, 2 in the backward, of 2 layers" in printed
    assert "expert blocks fused in the graphs of generation (one length, then any): 2 of 2, 2 of 2" in printed
    assert "18 of 18 bytes are those of eager" in printed
    assert "grouped_mlp" in (tmp_path / "report_hf_moe.html").read_text()


def test_hf_moe_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    command = [sys.executable, str(ROOT / "examples" / "05_hf_moe.py")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), PATHS))}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "pip install transformers (not here)" in done.stderr and "Traceback" not in done.stderr


def test_fp8_with_rewritten_graphs_run_by_torch(tmp_path: Path) -> None:
    printed = run_example("06_fp8.py", "--steps", "4", "--batch", "2", folder=tmp_path, FXFUSE_LOWER="eager")
    table = re.findall(r"^(full precision|Float8\S+|\.\.\. gradients not) +(\S+) +(\S+) +(\S+)$", printed, re.MULTILINE)
    assert len(table) == 4 and all(float(row[3]) < 0.05 for row in table) and any(float(row[3]) > 0 for row in table[1:])
    assert "4 plans were built for 4 recipes; 12 calls found theirs" in printed
    assert "linears quantised: 3 in the forward, of 4 in the model" in printed
    kept = {recipe: float(mib) for mib, recipe in re.findall(r"fused +(\S+) MiB kept for the backward  (\S+)$", printed, re.M)}
    assert kept["Float8CurrentScaling()"] < kept["Recipe()"]
    assert "scaled_linear" in (tmp_path / "report_fp8.html").read_text()


def test_pattern_pack_installs_and_loads_when_named(tmp_path: Path) -> None:
    """Installed for real, beside an fxfuse that does not know it; its fusion fires only when the pack is named."""
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    copy = shutil.copytree(ROOT / "examples" / "pattern_pack", tmp_path / "pack")
    subprocess.run([*install, "--target", str(target), str(copy)], check=True, timeout=120)
    program = (
        "import torch, fxfuse, torch.nn.functional as F\n"
        "report = fxfuse.explain(lambda x, w: F.softplus(F.linear(x, w)))(torch.randn(4, 8), torch.randn(6, 8))\n"
        "print(report.count('linear_softplus'))"
    )
    for packs, count in (("", "0"), ("example", "1")):
        variables = os.environ | {"PYTHONPATH": f"{PATHS}{os.pathsep}{target}", "FXFUSE_PACKS": packs}
        done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == count, done.stdout + done.stderr
