"""The kernels' arithmetic on a CPU: ``interpreted.py`` in a process of its own, since Triton's interpreter is a global switch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["test_up", "test_matmul", "test_dh", "not test_up and not test_matmul and not test_dh"])
def test_kernels_match_their_twins(part: str) -> None:
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreted.py"), "-q", "-x", "-k", part]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest", "-c", os.devnull, f"--rootdir={ROOT}"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'patterns'}", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
