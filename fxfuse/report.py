"""What happened to each captured graph, as data. ``display`` draws it, ``trace`` logs it; neither changes it."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import reprlib
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .errors import CacheError
from .naming import is_called

__all__ = ["Failure", "Fused", "GraphRecord", "Missed", "Report"]

SCHEMA = 2
"""Version of the JSON form: raised whenever a field is added, removed or changes its meaning."""
MAX_JSON = 64 << 20
"""Characters; a longer text is refused before it is parsed."""


@dataclasses.dataclass(frozen=True)
class Fused:
    """One region that a fusion replaced."""

    name: str
    """The fusion's name."""
    graph: str
    """The kind of graph it was found in: ``"inference"``, ``"joint"``, ``"forward"`` or ``"backward"``."""
    directions: tuple[str, ...]
    """Which passes it replaced: ``("forward",)``, ``("backward",)`` or both."""
    ops: tuple[str, ...]
    """The aten ops that it replaced, in graph order."""
    source: str
    """The user's line: ``file:line`` and, when it is readable, the code."""
    layer: str
    """The module path, such as ``layers.3.mlp``; empty for plain functions."""
    saved: tuple[str, ...]
    """What the region itself keeps for its backward (values that it computes; its inputs are not listed)."""
    kernel: str
    """The lowering that was chosen: ``"inline"``, ``"extern"``, ``"triton"``, ``"hopper"``, or ``"custom"`` for a user's own
    op."""
    before: tuple[str, ...] = ()
    """Names of the replaced nodes in ``GraphRecord.before``."""
    after: tuple[str, ...] = ()
    """Names of the inserted nodes in ``GraphRecord.after``."""
    choices: tuple[str, ...] = ()
    """For each operator whose lowering was chosen (on a GPU): the milliseconds of the candidates when they were measured, the
    chosen one first, and why others may not run."""


@dataclasses.dataclass(frozen=True)
class Missed:
    """The nearest that one fusion came to firing at one place, and what stopped it."""

    name: str
    matched: int
    """How many of the pattern's values were found."""
    total: int
    """How many values the pattern has."""
    reason: str
    node: str
    source: str
    layer: str = ""
    graph: str = ""

    @property
    def progress(self) -> float:
        """``matched / total``, between 0 and 1."""
        return self.matched / self.total if self.total else 0.0


@dataclasses.dataclass(frozen=True)
class Failure:
    """Something inside fxfuse raised; the unfused form ran instead."""

    stage: str
    """``"match"``, ``"lower"``, ``"compile"``, ``"launch"``, ``"backward"`` or ``"verify"``."""
    name: str
    """The fusion, or empty when the whole graph was affected."""
    error: str


@dataclasses.dataclass(frozen=True)
class GraphRecord:
    """One graph: before, after, and what happened in between."""

    kind: str
    """``"inference"``, ``"joint"``, ``"forward"`` or ``"backward"`` (the last two: halves of a nested region)."""
    before: str
    """The captured graph as Python code."""
    after: str
    """The rewritten graph as Python code, before lowering."""
    fused: tuple[Fused, ...] = ()
    missed: tuple[Missed, ...] = ()
    nodes: int = 0
    seconds: float = 0.0
    """Time that the rewriting took."""


