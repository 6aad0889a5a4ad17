"""The Hopper kernels compiled for sm_90 without a GPU, their activations and tile lists, and what they refuse."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon", reason="the Hopper kernels are written in Gluon, which this Triton lacks")
sys.path.append(str(Path(__file__).parent))

import gluon_model
import gluon_offline
import triton
from test_hopper_model import ROWS, tile_list

from fxfuse.kernels import hopper_launch as launch
from fxfuse.kernels import plans
from fxfuse.ops.activations import ACTIVATIONS
from fxfuse.ops.grouped_experts import activate, activate_backward

SOURCES = Path(launch.__file__).parent
RECORD = Path(__file__).parent / "hopper_registers.json"
SHARED_LIMIT, STACK_LIMIT, CODE_LIMIT = 227 * 1024, 32, 112 * 1024
"""Bytes; with code of 160 KiB, all of which each tile went through, ``dh`` with clamps took 1.6 times as long, with 112 not."""
refused = launch.available(launch.CAPABILITY, triton.__version__)
compiles = pytest.mark.skipif(refused is not None, reason=str(refused))

# ------------------------------------------------------------------------------------------------ compilation

EXPERTS, WIDTH, INNER = 4, 512, 1024


def rows(columns: int) -> Tensor:
    return torch.zeros(256, columns, dtype=torch.bfloat16)


def weight(n: int, k: int, transposed: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(E, n, k), stored with n contiguous if ``transposed``."""
    return torch.zeros(EXPERTS, k, n, dtype=dtype).transpose(1, 2) if transposed else torch.zeros(EXPERTS, n, k, dtype=dtype)


ENDS = torch.full((EXPERTS,), 256, dtype=torch.int32)


def up(
    layout: str, act: str = "silu", *, clamps: tuple[Any, Any] = (None, None), save: bool, bias: bool, transposed: bool
) -> Any:
    width = 2 * INNER if layout in ("concat", "interleaved") else INNER
    other = weight(INNER, WIDTH, transposed) if layout == "separate" else None
    line = torch.zeros(EXPERTS, width, dtype=torch.bfloat16) if bias else None
    return launch.up(rows(WIDTH), None, weight(width, WIDTH, transposed), other, line, ENDS, act, layout, *clamps, save)


def gathering(save: bool) -> Any:
    w, gather = weight(2 * INNER, WIDTH), torch.zeros(512, dtype=torch.int64)
    return launch.up(rows(WIDTH), gather, w, None, None, ENDS, "silu", "concat", None, None, save)


def matmul(*, transposed: bool, scaled: bool = False, inner: int = INNER) -> Any:
    w, bias = weight(inner, WIDTH, transposed), torch.zeros(EXPERTS, inner) if scaled else None
    return launch.matmul(rows(WIDTH), w, ENDS, transposed=True, bias=bias, scale=torch.zeros(256) if scaled else None)


def dh(layout: str, act: str = "silu", *, clamps: tuple[Any, Any] = (None, None), transposed: bool, routed: bool = True) -> Any:
    h, u = rows(2 * INNER if layout in ("concat", "interleaved") else INNER), rows(INNER) if layout == "separate" else None
    w = weight(INNER, WIDTH, transposed).transpose(1, 2)
    return launch.dh(rows(WIDTH), None, w, torch.zeros(256) if routed else None, h, u, ENDS, act, layout, *clamps)


def wgrad(into: torch.dtype | None) -> Any:
    buffer = None if into is None else torch.zeros(EXPERTS, WIDTH, INNER, dtype=into)
    return launch.wgrad(rows(WIDTH), rows(INNER), None, None, ENDS, into=buffer)


