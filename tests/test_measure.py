"""Choosing a lowering by its time: on what, and never one that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse import compat, measure
from fxfuse.ops.define import OPS, Candidate
from fxfuse.recipe import current_recipe
from fxfuse.settings import read

compiled_by_inductor = compat.compiled_by_inductor
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Candidates run eagerly; what they declare as ``milliseconds`` is their time."""

    def compiled(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Any]:
        def call() -> Any:
            return pytree.tree_leaves(function(*args))

        call.milliseconds = getattr(function, "milliseconds", 1.0)  # pyright: ignore[reportFunctionMemberAccess]
        return call

    monkeypatch.setattr(compat, "compiled_by_inductor", compiled)
    monkeypatch.setattr(measure, "_time", lambda call, _: call.milliseconds)
    monkeypatch.setattr(measure, "_winners", {})
    yield


def candidate(name: str, milliseconds: float, function: Callable[..., Any]) -> Candidate:
    def timed(*args: Any) -> Any:
        return function(*args)

    timed.milliseconds = milliseconds  # pyright: ignore[reportFunctionMemberAccess]
    return Candidate(name, lambda **_: None, timed)


def times(*candidates: Candidate, dtype: torch.dtype = F32) -> dict[str, float]:
    return measure._times("op", candidates, [torch.randn(64, 64).to(dtype)], 1)


