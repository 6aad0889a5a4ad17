"""A model of a Hopper GPU that runs Gluon kernels' own Python source on the CPU: enough of Gluon for ``fxfuse.kernels.hopper``.

What is asynchronous happens as late as the program allows, and in a random order: a TMA load when the scheduler picks it, a
warpgroup product at the wait that needs it, a TMA store at the wait for its buffer. So a stage or a buffer that is given back too
early shows as wrong numbers, and a barrier that nobody arrives at as ``Deadlock``. Addresses are computed modulo 2^64 and must
lie in a known tensor. Not modelled: the compiler, registers, layouts, and races between the threads of one partition.
"""

from __future__ import annotations

import dataclasses
import importlib
import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fxfuse.kernels.hopper_launch import Kernels

NAMES = "triton.experimental"


class Deadlock(AssertionError):
    """No partition can go on."""


# ------------------------------------------------------------------------------------------------ values


class Int(int):
    """A scalar in a register."""

    def to(self, dtype: torch.dtype) -> Int:
        return self


class Tile(torch.Tensor):
    """A tensor in registers: values, so that what looks in-place is not."""

    type = property(lambda self: types.SimpleNamespace(layout=None))

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __imul__(self, other: Any) -> Any:
        return self * other


def tile(t: torch.Tensor) -> Tile:
    return t.detach().clone().as_subclass(Tile)