GPT_OSS = (7.0, 1.702)
CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "down": lambda: matmul(transposed=False),
    "dX": lambda: matmul(transposed=True),
    "down, one tile wide": lambda: matmul(transposed=False, inner=256),
    "down, bias and scale": lambda: matmul(transposed=False, scaled=True),
    "up SwiGLU, saved": lambda: up("concat", save=True, bias=False, transposed=False),
    "up SwiGLU": lambda: up("concat", save=False, bias=False, transposed=False),
    "up SwiGLU, separate": lambda: up("separate", save=True, bias=False, transposed=False),
    "up SwiGLU, stored transposed": lambda: up("concat", save=True, bias=False, transposed=True),
    "up GeGLU, saved, bias": lambda: up("concat", "gelu", save=True, bias=True, transposed=False),
    "up GeGLU tanh, saved": lambda: up("concat", "gelu_tanh", save=True, bias=False, transposed=False),
    "up GPT-OSS, saved": lambda: up("interleaved", clamps=GPT_OSS, save=True, bias=True, transposed=True),
    "up GPT-OSS": lambda: up("interleaved", clamps=GPT_OSS, save=False, bias=True, transposed=True),
    "up SwiGLU, gathers, saved": lambda: gathering(save=True),
    "up SwiGLU, gathers": lambda: gathering(save=False),
    "up relu2, saved": lambda: up("plain", "relu2", save=True, bias=False, transposed=False),
    "up gelu, saved": lambda: up("plain", "gelu", save=True, bias=False, transposed=False),
    "up gelu, saved, bias": lambda: up("plain", "gelu", save=True, bias=True, transposed=False),
    "dh SwiGLU": lambda: dh("concat", transposed=True),
    "dh SwiGLU, unrouted": lambda: dh("separate", transposed=False, routed=False),
    "dh GeGLU": lambda: dh("concat", "gelu", transposed=True),
    "dh GeGLU tanh": lambda: dh("concat", "gelu_tanh", transposed=True),
    "dh GPT-OSS": lambda: dh("interleaved", clamps=GPT_OSS, transposed=False),
    "dh relu2": lambda: dh("plain", "relu2", transposed=True),
    "wgrad": lambda: wgrad(None),
    "wgrad, added": lambda: wgrad(torch.bfloat16),
    "wgrad, added in fp32": lambda: wgrad(torch.float32),
}
"""What models use. Of all 156 combinations of layout, activation, bias and clamps one exceeds the limit, with 72 bytes of stack:
``dh`` of a clamped gelu gate beside its up projection."""


CARRIED = {"t", "s", "phase", "j", "jphase"}
"""By the loop over tiles of every partition."""


def frozen(ttgir: str, kernel: str) -> list[str]:
    """Loops that do not carry what they must: the front end of Triton 3.6 drops names (below)."""
    found = []
    for line in ttgir.splitlines():
        if "scf.while" not in line and "scf.for" not in line:
            continue
        names = {name.rstrip("0123456789").rstrip("_") for name in re.findall(r"%(\w+) = %", line.split("loc(")[0])}
        needed = CARRIED if "scf.while" in line else {"s", "phase"}
        if kernel == "wgrad" and "scf.while" in line and "parity" in names:
            needed = needed | {"e", "start", "end", "parity"}
        found += [] if needed <= names else [line]
    return found


def hasty(ptx: str) -> list[str]:
    """Arrivals at a barrier, by one thread, that do not wait for the other threads of its partition.

    What they have read or written must be done: the barriers are all that orders partitions. (``compute-sanitizer --tool
    racecheck`` does not know these barriers: it reports every exchange between partitions, the compiler's own among them.)
    """
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("//", ".loc", ".reg"))]
    found, waited = [], False
    for line in lines:
        if "bar.sync" in line or "bar.warp.sync" in line or "barrier.sync" in line:
            waited = True
        elif "mbarrier.arrive" in line and "expect_tx" not in line and "cp.async" not in line:
            found += [] if waited else [line]
            waited = False
        elif (line.startswith("@") and "bra" in line) or re.search(r"\b(ld|st)\.shared|wgmma|cp\.async", line):
            waited = False
    return found


@compiles
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration_compiles_without_spills(name: str) -> None:
    with gluon_offline.recorded() as launches:
        CONFIGURATIONS[name]()
    (found,) = launches
    binary = found.compiled()
    assert not frozen(binary.asm["ttgir"], found.kernel.__name__)
    assert not hasty(binary.asm["ptx"]) and hasty(binary.asm["ptx"].replace("bar.sync", "none"))
    needs = gluon_offline.needs(binary)
    assert needs.stack <= STACK_LIMIT
    assert needs.shared <= SHARED_LIMIT
    assert needs.code <= CODE_LIMIT
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    of_version = recorded.setdefault(triton.__version__, {})
    if os.environ.get("FXFUSE_RECORD"):
        of_version[name] = dataclasses.asdict(needs)
        RECORD.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    if of_version:
        assert dataclasses.asdict(needs) == of_version[name], "FXFUSE_RECORD=1 records what it is now"