INLINE = candidate("inline", 1.0, lambda x: x * 2)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
def test_a_candidate_within_rounding_is_timed(dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps
    other = candidate("other", 0.5, lambda x: x * (2 + 2 * unit))
    assert times(INLINE, other, dtype=dtype) == {"inline": 1.0, "other": 0.5}


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize(
    "wrong",
    [lambda x: x * 2.2, lambda x: x * float("nan"), lambda x: (x * 2)[1:], lambda x: (x * 2).bool()],
    ids=["off", "nan", "shape", "dtype"],
)
def test_a_wrong_candidate_gets_no_time_and_one_warning(dtype: torch.dtype, wrong: Callable[[Tensor], Tensor]) -> None:
    with pytest.warns(fxfuse.FxfuseWarning, match="the lowering 'other' is not used, its result is wrong: output 0 is"):
        assert times(INLINE, candidate("other", 0.1, wrong), candidate("right", 0.5, lambda x: x + x), dtype=dtype) == {
            "inline": 1.0,
            "right": 0.5,
        }


def test_equal_keys_may_come_in_another_order() -> None:
    ordered = candidate("inline", 1.0, lambda x: torch.arange(3))
    assert set(times(ordered, candidate("other", 0.5, lambda x: torch.arange(3).flip(0)))) == {"inline", "other"}


def node(name: str, **arguments: Any) -> torch.fx.Node:
    """A call of ``fxfuse::<name>`` on fake tensors like these."""
    graph, mode = torch.fx.Graph(), compat.new_fake_mode()
    operator = getattr(torch.ops.fxfuse, name).default
    args = []
    for parameter in operator._schema.arguments:
        given = arguments[parameter.name]
        if isinstance(given, Tensor):
            place = graph.placeholder(parameter.name)
            place.meta["val"] = mode.from_tensor(given)
            given = place
        args.append(given)
    return graph.call_function(operator, tuple(args))


def experts_call(dtype: torch.dtype = BF16) -> dict[str, Any]:
    """A whole block of T 40, K 2, E 5, H 64, I 32."""
    return {
        "x": torch.empty(40, 64, dtype=dtype),
        "ids": torch.empty(40, 2, dtype=torch.int64),
        "p": torch.empty(40, 2, dtype=dtype),
        "ends": None,
        "w_gate": torch.empty(5, 64, 64, dtype=dtype),
        "w_up": None,
        "w_down": torch.empty(5, 64, 32, dtype=dtype),
        **dict.fromkeys(("b_gate", "b_down", "limit", "alpha")),
        **{"act": "silu", "layout": "concat", "first": False, "save": True},
    }


def winner(call: torch.fx.Node, *others: Candidate) -> str:
    inline = candidate("inline", 1.0, OPS[call.target].reference)
    return measure.fastest(call, [inline, *others], read(None, None), current_recipe()).name


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_an_expert_layer_is_measured_on_a_routing_and_finite_numbers(dtype: torch.dtype) -> None:
    seen: list[Any] = []
    call = node("grouped_mlp", **experts_call(dtype))
    reference = OPS[call.target].reference

    def spy(*args: Any) -> Any:
        seen.append(args)
        return reference(*args)

    assert winner(call, candidate("spy", 0.5, spy)) == "spy"
    ids = seen[0][1]
    assert ids.min() == 0 and ids.max() == 4 and all(len(set(row)) == 2 for row in ids.tolist())
    out, *_, ends = reference(*seen[0])
    assert out.isfinite().all() and ends.tolist() == torch.bincount(ids.flatten(), minlength=5).cumsum(0).tolist()


@pytest.mark.parametrize(("milliseconds", "wins"), [(0.5, "other"), (0.99, "inline"), (2.0, "inline")])
def test_the_fastest_wins_by_a_margin(milliseconds: float, wins: str) -> None:
    call = node("grouped_mlp", **experts_call())
    assert winner(call, candidate("other", milliseconds, OPS[call.target].reference)) == wins


def test_a_wrong_fast_candidate_loses() -> None:
    call = node("grouped_mlp", **experts_call())

    def wrong(*args: Any) -> Any:
        out, *rest = OPS[call.target].reference(*args)
        return out + 1, *rest

    with pytest.warns(fxfuse.FxfuseWarning, match="output 0 is off by"):
        assert winner(call, candidate("wrong", 0.1, wrong)) == "inline"


def test_the_backward_gets_the_routing_of_one_forward() -> None:
    mask = [True, True, True, False, True, False, False]
    saved = {"h": torch.empty(80, 64, dtype=BF16), "u": None, "order": torch.empty(80, dtype=torch.int64), "mask": mask}
    saved |= {"inverse": torch.empty(80, dtype=torch.int64), "ends": torch.empty(5, dtype=torch.int32)}
    arguments = {**experts_call(), **saved, "grad": torch.empty(40, 64, dtype=BF16)}
    call = node("grouped_mlp_backward", **arguments)
    values = measure.realistic({n: measure._real(a) for n, a in measure.arguments(call)})
    ids, order, inverse, ends = (values[n] for n in ("ids", "order", "inverse", "ends"))
    assert torch.equal(order[inverse], torch.arange(80)) and ends[-1] == 80 and ends.dtype is torch.int32
    assert torch.equal(ids.flatten()[order], ids.flatten().sort().values)
    assert values["mask"] == mask


def test_experts_alone_get_even_groups() -> None:
    block = {k: v for k, v in experts_call().items() if k not in ("x", "ids", "p", "first")}
    block |= {"rows": torch.empty(42, 64, dtype=BF16), "ends": torch.empty(5, dtype=torch.int32)}
    call = node("grouped_experts", **block)
    values = measure.realistic({n: measure._real(a) for n, a in measure.arguments(call)})
    assert values["ends"].tolist() == [8, 16, 25, 33, 42]


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["inline", "triton"])
def test_an_expert_layer_compiles_alone(name: str) -> None:
    """As it is measured: outside the graph that it comes from."""
    call = node("grouped_mlp", **experts_call())
    op = OPS[call.target]
    function = op.reference if name == "inline" else next(c.function for c in op.candidates if c.name == name)
    args = list(measure.realistic({n: measure._real(a) for n, a in measure.arguments(call)}).values())
    got = compiled_by_inductor(function, args, {})()
    assert measure.disagreement(got, op.reference(*args)) is None
    assert got[0].isfinite().all() and got[0].abs().sum() > 0
