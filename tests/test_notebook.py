"""``examples/inspect.ipynb`` runs, shows the report, and is committed without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


def test_inspect_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'patterns'}")
    notebook = nbformat.read(ROOT / "examples" / "inspect.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "strip the outputs before committing"
    NotebookClient(notebook, timeout=300).execute()
    shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert any("gated_mlp_silu" in data.get("text/html", "") for data in shown)
