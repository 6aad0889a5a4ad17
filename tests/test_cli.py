"""``python -m fxfuse``: what each command prints, its exit code, and one clear line when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from report_samples import graph, missed, sample

import fxfuse
from fxfuse import doctor
from fxfuse.__main__ import main
from fxfuse.doctor import Check
from fxfuse.report import Report

SCRIPT = """
import sys
import fxfuse, torch, torch.nn.functional as F

def f(x, w, b):
    return F.gelu(F.linear(x, w, b))

torch.compile(f, backend="fxfuse", options={"lower": "eager"})(torch.randn(4, 8), torch.randn(16, 8), torch.randn(16))
print("arguments", sys.argv[1:], __name__)
"""


def environment() -> dict[str, str]:
    """In which a child process finds what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "fxfuse", *arguments]
    return subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=300)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that fails."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and err.endswith("\n"), (code, out, err)
    return err


def linear_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """gelu(x @ w.T + b).

    More text.
    """
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, w, b))


def fusion(**changes: Any) -> Any:
    """What the command line reads of a Fusion."""
    fields = {
        "name": "linear_gelu",
        "side": "joint",
        "recipes": None,
        "pack": "builtin",
        "source": "/somewhere/linear.py:12",
        "ready": True,
        "pattern": linear_gelu,
        "sample_inputs": lambda: [torch.randn(4, 8), torch.randn(16, 8), torch.randn(16)],
    }
    return types.SimpleNamespace(**{**fields, **changes})


# ------------------------------------------------------------------------------------------------ usage


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'docter'" in refused(capsys, "docter")
    assert "unrecognized arguments: --jsn" in refused(capsys, "doctor", "--jsn")
    assert "required: COMMAND" in refused(capsys)


@pytest.mark.parametrize("name", ["doctor", "fusions", "explain", "bench", "report"])
def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0 and "--json" in capsys.readouterr().out


def test_an_unexpected_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("first\nsecond\x1b[31m")

    monkeypatch.setattr(fxfuse, "list_fusions", broken, raising=False)
    assert refused(capsys, "fusions") == "fxfuse fusions: RuntimeError: first second\\x1b[31m\n"


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    Report([graph(missed=tuple(missed(name=f"f{i}" * 9) for i in range(20000)))]).save(file)
    program = f"{sys.executable} -m fxfuse report {file} --json | head -c 10"
    done = subprocess.run(["bash", "-c", program], env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 10, "")


# ------------------------------------------------------------------------------------------------ doctor


def test_doctor_exit_code_follows_the_blockers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "checks", lambda: [Check("torch", "ok", "2.13.0"), Check("gpu", "note", "none")])
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok    torch  2.13.0\nnote  gpu    none\n\nno blocker\n"
    monkeypatch.setattr(doctor, "checks", lambda: [Check("backend", "blocker", "missing")])
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "checks": [{"name": "backend", "state": "blocker", "detail": "missing"}],
    }


def test_a_look_that_raises_is_a_blocker_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def _odd_thing() -> list[Check]:
        raise OSError("no")

    monkeypatch.setattr(doctor, "_LOOKS", (_odd_thing, doctor._python))
    assert [(c.name, c.state) for c in doctor.checks()] == [("odd thing", "blocker"), ("python", "ok")]


def test_a_missing_private_name_is_a_blocker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuse.compat.probe", lambda: {"compile_fx": True, "tracing": False})
    assert [c.state for c in doctor._private_torch_names()] == ["ok", "blocker"]


def test_a_cache_that_others_can_write_is_noted(tmp_path: Path) -> None:
    with fxfuse.config.patch(cache_dir=str(tmp_path / "cache")):
        assert next(doctor._cache()).detail.endswith("(not there yet)")
        (tmp_path / "cache").mkdir(0o700)
        assert next(doctor._cache()).state == "ok"
        (tmp_path / "cache").chmod(0o777)
        assert "others may write to it" in next(doctor._cache()).detail


def test_an_untested_torch_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, state in (("2.10.1", "note"), ("2.11.0+cpu", "ok"), ("2.14.1", "ok"), ("3.0.0a0+git1", "note")):
        monkeypatch.setattr(torch, "__version__", version)
        assert next(doctor._torch()).state == state


def test_doctor_finds_no_blocker_here() -> None:
    found = doctor.checks()
    assert not [c for c in found if c.state == "blocker"]
    assert {"python", "torch", "backend", "pack builtin", "cache"} <= {c.name for c in found}


# ------------------------------------------------------------------------------------------------ fusions


