"""How a Report reads: what is grouped with what, and the text for a terminal. Pure functions; ``page`` draws the HTML.

Every string that comes from the user's program (names, lines, reasons, error texts) passes ``plain`` on its way into text,
``esc`` into HTML, at the place where it is written and nowhere else.
"""

from __future__ import annotations

import dataclasses
import difflib
import html as _html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from .naming import is_called
from .report import Fused, Missed, Report

MISSES = 12
"""Most refusals listed in text."""
NEAR = 0.5
"""A pattern of which less was found is not a near miss: those are only named."""

# An absolute path up to its last part, or up to the installed package: where a report is shown, nobody needs the rest.
_FOLDERS = re.compile(
    r"""(?<![\w./\\])(?:[A-Za-z]:)?[/\\](?:[^/\\\s:"'<>]+[/\\])*?"""
    r"""(?:(?:site|dist)-packages[/\\]|(?=[^/\\\s:"'<>]+\.\w+(?![^\s:"',)])))"""
)


def printable(value: object, width: int = 2000) -> str:
    """``value`` on one line, with control characters spelled out: a terminal would obey them."""
    text = " ".join(str(value)[: 2 * width].split())
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= width else text[: width - 3] + "..."


def plain(value: object, width: int = 2000) -> str:
    """``printable``, with folders cut from paths."""
    return printable(_FOLDERS.sub("", str(value)[: 2 * width]), width)


def esc(value: object, width: int = 2000) -> str:
    """``value`` for HTML, as text or inside a quoted attribute."""
    return _html.escape(plain(value, width), quote=True)


# ------------------------------------------------------------------------------------------------ grouping


