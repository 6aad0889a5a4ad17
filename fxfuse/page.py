"""The report as HTML, code before and after in two panes, and one region as Mermaid. Pure functions of a Report.

No script, no style sheet, nothing fetched. Sites strip styling (GitHub does), so the marks carry the meaning: numbers, bars
and ``<mark>``; inline styles only tint, translucently, so that the page's own light or dark theme shows through.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from .display import Group, Refusal, choices, esc, groups, headline, near, plain, ranges, refusals
from .report import Failure, Fused, GraphRecord, Report

PANE_LINES = 4000
"""Longest code pane."""
GRAPHS = 40
"""Most graphs on one page."""
REFUSALS = 200
MERMAID_NODES = 40

_TINTS = ("#4e79a733", "#f28e2b33", "#59a14f33", "#e1575933", "#76b7b233", "#b07aa133", "#edc94833", "#ff9da733", "#9c755f33")
_CELL = 'align="left" valign="top" style="text-align:left;vertical-align:top;padding:2px 8px"'
_PANE = 'align="left" valign="top" style="text-align:left;vertical-align:top;width:50%;padding:2px 4px"'
_PRE = 'style="overflow:auto;max-height:36em;margin:0;line-height:1.35"'
_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>fxfuse report</title>
<body style="font-family:system-ui,sans-serif;margin:1.5em">
"""


@dataclasses.dataclass(frozen=True)
class Region:
    """What marks one fused region: its number in the report and the tint of its row."""

    number: int
    tint: str


def page(report: Report) -> str:
    """A page that stands alone."""
    return f"{_HEAD}{fragment(report)}\n</body>\n</html>\n"


def fragment(report: Report) -> str:
    """The report for a notebook cell."""
    rows, missed = groups(report), refusals(report)
    regions = {n: Region(n, _tint(i)) for i, row in enumerate(rows) for n in row.regions}
    parts = [
        f"<p><b>fxfuse: {esc(headline(report))}</b></p>",
        _fused_table(rows),
        _choices(choices(report)),
        _refused(missed),
        _failed(report.failures),
    ]
    first = 1
    for i, graph in enumerate(report.graphs[:GRAPHS], 1):
        own = [regions[first + k] for k in range(len(graph.fused))]
        parts.append(_graph(i, graph, own, opened=bool(graph.fused) and first == 1))
        first += len(graph.fused)
    if len(report.graphs) > GRAPHS:
        parts.append(f"<p>... {len(report.graphs) - GRAPHS} more graphs: <code>report.graphs[{GRAPHS}:]</code></p>")
    return "<div>\n" + "\n".join(filter(None, parts)) + "\n</div>"


# ------------------------------------------------------------------------------------------------ tables


def _tint(row: int) -> str:
    return _TINTS[row % len(_TINTS)]


def _table(head: Sequence[str], rows: Iterable[str]) -> str:
    cells = "".join(f"<th {_CELL}>{h}</th>" for h in head)
    return f"<table>\n<tr>{cells}</tr>\n" + "\n".join(rows) + "\n</table>"


def _cells(*values: object) -> str:
    return "".join(f"<td {_CELL}>{esc(v)}</td>" for v in values)


def _fused_table(rows: Sequence[Group]) -> str:
    head = ("region", "layer", "fusion", "passes", "saved", "kernel", "source")
    return _table(head, (fused_row(i, row) for i, row in enumerate(rows))) if rows else ""


def _choices(told: Sequence[str]) -> str:
    return _table(("kernels, the chosen one first",), (f"<tr>{_cells(c)}</tr>" for c in told)) if told else ""


def fused_row(index: int, row: Group) -> str:
    """One line of the table of fused regions."""
    mark = f'<td {_CELL}><mark style="background:{_tint(index)};color:inherit"><b>{ranges(row.regions)}</b> ▌</mark></td>'
    f = row.first
    return f"<tr>{mark}{_cells(row.layers, f.name, row.passes, row.saved or '-', f.kernel, f.source)}</tr>"


def _refused(missed: Sequence[Refusal]) -> str:
    if not missed:
        return ""
    rows = [
        f"<tr>{_cells(f'{m.matched}/{m.total}', m.name, m.reason, r.times, r.layers, m.node, m.source)}</tr>"
        for r in missed[:REFUSALS]
        for m in [r.first]
    ]
    more = f"<p>... {len(missed) - REFUSALS} more: <code>report.missed</code></p>" if len(missed) > REFUSALS else ""
    table = _table(("found", "fusion", "refused because", "times", "layer", "node", "source"), rows)
    return f"<details><summary><b>Missed</b>: {sum(r.times for r in near(missed))}</summary>\n{table}{more}\n</details>"


def _failed(failures: Sequence[Failure]) -> str:
    if not failures:
        return ""
    rows = [f"<tr>{_cells(f.stage, f.name or '(whole graph)', f.error)}</tr>" for f in failures]
    return f"<p><b>Failed</b>, the unfused form ran:</p>\n{_table(('stage', 'fusion', 'error'), rows)}"


# ------------------------------------------------------------------------------------------------ panes


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a graph's code: the node that it defines (or nothing), and the text."""

    node: str
    code: str


def lines(code: str) -> list[Line]:
    """A graph's Python code for reading: no ``x = None`` tails, no ``torch.ops.``, no blank lines."""
    found = []
    for raw in code.splitlines():
        text = re.sub(r";\s+(?:\w+ = )+None\s*$", "", raw.strip()).replace("torch.ops.", "")
        if text and not text.startswith("# No stacktrace"):
            name = re.match(r"(\w+)\s*[:=](?!=)[^;]*$", text)  # no semicolon: that line declares the types of all inputs
            found.append(Line(name[1] if name else "", text))
    return found


