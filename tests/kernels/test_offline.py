"""Every shipped configuration compiled for sm_90 and sm_80, which needs no GPU: it spills next to nothing and it fits.

``needs.json`` keeps what each needs of the GPU, by version of Triton: a change of a kernel shows there before it shows in a
time. ``python tests/kernels/test_offline.py`` writes it anew for the version that is installed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton
from offline import Needs, compiled

from fxfuse.kernels import bias, combine, dh, matmul, pairs, routing, up, wgrad
from fxfuse.kernels.launch import Config

RECORDED = Path(__file__).parent / "needs.json"
SHARED = {90: 232448, 80: 166912}
"""Bytes of shared memory that one block may use."""
SPILLED = 32
"""Bytes of a thread's stack that are let pass."""
COMMON = {"GROUP": 8, "EXPERTS": 256, "WHOLE": True, "PRECISION": "ieee", "WIDEN": False, "COUNTED": True}
FLOATS = "a w w_up x h u dh du d y grad grads rows scaled out bias bias_up"
OTHERS = {
    **dict.fromkeys(("p", "dp", "weights"), "*fp32"),
    **dict.fromkeys(("gather", "gather_d", "gather_x", "ids", "order", "tokens", "inverse"), "*i64"),
    **dict.fromkeys(("ends", "counts"), "*i32"),
    **dict.fromkeys(("limit", "alpha"), "fp32"),
}


@dataclasses.dataclass(frozen=True)
class Shipped:
    """One kernel as it is launched: its configuration, its constants, and which arguments are not there."""

    name: str
    kernel: Any
    capability: int
    config: Config
    element: str
    types: dict[str, str]
    constants: dict[str, Any]

    def needs(self) -> Needs:
        names = [n for n in self.kernel.arg_names if n not in self.constants]
        aligned = {n for n in names if n.startswith("stride_") or n.startswith("up_") or self.types.get(n, "i32").startswith("*")}
        widths = ("N", "K", "M", "H") if "S" in names else ("N", "M")
        aligned |= {n for n in names if n in widths}
        return compiled(self.kernel, self.capability, self.types, self.constants, aligned, self.config.warps, self.config.stages)


def _pointers(kernel: Any, element: str) -> dict[str, str]:
    """Types of the arguments that are not integers."""
    floats = {n: f"*{element}" for n in FLOATS.split()}
    return {n: t for n, t in {**floats, **OTHERS}.items() if n in kernel.arg_names}


def _tile(c: Config) -> dict[str, int]:
    return {"TM": c.m, "TN": c.n, "TK": c.k}


def _weight(inner: bool, *names: str) -> dict[str, Any]:
    """Which stride of a weight is one."""
    return {"INNER": inner, **{f"{n}_{'k' if inner else 'n'}": 1 for n in names}}


def _matmul(c: Config, inner: bool = True, biases: bool = False) -> tuple[Any, dict[str, Any]]:
    absent = {} if biases else {"bias": None}
    return matmul.matmul_kernel, {**_tile(c), **_weight(inner, "stride"), **absent, "BIAS": biases, "ZERO_TAIL": True}


def _up(
    c: Config, inner: bool = True, form: int = up.HALVES, oss: bool = False, save: bool = True, act: str = "silu"
) -> tuple[Any, dict[str, Any]]:
    absent = {} if oss else {"bias": None, "bias_up": None}
    kind = {
        "FORM": form,
        "BIAS": oss,
        "SAVE": save,
        "ACT": act,
        "LIMIT": oss,
        "ALPHA": oss,
        "GATHER": True,
        "SLICES": up.slices(c.n),
    }
    return up.up_kernel, {**_tile(c), **_weight(inner, "stride", "up"), **absent, **kind, "SLICES": up.slices(c.n)}


def _dh(
    c: Config, inner: bool = False, form: int = up.HALVES, oss: bool = False, act: str = "silu"
) -> tuple[Any, dict[str, Any]]:
    kind = {"FORM": form, "ACT": act, "LIMIT": oss, "ALPHA": oss, "GATHER": True, "WEIGHTS": True, "AHEAD": dh.ahead(c)}
    return dh.dh_kernel, {**_tile(c), **_weight(inner, "stride"), **kind}


def _wgrad(c: Config, gathers_d: bool = False) -> tuple[Any, dict[str, Any]]:
    absent = {"gather_x" if gathers_d else "gather_d": None}
    gathers = {"GATHER_D": gathers_d, "GATHER_X": not gathers_d}
    return wgrad.wgrad_kernel, {"TN": c.m, "TM": c.n, "TK": c.k, "SWEEP": c.sweep, "FOLD": 0, **absent, **gathers}


