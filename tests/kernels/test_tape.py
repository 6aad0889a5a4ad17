"""A pass that was taped does what it does as it is written, and no other pass takes its tape."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from absent import OPTIONAL, Absent
from contract import BF16, F16
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxfuse.compat import guards_of
from fxfuse.kernels import hopper_launch, path, plans, prepared, tape
from fxfuse.kernels.fresh import fresh
from fxfuse.ops import grouped_kernels
from fxfuse.ops.grouped_mlp import _grouped_mlp


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tape, "DEVICES", {"cpu", "meta", "cuda"})
    monkeypatch.setattr(prepared, "current_stream", lambda device: 0)
    before = torch.get_float32_matmul_precision()
    plans.forget()
    yield
    torch.set_float32_matmul_precision(before)
    plans.forget()


def steps(x: Tensor, y: Tensor | None, act: str, limit: float | None, first: bool, mask: list[Any]) -> tuple[Tensor, ...]:
    """A pass of torch's operators by what it is given: several results, views, new tensors, writes into one."""
    values, places = torch.sort(x.float() if act == "silu" else -x, dim=-1)
    total = values.t() if first else values.clamp(max=limit)
    total = total + len(torch.get_float32_matmul_precision())
    for i, wanted in enumerate(mask):
        if wanted:
            total = total * (i + 2)
    filled = fresh((2,), plans.Operand(x.shape, x.stride(), x.dtype, x.device), torch.float32)()
    filled.fill_(3.0)
    filled.add_(float(limit or 0))
    return total, places, x, filled, *(() if y is None else (torch.cat([y, y], 0)[1:],))


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """``function`` taped, and what it is called with as it is written."""
    found: list[Any] = []

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        found.append(args)
        return function(*args)

    return tape.taped(call), found


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    """Values and metadata."""
    described = lambda t: (t.shape, t.stride(), t.dtype, t.device)  # noqa: E731
    return [*map(described, got)] == [*map(described, want)] and all(
        g.device.type == "meta" or torch.equal(g, w) for g, w in zip(got, want, strict=True)
    )