def _graph(number: int, graph: GraphRecord, regions: Sequence[Region], *, opened: bool) -> str:
    before = {node: r for f, r in zip(graph.fused, regions, strict=True) for node in f.before}
    after = {node: r for f, r in zip(graph.fused, regions, strict=True) for node in f.after}
    (fw_before, bw_before), (fw_after, bw_after) = _halves(lines(graph.before)), _halves(lines(graph.after))
    body = _panes(fw_before, fw_after, before, after)
    if bw_before or bw_after:
        body += f"\n<details><summary>backward</summary>\n{_panes(bw_before, bw_after, before, after)}\n</details>"
    facts = f"{graph.nodes} nodes, {len(graph.fused)} fused in {1e3 * graph.seconds:.1f} ms"
    title = f"<summary><b>Graph {number}</b>: {esc(graph.kind)}, {facts}</summary>"
    return f"<details{' open' if opened else ''}>{title}\n{body}\n</details>"


def _halves(code: Sequence[Line]) -> tuple[Sequence[Line], Sequence[Line]]:
    """Forward and backward of a joint graph: the backward starts with the first node that reads a tangent."""
    reads = (i for i, line in enumerate(code) if line.node and re.search(r"\btangents_\d+\b", line.code.partition("=")[2]))
    split = next(reads, len(code))
    return code[:split], code[split:]


def _panes(before: Sequence[Line], after: Sequence[Line], old: Mapping[str, Region], new: Mapping[str, Region]) -> str:
    width = max((len(str(r.number)) for r in [*old.values(), *new.values()]), default=1)
    panes = (f"<td {_PANE}><pre {_PRE}>{_pane(*side, width)}</pre></td>" for side in ((before, old), (after, new)))
    head = f"<tr><th {_PANE}>before</th><th {_PANE}>after</th></tr>"
    return f'<table style="table-layout:fixed;width:100%">\n{head}\n<tr>{"".join(panes)}</tr>\n</table>'


def _pane(code: Sequence[Line], regions: Mapping[str, Region], width: int) -> str:
    shown = [_code_line(line, regions.get(line.node), width) for line in code[:PANE_LINES]]
    if len(code) > PANE_LINES:
        shown.append(f"<b>... {len(code) - PANE_LINES:,} more lines, cut here: report.graphs has them</b>")
    return "\n".join(shown)


def _code_line(line: Line, region: Region | None, width: int) -> str:
    code = esc(line.code, 300 if line.node else 120)
    if line.code.startswith("#"):
        return f'{"":{width}}  <span style="opacity:0.6">{code}</span>'
    if region is None:
        return f"{'':{width}}  {code}"
    return f'<mark style="background:{region.tint};color:inherit"><b>{region.number:{width}}</b> ▌{code}</mark>'


# ------------------------------------------------------------------------------------------------ one region


def mermaid(graph: GraphRecord, region: Fused) -> str:
    """A fused region, what it reads and who reads it, as Mermaid text; at most MERMAID_NODES boxes."""
    code = {line.node: line.code for line in lines(graph.before) if line.node}
    reads = {node: _names(text) for node, text in code.items()}
    reads["output"] = _names(" = ".join(("", *re.findall(r"^\s*return (.*)$", graph.before, re.MULTILINE))))
    members = set(region.before)
    inside = [node for node in code if node in members]
    known = code.keys() | _placeholders(graph.before)
    inputs = list(dict.fromkeys(name for node in inside for name in reads[node] if name in known and name not in members))
    outputs = [node for node in reads if node not in members and node not in inputs and not members.isdisjoint(reads[node])]
    every = [*inside, *inputs, *outputs]
    ids = {name: f"n{i}" for i, name in enumerate(every[:MERMAID_NODES])}
    boxes = [f'    {ids[n]}["{_label(n)}<br/>{_label(_callee(code[n]))}"]' for n in ids if n in members]
    ends = [f'  {ids[n]}(["{_label(n)}"])' for n in ids if n not in members]
    edges = [f"  {ids[a]} --> {ids[b]}" for b in ids for a in reads.get(b, ()) if a in ids and (a in members or b in members)]
    more = [f'  more["... {len(every) - len(ids)} more nodes"]'] if len(every) > len(ids) else []
    title = f"{region.name} in {region.layer or 'a function'}: {'+'.join(region.directions)}, {region.kernel}"
    return "\n".join(["flowchart TD", f'  subgraph region["{_label(title)}"]', *boxes, "  end", *ends, *edges, *more, ""])


def _names(code: str) -> list[str]:
    """The names that the right side of a line reads, each once."""
    return list(dict.fromkeys(re.findall(r"(?<![\w.\"'])[A-Za-z_]\w*(?!\w|\s*=)", code.partition(" = ")[2])))


def _placeholders(code: str) -> set[str]:
    """The graph's inputs: names in its signature, or unpacked below it."""
    unpacked = (line.partition(" = ")[0] for line in code.splitlines() if "tree_flatten_spec(" in line)
    signature = re.findall(r"^\s*def forward\((.*)", code, re.MULTILINE)
    return set(re.findall(r"[A-Za-z_]\w*", " ".join((*unpacked, *signature))))


def _callee(code: str) -> str:
    return code.partition(" = ")[2].partition("(")[0]


def _label(value: object) -> str:
    """``value`` inside a quoted Mermaid label: all but plain characters as their code points."""
    return re.sub(r"[^\w .,:/+-]", lambda c: f"#{ord(c[0])};", plain(value, 120), flags=re.ASCII)
