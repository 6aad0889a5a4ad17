"""The Hopper path of the grouped MLP: what ``hopper``'s kernels are launched with.

The functions are those of ``reference``, for bf16 and fp16. Symbols as there. Rows that are to be gathered are gathered before
the product, by a copy: TMA on Hopper cannot, and a caller that needs them twice gathers once and passes None. ``up`` does
without: its producers copy line after line.

Everything is on the device: the number of tiles of rows is known to the kernel only, which claims them one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .fresh import dense, fresh
from .plans import ALIGNMENT, Operand, planned

VERSIONS = ((3, 6), (3, 8))
"""Of Triton: Gluon is experimental, and a GPU has run what these make of the kernels."""
CAPABILITY = (9, 0)
MAX_EXPERTS = 4095
"""The tile list looks at all ``ends`` at once, in registers."""
MAX_ROWS = 2**30 - 256
"""A ragged view clips rows at a coordinate of 2^30."""
FAR, HUGE = 2**30, 0x7FFF0000
PRODUCT, PLAIN, HALVES, PAIRS = range(4)
"""Epilogues: none; an activation; one of a gate and an up projection from two sets of weight rows, or from every other row."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Stages of the ring, width of a stage in the summed dimension, columns of a tile, registers of the partitions."""

    stages: int
    depth: int
    columns: int = 256
    producer: int = 24
    consumer: int = 240
    registers: int = 168
    """A thread, before the partitions trade: wgmma of 256 columns is not assembled for fewer than 154."""


MM, GATHERED, DH, WGRAD = Config(4, 64), Config(4, 64, producer=56, consumer=224), Config(4, 64), Config(6, 32)

# ------------------------------------------------------------------------------------------------ what runs here


def available(capability: tuple[int, int] | None, version: str) -> str | None:
    """Why these kernels do not run with this GPU and this Triton, or None."""
    if capability != CAPABILITY:
        return f"the Hopper kernels need compute capability 9.0, this device has {capability}"
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found not in VERSIONS:
        known = " and ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        return f"the Hopper kernels are for Triton {known}, this is {version}"
    return None


