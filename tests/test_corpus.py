"""Programs written after public bug reports against compilers: each computes what eager computes.

``corpus/run.py`` runs them; here many cases share a child process, because importing torch takes longer than most cases.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fxfuse

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(p.stem for p in (CORPUS / "part_a").glob("case_*.py"))
STRICT = {"case_08_cast_is_a_rounding_boundary"}
"""Cases about explicit casts, which are rounding points under strict numerics only."""
WRONG_IN_INDUCTOR = {
    "case_11_copy_then_mutate_source": "pytorch#198131",
    "case_13_permute_is_not_transpose": "pytorch#195320",
}
THROUGH_INDUCTOR = [
    "case_01_addmm_alpha_beta",
    "case_06_zero_beta_ignores_nan",
    *STRICT,
    "case_12_intermediate_has_other_users",
    "case_16_stride0_tangent",
    *WRONG_IN_INDUCTOR,
]
TIMEOUT = 500.0


class Runner:
    """A child process that runs the cases it is told to, one after another, and is started again if one kills it."""

    def __init__(self, cache: Path, lower: str, recipe: str) -> None:
        package = Path(fxfuse.__file__).parent.parent
        path = [str(CORPUS), str(package), str(package / "patterns"), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "FXFUSE_LOWER": lower,
            "FXFUSE_RECIPE": recipe,
            "FXFUSE_CACHE_DIR": str(cache / "fxfuse"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        self.errors = cache / "stderr.txt"
        self.child: subprocess.Popen[str] | None = None

    def run(self, case: str) -> str:
        """The case's last line: PASS, SKIP and why, WRONG or RAISE and how."""
        if self.child is None:
            self.child = self._start()
        assert self.child.stdin is not None
        self.child.stdin.write(f"{CORPUS / 'part_a' / case}.py\n")
        self.child.stdin.flush()
        answer: queue.Queue[list[str]] = queue.Queue()
        threading.Thread(target=lambda: answer.put(self._lines()), daemon=True).start()
        try:
            lines = answer.get(timeout=TIMEOUT)
        except queue.Empty:
            self.close()
            return f"RAISE no answer within {TIMEOUT:.0f} s"
        if not lines:
            self.close()
            return f"RAISE the process died: {self.errors.read_text()[-2000:]}"
        return lines[-1]

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, str(CORPUS / "run.py"), "fxfuse", "--serve"]
        with self.errors.open("w") as errors:
            return subprocess.Popen(
                command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def _lines(self) -> list[str]:
        assert self.child is not None and self.child.stdout is not None
        lines: list[str] = []
        for line in self.child.stdout:
            if line.strip() == "DONE":
                return lines
            lines.append(line.strip())
        return []

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Runner]]:
    """A runner for each combination of lowering and recipe, made when it is first asked for."""
    runners: dict[tuple[str, str], Runner] = {}

    def get(*, lower: str, recipe: str = "default") -> Runner:
        if (lower, recipe) not in runners:
            runners[lower, recipe] = Runner(tmp_path_factory.mktemp("caches"), lower, recipe)
        return runners[lower, recipe]

    yield get
    for each in runners.values():
        each.close()


def check(status: str) -> None:
    if status.startswith("SKIP"):
        pytest.skip(status)
    assert status == "PASS"


@pytest.mark.parametrize("case", CASES)
def test_eager_lowering(case: str, runner: Callable[..., Runner]) -> None:
    check(runner(lower="eager", recipe="strict" if case in STRICT else "default").run(case))


def known_wrong(case: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.xfail(reason=WRONG_IN_INDUCTOR[case], strict=False)] if case in WRONG_IN_INDUCTOR else []


@pytest.mark.inductor
@pytest.mark.parametrize("case", [pytest.param(c, marks=known_wrong(c)) for c in THROUGH_INDUCTOR])
def test_through_inductor(case: str, runner: Callable[..., Runner]) -> None:
    check(runner(lower="auto", recipe="strict" if case in STRICT else "default").run(case))


def test_runner_reports_a_wrong_result_and_a_dead_process(tmp_path: Path, runner: Callable[..., Runner]) -> None:
    """The corpus can fail: a case that finds a difference, and one that ends its process, are not passes."""
    head = "SOURCE, KIND, NEEDS_CUDA, TRAIN, TOL = '', '', False, False, 0\n"
    wrong, dead = tmp_path / "wrong", tmp_path / "dead"
    wrong.with_suffix(".py").write_text(head + "def check(compile_fn, device):\n    assert compile_fn(lambda t: t + 1) is None\n")
    dead.with_suffix(".py").write_text(head + "import os\ndef check(compile_fn, device):\n    os._exit(7)\n")
    here = runner(lower="eager")
    assert here.run(str(wrong)).startswith("WRONG")
    assert here.run(str(dead)).startswith("RAISE the process died")
    assert here.run(CASES[0]) == "PASS"
