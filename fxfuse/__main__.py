"""The command line: ``python -m fxfuse doctor | fusions | explain FILE.py | bench NAME | report FILE``, each with ``--json``.

Exit code 0: done; 1: ``doctor`` found a blocker; 2: an error, told in one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .display import printable
from .report import Report


class CommandError(Exception):
    """A command cannot do what was asked; the message is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    args = _parser().parse_args(words[:split])
    args.rest = words[split + 1 :]
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has seen enough; the interpreter must not complain about it while it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CommandError as error:
        return _complain(args.command, str(error))
    except Exception as error:
        return _complain(args.command, f"{type(error).__name__}: {error}")


def _complain(command: str, message: str) -> int:
    print(f"fxfuse {command}: {printable(message, 500)}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fxfuse", description="Look at fxfuse, a torch.compile backend.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--json", action="store_true", help="print data instead of text")
        command.set_defaults(run=run)
        return command

    add("doctor", _doctor, "Check this machine: torch, triton, GPU, backend, packs, cache, private torch names.")
    add("fusions", _fusions, "List the registered fusions in the order in which they are tried.")
    explain = add("explain", _explain, "Run a script (its arguments after --) and print what was fused in all it compiled.")
    explain.add_argument("file", metavar="FILE.py")
    bench = add("bench", _bench, "Time one fusion's pattern: eager, Inductor, fxfuse.")
    bench.add_argument("name", metavar="NAME")
    bench.add_argument("--seconds", type=float, default=0.5, help="measuring time for each (default: %(default)s)")
    report = add("report", _report, "Print a report that was saved as JSON, or draw it as a page.")
    report.add_argument("file", metavar="FILE.json")
    report.add_argument("--html", metavar="OUT.html", help="write a page instead of printing")
    return parser


# ------------------------------------------------------------------------------------------------ doctor, fusions


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import checks

    found = checks()
    blocked = [c for c in found if c.state == "blocker"]
    if args.json:
        print(json.dumps({"ok": not blocked, "checks": [dataclasses.asdict(c) for c in found]}, indent=2))
    else:
        _print_table([(c.state, c.name, c.detail) for c in found])
        print(f"\n{len(blocked)} blocker{'s' * (len(blocked) != 1)}" if blocked else "\nno blocker")
    return 1 if blocked else 0


def _fusions(args: argparse.Namespace) -> int:
    rows = [_describe(f) for f in _all_fusions()]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        head = ("name", "side", "recipes", "pack", "source", "what")
        _print_table([head, *map(_fusion_row, rows)])
    return 0


def _all_fusions() -> list[Any]:
    import fxfuse

    return list(fxfuse.list_fusions())


def _describe(fusion: Any) -> dict[str, Any]:
    doc = inspect.getdoc(fusion.pattern) or ""
    return {
        "name": fusion.name,
        "side": fusion.side,
        "recipes": None if fusion.recipes is None else list(fusion.recipes),
        "pack": fusion.pack,
        "source": fusion.source,
        "ready": fusion.ready,
        "doc": doc.strip().partition("\n")[0],
    }


def _fusion_row(row: dict[str, Any]) -> tuple[str, ...]:
    what = row["doc"] if row["ready"] else "(inactive: it has no rewrite yet)"
    return (row["name"], row["side"], ", ".join(row["recipes"] or ["all"]), row["pack"], row["source"], what)