def supported(
    capability: tuple[int, int] | None, version: str, rows: int | torch.SymInt, experts: int, **tensors: Tensor | None
) -> str | None:
    """Why the Hopper kernels cannot take these arguments, or None.

    Args:
        capability, version: of the device and of Triton.
        rows, experts: S and E.
        tensors: by name, the matrices: rows (S, C) or (T, C), any strides; weights (E, N, K) with N or K contiguous. Results are
            as wide as weights are: whoever calls ``up`` alone names a tensor as wide as what it returns.
    """
    reason = available(capability, version)
    if reason is not None:
        return reason
    if experts > MAX_EXPERTS:
        return f"{experts} experts; there may be {MAX_EXPERTS}"
    given = {name: t for name, t in tensors.items() if t is not None}
    for name, t in given.items():
        if t.dtype not in (torch.bfloat16, torch.float16):
            return f"{name} is {t.dtype}; the Hopper kernels take bfloat16 and float16"
        if len({g.dtype for g in given.values()}) > 1:
            return "the matrices differ in dtype: " + ", ".join(f"{n} {g.dtype}" for n, g in given.items())
        reason = _misaligned(name, t)
        if reason is not None:
            return reason
    widest = max([max(t.shape[1:]) for t in given.values()], default=1)
    if isinstance(rows, int) and (rows > MAX_ROWS or (rows // 128 + experts + 2) * (widest // 128 + 1) >= 2**31):
        return f"{rows} rows times {widest} columns are more tiles than 32 bits count"
    return None  # of rows that are known at run time alone, what is prepared for them asks


def _misaligned(name: str, t: Tensor) -> str | None:
    """Whether TMA cannot read ``t`` where it lies (weights), or where a contiguous copy of it would (rows)."""
    size = t.element_size()
    if any(extent * size % ALIGNMENT for extent in t.shape[1:]):
        return f"{name} is {tuple(t.shape)}; its widths must be multiples of {ALIGNMENT // size}"
    if t.dim() == 2:
        return None
    strides = [s for s, extent in zip(t.stride(), t.shape, strict=True) if extent > 1]
    inner = [s for s in t.stride()[1:] if s == 1]
    aligned = all(s == 1 or (s > 0 and s * size % ALIGNMENT == 0) for s in strides) and t.storage_offset() * size % ALIGNMENT == 0
    if len(inner) != 1 or not aligned:
        return f"{name} has strides {t.stride()}; one of the last two must be 1, the others multiples of {ALIGNMENT // size}"
    return None


# ------------------------------------------------------------------------------------------------ the functions


def tile_list(ends: Tensor, rows: int) -> Tensor:
    """``reference.tile_list``: what ``hopper_tiles`` writes, (limit, 8) int32."""
    return _tile_list(ends, rows)


@planned
def _tile_list(precision: str, ends: Operand, rows: int) -> Callable[..., Tensor]:
    from . import hopper_tiles
    from .prepared import Launch

    (experts,) = ends.shape
    groups = 1 << experts.bit_length()  # a power of two, more than E
    new = fresh((hopper_tiles.limit(rows, experts), hopper_tiles.FIELDS), ends)
    programs = experts + 1 if rows else 0
    fill = Launch(hopper_tiles.fill, (programs,), ends.device, (rows, experts, groups, hopper_tiles.ROWS, 128))

    def run(ends: Tensor, _: int) -> Tensor:
        tiles = new()
        fill(ends, tiles)
        return tiles

    return run


def up(
    x: Tensor,
    gather: Tensor | None,
    w_gate: Tensor,
    w_up: Tensor | None,
    b_gate: Tensor | None,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
    *,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.up``: a (S, I); h (S, 2 I) or (S, I) and u (S, I), or empty tensors."""
    gather, w_up = None if gather is None else gather.contiguous(), None if w_up is None else _aligned(w_up)
    tiles = tile_list(ends, (x if gather is None else gather).shape[0]) if tiles is None else tiles
    return _up(_dense(x), gather, _aligned(w_gate), w_up, _lines(b_gate), tiles, act, layout, limit, alpha, save)


@planned
def _up(
    precision: str,
    x: Operand,
    gather: Operand | None,
    w_gate: Operand,
    w_up: Operand | None,
    b_gate: Operand | None,
    tiles: Operand,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    rows, width = (x if gather is None else gather).shape[0], w_gate.shape[1]
    inner = width // 2 if layout in ("concat", "interleaved") else width
    saved = _parts(layout, _dense_as((rows, width), x), _dense_as((rows, inner), x)) if save else []
    product = _mm(
        x, gather is not None, _parts(layout, w_gate, w_up), [View(_dense_as((rows, inner), x)), *saved], tiles,
        (_mode(layout), act, limit, alpha, save), b_gate, False,
    )  # fmt: skip

    new, new_nothing = fresh((rows, inner), x), fresh((0,), x)
    new_h = fresh((rows, width), x) if save else new_nothing
    new_u = new if save and w_up is not None else new_nothing

    def run(
        x: Tensor, gather: Tensor | None, w: Tensor, w_up: Tensor | None, bias: Tensor | None, tiles: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        a, h, u = new(), new_h(), new_u()
        first = h if save else a
        product(tiles, x, gather, w, w if w_up is None else w_up, a, first, first if w_up is None or not save else u, bias, None)
        return a, h, u

    return run


def matmul(
    a: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    zero_tail: bool = True,
    scale: Tensor | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """``reference.matmul``: (S, N). ``scale`` (S,) fp32 multiplies the rows, bias included.

    The rows of no expert are zero also where that is not asked for.
    """
    tiles = tile_list(ends, a.shape[0]) if tiles is None else tiles
    return _matmul(_dense(a), _aligned(w), tiles, transposed, _lines(bias), _floats(scale))


@planned
def _matmul(
    precision: str, a: Operand, w: Operand, tiles: Operand, transposed: bool, bias: Operand | None, scale: Operand | None
) -> Callable[..., Tensor]:
    w = w if transposed else _swapped(w)
    out = _dense_as((a.shape[0], w.shape[1]), a)
    product = _mm(a, False, [View(w)], [View(out)], tiles, (PRODUCT, "", None, None, False), bias, scale is not None)

    new = fresh(out.shape, a)

    def run(a: Tensor, w: Tensor, tiles: Tensor, _: bool, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        found = new()
        product(tiles, a, None, w, w, found, found, found, bias, scale)
        return found

    return run


def dh(
    grad: Tensor,
    gather: Tensor | None,
    w_down: Tensor,
    p: Tensor | None,
    h: Tensor,
    u: Tensor | None,
    ends: Tensor,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
    *,
    tiles: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``reference.dh``: gradients of h and u, dp (S, parts) fp32, p times the activation (S, I)."""
    rows, u = grad if gather is None else grad.index_select(0, gather), None if u is None else _dense(u)
    tiles = tile_list(ends, h.shape[0]) if tiles is None else tiles
    return _dh(_dense(rows), _aligned(w_down), _floats(p), _dense(h), u, tiles, act, layout, limit, alpha)


@planned
def _dh(
    precision: str,
    grad: Operand,
    w_down: Operand,
    p: Operand | None,
    h: Operand,
    u: Operand | None,
    tiles: Operand,
    act: str,
    layout: str,
    limit: float | None,
    alpha: float | None,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    (rows, width), inner, config, kernels = h.shape, w_down.shape[2], DH, _kernels()
    across, mode, quarter = -(-inner // config.columns), _mode(layout), config.columns // 4
    block = 2 * quarter if mode == PAIRS else quarter
    scaled = View(_dense_as((rows, inner), grad))
    before = [*_parts(layout, h, u), scaled][:2]
    after = [*_parts(layout, _dense_as((rows, width), grad), _dense_as((rows, inner), grad)), scaled][:2]
    b, order = _weight(View(_swapped(w_down)), config.depth, config.columns)
    boxes = [_ragged(v, block if v is not scaled else quarter) for v in (*before, *after, scaled)]
    launch = _launch(
        kernels.dh, tiles.shape[0] * across if rows else 0, config, grad.device, [_rows(grad, config.depth), b, *boxes],
        (w_down.shape[0], grad.shape[1], across, config.stages, config.depth, config.columns, order, mode, act, limit, alpha,
         p is not None),
    )  # fmt: skip

    new, new_dh, new_sums = fresh((rows, inner), grad), fresh((rows, width), grad), fresh((rows, across), grad, torch.float32)
    new_du = fresh((0,), grad) if u is None else new

    def run(
        grad: Tensor, w: Tensor, p: Tensor | None, h: Tensor, u: Tensor | None, tiles: Tensor, *_: object
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        d, du, sums, a = new_dh(), new_du(), new_sums(), new()
        gates, ups = ((h, d), (u, du) if u is not None else (h, d) if mode == HALVES else (a, a))
        launch(grad, w, gates[0], ups[0], gates[1], ups[1], a, tiles, tiles if p is None else p, sums)
        return d, du, sums, a

    return run


def wgrad(
    d: Tensor,
    x: Tensor,
    gather_d: Tensor | None,
    gather_x: Tensor | None,
    ends: Tensor,
    *,
    into: Tensor | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """``reference.wgrad``: (E, N, M); added to ``into``, of d's dtype or fp32, if that is given."""
    d = d if gather_d is None else d.index_select(0, gather_d)
    x = x if gather_x is None else x.index_select(0, gather_x)
    tiles = tile_list(ends, d.shape[0]) if tiles is None else tiles
    return _wgrad(_dense(d), _dense(x), ends, tiles, into)


@planned
def _wgrad(precision: str, d: Operand, x: Operand, ends: Operand, tiles: Operand, into: Operand | None) -> Callable[..., Tensor]:
    (rows, n), m, experts, config = d.shape, x.shape[1], ends.shape[0], WGRAD
    out = _dense_as((experts, n, m), d) if into is None else into
    down, across = -(-n // 128), -(-m // config.columns)
    width = config.columns // 2 if out.dtype.itemsize == 2 else config.columns // 4
    boxes = [_ragged(View(d), 64, config.depth), _ragged(View(x), config.columns, config.depth), _box(View(out), (1, 64, width))]
    parts = experts * down * across
    launch = _launch(
        _kernels().wgrad, parts if rows else 0, config, d.device, boxes,
        (parts, down, across, config.stages, config.depth, config.columns, into is not None),
    )  # fmt: skip

    new = fresh((experts, n, m), d)

    def run(d: Tensor, x: Tensor, ends: Tensor, tiles: Tensor, into: Tensor | None) -> Tensor:
        found = new() if into is None else into
        if rows == 0:
            return found.zero_() if into is None else found
        launch(d, x, found, ends, tiles)
        return found

    return run


# ------------------------------------------------------------------------------------------------ layouts


class View(NamedTuple):
    """Part of a tensor that begins at an element of it."""

    part: Operand
    first: int = 0


def _mode(layout: str) -> int:
    """What the kernels know a layout as."""
    return {"plain": PLAIN, "interleaved": PAIRS}.get(layout, HALVES)


def _parts(layout: str, first: Operand, second: Operand | None) -> list[View]:
    """Gate and up, in the second dimension, where they can be told apart by a view with contiguous lines; else one tensor."""
    if layout == "concat":
        outer, both, *rest = first.shape
        half = first._replace(shape=(outer, both // 2, *rest))
        return [View(half), View(half, both // 2 * first.stride[1])]
    return [View(first), View(second)] if layout == "separate" and second is not None else [View(first)]


def _swapped(w: Operand) -> Operand:
    """w (E, N, K) as (E, K, N)."""
    (e, n, k), (stride_e, stride_n, stride_k) = w.shape, w.stride
    return w._replace(shape=(e, k, n), stride=(stride_e, stride_k, stride_n))


def _dense_as(shape: tuple[int, ...], like: Operand) -> Operand:
    """A new tensor."""
    return like._replace(shape=shape, stride=dense(shape))


def _dense(t: Tensor) -> Tensor:
    """``t`` (S, C), copied where TMA cannot read it."""
    (rows, columns), (pitch, step) = t.shape, t.stride()
    fits = step == 1 and (rows == 1 or (pitch >= columns and pitch * t.itemsize % ALIGNMENT == 0))
    return t if fits and t.data_ptr() % ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def _aligned(w: Tensor) -> Tensor:
    """``w``, copied where TMA cannot read from its address."""
    return w if w.data_ptr() % ALIGNMENT == 0 else w.clone()


def _lines(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.stride(1) == 1 else bias.contiguous()


def _floats(t: Tensor | None) -> Tensor | None:
    return t if t is None or (t.dtype is torch.float32 and t.is_contiguous()) else t.float().contiguous()


# ------------------------------------------------------------------------------------------------ descriptors and launches

Box = Callable[[int], Any]
"""A descriptor of what lies at an address."""


def _mm(
    a: Operand,
    gathers: bool,
    weights: Sequence[View],
    results: Sequence[View],
    tiles: Operand,
    kind: tuple[Any, ...],
    bias: Operand | None,
    scaled: bool,
) -> Callable[..., None]:
    """Launches of (list of tiles, a, gather, weights of gate and up, result, saved gate and up, bias, scale).

    Args:
        results: the result and what is saved, or the result alone.
        kind: epilogue, activation, limit, alpha, whether anything is saved.
    """
    config, rows = GATHERED if gathers else MM, results[0].part.shape[0]
    width = config.columns // len(weights)
    described = [_weight(w, config.depth, width) for w in weights]
    if len({order for _, order in described}) > 1:
        raise ValueError("w_gate and w_up are stored in different orders")
    (b, order), (b2, _) = described[0], described[-1]
    boxes = [_ragged(r, config.columns // 4) for r in results]
    pitch = _strides(a)[0] if gathers else 0
    experts, columns, _ = weights[0].part.shape
    across = -(-columns // width)
    launch = _launch(
        _kernels().mm, tiles.shape[0] * across if rows else 0, config, a.device,
        [_rows(a, config.depth), 0, 0, 0, b, b2, boxes[0], boxes[min(1, len(boxes) - 1)], boxes[-1]],
        (1 if bias is None else bias.stride[0], experts, a.shape[1], columns, across, config.stages, config.depth,
         config.columns, order, *kind, bias is not None, scaled, gathers),
    )  # fmt: skip

    def run(tiles: Tensor, a: Tensor, gather: Tensor | None, w: Tensor, w2: Tensor, out: Tensor, *more: Tensor | None) -> None:
        gate, up, bias, scale = more
        lines = (tiles, pitch, tiles) if gather is None else (a, pitch, gather)
        launch(a, *lines, w, w2, out, gate, up, tiles, tiles if bias is None else bias, tiles if scale is None else scale)

    return run


def _launch(
    kernel: Any, most: int, config: Config, device: torch.device, slots: Sequence[int | Box], after: tuple[Any, ...]
) -> Callable[..., None]:
    """One program an SM, or as many as there can be tiles."""
    from .prepared import Launch

    if most >= 2**31:
        raise NotImplementedError(f"{most} tiles are more than 32 bits count")
    grid = (min(most, _processors(device)),)
    scalars = (*after, config.producer, config.consumer)
    return Launch(kernel, grid, device, scalars, dict(enumerate(slots)), num_warps=4, maxnreg=config.registers)


def _rows(t: Operand, depth: int) -> Box:
    return _box(View(t), (64, depth))


def _weight(w: View, depth: int, columns: int) -> tuple[Box, bool]:
    """A descriptor of w (E, N, K), and whether N and not K is contiguous."""
    if w.part.stride[2] == 1:
        return _box(w, (1, columns, depth)), False
    return _box(View(_swapped(w.part), w.first), (1, depth, columns)), True


def _ragged(t: View, width: int, rows: int = 64) -> Box:
    """Boxes of rows of t (S, C) that are clipped at a row that the kernel chooses.

    Coordinates (2^30, end, 2^30 - end + row, column): the strides of the first two undo what the third adds, modulo 2^64 in
    bytes, and the third is out of bounds where row >= end.
    """
    if t.part.shape[0] > MAX_ROWS:
        raise NotImplementedError(f"{t.part.shape[0]} rows are more than a ragged view clips")
    pitch = _strides(t.part)[0]
    clipped = t.part._replace(shape=(HUGE, HUGE, FAR, t.part.shape[1]), stride=(2**34 - pitch, pitch, pitch, 1))
    return _box(View(clipped, t.first), (1, 1, rows, width))


def _box(t: View, block: tuple[int, ...]) -> Box:
    describe, part, strides = _kernels().descriptor, t.part, _strides(t.part)
    shift = t.first * part.dtype.itemsize
    return lambda address: describe(address + shift, part.dtype, tuple(part.shape), strides, block)


def _strides(t: Operand) -> tuple[int, ...]:
    """Those of ``t``; of a dimension of one line the stride means nothing and may be odd."""
    step = ALIGNMENT // t.dtype.itemsize
    *outer, inner = zip(t.stride, t.shape, strict=True)
    return (*[max(step, t.shape[-1]) if extent == 1 else stride for stride, extent in outer], inner[0])


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Kernels(NamedTuple):
    descriptor: Any
    mm: Any
    dh: Any
    wgrad: Any


@functools.cache
def _kernels() -> Kernels:
    from . import hopper, hopper_dh, hopper_mm, hopper_wgrad

    return Kernels(hopper.descriptor, hopper_mm.mm, hopper_dh.dh, hopper_wgrad.wgrad)
