"""The Hopper path of the grouped MLP: what ``hopper``'s kernels are launched with.

The functions are those of ``reference``, for bf16 and fp16. Symbols as there. Rows that are to be gathered are gathered before
the product, by a copy: TMA on Hopper cannot, and a caller that needs them twice gathers once and passes None. ``up`` does
without: its producers copy line after line.

Everything is on the device: the number of tiles of rows is known to the kernel only, which claims them one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

VERSIONS = ((3, 6), (3, 9))
"""Triton from the first on, and before the second: Gluon is experimental and its functions are renamed."""
CAPABILITY = (9, 0)
MAX_EXPERTS = 4095
"""The tile list looks at all ``ends`` at once, in registers."""
MAX_ROWS = 2**30 - 256
"""A ragged view clips rows at a coordinate of 2^30."""
ALIGNMENT = 16
"""Bytes that TMA wants addresses and strides to be multiples of."""
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


MM, GATHERED, DH, WGRAD = Config(4, 64), Config(4, 64, producer=40, consumer=232), Config(3, 64), Config(6, 32)

# ------------------------------------------------------------------------------------------------ what runs here


def available(capability: tuple[int, int] | None, version: str) -> str | None:
    """Why these kernels do not run with this GPU and this Triton, or None."""
    if capability != CAPABILITY:
        return f"the Hopper kernels need compute capability 9.0, this device has {capability}"
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, high = VERSIONS
    if not low <= found < high:
        return f"the Hopper kernels are for Triton {low[0]}.{low[1]} to before {high[0]}.{high[1]}, this is {version}"
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
    return _too_many(rows, experts, widest) if isinstance(rows, int) else None


def _too_many(rows: int, experts: int, columns: int) -> str | None:
    """Whether 32 bits count the tiles; of a size that is known at run time alone this is asked at every launch."""
    if rows > MAX_ROWS or (rows // 128 + experts + 2) * (columns // 128 + 1) >= 2**31:
        return f"{rows} rows times {columns} columns are more tiles than 32 bits count"
    return None


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
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.up``: a (S, I); h (S, 2 I) or (S, I) and u (S, I), or empty tensors."""
    rows = x.shape[0] if gather is None else gather.shape[0]
    inner = w_gate.shape[1] // (2 if layout in ("concat", "interleaved") else 1)
    a = _empty((rows, inner), x)
    h, u = _before(layout, a, x) if save else (_empty((0,), x), _empty((0,), x))
    if rows:
        left, right = _parts(layout, w_gate, w_up, 1)
        saved = _parts(layout, h, u, 1) if save else (a, None)
        _mm(x, gather, left, right, a, saved, ends, _mode(layout), act, limit, alpha, save, b_gate, None)
    return a, h, u