def new(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same metadata, other values."""
    return tuple(torch.empty_like(a).copy_(a.flip(0)) if isinstance(a, Tensor) else a for a in args)


X, Y = torch.randn(4, 16), torch.randn(3, 16)
CALL = (X, Y, "silu", 7.0, True, [True, False])
OTHERS: dict[str, tuple[int, Any]] = {
    "shape": (0, torch.randn(5, 16)),
    "stride": (0, torch.randn(16, 4).t()),
    "dtype": (0, torch.randn(4, 16).to(F16)),
    "shape of the second": (1, torch.randn(4, 16)),
    "stride of the second": (1, torch.randn(3, 32)[:, ::2]),
    "dtype of the second": (1, torch.randn(3, 16).to(BF16)),
    "absent": (1, None),
    "activation": (2, "gelu"),
    "limit": (3, 6.0),
    "no limit": (3, None),
    "flag": (4, False),
    "mask": (5, [False, True]),
    "more": (5, [True, True]),
    "device": (0, torch.randn(4, 16, device="meta")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_argument_is_another_pass(other: str) -> None:
    at, value = OTHERS[other]
    changed = (*CALL[:at], value, *CALL[at + 1 :])
    if other == "device":
        changed = (value, value[:3], *CALL[2:])
    function, plainly = counted(steps)
    for args in (CALL, changed, CALL, changed, new(CALL), new(changed)):
        assert same(function(*args), steps(*args))
    assert len(plainly) == 2


def test_guards_tell_metadata_apart() -> None:
    given = (X, Y)
    check = guards_of(given)
    assert check(*given) and check(torch.zeros(4, 16), torch.zeros(3, 16)) and not check(Y, X)
    others = [torch.zeros(5, 16), torch.zeros(4, 17), torch.zeros(16, 4).t(), X.double(), X.to("meta"), torch.zeros(4, 16, 1)]
    assert not any(check(other, Y) for other in others)


def test_more_kinds_of_passes_than_are_recent() -> None:
    """In any order, and with absent tensors in other places."""
    given = [(torch.randn(rows, 16), *CALL[1:]) for rows in range(1, 2 * tape.RECENT)]
    function, plainly = counted(steps)
    for args in [*given, *given, *reversed(given), given[0], given[3], given[0]]:
        assert same(function(*new(args)), steps(*new(args)))
    assert len(plainly) == len(given)
    places, plainly = counted(lambda x, y, z: tuple(t + i for i, t in enumerate((x, y, z)) if t is not None))
    for _ in range(3):
        for at in range(3):
            args = [torch.zeros(4), torch.zeros(4)]
            args.insert(at, None)
            assert [t[0].item() for t in places(*args)] == [i for i in range(3) if i != at]
    assert len(plainly) == 3


def test_the_precision_of_products_is_part_of_the_key() -> None:
    function, _ = counted(steps)
    for allowed in ("highest", "high", "highest", "high"):
        torch.set_float32_matmul_precision(allowed)
        assert same(function(*CALL), steps(*CALL))


def test_results_are_new_tensors_each_time() -> None:
    function, plainly = counted(steps)
    first, second, third = (function(*CALL) for _ in range(3))
    assert len(plainly) == 1
    for got in (second, third):
        assert got[2] is X and not {t.data_ptr() for t in got[:2]} & {t.data_ptr() for t in first[:2]}
    assert second[0].data_ptr() != third[0].data_ptr()


def test_misaligned_addresses_run_as_it_is_written() -> None:
    function, plainly = counted(steps)
    shifted = (torch.randn(65)[1:].view(4, 16), *CALL[1:])
    assert shifted[0].data_ptr() % plans.ALIGNMENT
    for args in (shifted, CALL, shifted, CALL):
        assert same(function(*args), steps(*args))
    assert len(plainly) == 3


CONSTANT = torch.ones(16)


@pytest.mark.parametrize(
    "once",
    [
        lambda x, y: (x * x.sum().item(),),  # a value decides
        lambda x, y: (x[x > 0],),  # and here how large a result is
        lambda x, y: (x + CONSTANT,),  # a tensor from elsewhere, which may be another one the next time
        lambda x, y: (x.clone(), CONSTANT),
        lambda x, y: (x.view(-1)[: int((x > 0).sum())].clone(),),
    ],
)
def test_what_may_differ_is_not_taped(once: Any) -> None:
    function, plainly = counted(once)
    for _ in range(tape.ATTEMPTS + 2):
        args = torch.randn(4, 16), torch.randn(4, 16)
        assert same(function(*args), once(*args))
    assert len(plainly) == tape.ATTEMPTS + 2


def test_one_tensor_as_two_arguments_is_not_taped() -> None:
    function, plainly = counted(lambda x, y: (x - 2 * y,))
    for x, y in ((X, X), (X, X), (X, X + 1), (X + 2, X), (X, X)):
        assert same(function(x, y), (x - 2 * y,))
    assert len(plainly) == 3  # twice in vain, then with two tensors; the tape serves all


def test_a_pass_that_failed_is_not_kept() -> None:
    fails = [True]

    def sometimes(x: Tensor) -> tuple[Tensor, ...]:
        found = x + 1
        if fails[0]:
            raise RuntimeError
        return (found * 2,)

    function, plainly = counted(sometimes)
    with pytest.raises(RuntimeError):
        function(X)
    assert tape.recorder() is None
    fails[0] = False
    for _ in range(3):
        assert same(function(X), ((X + 1) * 2,))
    assert len(plainly) == 2


def test_a_pass_within_a_pass() -> None:
    inner, within = counted(steps)

    def around(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (inner(x + 1, y, *CALL[2:])[0] * 2,)

    function, outside = counted(around)
    for _ in range(3):
        x = torch.randn(4, 16)
        assert same(function(x, Y), (steps(x + 1, Y, *CALL[2:])[0] * 2,))
    assert len(outside) == len(within) == 1


def noted(function: Callable[..., Any], *args: Tensor) -> tape.Tape:
    with tape.Recorder(args) as notes:
        results = function(*args)
    found = notes.tape(results)
    assert found is not None
    return found


def test_the_text_of_a_tape() -> None:
    """What no later step reads is freed, what nobody reads is not made; arguments are the caller's."""
    make = fresh((4,), plans.Operand((4,), (1,), torch.float32, X.device))

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, _unused = make(), make()
        first.fill_(1.0)
        values, _places = torch.sort(x[0, :4] * first)
        return values + y[0, 0], y

    found = noted(function, X, Y)
    assert found.source == TEXT
    got = found.play(0, X, Y)
    assert got is not None and same(got, function(X, Y)) and got[1] is Y
    one_off = torch.zeros(X.numel() + 1)[1:].view_as(X)
    assert found.play(0, one_off, Y) is None and found.play(0, X, one_off) is None


TEXT = """\
def play(stream, t0, t1):
    a0 = t0.data_ptr()
    a1 = t1.data_ptr()
    if (a0 | a1) % 16:
        return None
    t2 = c0()
    t4, = c1(t2,)
    del t2
    t5, = c2(t0,)
    t6, = c3(t5,)
    del t5
    t7, = c4(t6,t4,)
    del t6
    del t4
    t8,t9, = c5(t7,)
    del t7
    t10, = c6(t1,)
    t11, = c7(t10,)
    del t10
    t12, = c8(t8,t11,)
    del t8
    del t11
    return t12,t1,"""


class Noted(prepared.Direct):
    """A launch that notes what it is handed."""

    def __init__(self, tensors: int, found: list[list[Any]]) -> None:
        places = [(i, 4 + i, 8 * (i == 1)) for i in range(tensors)]
        super().__init__(None, lambda *args: found.append(list(args)), [1, 1, 1, 0, *[0] * tensors, "end"], places, [])


def launched_pass(sizes: list[int], found: list[list[Any]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Makes a tensor of each size, notes a launch with all of them, and returns the last; an operator too reads the first."""
    new = [fresh((size,), plans.Operand((1,), (1,), torch.uint8, X.device)) for size in sizes]
    direct = Noted(len(sizes) + 1, found)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        made = [make() for make in new]
        made[0].fill_(1)
        notes = tape.recorder()
        assert notes is not None
        notes.launched(direct, [x, *made])
        return (made[-1],)

    return function


def test_small_tensors_share_one() -> None:
    """Those that only launches name; each is apart from the others."""
    found: list[list[Any]] = []
    sizes = [64, 5, 512, 513, 0, tape.SMALL, tape.SMALL + 1, 7]
    taped = noted(launched_pass(sizes, found), X)
    played = taped.play(3, X)
    assert played is not None
    (result,) = played
    shared = [line.split(" = ") for line in taped.source.split("\n    ") if " = base + " in line]
    names, offsets = zip(*[(name, int(at.removeprefix("base + "))) for name, at in shared], strict=True)
    assert names == tuple(f"a{n}" for n in (2, 3, 4, 5, 6))  # not the first, the one too large and the result
    within = sorted(zip(offsets, [5, 512, 513, 0, tape.SMALL], strict=True))
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(within)) and not any(o % 512 for o in offsets)
    (again,) = found
    assert again[:5] == [1, 1, 1, 3, X.data_ptr()] and again[-1] == "end" and result.data_ptr() == again[-2]
    assert [a - again[6] for a in again[6:11]] == [o - offsets[0] for o in offsets]


def test_a_small_tensor_alone_shares_nothing() -> None:
    assert "base" not in noted(launched_pass([64, 5, tape.SMALL + 1, 7], []), X).source


def test_memory_is_freed_in_time() -> None:
    """Of a chain of tensors no more than two are alive."""
    alive: set[int] = set()
    most = [0]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(6):
            x = x + 1
        return (x,)

    taped = noted(function, X)
    watched = [c if not callable(c) else _watching(c, alive, most) for c in taped.constants]
    space = {f"c{i}": c for i, c in enumerate(watched)}
    exec(taped.source, space)
    assert same(space["play"](0, X), function(X))
    assert most[0] == 2


def _watching(call: Any, alive: set[int], most: list[int]) -> Any:
    def watched(*args: Tensor) -> list[Tensor]:
        found = call(*args)
        for t in found:
            alive.add(id(t))
            weakref.finalize(t, alive.discard, id(t))
        most[0] = max(most[0], len(alive))
        return found

    return watched


def test_hooks_see_launches_of_passes_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    function, plainly = counted(steps)
    for _ in range(2):
        function(*CALL)
    assert len(plainly) == 1
    monkeypatch.setattr(prepared, "hooked", lambda: True)
    assert same(function(*CALL), steps(*CALL)) and len(plainly) == 2


def test_another_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass runs on the device of its tensors."""
    current, entered = [1], []

    class Device:
        def __init__(self, wanted: torch.device) -> None:
            self.before, self.wanted = current[0], wanted.index

        def __enter__(self) -> None:
            entered.append(self.wanted)
            current[0] = self.wanted

        def __exit__(self, *error: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", Device)

    class There(Tensor):
        device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    function, plainly = counted(lambda x: (x,))
    for _ in range(3):
        function(torch.zeros(4).as_subclass(There))
    assert entered == [0, 0, 0] and current == [1] and len(plainly) == 1


def test_passes_of_several_threads() -> None:
    """Each goes through its own steps, also while another one's pass is noted."""
    given = [CALL, *[(*CALL[:at], value, *CALL[at + 1 :]) for at, value in OTHERS.values() if value is not OTHERS["device"][1]]]
    together, wrong = threading.Barrier(len(given), timeout=10), []
    function, _ = counted(steps)

    def run(args: tuple[Any, ...]) -> None:
        together.wait()
        wrong.extend(args for _ in range(5) if not same(function(*args), steps(*args)))

    threads = [threading.Thread(target=run, args=(args,)) for args in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tapes_are_bounded_and_can_be_dropped() -> None:
    function, plainly = counted(lambda x: (x + 1,))
    for rows in range(plans.KEPT + 3):
        function(torch.zeros(rows, 1))
    assert all(c.cache_info().currsize <= plans.KEPT for c in plans._caches)
    function(X)
    plainly.clear()
    function(X)
    assert not plainly
    plans.forget()
    function(X)
    assert len(plainly) == 1


def test_passes_elsewhere_are_not_taped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "DEVICES", {"cuda"})
    function, plainly = counted(steps)
    for _ in range(3):
        function(*CALL)
    assert len(plainly) == 3


# ------------------------------------------------------------------------------------------------ the operators' passes


TOKENS, CHOSEN, EXPERTS, HIDDEN, INNER = 12, 2, 4, 64, 32


def arguments(layout: str = "concat", dtype: torch.dtype = BF16, first: bool = False, save: bool = True) -> dict[str, Any]:
    """Of ``mlp``, by name."""
    wide = 2 * INNER if layout == "concat" else INNER
    make = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
    return {
        "x": make(TOKENS, HIDDEN), "ids": torch.randint(EXPERTS, (TOKENS, CHOSEN)), "p": make(TOKENS, CHOSEN), "ends": None,
        "w_gate": make(EXPERTS, wide, HIDDEN), "w_up": make(EXPERTS, INNER, HIDDEN) if layout == "separate" else None,
        "w_down": make(EXPERTS, HIDDEN, INNER), "b_gate": None, "b_down": make(EXPERTS, HIDDEN), "act": "silu",
        "layout": layout, "limit": None, "alpha": None, "first": first, "save": save,
    }  # fmt: skip


def backward_arguments(forward: dict[str, Any], mask: list[bool] | None = None) -> dict[str, Any]:
    _, h, u, order, inverse, ends = _grouped_mlp.reference(**forward)
    there = [forward[n] is not None for n in ("x", "p", "w_gate", "w_up", "w_down", "b_gate", "b_down")]
    saved = {"h": h, "u": u if u.numel() else None, "order": order, "inverse": inverse, "ends": ends, "mask": mask or there}
    found = {**forward, "grad": torch.randn_like(forward["x"]), **saved}
    names = torch.ops.fxfuse.grouped_mlp_backward.default._schema.arguments
    return {a.name: found[a.name] for a in names}


class Keeping(TorchDispatchMode):
    """No tensor that an operator of torch makes is freed: none has the address of another."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **kwargs or {})
        self.kept += [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result


@pytest.fixture(params=["portable", "hopper"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """What a pass launches, and what it returns: compiled functions, scalars and tensors, in order."""
    if prepared.VERSION not in OPTIONAL:
        pytest.skip("this Triton launches in its own way")
    if request.param == "hopper" and hopper_launch.available((9, 0), ".".join(map(str, prepared.VERSION))):
        pytest.skip("no Gluon")
    absent = Absent()
    absent.install(monkeypatch)
    kept: list[Tensor] = []
    empty = torch._C._dynamo.guards._empty_strided_cpu

    def zeros(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:  # no kernel runs: what is an index must be one
        kept.append(empty(size, stride, dtype))
        ctypes.memset(kept[-1].data_ptr(), 0, kept[-1].numel() * kept[-1].itemsize)
        return kept[-1]

    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", zeros)
    monkeypatch.setattr(hopper_launch, "_processors", lambda _: 132)
    monkeypatch.setattr(grouped_kernels, "_functions", lambda name, like: path(request.param))

    def run(function: Callable[..., Any], named: dict[str, Any]) -> list[Any]:
        """All that is handed over; an address as the number of the tensor, in the order that launches name them in."""
        absent.launched.clear()
        kept.clear()
        given = [t for t in named.values() if isinstance(t, Tensor)]
        with Keeping(kept):
            results = function(*named.values(), request.param)
        made = {t.data_ptr(): t.numel() * t.itemsize for t in [*given, *kept, *results] if t.data_ptr()}
        order: dict[int, int] = {}

        def known(a: Any) -> Any:
            if type(a) is not int or abs(a) < 2**20:
                return a
            base = next((p for p, size in made.items() if p <= a < p + size), None)
            return a if base is None else ("tensor", order.setdefault(base, len(order)), a - base)

        return [[known(a) for a in flat(args)] for args in absent.launched] + [[known(t.data_ptr()) for t in results]]

    return run


def flat(args: Any) -> Iterator[Any]:
    for a in args:
        if isinstance(a, (tuple, list)):
            yield from flat(a)
        else:
            yield a


def test_passes_of_the_operators(launched: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever came before, a pass launches what it launches alone, and the second one of its kind asks for no plan."""
    monkeypatch.setattr(tape, "SMALL", -1)  # each tensor has its address
    changes: list[dict[str, Any]] = [{}, {"layout": "separate"}, {"dtype": F16}, {"first": True}]
    forwards = [arguments(**c) for c in [*changes, {"save": False}]]
    forwards.append({**forwards[0], "ids": forwards[0]["ids"].int()})
    forwards.append({**forwards[0], "b_down": None})
    forwards.append({**forwards[0], "p": forwards[0]["p"].float()})
    backwards = [backward_arguments(f) for f in forwards if f["save"]]
    backwards.append({**backwards[0], "h": None})
    only = [[i == j for i in range(7)] for j in (0, 1, 2, 4, 6)]
    backwards += [{**backwards[0], "mask": mask} for mask in only]
    steps = [(grouped_kernels.mlp, f) for f in forwards] + [(grouped_kernels.mlp_backward, b) for b in backwards]
    for function, named in steps:  # compile and prepare
        launched(function, named)
    alone = []
    for function, named in steps:
        plans.forget()
        launched(function, named)
        alone.append(launched(function.__wrapped__, named))
        assert alone[-1]
    plans.forget()
    for function, named in [*steps, *steps]:  # the first time Triton launches
        launched(function, named)
    with monkeypatch.context() as patch:
        patch.setattr(plans, "Operand", None)  # what a plan's key is made of
        for (function, named), want in zip(steps, alone, strict=True):
            assert launched(function, named) == want