def _print_table(rows: Sequence[Sequence[object]]) -> None:
    cells = [[printable(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


# ------------------------------------------------------------------------------------------------ explain, report


def _explain(args: argparse.Namespace) -> int:
    import fxfuse

    if not Path(args.file).is_file():
        raise CommandError(f"no such file: {args.file}")
    fxfuse.reset()
    try:
        with _as_script(args.file, args.rest), contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            runpy.run_path(args.file, run_name="__main__")
        failed = ""
    except SystemExit as stop:
        failed = "" if stop.code in (None, 0) else f"{args.file} exited with {stop.code}"
    except Exception as error:
        failed = f"{args.file} raised {type(error).__name__}: {error}{_line_in(args.file, error)}"
    report = Report.merge(fxfuse.reports())
    print(report.to_json() if args.json else report)
    if failed:
        raise CommandError(failed)
    if not report.graphs:
        print(
            f'fxfuse explain: {printable(args.file)} compiled nothing with torch.compile(..., backend="fxfuse")', file=sys.stderr
        )
    return 0


@contextlib.contextmanager
def _as_script(file: str, args: Sequence[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as ``python FILE.py ARGS`` sets them."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [file, *args], [str(Path(file).resolve().parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, path


def _line_in(file: str, error: Exception) -> str:
    inside = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {inside[-1]})" if inside else ""


def _report(args: argparse.Namespace) -> int:
    try:
        report = Report.from_json(Path(args.file).read_bytes())
    except OSError as error:
        raise CommandError(f"cannot read {args.file}: {error.strerror}") from None
    if args.html:
        if Path(args.html).suffix.lower() != ".html":
            raise CommandError(f"--html {args.html}: the name must end in .html")
        report.save(args.html)
    else:
        print(report.to_json() if args.json else report)
    return 0


# ------------------------------------------------------------------------------------------------ bench


def _bench(args: argparse.Namespace) -> int:
    fusions = {f.name: f for f in _all_fusions()}
    if args.name not in fusions:
        close = difflib.get_close_matches(args.name, fusions, n=1)
        raise CommandError(f"no fusion {args.name!r}; {f'did you mean {close[0]!r}?' if close else 'see: fxfuse fusions'}")
    fusion = fusions[args.name]
    inputs = [
        x.requires_grad_(fusion.side == "joint" and x.is_floating_point()) if hasattr(x, "shape") else x
        for x in fusion.sample_inputs()
    ]
    rows = [_time(backend, fusion, inputs, args.seconds) for backend in ("eager", "inductor", "fxfuse")]
    shapes = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if hasattr(x, "shape") else repr(x) for x in inputs]
    if args.json:
        print(json.dumps({"name": fusion.name, "side": fusion.side, "inputs": shapes, "results": rows}, indent=2))
    else:
        print(f"{fusion.name} ({fusion.side}) on {', '.join(shapes)}; one thread; so small, this is the cost of a call")
        _print_table([(r["backend"], r["error"] or f"{r['microseconds']:.1f} us, iqr {r['iqr']:.1f}", r["note"]) for r in rows])
    return 0


def _time(backend: str, fusion: Any, inputs: Sequence[Any], seconds: float) -> dict[str, Any]:
    """Median time of one call of the pattern, for a joint fusion with its backward; ``iqr`` tells how noisy the machine is."""
    import torch
    from torch.utils.benchmark import Timer

    leaves = [x for x in inputs if hasattr(x, "requires_grad") and x.requires_grad]

    def step() -> None:
        out = function(*inputs)
        if leaves:
            torch.autograd.grad(out.sum(), leaves)

    row: dict[str, Any] = {"backend": backend, "microseconds": None, "iqr": None, "error": "", "note": ""}
    try:
        torch.compiler.reset()
        function = fusion.pattern if backend == "eager" else torch.compile(fusion.pattern, backend=backend)
        with torch.set_grad_enabled(bool(leaves)):
            step()
            measured = Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=seconds)
        row |= {"microseconds": 1e6 * measured.median, "iqr": 1e6 * measured.iqr}
        row["note"] = _was_fused(fusion) if backend == "fxfuse" else ""
    except Exception as error:  # no C++ compiler here: the other rows still say something
        row["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return row


def _was_fused(fusion: Any) -> str:
    import fxfuse

    report = fxfuse.last_report()
    if report is not None and report.count(fusion.name):
        return "fused"
    if fusion.side == "backward":
        return "not fused: a backward fusion fires inside a backward only"
    return report.why_not(fusion.name).replace("\n", " ") if report is not None else "not compiled"


if __name__ == "__main__":
    sys.exit(main())
