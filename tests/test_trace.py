"""What is logged, at which level, and what tlparse gets."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from report_samples import graph, missed, sample

from fxfuse import trace
from fxfuse.report import Report

Artifacts = dict[str, tuple[str, Callable[[], str]]]


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> Artifacts:
    """What was handed to TORCH_TRACE: name -> encoding and payload, not run yet."""
    found: Artifacts = {}
    monkeypatch.setattr(trace, "trace_artifact", lambda name, encoding, payload: found.update({name: (encoding, payload)}))
    return found


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    caplog.set_level(level, logger="fxfuse")
    trace.emit(sample())
    assert {r.name for r in caplog.records} <= {"fxfuse"}
    return [f"{r.levelname} {r.getMessage()}" for r in caplog.records]


def test_info_is_one_line_a_graph(caplog: pytest.LogCaptureFixture, artifacts: Artifacts) -> None:
    assert messages(caplog, logging.INFO) == [
        "INFO joint: fused linear_gelu x4, linear_add x1; missed linear_gelu x2, linear_relu x1 "
        "(report.why_not('linear_gelu')); 181 nodes, 4.2 ms",
        "INFO inference: nothing fused; 181 nodes, 4.2 ms",
        "INFO failed in launch, runs unfused: gated_mlp_silu: RuntimeError: out of shared memory at k.py:3",
    ]


def test_debug_adds_one_line_a_near_miss(caplog: pytest.LogCaptureFixture, artifacts: Artifacts) -> None:
    debug = [m for m in messages(caplog, logging.DEBUG) if m.startswith("DEBUG")]
    assert len(debug) == 3
    assert debug[0] == (
        "DEBUG missed linear_gelu 3/4 at gelu_9 (layers.4.mlp): gelu: pattern has approximate 'none', model has 'tanh' "
        "[net.py:31 F.gelu(y, approximate='tanh')]"
    )


def test_a_pattern_of_which_little_was_found_is_only_debug() -> None:
    assert trace.graph_line(graph(missed=(missed(matched=1, total=9),))) == "joint: nothing fused; 181 nodes, 4.2 ms"


def test_nothing_is_logged_by_default(caplog: pytest.LogCaptureFixture, artifacts: Artifacts) -> None:
    assert messages(caplog, logging.WARNING) == []


def test_artifacts_are_lazy_and_complete(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "to_json", lambda self: pytest.fail("the payload ran although nobody asked for it"))
    trace.emit(sample())
    monkeypatch.undo()
    assert {name: encoding for name, (encoding, _) in artifacts.items()} == {
        "fxfuse_report": "json",
        "fxfuse_before": "string",
        "fxfuse_after": "string",
    }


def test_artifact_payloads(artifacts: Artifacts) -> None:
    trace.emit(sample())
    assert Report.from_json(artifacts["fxfuse_report"][1]()) == sample()
    assert artifacts["fxfuse_before"][1]().count("def forward") == 2
    assert "linear_act_backward" in artifacts["fxfuse_after"][1]()


def test_a_log_line_stays_one_line(caplog: pytest.LogCaptureFixture, artifacts: Artifacts) -> None:
    caplog.set_level(logging.DEBUG, logger="fxfuse")
    trace.emit(Report([graph("joint\n\x1b[31mfake")]))
    assert caplog.records[0].getMessage().startswith("joint \\x1b[31mfake: nothing fused")


SCRIPT = """
import fxfuse, torch, torch.nn.functional as F
torch.set_num_threads(1)

def f(x, w, b, v):
    return F.gelu(F.linear(x, w, b)) + F.gelu(F.linear(x, v) * 3)

args = [torch.randn(*shape) for shape in ((4, 8), (16, 8), (16,), (16, 8))]
torch.compile(f, backend="fxfuse", options={"lower": "eager"})(*args)
"""


def compile_under(tmp_path: Path, **environment: str) -> str:
    """What a small compilation writes to stderr with these environment variables."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_torch_logs_and_torch_trace(tmp_path: Path) -> None:
    logs = compile_under(tmp_path, TORCH_LOGS="+fxfuse", TORCH_TRACE=str(tmp_path / "trace"))
    assert "inference: fused linear_gelu x1" in logs
    assert "] missed linear_gelu_tanh" in logs
    written = "".join(p.read_text() for p in (tmp_path / "trace").rglob("*.log"))
    headers = [json.loads(line.partition("] ")[2]) for line in written.splitlines() if '{"artifact"' in line and line[0] != "\t"]
    assert {h["artifact"]["name"] for h in headers} >= {"fxfuse_report", "fxfuse_before", "fxfuse_after"}


def test_torch_logs_without_plus_has_no_near_misses(tmp_path: Path) -> None:
    logs = compile_under(tmp_path, TORCH_LOGS="fxfuse")
    assert "inference: fused linear_gelu x1" in logs and "] missed" not in logs