def test_fusions_as_text_and_as_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [fusion(), fusion(name="mine", side="forward", recipes=("default",), pack="", ready=False)]
    monkeypatch.setattr(fxfuse, "list_fusions", lambda: found, raising=False)
    assert main(["fusions"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "side", "recipes", "pack", "source", "what"]
    assert first.split(maxsplit=5) == ["linear_gelu", "joint", "all", "builtin", "/somewhere/linear.py:12", "gelu(x @ w.T + b)."]
    assert "inactive" in second
    assert main(["fusions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0] == {
        "name": "linear_gelu",
        "side": "joint",
        "recipes": None,
        "pack": "builtin",
        "source": "/somewhere/linear.py:12",
        "ready": True,
        "doc": "gelu(x @ w.T + b).",
    }


def test_the_real_fusions_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fusions", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["linear_gelu"]["side"] == "joint" and rows["linear_gelu"]["pack"] == "builtin"
    assert all(row["source"].rpartition(":")[2].isdigit() for row in rows.values())


# ------------------------------------------------------------------------------------------------ explain


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Report]:
    """The reports that ``fxfuse.reports()`` gives."""
    found = [sample(), Report([graph("inference")])]
    monkeypatch.setattr(fxfuse, "reports", lambda: found, raising=False)
    monkeypatch.setattr(fxfuse, "reset", lambda: None, raising=False)
    return found


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_explain_prints_all_reports_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: list[Report]) -> None:
    file = script(tmp_path, "import sys\nprint('hello', sys.argv[1:], __name__)")
    assert main(["explain", file, "--json", "--", "--steps", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == "hello ['--steps', '3'] __main__\n"
    assert Report.from_json(out) == Report.merge(recorded)
    assert main(["explain", file]) == 0
    assert capsys.readouterr().out == f"hello [] __main__\n{Report.merge(recorded)}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys\nsys.exit(3)", "exited with 3"),
        ("x = 1\n1 / 0", "raised ZeroDivisionError: division by zero (line 2)"),
        ("def f(:", "raised SyntaxError"),
    ],
)
def test_explain_of_a_script_that_fails_still_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: list[Report], text: str, message: str
) -> None:
    argv, path = list(sys.argv), list(sys.path)
    assert main(["explain", script(tmp_path, text)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("fxfuse: 5 fused") and message in err and err.count("\n") == 1
    assert (sys.argv, sys.path) == (argv, path)


def test_explain_of_a_clean_exit_is_no_error(tmp_path: Path, recorded: list[Report]) -> None:
    assert main(["explain", script(tmp_path, "import sys\nsys.exit(0)")]) == 0


def test_explain_says_when_nothing_was_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: list[Report]
) -> None:
    recorded.clear()
    assert main(["explain", script(tmp_path, "")]) == 0
    assert 'compiled nothing with torch.compile(..., backend="fxfuse")' in capsys.readouterr().err


def test_explain_of_no_file(capsys: pytest.CaptureFixture[str], recorded: list[Report]) -> None:
    assert refused(capsys, "explain", "/nowhere/x.py") == "fxfuse explain: no such file: /nowhere/x.py\n"


def test_explain_in_a_fresh_process(tmp_path: Path) -> None:
    done = command("explain", script(tmp_path, SCRIPT), "--json", "--", "a", "--b")
    assert done.returncode == 0, done.stderr
    report = Report.from_json(done.stdout)
    assert report.count("linear_gelu") == 1
    assert "script.py:6" in report.fused[0].source
    assert "arguments ['a', '--b'] __main__" in done.stderr


# ------------------------------------------------------------------------------------------------ report


def test_report_prints_what_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    sample().save(file)
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out == f"{sample()}\n"
    assert main(["report", str(file), "--json"]) == 0
    assert Report.from_json(capsys.readouterr().out) == sample()
    assert main(["report", str(file), "--html", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_report_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "r.json", tmp_path / "bad.json"
    sample().save(good)
    bad.write_text("{")
    assert "cannot read /nowhere.json: No such file" in refused(capsys, "report", "/nowhere.json")
    assert "CacheError: not a fxfuse report" in refused(capsys, "report", str(bad))
    assert "must end in .html" in refused(capsys, "report", str(good), "--html", str(tmp_path / "r.pdf"))
    assert "No such file" in refused(capsys, "report", str(good), "--html", "/nowhere/r.html")


# ------------------------------------------------------------------------------------------------ bench


def test_bench_of_an_unknown_name_suggests(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxfuse, "list_fusions", lambda: [fusion()], raising=False)
    assert "no fusion 'linear_gelo'; did you mean 'linear_gelu'?" in refused(capsys, "bench", "linear_gelo")
    assert "no fusion 'q'; see: fxfuse fusions" in refused(capsys, "bench", "q")


def test_bench_times_every_backend_and_survives_one_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(function: Any, backend: str) -> Any:
        if backend == "inductor":
            raise RuntimeError("no compiler\nlong story")
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(fxfuse, "list_fusions", lambda: [fusion()], raising=False)
    monkeypatch.setattr(fxfuse, "last_report", sample, raising=False)
    assert main(["bench", "linear_gelu", "--seconds", "0.01", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["inputs"] == ["float32 [4, 8]", "float32 [16, 8]", "float32 [16]"]
    eager, inductor, fused = data["results"]
    assert eager["microseconds"] > 0 and fused["microseconds"] > 0 and fused["note"] == "fused"
    assert inductor == {
        "backend": "inductor",
        "microseconds": None,
        "iqr": None,
        "error": "RuntimeError: no compiler",
        "note": "",
    }
    assert main(["bench", "linear_gelu", "--seconds", "0.01"]) == 0
    assert "RuntimeError: no compiler" in capsys.readouterr().out


@pytest.mark.inductor
@pytest.mark.slow
def test_bench_of_a_real_fusion() -> None:
    done = command("bench", "linear_gelu", "--seconds", "0.05", "--json")
    assert done.returncode == 0, done.stderr
    results = {r["backend"]: r for r in json.loads(done.stdout)["results"]}
    assert all(r["microseconds"] for r in results.values()), results
    assert results["fxfuse"]["note"] == "fused"
