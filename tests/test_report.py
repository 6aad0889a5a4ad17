"""Reports as data: counting, explaining, and a JSON form that is strict."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import fused, graph, missed, sample

from fxfuse.errors import CacheError
from fxfuse.report import Failure, Fused, GraphRecord, Missed, Report


def test_count_takes_a_glob_and_a_direction() -> None:
    report = sample()
    assert report.count("linear_gelu") == 4
    assert report.count("linear_*") == 5
    assert report.count("linear_*", "backward") == 4
    assert report.count("linear_add", graph="forward") == 1
    assert report.count("Linear_*") == 0
    with pytest.raises(ValueError, match="'forward' or 'backward'"):
        report.count("x", graph="joint")


def test_why_not_of_a_fusion_that_fired_says_where() -> None:
    text = sample().why_not("linear_gelu")
    assert text.startswith("linear_gelu fused 4 times:\n  layers.{0-3}.mlp  forward+backward  net.py:12")
    assert "Refused elsewhere:" in text and "3/4" in text


def test_why_not_of_a_near_miss_gives_reason_node_and_line() -> None:
    text = Report([graph(missed=(missed(),))]).why_not("linear_gelu")
    for part in ("did not fire", "3/4", "model has 'tanh'", "node gelu_9", "layers.4.mlp", "net.py:31"):
        assert part in text


def test_why_not_lists_the_best_miss_first() -> None:
    text = Report([graph(missed=(missed(matched=1, reason="far"), missed(matched=3, reason="near")))]).why_not("linear_gelu")
    assert text.index("near") < text.index("far")


def test_why_not_also_answers_for_nodes_that_another_fusion_took() -> None:
    report = Report([graph(fused=(fused(),), missed=(missed(name="linear_relu", node="gelu"),))])
    assert "3/4  linear_relu" in report.why_not("linear_relu")


def test_why_not_of_a_misspelled_name_suggests() -> None:
    assert "Did you mean 'linear_gelu'" in sample().why_not("linear_gelo")


def test_why_not_knows_the_registry_when_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = type(sys)("fxfuse.registry")
    registry.list_fusions = lambda: [type("F", (), {"name": "gated_mlp_gelu"})]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fxfuse.registry", registry)
    assert "no root op of that pattern occurs in the captured graphs (2)" in sample().why_not("gated_mlp_gelu")
    assert "no fusion of that name is registered. Did you mean 'gated_mlp_gelu'?" in sample().why_not("gated_mlp_gel")


def test_why_not_reports_a_failure() -> None:
    assert "Failed in launch: RuntimeError" in sample().why_not("gated_mlp_silu")


def test_report_needs_no_torch() -> None:
    code = (
        "import sys, types; p = types.ModuleType('fxfuse'); p.__path__ = [sys.argv[1]]; sys.modules['fxfuse'] = p\n"
        "from fxfuse.report import Report\n"
        "r = Report.from_json(Report().to_json()); str(r); r._repr_mimebundle_(); r.why_not('x')\n"
        "assert 'torch' not in sys.modules"
    )
    import fxfuse.report

    subprocess.run([sys.executable, "-c", code, str(Path(fxfuse.report.__file__).parent)], check=True)


def test_merge_keeps_the_order_and_names_every_recipe() -> None:
    merged = Report.merge([sample(), Report([graph(kind="inference")], recipe="strict", graph_hash="b"), sample()])
    assert [g.kind for g in merged.graphs] == ["joint", "inference", "inference", "joint", "inference"]
    assert (merged.recipe, merged.graph_hash) == ("default, strict", "a, b")
    assert Report.merge([]) == Report()


def test_repr_is_one_short_line() -> None:
    assert "\n" not in repr(sample()) and len(repr(sample())) < 200


# ------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize(("name", "start"), [("r.html", "<!doctype html>"), ("r.json", "{"), ("r.TXT", "fxfuse: 5 fused")])
def test_save_by_suffix(tmp_path: Path, name: str, start: str) -> None:
    sample().save(tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


def test_save_refuses_another_suffix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(".html, .json, .txt")):
        sample().save(tmp_path / "r.pdf")
    assert not list(tmp_path.iterdir())


def test_a_saved_page_names_no_folder(tmp_path: Path) -> None:
    sample().save(tmp_path / "r.html")
    assert "alice" not in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_unpaired_surrogates_round_trip_and_can_be_saved(tmp_path: Path) -> None:
    report = Report([graph(fused=(fused(layer="a\udc80b"),))])
    assert Report.from_json(report.to_json()) == report
    for suffix in ("html", "json", "txt"):
        report.save(tmp_path / f"r.{suffix}")


# ------------------------------------------------------------------------------------------------ JSON


names = st.text(max_size=8)
tuples = st.lists(names, max_size=3).map(tuple)
small = st.integers(-(2**53) + 1, 2**53 - 1)
fused_values = st.builds(Fused, names, names, tuples, tuples, names, names, tuples, names, tuples, tuples)
missed_values = st.builds(Missed, names, small, small, names, names, names, names, names)
graph_values = st.builds(
    GraphRecord,
    names,
    names,
    names,
    st.lists(fused_values, max_size=2).map(tuple),
    st.lists(missed_values, max_size=2).map(tuple),
    small,
    st.floats(0, 1e6),
)
reports = st.builds(
    Report, st.lists(graph_values, max_size=2), st.lists(st.builds(Failure, names, names, names), max_size=2), names, names
)


@settings(max_examples=60, deadline=None, database=None)
@given(reports)
def test_every_report_round_trips_and_renders(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report
    assert str(report) and report._repr_mimebundle_()["text/html"]
    for f in report.fused:
        report.to_mermaid(f"{f.name}#0")
        report.why_not(f.name)


def test_from_json_reads_bytes() -> None:
    assert Report.from_json(sample().to_json().encode()) == sample()


def change(**changes: object) -> str:
    return json.dumps({**json.loads(sample().to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a fxfuse report"),
        ("[]", "not a fxfuse report"),
        ("{}", "'fxfuse_report' is missing"),
        ("[" * 100_000, "not a fxfuse report"),
        (b"\xff\xfe\x00", "not a fxfuse report"),
        (change(fxfuse_report=99), "schema version 99"),
        (change(fxfuse_report=True), "schema version True"),
        (change(fxfuse_report="1"), "schema version '1'"),
        (change(extra=1), "unknown field 'extra'"),
        (change(recipe=None), "report.recipe: str is needed"),
        (change(graphs={}), "report.graphs: a list is needed"),
        (change(graphs=[1]), r"report.graphs\[0\]: an object is needed"),
        (json.dumps({"fxfuse_report": 2}), "missing field 'failures'"),
        (sample().to_json().replace('"nodes": 181', '"nodes": true'), r"report.graphs\[0\].nodes: int is needed"),
        (sample().to_json().replace('"nodes": 181', '"nodes": 1' + "0" * 400), "nodes: int is needed"),
        (sample().to_json().replace('"nodes": 181', '"nodes": 1' + "0" * 5000), "not a fxfuse report"),
        (sample().to_json().replace('"seconds": 0.0042', '"seconds": NaN'), "seconds: float is needed"),
        (sample().to_json().replace('"seconds": 0.0042', '"seconds": 1e999'), "seconds: float is needed"),
        (change(graphs=json.loads("[" * 200 + "]" * 200)), r"report.graphs\[0\]"),
    ],
)
def test_from_json_refuses(text: str | bytes, message: str) -> None:
    with pytest.raises(CacheError, match=message):
        Report.from_json(text)


def test_from_json_refuses_a_huge_text_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuse.report.MAX_JSON", 100)
    with pytest.raises(CacheError, match="at most 100 are read"):
        Report.from_json(sample().to_json())


def test_mutated_json_is_read_or_refused_and_nothing_else() -> None:
    source, rng = sample().to_json(), random.Random(0)
    tokens = ["null", "true", "-1", "1e400", '"', "{", "}", "[", "]", ",", ":", '"\\ud800"', "<script>", "\\u0000", "9" * 30]
    refused = 0
    for _ in range(1500):
        text = source
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(text))
            stop = min(len(text), start + rng.choice([0, 1, 1, 2, 30]))
            text = text[:start] + rng.choice([*tokens, chr(rng.randrange(1, 300)), text[start : start + 20]]) + text[stop:]
        try:
            report = Report.from_json(text)
        except CacheError:
            refused += 1
        else:
            assert dataclasses.is_dataclass(report) and str(report)
            report._repr_mimebundle_()
    assert refused > 500