def matmul(
    a: Tensor,
    w: Tensor,
    ends: Tensor,
    *,
    transposed: bool,
    bias: Tensor | None = None,
    zero_tail: bool = True,
    scale: Tensor | None = None,
) -> Tensor:
    """``reference.matmul``: (S, N). ``scale`` (S,) fp32 multiplies the rows, bias included.

    The rows of no expert are zero also where that is not asked for.
    """
    w = w if transposed else w.transpose(1, 2)
    out = _empty((a.shape[0], w.shape[1]), a)
    if a.shape[0]:
        _mm(a, None, w, None, out, (out, None), ends, PRODUCT, "", None, None, False, bias, scale)
    return out


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``reference.dh``: gradients of h and u, dp (S,) fp32, p times the activation (S, I)."""
    rows = grad if gather is None else grad.index_select(0, gather)
    count, inner, config, kernels = rows.shape[0], w_down.shape[2], DH, _kernels()
    scaled = _empty((count, inner), grad)
    d, du = _before(layout, scaled, grad)
    across = -(-inner // config.columns)
    partial = _empty((count, across), grad, torch.float32)
    if count == 0:
        return d, du, partial.view(0), scaled
    mode, quarter = _mode(layout), config.columns // 4
    block = 2 * quarter if mode == PAIRS else quarter
    mine = _ragged(kernels, scaled, quarter)
    before = [_dense(t) for t in _parts(layout, _dense(h), u, 1) if t is not None]
    after = [t for t in _parts(layout, d, du, 1) if t is not None]
    hg, hu = [*[_ragged(kernels, t, block) for t in before], mine][:2]
    dg, dlast = [*[_ragged(kernels, t, block) for t in after], mine][:2]
    b, order = _weight(kernels, w_down.transpose(1, 2), config.depth, config.columns)
    weights = ends if p is None else p.float().contiguous()
    table = _tiles(ends, count)
    args = (_rows(kernels, rows, config.depth), b, hg, hu, dg, dlast, mine, table, weights, partial)
    sizes = (ends.shape[0], rows.shape[1], across)
    options = (config.stages, config.depth, config.columns, order, mode, act, limit, alpha, p is not None)
    _launch(kernels.dh, table.shape[0] * across, config, rows, *args, *sizes, *options)
    return d, du, partial.view(count) if across == 1 else partial.sum(1), scaled


def wgrad(
    d: Tensor, x: Tensor, gather_d: Tensor | None, gather_x: Tensor | None, ends: Tensor, *, into: Tensor | None = None
) -> Tensor:
    """``reference.wgrad``: (E, N, M); added to ``into``, of d's dtype or fp32, if that is given."""
    d = d if gather_d is None else d.index_select(0, gather_d)
    x = x if gather_x is None else x.index_select(0, gather_x)
    experts, config, kernels = ends.shape[0], WGRAD, _kernels()
    out = _empty((experts, d.shape[1], x.shape[1]), d) if into is None else into
    if d.shape[0] == 0:
        return out.zero_() if into is None else out
    down, across = -(-out.shape[1] // 128), -(-out.shape[2] // config.columns)
    width = config.columns // 2 if out.element_size() == 2 else config.columns // 4
    box = kernels.descriptor(out.data_ptr(), out.dtype, tuple(out.shape), _strides(out), (1, 64, width))
    left = _ragged(kernels, _dense(d), 64, config.depth)
    right = _ragged(kernels, _dense(x), config.columns, config.depth)
    counter = torch.zeros(1, dtype=torch.int32, device=d.device)
    tiles = experts * down * across
    options = (config.stages, config.depth, config.columns, into is not None)
    _launch(kernels.wgrad, tiles, config, d, left, right, box, ends, counter, tiles, down, across, *options)
    return out


# ------------------------------------------------------------------------------------------------ layouts


def _mode(layout: str) -> int:
    """What the kernels know a layout as."""
    return {"plain": PLAIN, "interleaved": PAIRS}.get(layout, HALVES)


def _before(layout: str, a: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """What precedes an activation a (S, I): h, and u or an empty tensor."""
    rows, inner = a.shape
    h = _empty((rows, 2 * inner if layout in ("concat", "interleaved") else inner), like)
    return h, _empty((rows, inner) if layout == "separate" else (0,), like)


def _parts(layout: str, first: Tensor, second: Tensor | None, dim: int) -> tuple[Tensor, Tensor | None]:
    """Gate and up where they can be told apart by a view with contiguous lines, else one tensor."""
    if layout == "concat":
        gate, last = first.chunk(2, dim)
        return gate, last
    return first, second if layout == "separate" else None


# ------------------------------------------------------------------------------------------------ descriptors and launches


def _mm(
    a: Tensor,
    gather: Tensor | None,
    w: Tensor,
    w2: Tensor | None,
    out: Tensor,
    saved: tuple[Tensor, Tensor | None],
    ends: Tensor,
    mode: int,
    act: str,
    limit: float | None,
    alpha: float | None,
    save: bool,
    bias: Tensor | None,
    scale: Tensor | None,
) -> None:
    kernels, config = _kernels(), MM if gather is None else GATHERED
    width = config.columns // 2 if w2 is not None else config.columns
    b, order = _weight(kernels, w, config.depth, width)
    b2, order2 = (b, order) if w2 is None else _weight(kernels, w2, config.depth, width)
    if order != order2:
        raise ValueError("w_gate and w_up are stored in different orders")
    boxes = [_ragged(kernels, t, config.columns // 2) for t in (out, saved[0], saved[1]) if t is not None]
    table = _tiles(ends, out.shape[0])
    line = ends if bias is None else bias if bias.stride(1) == 1 else bias.contiguous()
    across = -(-w.shape[1] // width)
    factors = ends if scale is None else scale.float().contiguous()
    a = _dense(a)
    lines = (ends, 0, ends) if gather is None else (a, _strides(a)[0], gather.contiguous())
    args = (_rows(kernels, a, config.depth), *lines, b, b2, boxes[0], boxes[1], boxes[-1], table, line, factors)
    sizes = (line.stride(0), ends.shape[0], a.shape[1], w.shape[1], across)
    flags = (mode, act, limit, alpha, save, bias is not None, scale is not None, gather is not None)
    _launch(
        kernels.mm, table.shape[0] * across, config, a, *args, *sizes, config.stages, config.depth, config.columns, order, *flags
    )


def _launch(kernel: Any, most: int, config: Config, like: Tensor, *args: Any) -> None:
    """On ``like``'s device, one program an SM, or as many as there can be tiles."""
    if most >= 2**31:
        raise NotImplementedError(f"{most} tiles are more than 32 bits count")
    grid = (min(most, _processors(like.device)),)
    with _on(like.device):
        kernel[grid](*args, config.producer, config.consumer, num_warps=4, maxnreg=config.registers)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _tiles(ends: Tensor, rows: int) -> Tensor:
    """The list of the tiles of rows, with the counter that they are claimed by at zero: one launch takes it."""
    from . import hopper_tiles as tiles

    experts = ends.shape[0]
    table = _empty((tiles.limit(rows, experts), tiles.FIELDS), ends)
    groups = 1 << experts.bit_length()  # a power of two, more than E
    with _on(ends.device):
        tiles.fill[(experts + 1,)](ends, table, rows, experts, groups, tiles.ROWS, 128)
    return table


def _rows(kernels: Kernels, t: Tensor, depth: int) -> Any:
    t = _dense(t)
    return kernels.descriptor(t.data_ptr(), t.dtype, tuple(t.shape), _strides(t), (64, depth))


def _weight(kernels: Kernels, w: Tensor, depth: int, columns: int) -> tuple[Any, bool]:
    """A descriptor of w (E, N, K), and whether N and not K is contiguous."""
    order = w.stride(2) != 1
    w = w.transpose(1, 2) if order else w
    w = w if w.data_ptr() % ALIGNMENT == 0 else w.clone()
    block = (1, depth, columns) if order else (1, columns, depth)
    return kernels.descriptor(w.data_ptr(), w.dtype, tuple(w.shape), _strides(w), block), order


def _ragged(kernels: Kernels, t: Tensor, width: int, rows: int = 64) -> Any:
    """Boxes of rows of t (S, C) that are clipped at a row that the kernel chooses.

    Coordinates (2^30, end, 2^30 - end + row, column): the strides of the first two undo what the third adds, modulo 2^64 in
    bytes, and the third is out of bounds where row >= end.
    """
    pitch = _strides(t)[0]
    shape, strides = (HUGE, HUGE, FAR, t.shape[1]), (2**34 - pitch, pitch, pitch, 1)
    return kernels.descriptor(t.data_ptr(), t.dtype, shape, strides, (1, 1, rows, width))


def _strides(t: Tensor) -> tuple[int, ...]:
    """Those of ``t``; of a dimension of one line the stride means nothing and may be odd."""
    step = ALIGNMENT // t.element_size()
    *outer, inner = zip(t.stride(), t.shape, strict=True)
    return (*[max(step, t.shape[-1]) if extent == 1 else stride for stride, extent in outer], inner[0])


def _dense(t: Tensor) -> Tensor:
    """``t`` (S, C), copied where TMA cannot read it."""
    size = t.element_size()
    fits = t.stride(1) == 1 and (t.shape[0] == 1 or (t.stride(0) >= t.shape[1] and t.stride(0) * size % ALIGNMENT == 0))
    return t if fits and t.data_ptr() % ALIGNMENT == 0 else t.clone(memory_format=torch.contiguous_format)


def _empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


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