@dataclasses.dataclass
class Report:
    """Everything that happened while one frame was compiled (or, from ``explain``, several frames)."""

    graphs: list[GraphRecord] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    recipe: str = ""
    graph_hash: str = ""

    @property
    def fused(self) -> list[Fused]:
        """Every fused region, in graph order."""
        return [f for g in self.graphs for f in g.fused]

    @property
    def missed(self) -> list[Missed]:
        """The best near miss of each fusion at each place, best first."""
        return sorted((m for g in self.graphs for m in g.missed), key=lambda m: -m.progress)

    def __repr__(self) -> str:
        from . import display

        return f"<Report: {display.headline(self)}>"

    def __str__(self) -> str:
        from . import display

        return display.text(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from . import display, page

        return {"text/plain": display.text(self), "text/html": page.fragment(self)}

    def count(self, name: str, graph: str | None = None) -> int:
        """How many regions were fused by the fusions called ``name``.

        Args:
            name: a fusion's name, the name of a family (``"grouped_mlp"`` for ``"grouped_mlp[sorted, packed silu]"`` and
                the like), or a glob such as ``"linear_*"``.
            graph: ``"forward"`` or ``"backward"``: only regions that replaced something in that pass.
        """
        if graph not in (None, "forward", "backward"):
            raise ValueError(f"count({name!r}, graph={graph!r}): graph is 'forward' or 'backward'")
        called = [f for f in self.fused if is_called(f.name, name) or fnmatch.fnmatchcase(f.name, name)]
        return sum(graph is None or graph in f.directions for f in called)

    def why_not(self, name: str) -> str:
        """Why the fusion ``name`` did not fire: its nearest misses, each with reason and source line; or where it did fire."""
        from . import display

        return display.why_not(self, name, _registered())

    def to_mermaid(self, region: str) -> str:
        """One fused region as Mermaid text (GitHub and Jupyter draw it): ``"linear_gelu#2"`` is the third one of that name.

        Raises:
            ValueError: the report has no such region.
        """
        from . import page

        name, mark, number = region.rpartition("#")
        if not mark:
            name, number = region, "0"
        found = [(g, f) for g in self.graphs for f in g.fused if is_called(f.name, name)]
        if not number.isdecimal() or int(number) >= len(found):
            known = ", ".join(f"{n}#0..{self.count(n) - 1}" for n in dict.fromkeys(f.name for f in self.fused)) or "none"
            raise ValueError(f"no fused region {region!r} in this report; it has: {known}")
        return page.mermaid(*found[int(number)])

    def save(self, path: str | Path) -> None:
        """Write the report as a page (``.html``, folders cut from paths), as data (``.json``) or as text (``.txt``)."""
        from . import display, page

        render: dict[str, Callable[[Report], str]] = {".html": page.page, ".json": Report.to_json, ".txt": display.text}
        suffix = Path(path).suffix.lower()
        if suffix not in render:
            raise ValueError(f"cannot save a report as {str(path)!r}: the name must end in {', '.join(render)}")
        Path(path).write_text(render[suffix](self), encoding="utf-8", errors="backslashreplace")

    def to_json(self) -> str:
        """The whole report as JSON; ``from_json`` reads it back to an equal report."""
        return json.dumps({"fxfuse_report": SCHEMA, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read what ``to_json`` wrote.

        Raises:
            CacheError: not JSON, another schema version, an unknown or missing field, or a value of the wrong type.
        """
        if len(text) > MAX_JSON:
            raise CacheError(f"not a fxfuse report: {len(text):,} characters, at most {MAX_JSON:,} are read")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CacheError(f"not a fxfuse report: {error}") from None
        if not isinstance(data, dict) or "fxfuse_report" not in data:
            raise CacheError("not a fxfuse report: the key 'fxfuse_report' is missing")
        version = data.pop("fxfuse_report")
        if type(version) is not int or version != SCHEMA:
            raise CacheError(f"report of schema version {reprlib.repr(version)}; this fxfuse reads version {SCHEMA}")
        return _decode(cls, data, "report")

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """One report of several compilations, in their order."""
        parts = list(reports)
        return cls(
            graphs=[g for r in parts for g in r.graphs],
            failures=[f for r in parts for f in r.failures],
            recipe=", ".join(dict.fromkeys(r.recipe for r in parts if r.recipe)),
            graph_hash=", ".join(dict.fromkeys(r.graph_hash for r in parts if r.graph_hash)),
        )


def _registered() -> dict[str, Sequence[str] | None] | None:
    """Names of the registered fusions and the recipes they are for (None: all); None when no registry is loaded, as when a saved
    report is read elsewhere.

    Looked up, not imported: a report is data, and reading one must load neither torch nor the patterns.
    """
    listing = getattr(sys.modules.get("fxfuse.registry"), "list_fusions", None)
    return None if listing is None else {fusion.name: getattr(fusion, "recipes", None) for fusion in listing()}


def _decode(kind: Any, value: Any, where: str) -> Any:
    """``value``, parsed from JSON, as the type that a field of the dataclasses above declares."""
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, value, where)
    if origin := typing.get_origin(kind):
        if not isinstance(value, list):
            raise CacheError(f"{where}: a list is needed, not {reprlib.repr(value)}")
        item = typing.get_args(kind)[0]
        return origin(_decode(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind or (kind in (int, float) and not abs(value) < 2**53):  # also NaN
        raise CacheError(f"{where}: {kind.__name__} is needed, not {reprlib.repr(value)}")
    return value


def _decode_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise CacheError(f"{where}: an object is needed, not {reprlib.repr(value)}")
    types = typing.get_type_hints(kind)
    if odd := sorted(types.keys() ^ value.keys()):
        raise CacheError(f"{where}: {'missing' if odd[0] in types else 'unknown'} field {reprlib.repr(odd[0])}")
    return kind(**{name: _decode(types[name], value[name], f"{where}.{name}") for name in types})
