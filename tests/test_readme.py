"""The Python blocks of the README run, in order, in one namespace."""

import re
from pathlib import Path

import pytest

import fxfuse

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = README.read_text()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.S | re.M))
    assert len(blocks) >= 3
    with fxfuse.config.patch(lower="eager"):  # the same graphs without waiting for a compiler
        for block in blocks:
            line = text[: block.start(1)].count("\n")
            exec(compile("\n" * line + block[1], str(README), "exec"), namespace)


def test_fusions_that_the_readme_names_exist() -> None:
    table = README.read_text().split("## Built-in fusions")[1].split("\n## ")[0]
    names = {f.name for f in fxfuse.list_fusions() if f.pack == "builtin"}
    for row in re.findall(r"^\| `([^|]+)` \|", table, re.M):
        for name in row.split("`, `"):
            stem, _, _ = name.partition("{")
            assert any(n.startswith(stem) for n in names), f"the README names {name!r}, which is not registered"