def whole(t: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    return t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


class Product:
    """An accumulator with products under way."""

    def __init__(self, value: torch.Tensor, pending: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
        self.value, self.pending = value, pending


class Pointer:
    """To an element of a tensor, or to several."""

    def __init__(self, tensor: torch.Tensor, offset: Any = 0) -> None:
        self.flat, self.offset = (
            tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0),
            0,
        )
        self.offset = tensor.storage_offset() + offset

    def __add__(self, other: Any) -> Pointer:
        found = object.__new__(Pointer)
        found.flat, found.offset = self.flat, self.offset + other
        return found

    def __sub__(self, other: Any) -> Pointer:
        return self + -other


# ------------------------------------------------------------------------------------------------ machine


class Machine:
    """Partitions as threads of which one runs at a time; the seed decides which goes on where several could."""

    def __init__(self, seed: int) -> None:
        self.random, self.tasks, self.copies, self.memory = random.Random(seed), [], [], []
        self.local, self.error = threading.local(), None
        self.back = threading.Semaphore(0)

    def known(self, t: torch.Tensor) -> None:
        """Kernels may use this tensor's memory."""
        view = whole(t).view(torch.int16 if t.element_size() == 2 else torch.int32).numpy()
        self.memory.append((view.ctypes.data, view, t))

    def start(self, cta: Cta, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.tasks.append(Task(self, cta, function, args))

    def run(self) -> None:
        for task in self.tasks:
            task.thread.start()
        while True:
            ready = [t for t in self.tasks if not t.done and t.ready()]
            choices = [*ready, *self.copies]
            if self.error is not None or not choices:
                break
            choice = self.random.choice(choices)
            if isinstance(choice, Task):
                choice.go.release()
                self.back.acquire()
            else:
                self.copies.remove(choice)
                choice()
        stuck = [t.name for t in self.tasks if not t.done]
        for t in self.tasks:
            t.abandoned = True
            t.go.release()
        self.tasks, self.copies = [], []
        if self.error is not None:
            raise self.error
        if stuck:
            raise Deadlock(f"waiting forever: {stuck}")


class Task:
    """One partition of one CTA."""

    def __init__(self, machine: Machine, cta: Cta, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.machine, self.cta, self.name = machine, cta, f"{function.__name__} of CTA {cta.index}"
        self.function, self.args, self.done, self.abandoned = function, args, False, False
        self.ready: Callable[[], bool] = lambda: True
        self.go, self.stores, self.unfenced = threading.Semaphore(0), [], []
        self.copies: list[Callable[[], None]] = []
        self.fenced = False
        self.thread = threading.Thread(target=self.main, daemon=True)

    def main(self) -> None:
        self.go.acquire()
        self.machine.local.task = self
        try:
            if not self.abandoned:
                self.function(*self.args)
                assert not self.stores, f"{self.name} ends with stores under way"
        except SystemExit:
            pass
        except BaseException as error:
            self.machine.error = self.machine.error or error
        self.done = True
        self.machine.back.release()

    def wait(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.machine.back.release()
        self.go.acquire()
        if self.abandoned:
            raise SystemExit
        self.ready = lambda: True


@dataclasses.dataclass
class Cta:
    index: int
    count: int
    shared: int = 0


class Barrier:
    """An mbarrier."""

    count = pending = bytes = phase = 0

    def arrive(self, count: int, size: int = 0) -> None:
        self.pending, self.bytes = self.pending - count, self.bytes + size
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1


class Shared:
    """A view of shared memory."""

    def __init__(self, t: Any, state: dict[str, Any]) -> None:
        self.t, self.state = t, state

    def index(self, i: Any) -> Any:
        if isinstance(self.t, list):
            return self.t[int(i)]
        assert 0 <= int(i) < self.t.shape[0]
        return Shared(self.t[int(i)], self.state.setdefault(int(i), {}))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.t.narrow(dim, start, length), self.state)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.t.view(list(shape)), self.state)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.t.permute(*order), self.state)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        assert dtype == self.t.dtype and self.t.is_contiguous()
        return Shared(self.t.view(list(shape)), self.state.setdefault(tuple(shape), {}))

    def load(self, layout: Any) -> Tile:
        return tile(self.t)

    def store(self, value: torch.Tensor) -> None:
        assert value.dtype == self.t.dtype and value.shape == self.t.shape, (value.dtype, self.t.dtype, value.shape)
        self.t.copy_(value)
        self.state["unfenced"] = True
        machine().local.task.unfenced.append(self.state)


class Descriptor:
    """A TMA descriptor."""

    def __init__(self, address: int, dtype: torch.dtype, shape: Any, strides: Any, block: Any) -> None:
        assert address % 16 == 0 and strides[-1] == 1 and all(s * dtype.itemsize % 16 == 0 and s > 0 for s in strides[:-1])
        assert all(0 < s < 2**32 for s in shape) and all(0 < s * dtype.itemsize < 2**40 for s in strides[:-1])
        self.address, self.dtype, self.sizes, self.strides = address, dtype, shape, strides
        self.block_type = types.SimpleNamespace(shape=list(block))
        self.layout = None

    def places(self, at: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of a box's elements, and which of them are inside."""
        block = self.block_type.shape
        address, inside = np.full(block, self.address, dtype=np.uint64), np.ones(block, dtype=bool)
        for d, (first, extent, size, stride) in enumerate(zip(at, block, self.sizes, self.strides, strict=True)):
            assert -(2**31) <= int(first) < 2**31
            i = (int(first) + np.arange(extent)).reshape([-1 if k == d else 1 for k in range(len(block))])
            inside &= (i >= 0) & (i < size)
            step = (stride * self.dtype.itemsize) % 2**64
            address = address + i.astype(np.int64).astype(np.uint64) * np.uint64(step)
        return address, inside

    def elements(self, address: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The memory that these addresses lie in, and where."""
        if address.size == 0:
            return np.zeros(0, np.int16 if self.dtype.itemsize == 2 else np.int32), address.astype(np.int64)
        for start, view, _ in machine().memory:
            if start <= int(address.min()) and int(address.max()) < start + view.nbytes and view.itemsize == self.dtype.itemsize:
                return view, ((address - np.uint64(start)) // np.uint64(view.itemsize)).astype(np.int64)
        raise AssertionError("a box lies outside of every tensor")

    def read(self, at: Sequence[Any]) -> torch.Tensor:
        address, inside = self.places(at)
        view, where = self.elements(address[inside])
        found = np.zeros(inside.shape, dtype=view.dtype)
        found[inside] = view[where]
        return torch.from_numpy(found).view(self.dtype)

    def write(self, at: Sequence[Any], value: torch.Tensor) -> None:
        address, inside = self.places(at)
        view, where = self.elements(address[inside])
        view[where] = value.contiguous().view(torch.int16 if self.dtype.itemsize == 2 else torch.int32).numpy()[inside]


_machine: list[Machine] = []


def machine() -> Machine:
    return _machine[-1]


@contextmanager
def running(seed: int) -> Any:
    """A machine on which the kernels run."""
    _machine.append(Machine(seed))
    try:
        yield _machine[-1]
    finally:
        _machine.pop()


# ------------------------------------------------------------------------------------------------ Gluon


class Jitted:
    """A kernel or a function of kernels."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__ = function, function.__name__

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            here = [Pointer(a) if isinstance(a, torch.Tensor) else a for a in args]
            for index in range(grid[0]):
                machine().local.cta = Cta(index, grid[0])
                self.function(*here)
            machine().run()

        return launch


def cta() -> Cta:
    task = getattr(machine().local, "task", None)
    return machine().local.cta if task is None else task.cta


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    size = int(np.prod(shape)) * dtype.itemsize
    cta().shared += size
    assert cta().shared <= 232448, f"{cta().shared} bytes of shared memory"
    if dtype is torch.int64:  # barriers
        return Shared([Barrier() for _ in range(shape[0])], {})
    filled = torch.full(list(shape), float("nan")) if dtype.is_floating_point else torch.full(list(shape), -1)
    return Shared(filled.to(dtype), {})


def load(pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
    if isinstance(pointer.offset, torch.Tensor):
        allowed = torch.as_tensor(mask).expand(pointer.offset.shape)
        here = torch.where(allowed, pointer.offset, 0)
        assert bool(((here >= 0) & (here < pointer.flat.numel())).all()), "a load outside of its tensor"
        return (
            torch.where(allowed, pointer.flat[here], torch.as_tensor(0 if other is None else other))
            .as_subclass(Tile)
            .to(pointer.flat.dtype)
        )
    if not mask:
        return Int(other)
    assert 0 <= pointer.offset < pointer.flat.numel(), "a load outside of its tensor"
    return Int(pointer.flat[pointer.offset].item())


def store(pointer: Pointer, value: Any, mask: Any) -> None:
    offset, value, mask = (torch.as_tensor(v) for v in (pointer.offset, value, mask))
    where = offset[mask]
    assert bool(((where >= 0) & (where < pointer.flat.numel())).all()), "a store outside of its tensor"
    pointer.flat[where] = value[mask].to(pointer.flat.dtype)


def atomic_add(pointer: Pointer, value: int, sem: str) -> Int:
    old = Int(pointer.flat[pointer.offset].item())
    pointer.flat[pointer.offset] += value
    machine().local.task.wait(lambda: True)  # others may go on before what it found arrives
    return old


def where(condition: Any, yes: Any, no: Any) -> Any:
    if not any(isinstance(v, torch.Tensor) for v in (condition, yes, no)):
        return yes if condition else no
    dtype = next((v.dtype for v in (yes, no) if isinstance(v, torch.Tensor)), torch.float64)
    yes, no = (v if isinstance(v, torch.Tensor) else torch.tensor(v, dtype=dtype) for v in (yes, no))
    return torch.where(torch.as_tensor(condition), yes, no).as_subclass(Tile)


def warp_specialize(functions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
    assert len(functions) == len(warps) + 1 == len(registers) + 1
    for function, args in functions:
        machine().start(cta(), function, args)


def init(bar: Barrier, count: int) -> None:
    bar.count = bar.pending = count


def wgmma(a: Shared, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Product:
    assert is_async and a.t.shape[1] == b.t.shape[0] and a.t.shape[0] == 64
    assert machine().local.task.fenced or not a.state.get("by threads"), "a product of what threads wrote, without a fence"
    value, pending = (acc.value, acc.pending) if isinstance(acc, Product) else (acc, [])

    def step(before: torch.Tensor) -> torch.Tensor:
        product = a.t.float() @ b.t.float()
        return before + product if use_acc else product

    return Product(value, [*pending, step])


def wgmma_wait(outstanding: int, deps: Sequence[Any]) -> Any:
    (acc,) = deps
    if not isinstance(acc, Product):
        return acc
    value, pending = acc.value, list(acc.pending)
    while len(pending) > outstanding:
        value = pending.pop(0)(value)
    value = value.as_subclass(Tile)
    return value if outstanding == 0 else Product(value, pending)


def tma_load(d: Descriptor, at: Sequence[Any], bar: Barrier, result: Shared) -> None:
    assert list(result.t.shape) == d.block_type.shape, (result.t.shape, d.block_type.shape)
    assert result.t.dtype == d.dtype
    assert len(at) == len(d.sizes)
    here = [int(i) for i in at]

    def copy() -> None:
        result.t.copy_(d.read(here))
        bar.arrive(0, -result.t.numel() * d.dtype.itemsize)

    machine().copies.append(copy)


def tma_store(d: Descriptor, at: Sequence[Any], source: Shared) -> None:
    assert list(source.t.shape) == d.block_type.shape and source.t.dtype == d.dtype
    assert not source.state.get("unfenced"), "a TMA store of what was written without a fence"
    here = [int(i) for i in at]
    machine().local.task.stores.append(lambda: d.write(here, source.t))


def thread_copy(smem: Shared, pointer: Pointer, mask: torch.Tensor) -> None:
    """cp.async; zeros where the mask says no."""

    def copy() -> None:
        smem.t.copy_(load(pointer, mask.expand(smem.t.shape), 0.0))
        smem.state["by threads"] = True

    assert pointer.offset.shape == smem.t.shape
    machine().local.task.copies.append(copy)


def thread_arrive(bar: Barrier, increment_count: bool) -> None:
    """Each of four warps' threads arrives when what it copied so far is there."""
    assert not increment_count
    task = machine().local.task
    copies, task.copies = task.copies, []

    def finish() -> None:
        for copy in copies:
            copy()
        bar.arrive(128)

    machine().copies.append(finish)


def store_wait(pending: int) -> None:
    stores = machine().local.task.stores
    while len(stores) > pending:
        stores.pop(0)()


def fence() -> None:
    task = getattr(machine().local, "task", None)
    if task is not None:
        task.fenced = True
    while task is not None and task.unfenced:
        task.unfenced.pop()["unfenced"] = False


def arrive(bar: Barrier, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        bar.arrive(count)


def wait(bar: Barrier, phase: Any) -> None:
    requested = int(phase)
    machine().local.task.fenced = False
    machine().local.task.wait(lambda: bar.phase != requested)


def expect(bar: Barrier, size: int) -> None:
    bar.arrive(1, size)


ASM: dict[str, Callable[..., Any]] = {
    "ex2.approx.ftz.f32": torch.exp2,
    "rcp.approx.ftz.f32": torch.reciprocal,
    "setp.le.f32": lambda x, bound, y: torch.where(x <= bound, y, 0.0),
}
"""Instructions, as exact functions of what the text that begins with them is given."""


def assembled(text: str, *args: Any, **options: Any) -> Any:
    (instruction,) = [known for known in ASM if known in text]
    return ASM[instruction](*args[1])


def extremum(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Of tensors NaN where one is, of integers as usual."""
    return lambda a, b, **options: function(a, torch.as_tensor(b)) if isinstance(a, torch.Tensor) else plain(a, b)


def modules() -> dict[str, types.ModuleType]:
    """Stand-ins for what ``hopper`` imports."""

    def made_of(name: str, **content: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(content)
        return made

    nothing = lambda *args, **options: None  # noqa: E731
    gl = made_of(
        f"{NAMES}.gluon.language",
        **{f"{kind}Layout": nothing for kind in ("NVMMAShared", "NVMMADistributed", "Slice", "Blocked", "SwizzledShared")},
        constexpr=lambda v: v, static_range=range, static_assert=nothing,
        **{f"int{n}": getattr(torch, f"int{n}") for n in (8, 16, 32, 64)},
        float32=torch.float32, bfloat16=torch.bfloat16, float16=torch.float16,
        allocate_shared_memory=allocate, load=load, store=store, atomic_add=atomic_add, where=where,
        warp_specialize=warp_specialize, program_id=lambda axis: cta().index, num_programs=lambda axis: cta().count,
        full=lambda shape, value, dtype, layout: tile(torch.full(shape, int(value), dtype=dtype)),
        zeros=lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
        arange=lambda start, end, layout: tile(torch.arange(start, end)),
        max=lambda t, axis: Int(t.max().item()), sum=lambda t, axis: t.sum(axis),
        maximum=extremum(torch.maximum, max), minimum=extremum(torch.minimum, min),
        split=lambda t: tuple(t.unbind(-1)), join=lambda a, b: torch.stack([a, b], -1),
        permute=lambda t, order: t.permute(*order), reshape=lambda t, shape: t.reshape(*shape),
        exp2=torch.exp2, abs=torch.abs, inline_asm_elementwise=assembled,
    )  # fmt: skip
    hopper = made_of(
        f"{NAMES}.gluon.language.nvidia.hopper",
        async_copy=made_of("async_copy", async_copy_global_to_shared=thread_copy, mbarrier_arrive=thread_arrive),
        fence_async_shared=fence, warpgroup_mma=wgmma, warpgroup_mma_wait=wgmma_wait,
        mbarrier=made_of("mbarrier", MBarrierLayout=nothing, init=init, wait=wait, arrive=arrive, expect=expect),
        tma=made_of("tma", async_copy_global_to_shared=tma_load, async_copy_shared_to_global=tma_store, store_wait=store_wait),
    )  # fmt: skip
    gluon = made_of(f"{NAMES}.gluon", jit=Jitted, language=gl)
    found = [made_of(NAMES, gluon=gluon), gluon, gl, made_of(f"{NAMES}.gluon.language.nvidia", hopper=hopper), hopper]
    found += [made_of(f"{NAMES}.gluon.nvidia"), made_of(f"{NAMES}.gluon.nvidia.hopper", TensorDescriptor=Descriptor)]
    return {m.__name__: m for m in found}


def module(name: str, folder: Path) -> types.ModuleType:
    """A module of a folder, and all that it imports from there, for the machine."""
    package = types.ModuleType("hopper_on_the_model")
    package.__path__ = [str(folder)]
    with patch.dict(sys.modules, modules() | {package.__name__: package}):  # forgets what is imported here
        return importlib.import_module(f"{package.__name__}.{name}")


def kernels(folder: Path) -> Kernels:
    """What a launcher launches, for the machine."""
    return Kernels(Descriptor, *[getattr(module(f"hopper_{name}", folder), name) for name in ("mm", "dh", "wgrad")])