# ------------------------------------------------------------------------------------------------ the front end's trap

TRAP = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def trapped(out, n):
    s = 0
    prev = s
    for k in range(n):
        gl.store(out + k, prev)
        prev = s
        s = (s + 1) % 4

@gluon.jit
def carried(out, n):
    s = 0
    prev = 3
    for k in range(n):
        gl.store(out + k, prev)
        prev = s
        s = (s + 1) % 4
"""


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="seen in 3.6")
def test_a_name_that_starts_as_an_alias_is_frozen_by_the_front_end(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(TRAP)
    space: dict[str, Any] = {"__name__": "trap"}
    exec(compile(TRAP, str(tmp_path / "trap.py"), "exec"), space)
    carried = {}
    for name in ("trapped", "carried"):
        found = gluon_offline.Launch(space[name], (1,), (torch.zeros(16, dtype=torch.int32), 7), {"num_warps": 4})
        (loop,) = [line for line in found.compiled().asm["ttgir"].splitlines() if "scf.for" in line]
        carried[name] = loop.count(" = ", loop.index("iter_args")) if "iter_args" in loop else 0
    assert carried == {"trapped": 0, "carried": 2}  # nothing is left of `s` either: all that reads it is the frozen name


def aliases(tree: ast.AST) -> Iterator[str]:
    """Names that a loop carries and that hold the value of another name when it begins."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        for loop in (n for n in ast.walk(function) if isinstance(n, ast.For | ast.While)):
            inside = {n.id for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            for statement in ast.walk(function):
                if (
                    not isinstance(statement, ast.Assign)
                    or statement.lineno >= loop.lineno
                    or not isinstance(statement.value, ast.Name)
                ):
                    continue
                names = {n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
                yield from (f"{function.name}: {n} = {statement.value.id}" for n in names & inside)


def test_no_carried_name_of_ours_starts_as_an_alias() -> None:
    assert list(aliases(ast.parse(TRAP))) == ["trapped: prev = s"]
    for file in SOURCES.glob("hopper*.py"):
        assert list(aliases(ast.parse(file.read_text()))) == []


# ------------------------------------------------------------------------------------------------ activations

OPTIONS = [(act, limit, None) for act in ACTIVATIONS for limit in (None, 0.7)]
OPTIONS += [("silu", 0.7, 1.702), ("silu", None, 1.702)]


@pytest.mark.parametrize(("act", "limit", "alpha"), OPTIONS)
@pytest.mark.parametrize("gate", [True, False])
def test_activation_and_its_backward_are_the_operators(act: str, limit: float | None, alpha: float | None, gate: bool) -> None:
    if alpha is not None and not gate:
        pytest.skip("alpha goes with a gate")
    device = gluon_model.module("hopper_activation", SOURCES)
    edges = [0.7, -0.7, 3.5, -3.5, float("nan"), *([] if limit is None else [float("inf"), -float("inf")])]
    g = torch.tensor([*torch.linspace(-9, 9, 401).tolist(), *edges], dtype=torch.float64).as_subclass(gluon_model.Tile)
    u = g.flip(0) * 0.2
    u[u.isnan()] = 0.0 if act.startswith("relu") else float("nan")  # a NaN of u reaches gradients also where a slope is zero
    da = torch.linspace(-1, 1, len(g), dtype=torch.float64).as_subclass(gluon_model.Tile)
    u = u if gate else None
    options = (act, limit, alpha)
    plain = [None if t is None else t.as_subclass(torch.Tensor) for t in (g, u, da)]
    true = activate(*plain[:2], *options)
    dg, du = activate_backward(plain[2], plain[0], plain[1], *options)
    tolerance = {"rtol": 1e-7, "atol": 1e-6 if act == "gelu" else 1e-7, "equal_nan": True}  # two series are good to fp32
    if u is None:
        a, slope = device.activated_backward(g, *options)
        torch.testing.assert_close(device.activated(g, *options).as_subclass(torch.Tensor), true, **tolerance)
    else:
        a, slope, upward = device.gated_backward(g, u, *options)
        torch.testing.assert_close(device.gated(g, u, *options).as_subclass(torch.Tensor), true, **tolerance)
        torch.testing.assert_close((da * upward).as_subclass(torch.Tensor), du, **tolerance)
    torch.testing.assert_close(a.as_subclass(torch.Tensor), true, **tolerance)
    torch.testing.assert_close((da * slope).as_subclass(torch.Tensor), dg, **tolerance)


# ------------------------------------------------------------------------------------------------ tile lists

LISTS = [[ROWS[name], extra] for name in ROWS for extra in (0, 70)] + [[[], 0], [[0], 1], [[100000, 3], 0], [[1] * 130, 5]]
FILL = """
import json, sys
import interpreter
import torch
from fxfuse.kernels import hopper_tiles as tiles
found = []
for counts, extra in json.loads(sys.argv[1]):
    rows, experts = sum(counts) + extra, len(counts)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    table = torch.full((tiles.limit(rows, experts), tiles.FIELDS), -1, dtype=torch.int32)
    tiles.fill[(experts + 1,)](ends, table, rows, experts, 1 << experts.bit_length(), tiles.ROWS, 128)
    found.append(table.tolist())
print(json.dumps(found))
"""


def test_tile_list_kernel_writes_every_tile() -> None:
    lists = [case for case in LISTS if case[0]]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", FILL, json.dumps(lists)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for (counts, extra), table in zip(lists, json.loads(done.stdout), strict=True):
        expected = tile_list(torch.tensor(counts).cumsum(0).tolist(), sum(counts) + extra)
        assert table[: len(expected)] == expected
        assert all(record == [-1] * 8 for record in table[len(expected) :])


@pytest.mark.parametrize(("counts", "extra"), [case for case in LISTS if case[0]])
def test_tiles_cover_every_row_and_column_once(counts: list[int], extra: int) -> None:
    device, across, total = gluon_model.module("hopper", SOURCES), 3, sum(counts) + extra
    ends = torch.tensor(counts).cumsum(0).tolist()
    records = tile_list(ends, total)
    table, owner = gluon_model.Pointer(torch.tensor(records, dtype=torch.int32)), torch.full((total, across), -1)
    for t in range(records[0][0] * across):
        e, first, last, end, n = device.tile_at(table, t, across)
        for row in (first, first + 64):
            if row >= last:
                continue
            mine = owner[row : min(row + 64, end), n]
            assert len(mine)
            assert bool((mine == -1).all())
            mine[:] = int(e)
    expected = torch.searchsorted(torch.tensor(ends), torch.arange(total), right=True)
    assert torch.equal(owner, expected.unsqueeze(1).expand(-1, across))


# ------------------------------------------------------------------------------------------------ what is refused


def refusal(
    capability: tuple[int, int] | None = (9, 0), version: str = "3.6.0", count: int = 64, **tensors: Tensor | None
) -> str:
    return launch.supported(capability, version, count, EXPERTS, **tensors) or ""


def test_supported_says_why_not() -> None:
    a, w = rows(WIDTH), weight(INNER, WIDTH)
    assert refusal(a=a, w=w, u=None) == ""
    assert refusal(a=a, w=weight(40, WIDTH, True)) == ""
    assert refusal(a=a[:, 1:9], w=w) == ""  # rows are copied where they are not aligned
    assert "9.0" in refusal((8, 0), a=a)
    assert "9.0" in refusal(None, a=a)
    assert "Triton" in refusal(version="3.5.1", a=a)
    assert "Triton" in refusal(version="3.9.0", a=a)
    assert "float32" in refusal(a=a.float())
    assert "differ" in refusal(a=a, w=w.half())
    assert "multiples of 8" in refusal(a=rows(9))
    assert "strides" in refusal(w=weight(INNER, 2 * WIDTH)[:, :, ::2])
    assert "strides" in refusal(w=weight(INNER, WIDTH + 4)[:, :, :WIDTH])
    assert "strides" in refusal(w=weight(INNER, WIDTH + 8)[:, :, 1 : WIDTH + 1])
    assert "32 bits" in refusal(count=2**31, a=a)
    assert "experts" in (launch.supported((9, 0), "3.6.0", 64, 5000) or "")


def test_more_rows_than_a_view_clips_are_refused_when_they_are_known() -> None:
    """``supported`` cannot ask about rows that are known at run time alone."""
    rows = plans.Operand((launch.MAX_ROWS + 1, 8), (8, 1), torch.bfloat16, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="rows are more than a ragged view clips"):
        launch._ragged(launch.View(rows), 8)
