"""Pattern packs: loaded by their entry point, or not at all."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fxfuse
from fxfuse import PatternError, registry


def is_registered(name: str) -> bool:
    return any(f.name == name for f in fxfuse.list_fusions())


GOOD = """
import fxfuse

@fxfuse.register_forward_fusion(name="pack_sincos")
def sincos(x):
    return x.sin().cos()

sincos.rewrite(lambda x: x.sin().cos())
"""
BROKEN = {
    "an exception": ("raise ValueError('the pack is broken\\nin two lines')", "ValueError: the pack is broken"),
    "an import": ("import a_module_that_is_not_there", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
    "a syntax error": ("def", "SyntaxError"),
    "a wrong rewrite": (
        "fusion = fxfuse.register_forward_fusion(name='pack_wrong')(lambda x: x.cos())\nfusion.rewrite(lambda x: x.sin())",
        "PatternError: fusion 'pack_wrong' at .*relative error",
    ),
}


class Pack:
    """A pattern pack on disk that an entry point names."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "sample_pack.py"

    def write(self, text: str) -> None:
        self.file.write_text(text)
        importlib.invalidate_caches()


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pack]:
    installed = metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        point = metadata.EntryPoint("sample", "sample_pack", registry.ENTRY_POINT_GROUP)
        return (
            [*installed(**selection), point] if selection.get("group") == registry.ENTRY_POINT_GROUP else installed(**selection)
        )

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Pack(tmp_path)
    sys.modules.pop("sample_pack", None)
    registry._packs.pop("sample", None)


def test_a_pack_registers_its_fusions(pack: Pack) -> None:
    pack.write(GOOD)
    fxfuse.load_pack("sample")
    (fusion,) = [f for f in fxfuse.list_fusions() if f.pack == "sample"]
    assert (fusion.name, fusion.ready) == ("pack_sincos", True)
    assert registry.packs()["sample"] == ""
    fxfuse.load_pack("sample")
    assert [f for f in fxfuse.list_fusions() if f.pack == "sample"] == [fusion]


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_pack_that_fails_to_import_leaves_nothing(pack: Pack, text: str, message: str) -> None:
    before = fxfuse.list_fusions()
    pack.write(GOOD + text)
    with pytest.raises(PatternError, match=rf"pack 'sample' \(sample_pack\) failed to import: {message}") as refusal:
        fxfuse.load_pack("sample")
    assert "\n" not in str(refusal.value)
    assert fxfuse.list_fusions() == before
    assert "sample_pack" not in sys.modules
    assert registry.packs()["sample"]
    assert registry.loading_pack() == ""
    pack.write(GOOD)
    fxfuse.load_pack("sample")
    assert is_registered("pack_sincos")
    assert registry.packs()["sample"] == ""


def test_a_pack_that_is_named_in_the_environment_and_broken_is_one_warning(pack: Pack) -> None:
    pack.write("raise ValueError('the pack is broken')")
    before = fxfuse.list_fusions()
    with fxfuse.config.patch(packs="sample"):
        with pytest.warns(fxfuse.FxfuseWarning, match="the pack is broken"):
            assert fxfuse.list_fusions() == before
        assert fxfuse.list_fusions() == before


def test_a_pack_that_is_not_installed_is_refused(pack: Pack) -> None:
    with pytest.raises(PatternError, match=r"pack 'smaple' is not installed; installed packs: .*sample"):
        fxfuse.load_pack("smaple")