@dataclasses.dataclass(frozen=True)
class Group:
    """Regions that differ only in the number of their layer: one row of the table."""

    first: Fused
    layers: str
    saved: str
    regions: tuple[int, ...]
    """Numbers of the regions, counted from 1 through the whole report."""

    @property
    def passes(self) -> str:
        return "+".join(self.first.directions)


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Near misses of one fusion for one reason."""

    first: Missed
    layers: str
    times: int


def groups(report: Report) -> list[Group]:
    """The fused regions by layer, in graph order, numbered layers side by side: ``layers.{0-31}.mlp``."""
    rows: dict[tuple[object, ...], list[tuple[int, Fused]]] = {}
    for number, f in enumerate(report.fused, 1):
        key = (_template(f.layer), f.name, f.directions, f.kernel, f.source, tuple(map(_stem, f.saved)))
        rows.setdefault(key, []).append((number, f))
    order = {layer: i for i, layer in reversed(list(enumerate(key[0] for key in rows)))}
    return [
        Group(
            first=members[0][1],
            layers=compact(f.layer for _, f in members),
            saved=_saved([f.saved for _, f in members]),
            regions=tuple(number for number, _ in members),
        )
        for _, members in sorted(rows.items(), key=lambda row: order[row[0][0]])
    ]


def refusals(report: Report) -> list[Refusal]:
    """The near misses worth reading, best first: identical ones once, none inside a region that another fusion took."""
    rows: dict[tuple[str, str], list[Missed]] = {}
    for graph in report.graphs:
        taken = {node for f in graph.fused for node in f.before}
        for m in graph.missed:
            if m.node not in taken:
                rows.setdefault((m.name, re.sub(r"_\d+\b", "", m.reason)), []).append(m)
    found = [Refusal(max(ms, key=lambda m: m.progress), compact(m.layer for m in ms), len(ms)) for ms in rows.values()]
    return sorted(found, key=lambda r: (-r.first.progress, -r.times))


def near(missed: Sequence[Refusal]) -> list[Refusal]:
    """Those that came near enough to be counted."""
    return [r for r in missed if r.first.progress >= NEAR]


def compact(layers: Iterable[str]) -> str:
    """``layers.0.mlp, layers.1.mlp, layers.3.mlp`` as ``layers.{0,1,3}.mlp``; runs of four and more as ``{0-31}``."""
    found: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for layer in dict.fromkeys(layers):
        found.setdefault(_template(layer), []).append(tuple(int(p) for p in layer.split(".") if _is_number(p)))
    return ", ".join(text for template, indices in found.items() for text in _spellings(template, indices)) or "-"


def _spellings(template: tuple[str, ...], indices: Sequence[tuple[int, ...]]) -> list[str]:
    columns = [sorted(set(column)) for column in zip(*indices, strict=True)]
    if math.prod(map(len, columns)) == len(indices):
        numbers = map(_braces, columns)
        return [".".join(next(numbers) if part == "#" else part for part in template)]
    split = next(i for i, column in enumerate(columns) if len(column) > 1)
    return [t for n in columns[split] for t in _spellings(template, [i for i in indices if i[split] == n])]


def _braces(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{ranges(numbers)}}}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs of four and more abbreviated: ``0-31,40``."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 3 else ",".join(map(str, r)) for r in runs)


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 10


def _template(layer: str) -> tuple[str, ...]:
    return tuple("#" if _is_number(part) else part for part in layer.split("."))


def _saved(saved: Sequence[tuple[str, ...]]) -> str:
    """What each of several regions saves: by name when they agree, else names without their numbers."""
    if len(set(saved)) == 1:
        return ", ".join(saved[0])
    return ", ".join(dict.fromkeys(f"{_stem(s)}_*" for s in saved[0]))


def _stem(node: str) -> str:
    return re.sub(r"_\d+$", "", node)


# ------------------------------------------------------------------------------------------------ text


def headline(report: Report) -> str:
    """``5 fused, 2 missed (best: ...)``."""
    if not report.graphs and not report.failures:
        return "no graph was captured"
    missed = near(refusals(report))
    text = f"{len(report.fused)} fused, {sum(r.times for r in missed)} missed"
    if missed:
        m = missed[0].first
        text += f" (best: {plain(m.name)} {m.matched}/{m.total}, {plain(m.reason, 120)})"
    return text + (f", {len(report.failures)} failed" if report.failures else "")


def choices(report: Report) -> list[str]:
    """How the lowerings were chosen, once each."""
    return list(dict.fromkeys(c for f in report.fused for c in f.choices))


def text(report: Report) -> str:
    """The report for a terminal."""
    blocks = [f"fxfuse: {headline(report)}"]
    if report.graphs:
        blocks[0] += f"\n{plain(_graphs_line(report))}"
    if fused := groups(report):
        rows = [("layer", "fusion", "passes", "saved", "kernel", "source"), *map(_row, fused)]
        blocks.append(_table(rows))
    if told := choices(report):
        blocks.append("\n".join(["kernels (the chosen one first)", *(f"  {plain(c, 400)}" for c in told)]))
    if missed := refusals(report):
        blocks.append("\n".join(["missed (of the pattern's values, so many were found)", *_missed_lines(missed)]))
    if report.failures:
        lines = [f"  {plain(f.stage)}  {plain(f.name) or '(whole graph)'}  {plain(f.error, 400)}" for f in report.failures]
        blocks.append("\n".join(["failed (the unfused form ran)", *lines]))
    return "\n\n".join(blocks)


def _graphs_line(report: Report) -> str:
    kinds = dict.fromkeys(g.kind for g in report.graphs)
    counted = ", ".join(f"{sum(g.kind == kind for g in report.graphs)} {kind}" for kind in kinds)
    nodes, ms = sum(g.nodes for g in report.graphs), 1e3 * sum(g.seconds for g in report.graphs)
    recipe = f", recipe {'default' if report.recipe == 'Recipe()' else report.recipe}" if report.recipe else ""
    return f"graphs: {counted}; {nodes} nodes, rewritten in {ms:.1f} ms{recipe}"


def _row(group: Group) -> tuple[str, ...]:
    f = group.first
    name = f.name if len(group.regions) == 1 else f"{f.name} x{len(group.regions)}"
    return (group.layers, name, group.passes, group.saved or "-", f.kernel, f.source)


def _table(rows: Sequence[Sequence[str]]) -> str:
    cells = [[plain(cell, 100 if i == len(row) - 1 else 44) for i, cell in enumerate(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _missed_lines(missed: Sequence[Refusal]) -> list[str]:
    close = near(missed)
    rest = dict.fromkeys(plain(r.first.name) for r in missed[len(close[:MISSES]) :])
    lines = [line for r in close[:MISSES] for line in _refusal_lines(r)]
    return lines + ([f"  further off: {', '.join(rest)}"] if rest else [])


def _refusal_lines(r: Refusal) -> list[str]:
    m, times = r.first, f" x{r.times}" if r.times > 1 else ""
    where = ", ".join(filter(None, (r.layers if r.layers != "-" else "", f"node {m.node}" if m.node else "", m.graph)))
    return [
        f"  {m.matched}/{m.total}  {plain(m.name)}{times}: {plain(m.reason, 400)}",
        f"       {plain(where, 200)}" + (f"  {plain(m.source, 160)}" if m.source else ""),
    ]


def why_not(report: Report, name: str, registered: Mapping[str, Sequence[str] | None] | None) -> str:
    """The answer of ``Report.why_not``; ``registered``: the names that exist, each with the recipes it is for (None: all); None
    when that is not known.
    """
    fired = [g for g in groups(report) if is_called(g.first.name, name)]
    missed = [r for r in _every_refusal(report) if is_called(r.first.name, name)]
    lines = []
    if fired:
        lines.append(f"{plain(name)} fused {_times(sum(len(g.regions) for g in fired))}:")
        lines += [f"  {plain(g.layers)}  {plain(g.passes)}  {plain(g.first.source)}" for g in fired]
    if missed:
        lines.append("Refused elsewhere:" if fired else f"{plain(name)} did not fire. Nearest, by values of the pattern found:")
        lines += [line for r in missed[:MISSES] for line in _refusal_lines(r)]
    lines += [f"Failed in {plain(f.stage)}: {plain(f.error)}" for f in report.failures if is_called(f.name, name)]
    return "\n".join(lines) or _nothing_near(report, name, registered)


def _every_refusal(report: Report) -> list[Refusal]:
    """Also those inside regions that another fusion took."""
    return refusals(Report([dataclasses.replace(g, fused=()) for g in report.graphs]))


def _nothing_near(report: Report, name: str, registered: Mapping[str, Sequence[str] | None] | None) -> str:
    of_this_name = {r: recipes for r, recipes in (registered or {}).items() if is_called(r, name)}
    limited = {recipe for recipes in of_this_name.values() for recipe in recipes or ()}
    if of_this_name and None not in of_this_name.values():
        under = " or ".join(sorted(limited))
        return f"{plain(name)} did not fire: it runs under {under} recipes, this one is {plain(report.recipe)}."
    if of_this_name:
        return f"{plain(name)} did not fire: no root op of that pattern occurs in the captured graphs ({len(report.graphs)})."
    known = {f.name for f in report.fused} | {m.name for m in report.missed} | set(registered or ())
    close = difflib.get_close_matches(name, sorted(known), n=3)
    hint = f" Did you mean {' or '.join(repr(plain(c)) for c in close)}?" if close else ""
    what = "no fusion of that name is registered." if registered is not None else "that name is not in this report."
    return f"{plain(name)}: {what}{hint}"


def _times(n: int) -> str:
    return "once" if n == 1 else f"{n} times"
