"""Launches that are prepared once: what Triton binds, specialises and looks up at every launch is done at the first.

``kernel[grid](...)`` costs 30 to 90 us of the host, and each tensor descriptor among its arguments about 10 us more; a prepared
launch hands the addresses and what else never changes to the function that Triton compiled for the kernel's signature.

The only file that knows how Triton launches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from .plans import ALIGNMENT
from .tape import recorder

MAPS = 4096
"""Tensor maps that are kept, of 128 bytes each."""
Box = Callable[[int], Any]
"""A tensor descriptor of what lies at an address."""
VERSION = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
_knobs = triton.knobs.runtime


class Launch:
    """A kernel with its grid and with all of its arguments but the tensors, which come first.

    Calls differ in addresses alone: one launch is always called with tensors of the same dtypes on the same device, and with the
    same None and numbers between them. The first call is Triton's own, and so is one with a misaligned address, or with launch
    hooks.

    Args:
        kernel: takes tensors or descriptors, then ``scalars``, then constants that ``options`` names.
        grid: how many programs; where there are none nothing is launched.
        scalars: arguments after the tensors.
        slots: by place, what a tensor is handed over as if not as its first element: another element, or a descriptor.
        options: the other constants by name, and Triton's.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        device: torch.device,
        scalars: Sequence[Any],
        slots: Mapping[int, int | Box] | None = None,
        **options: Any,
    ) -> None:
        self.kernel, self.grid, self.device, self.scalars, self.options = kernel, grid, device, tuple(scalars), options
        self.slots = slots or {}
        self.guarded = device.type == "cuda" and torch.cuda.device_count() > 1
        self.direct: Direct | None = None

    def __call__(self, *tensors: Tensor | int | None) -> None:
        """On the current stream of the tensors' device."""
        if self.guarded and torch.accelerator.current_device_index() != self.device.index:
            with torch.cuda.device(self.device):
                return self(*tensors)
        if 0 in self.grid:
            return
        direct = None if hooked() else self.direct
        if direct is None or not direct(tensors, self.device.index):
            direct = None
            self._ordinary(tensors)
        if (notes := recorder()) is not None:
            notes.launched(direct, tensors)

    def _ordinary(self, tensors: Sequence[Tensor | int | None]) -> None:
        """Let Triton launch, and keep what it compiled unless that was for misaligned addresses."""
        args = [_handed(t, self.slots.get(i, 0)) if isinstance(t, Tensor) else t for i, t in enumerate(tensors)]
        compiled = self.kernel[self.grid](*args, *self.scalars, **self.options)
        aligned = not any(isinstance(a, Tensor) and a.data_ptr() % ALIGNMENT for a in args)
        if self.direct is None and compiled is not None and aligned:
            named = [self.options[name] for name in self.kernel.arg_names[len(args) + len(self.scalars) :]]
            self.direct = _direct(compiled, self.grid, tensors, self.slots, (*self.scalars, *named))


def _handed(t: Tensor, slot: int | Box) -> Any:
    if callable(slot):
        return slot(t.data_ptr())
    return t.as_strided((1,), (1,), t.storage_offset() + slot) if slot else t


# ------------------------------------------------------------------------------------------------ what is private to Triton


class Direct:
    """Launches what Triton compiled for some tensors with others of the same metadata.

    Args:
        compiled: owns the code.
        run: the function of Triton's that launches.
        filled: its arguments, among them the grid.
        pointers: which tensor's address goes where, and what is added to it, in bytes.
        maps: the same for tensor maps: which tensor's, where, and what gives the map of an address.
    """

    STREAM = 3

    def __init__(
        self,
        compiled: Any,
        run: Callable[..., Any],
        filled: list[Any],
        pointers: Sequence[tuple[int, int, int]],
        maps: Sequence[tuple[int, int, Callable[[int], Any]]],
    ) -> None:
        self.compiled, self.run, self.filled, self.pointers, self.maps = compiled, run, filled, pointers, maps

    def __call__(self, tensors: Sequence[Any], device: int | None) -> bool:
        """Launch on the device's current stream, unless an address is misaligned, and say whether."""
        args, bits = self.filled.copy(), 0
        for i, place, shift in self.pointers:
            args[place] = address = tensors[i].data_ptr() + shift
            bits |= address
        if bits % ALIGNMENT:
            return False
        for i, place, encode in self.maps:
            args[place] = encode(tensors[i].data_ptr())
        args[self.STREAM] = current_stream(device)
        self.run(*args)
        return True


def _direct(
    compiled: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor | int | None],
    slots: Mapping[int, int | Box],
    after: tuple[Any, ...],
) -> Direct | None:
    """For what Triton compiled for ``tensors``; None where it is not known how this Triton launches.

    ``after``: all arguments after the tensors.
    """
    described = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    launcher = _launcher(compiled, bool(described))
    if launcher is None or len(described) != sum(map(callable, slots.values())) or not all(described):
        return None
    run, before = launcher
    filled: list[Any] = [*(*grid, 1, 1)[:3], 0, *before]
    pointers: list[tuple[int, int, int]] = []
    maps: list[tuple[int, int, Callable[[int], Any]]] = []
    for i, t in enumerate(tensors):
        slot = slots.get(i, 0)
        if not isinstance(t, Tensor):
            filled.append(t)
        elif callable(slot):
            encode = _encoder(slot, described.pop(0))
            maps.append((i, len(filled), functools.partial(_encoded, encode)))
            filled += encode(t.data_ptr())  # a tensor map, then extents and strides, which never change
        else:
            pointers.append((i, len(filled), slot * t.element_size()))
            filled.append(0)
    return Direct(compiled, run, [*filled, *after], pointers, maps)


def hooked() -> bool:
    """Whether somebody wants to see every launch."""
    hook = _knobs.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def current_stream(device: int | None) -> int:
    """Of a device."""
    return driver.active.get_current_stream(device)


def _launcher(compiled: Any, described: bool) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The C function behind a compiled kernel, and what it takes between x, y, z, stream and the kernel's arguments.

    Without scratch memory, and without hooks.
    """
    kept = compiled.run
    if type(kept).__name__ != "CudaLauncher" or kept.global_scratch_size or kept.profile_scratch_size:
        return None
    flags = (compiled.function, kept.launch_cooperative_grid, kept.launch_pdl)
    if VERSION in ((3, 5), (3, 6)):  # a function for each signature, in a closure where there are descriptors to encode
        run = _captured(kept.launch, "launcher") if described else kept.launch
        return None if run is None else (run, (*flags, None, None, compiled.packed_metadata, None, None, None))
    if VERSION in ((3, 7), (3, 8)) and not getattr(kept, "gsan_enabled", False):  # one function that is told the signature
        run = driver.active.utils.launch
        before = (*flags, compiled.packed_metadata, *[None] * 5, kept.arg_annotations, kept.kernel_signature)
        return lambda x, y, z, stream, *args: run(x, y, z, stream, *before, args), ()
    return None


def _captured(function: Any, name: str) -> Any:
    """What a closure knows by this name, or None."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for known, cell in cells if known == name), None)


@functools.lru_cache(maxsize=MAPS)
def _encoded(encode: Callable[[int], Sequence[Any]], address: int) -> Any:
    """The tensor map of what lies at an address: it depends on nothing else, a kept one is never stale."""
    return encode(address)[0]


def _encoder(box: Box, metadata: Any) -> Callable[[int], Sequence[Any]]:
    from triton.backends.nvidia.driver import make_tensordesc_arg

    more = (None,) if VERSION >= (3, 8) else ()
    return lambda address: make_tensordesc_arg(box(address), metadata, *more)