MANY_ROWS: dict[ModuleType, dict[str, Callable[[Config], tuple[Any, dict[str, Any]]]]] = {
    matmul: {"transposed": _matmul, "plain, bias": lambda c: _matmul(c, False, True)},
    up: {
        "saved": _up,
        "not saved": lambda c: _up(c, save=False),
        "gpt-oss": lambda c: _up(c, False, up.PAIRS, True),
        "no gate, gelu": lambda c: _up(c, form=up.PLAIN, act="gelu"),
    },
    dh: {
        "silu": _dh,
        "gpt-oss": lambda c: _dh(c, True, up.PAIRS, True),
        "no gate, gelu_tanh": lambda c: _dh(c, form=up.PLAIN, act="gelu_tanh"),
    },
    wgrad: {"gathered x": _wgrad, "gathered d": lambda c: _wgrad(c, True)},
}
"""By kernel: what the largest tile is launched as. The others are launched as the first of these."""


def shipped() -> Iterator[Shipped]:
    for module, launches in MANY_ROWS.items():
        name = module.__name__.rsplit(".", 1)[1]
        table: dict[tuple[int, int], tuple[tuple[int, Config], ...]] = module.CONFIGS
        for capability in (90, 80):
            half = table.get((capability // 10, 2), table[8, 2])
            for *_, c in half[:-1] if capability == 90 else ():
                yield _shipped(f"{name}: {next(iter(launches))}", next(iter(launches.values())), c, capability)
            for what, launch in launches.items():
                yield _shipped(f"{name}: {what}", launch, half[-1][1], capability)
            for precision in ("ieee", "tf32"):
                single = table[8, 4][-1][1]
                what, launch = next(iter(launches.items()))
                yield _shipped(f"{name}: {what}, {precision}", launch, single, capability, "fp32", precision)
    small = Config(1, 1, 1, 4, 3)
    for capability in (90, 80):
        constants = {"TM": bias.ROWS, "TN": bias.COLUMNS, "WEIGHTS": True, "GATHER": True}
        yield _shipped("bias", lambda c: (bias.bias_kernel, constants), small, capability)  # noqa: B023
        summed = {"TN": combine.COLUMNS, "WEIGHTS": True, "BIAS": True}
        yield _shipped("combine", lambda c: (combine.combine_kernel, summed), small, capability)  # noqa: B023
        for _, columns, warps in pairs.LINES:
            spread, c = {"TN": columns, "ROWS": True, "WEIGHTS": True, "stride_inverse": 1}, Config(1, columns, 1, warps, 3)
            yield _shipped(f"spread {columns}", lambda c: (pairs.spread_kernel, spread), c, capability)  # noqa: B023
        for experts in (8, 128, 1024):
            for kernel in (routing.count_kernel, routing.place_kernel):
                yield _shipped(f"routing of {experts}: {kernel.__name__}", _routing(kernel, experts), small, capability)


def _routing(kernel: Any, experts: int) -> Callable[[Config], tuple[Any, dict[str, Any]]]:
    def launch(_: Config) -> tuple[Any, dict[str, Any]]:
        return kernel, {n: v for n, v in routing.constants(experts).items() if n in kernel.arg_names}

    return launch


def _shipped(
    name: str,
    launch: Callable[[Config], tuple[Any, dict[str, Any]]],
    c: Config,
    capability: int,
    element: str = "bf16",
    precision: str = "ieee",
) -> Shipped:
    kernel, constants = launch(c)
    if "FOLD" in constants and element == "fp32":
        constants["FOLD"] = wgrad.FOLD
    c = c.fitting(4 if element == "fp32" else 2, 2 if constants.get("FORM") in (up.PAIRS, up.HALVES) else 1, SHARED[capability])
    if "counts" in kernel.arg_names:
        c = dataclasses.replace(c, warps=routing.WARPS)
    types = _pointers(kernel, element)
    shared = {n: v for n, v in {**COMMON, "PRECISION": precision}.items() if n in kernel.arg_names and n not in constants}
    tile = f" {c.m}x{c.n}x{c.k}" + (f", {c.sweep} side by side" if c.sweep > 1 else "") if c.m > 1 else ""
    return Shipped(f"sm_{capability} {name}{tile}", kernel, capability, c, element, types, {**constants, **shared})


ALL = list(shipped())


@pytest.mark.parametrize("launch", ALL, ids=lambda s: s.name)
def test_configuration_fits_and_does_not_spill(launch: Shipped) -> None:
    needs = launch.needs()
    assert needs.stack <= SPILLED
    assert needs.shared <= SHARED[launch.capability]
    recorded = json.loads(RECORDED.read_text()).get(triton.__version__)
    if recorded is not None:
        assert dataclasses.asdict(needs) == recorded.get(launch.name), "run this file as a program to record what changed"


def test_names_are_distinct() -> None:
    assert len({s.name for s in ALL}) == len(ALL)


def main() -> None:
    content = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    content[triton.__version__] = {s.name: dataclasses.asdict(s.needs()) for s in ALL}
    lines = [f'"{version}": {{\n' + ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in found.items()) + "\n}"
             for version, found in sorted(content.items())]  # fmt: skip
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
