"""A benchmark's result: printed as a table, kept as JSON beside it, with what it was measured on."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fxfuse

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """What decides a timing: processor, GPU, versions, commit."""
    return {
        "cpu": _cpu_name(),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fxfuse": fxfuse.__version__,
        "commit": _git("rev-parse", "--short=12", "HEAD") + (" (modified)" if _git("status", "--porcelain") else ""),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as aligned text; floats with three significant digits."""
    cells = [list(rows[0]), *([_text(v) for v in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def record(name: str, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print ``rows`` under ``title`` and write them to ``results/<name>.json``."""
    here = machine()
    print(f"\n{title}\n{', '.join(f'{k} {v}' for k, v in here.items())}\n{table(rows)}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    content = {"title": title, "command": " ".join(["python", *sys.argv]), "machine": here, "rows": list(rows)}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
