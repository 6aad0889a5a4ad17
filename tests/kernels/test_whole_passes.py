"""A pass takes the plans of the first one with the same metadata, and of no other."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from absent import OPTIONAL, Absent
from contract import BF16, F16
from torch import Tensor

from fxfuse.kernels import hopper_launch, path, plans, prepared
from fxfuse.ops import grouped_kernels
from fxfuse.ops.grouped_mlp import _grouped_mlp

Described = tuple[Any, ...]
made: list[Described] = []
"""What was prepared, in order."""


@plans.planned
def described(precision: str, *seen: Any) -> Callable[..., Described]:
    made.append((precision, *seen))
    return lambda *args: (precision, *seen)


def calls(
    describe: Any, x: Tensor, y: Tensor | None, act: str, limit: float | None, first: bool, mask: list[Any]
) -> list[Described]:
    """A function that calls planned ones by what it is given."""
    found = [describe(x, act, limit)] if first else []
    found += [describe(x, i) for i, wanted in enumerate(mask) if wanted]
    return found if y is None else [*found, describe(y, first)]


def planless(*args: Any) -> Described:
    return (plans.precision(args[0].dtype), *map(seen, args))


both = plans.whole(functools.partial(calls, described))
expected = functools.partial(calls, planless)


def seen(a: Any) -> Any:
    return plans.Operand(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, Tensor) else a


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    plans.forget()
    made.clear()
    yield
    torch.set_float32_matmul_precision(before)
    plans.forget()


X, Y = torch.zeros(4, 16), torch.zeros(3, 16)
CALL = (X, Y, "silu", 7.0, True, [True, False])
OTHERS: dict[str, tuple[int, Any]] = {
    "shape": (0, torch.zeros(5, 16)),
    "stride": (0, torch.zeros(16, 4).t()),
    "dtype": (0, torch.zeros(4, 16, dtype=F16)),
    "shape of the second": (1, torch.zeros(4, 16)),
    "stride of the second": (1, torch.zeros(3, 32)[:, ::2]),
    "dtype of the second": (1, torch.zeros(3, 16, dtype=BF16)),
    "absent": (1, None),
    "activation": (2, "gelu"),
    "limit": (3, 6.0),
    "no limit": (3, None),
    "flag": (4, False),
    "mask": (5, [False, True]),
    "more": (5, [True, True]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_argument_is_another_pass(other: str) -> None:
    at, value = OTHERS[other]
    changed = (*CALL[:at], value, *CALL[at + 1 :])
    for args in (CALL, changed, CALL, changed):
        assert both(*args) == expected(*args)


def test_another_device_is_another_pass() -> None:
    device = torch.device("meta")
    meta = (X.to(device), *CALL[1:])
    for args in (CALL, meta, CALL, meta):
        assert both(*args) == expected(*args)


def test_the_precision_of_products_is_part_of_the_key() -> None:
    for allowed in ("highest", "high", "highest", "high"):
        torch.set_float32_matmul_precision(allowed)
        assert both(*CALL) == expected(*CALL)


def test_the_second_pass_computes_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    first = both(*CALL)
    monkeypatch.setattr(plans, "Operand", None)  # what a key is made of
    again = (torch.ones(4, 16), torch.ones(3, 16), *CALL[2:])
    assert both(*again) == first
    with pytest.raises(TypeError):
        both(torch.zeros(5, 16), *CALL[1:])


def test_misaligned_addresses_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted = (torch.zeros(65)[1:].view(4, 16), *CALL[1:])
    assert shifted[0].data_ptr() % plans.ALIGNMENT
    for args in (shifted, CALL, shifted, CALL):
        assert both(*args) == expected(*args)
    monkeypatch.setattr(plans, "Operand", None)
    with pytest.raises(TypeError):
        both(*shifted)


def test_a_pass_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [True]

    @plans.whole
    def sometimes(x: Tensor) -> list[Described]:
        found = [described(x, 1)]
        if fails[0]:
            raise RuntimeError
        return [*found, described(x, 2)]

    with pytest.raises(RuntimeError):
        sometimes(X)
    assert described(X, 3) == planless(X, 3)
    fails.clear()
    fails.append(False)
    wanted = [planless(X, 1), planless(X, 2)]
    assert sometimes(X) == wanted
    monkeypatch.setattr(plans, "Operand", None)
    assert sometimes(X) == wanted


def test_a_pass_within_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    @plans.planned
    def nested(precision: str, *_: Any) -> Callable[..., list[Described]]:
        return lambda *args: [*both(*CALL), described(Y, 5)]

    @plans.whole
    def around(x: Tensor) -> list[Any]:
        return [described(x, 1), nested(x), described(x, 2)]

    @plans.whole
    def directly(x: Tensor) -> list[Any]:
        return [described(x, 1), both(*CALL), both(x, *CALL[1:]), described(x, 2)]

    within = [*expected(*CALL), planless(Y, 5)]
    wanted = [
        [planless(X, 1), within, planless(X, 2)],
        [planless(X, 1), expected(*CALL), expected(X, *CALL[1:]), planless(X, 2)],
    ]
    assert [around(X), directly(X)] == wanted
    monkeypatch.setattr(plans, "Operand", None)
    assert [around(X), directly(X)] == wanted


def test_a_pass_that_goes_another_way_takes_no_plan_that_is_not_its() -> None:
    way = ["there"]

    @plans.planned
    def other(precision: str, *_: Any) -> Callable[..., str]:
        return lambda *args: "other"

    @plans.whole
    def function(x: Tensor) -> list[Any]:
        return [described(x, 1), described(x, 2)] if way[0] == "there" else [other(x), described(x, 3)]

    assert function(X) == [planless(X, 1), planless(X, 2)]
    way[0] = "elsewhere"
    assert function(X) == ["other", planless(X, 3)]


def test_passes_of_several_threads() -> None:
    """Each goes through its own plans, also while another one's pass is under way."""
    given = [CALL, *[(*CALL[:at], value, *CALL[at + 1 :]) for at, value in OTHERS.values()]]
    together, wrong = threading.Barrier(len(given), timeout=10), []

    def waiting(*args: Any) -> Described:
        time.sleep(1e-3)
        return described(*args)

    function = plans.whole(functools.partial(calls, waiting))

    def run(args: tuple[Any, ...]) -> None:
        together.wait()
        wrong.extend(args for _ in range(3) if function(*args) != expected(*args))

    threads = [threading.Thread(target=run, args=(args,)) for args in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_passes_are_bounded_and_can_be_dropped() -> None:
    for rows in range(plans.KEPT + 3):
        both(torch.zeros(rows, 1), *CALL[1:])
    assert all(c.cache_info().currsize <= plans.KEPT for c in plans._caches)
    both(*CALL)
    made.clear()
    both(*CALL)
    assert not made
    plans.forget()
    both(*CALL)
    assert len(made) == 3


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


@pytest.fixture(params=["portable", "hopper"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """What a pass launches, addresses aside: compiled functions, scalars, in order."""
    if prepared.VERSION not in OPTIONAL:
        pytest.skip("this Triton launches in its own way")
    if request.param == "hopper" and hopper_launch.available((9, 0), ".".join(map(str, prepared.VERSION))):
        pytest.skip("no Gluon")
    absent = Absent()
    absent.install(monkeypatch)
    zeros = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype).zero_()  # noqa: E731
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", zeros)  # no kernel runs: what is an index must be one
    monkeypatch.setattr(hopper_launch, "_processors", lambda _: 132)
    monkeypatch.setattr(grouped_kernels, "_functions", lambda name, like: path(request.param))

    def run(function: Callable[..., Any], named: dict[str, Any]) -> list[Any]:
        absent.launched.clear()
        function(*named.values(), request.param)
        return [[a for a in flat(args) if not isinstance(a, int) or abs(a) < 2**32] for args in absent.launched]

    return run


def flat(args: Any) -> Iterator[Any]:
    for a in args:
        if isinstance(a, (tuple, list)):
            yield from flat(a)
        else:
            yield a


def test_passes_of_the_operators(launched: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever came before, a pass launches what it launches alone; the second one of its kind computes no keys."""
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
    for function, named in steps:
        launched(function, named)
    with monkeypatch.context() as patch:
        patch.setattr(plans, "Operand", None)
        for (function, named), want in zip(steps, alone, strict=True):
            assert launched(function, named) == want
