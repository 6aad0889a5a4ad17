"""Choosing a lowering by its time: on what, and never one that is wrong."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import report_samples
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

import fxfuse
from fxfuse import choose, compat, folder, measure, winners
from fxfuse.ops.define import OPS, Candidate
from fxfuse.recipe import current_recipe
from fxfuse.settings import read

compiled_by_inductor = compat.compiled_by_inductor
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def without_inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Candidates run eagerly; what they declare as ``milliseconds`` is their time. No winner is known."""

    def compiled(function: Callable[..., Any], args: Any, kwargs: Any) -> Callable[[], Any]:
        def call() -> Any:
            return pytree.tree_leaves(function(*args))

        call.milliseconds = getattr(function, "milliseconds", 1.0)  # pyright: ignore[reportFunctionMemberAccess]
        return call

    monkeypatch.setattr(compat, "compiled_by_inductor", compiled)
    monkeypatch.setattr(measure, "_time", lambda call, _: call.milliseconds)
    with fxfuse.config.patch(cache_dir=str(tmp_path)):
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


def test_a_candidate_may_say_how_exact_its_arithmetic_is() -> None:
    def coarse(x: Tensor) -> Tensor:
        return x * 2.01

    exact = candidate("coarse", 0.5, coarse)
    assert set(times(INLINE, dataclasses.replace(exact, tolerance=2.0**-7))) == {"inline", "coarse"}
    with pytest.warns(fxfuse.FxfuseWarning, match="output 0 is off by"):
        assert set(times(INLINE, exact)) == {"inline"}


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
    return measure.fastest(call, [inline, *others], read(None, None), current_recipe())[0].name


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


# ------------------------------------------------------------------------------------------------ what is measured again


def dynamic(tensor: Tensor, dims: Sequence[int], mode: Any, name: str) -> Tensor:
    """A fake tensor like this one; these dimensions are symbols, one for each size."""
    sizes = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(tensor.dim())]
    source = torch._dynamo.source.ConstantSource(name)
    return mode.from_tensor(tensor, source=source, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def linear_call(
    rows: int, dims: Sequence[int] = (), dtype: torch.dtype = F32, width: int = 48, act: str = "relu"
) -> torch.fx.Node:
    """``fxfuse::linear_act`` on (rows, 32), with these dimensions of x dynamic."""
    x, w, b = torch.empty(rows, 32, dtype=dtype), torch.empty(width, 32, dtype=dtype), torch.empty(width, dtype=dtype)
    call, mode = node("linear_act", x=x, w=w, b=b, act=act, save=False), FakeTensorMode(shape_env=ShapeEnv())
    for place, tensor in zip(call.all_input_nodes, (x, w, b), strict=True):
        place.meta["val"] = dynamic(tensor, dims if place.name == "x" else (), mode, place.name)
    return call


def routed_call(tokens: int, chosen: int = 6) -> torch.fx.Node:
    """``fxfuse::grouped_mlp_backward`` with static sizes."""
    mask = [True, True, True, False, True, False, False]
    order = torch.empty(tokens * chosen, dtype=torch.int64)
    block = experts_call() | {"x": torch.empty(tokens, 64, dtype=BF16), "ids": torch.empty(tokens, chosen, dtype=torch.int64)}
    block |= {"p": torch.empty(tokens, chosen, dtype=BF16), "grad": block["x"], "h": torch.empty(tokens * chosen, 64, dtype=BF16)}
    block |= {"u": None, "order": order, "inverse": order, "ends": torch.empty(5, dtype=torch.int32), "mask": mask}
    return node("grouped_mlp_backward", **block)


def key_of(call: torch.fx.Node, recipe: Any = None, **options: Any) -> str:
    chosen = [INLINE, candidate("other", 0.5, INLINE.function)]
    return json.dumps(measure.key_of(call, chosen, read(None, options), recipe or current_recipe()), sort_keys=True)


def test_a_dynamic_size_is_measured_once_for_a_bucket() -> None:
    assert '"~1024"' in key_of(linear_call(600, [0]))
    assert len({key_of(linear_call(rows, [0])) for rows in (513, 600, 777, 1023, 1024)}) == 1
    assert len({key_of(linear_call(rows, [0])) for rows in (512, 600, 1025, 4000)}) == 4
    assert len({key_of(linear_call(rows)) for rows in (513, 600, 600, 1024)}) == 3  # static sizes are exact
    assert key_of(linear_call(1024)) != key_of(linear_call(1024, [0]))


def test_strides_made_of_dynamic_sizes_split_no_bucket() -> None:
    """96 times a size crosses a power of two where the size does not."""

    def call(rows: int) -> torch.fx.Node:
        made, mode = linear_call(rows), FakeTensorMode(shape_env=ShapeEnv())
        made.all_input_nodes[0].meta["val"] = dynamic(torch.empty(2, rows, 96), [1], mode, "x")
        return made

    assert len({key_of(call(rows)) for rows in (520, 1000)}) == 1 < len({key_of(call(rows)) for rows in (520, 1030)})


def test_rows_of_experts_are_measured_once_for_a_bucket() -> None:
    assert len({key_of(routed_call(tokens)) for tokens in (65, 70, 100, 128)}) == 1
    assert len({key_of(routed_call(tokens)) for tokens in (64, 65, 129)}) == 3
    assert key_of(routed_call(100, 6)) != key_of(routed_call(100, 5))


@pytest.mark.parametrize(
    "n, up", [(-3, -3), (0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1023, 1024), (1024, 1024), (1025, 2048)]
)
def test_buckets(n: int, up: int) -> None:
    assert measure.bucket(n) == up


def test_what_a_winner_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key_of(linear_call(64)),
        key_of(linear_call(64, dtype=BF16)),
        key_of(linear_call(64, width=64)),
        key_of(linear_call(64, act="gelu")),
        key_of(linear_call(64), fxfuse.Recipe(deterministic=True)),
        key_of(linear_call(64), autotune="max"),
        key_of(linear_call(64), epilogue_fusion=False),
    ]
    for name, value in [
        ("software", lambda: ("torch", "other")),
        ("gpu", lambda index: "another"),
        ("numerics_flags", lambda: (1,)),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(measure, name, value)
            keys.append(key_of(linear_call(64)))
    assert len(set(keys)) == len(keys) and key_of(linear_call(64)) == keys[0]


class Clock:
    """Every measurement takes ``seconds``, counted in ``calls``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.now, self.calls, times = 0.0, 0, measure._times

        def counted(*args: Any) -> dict[str, float]:
            self.now += seconds
            self.calls += 1
            return times(*args)

        monkeypatch.setattr(measure, "_times", counted)
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)


def fast(call: torch.fx.Node) -> Candidate:
    return candidate("other", 0.5, OPS[call.target].reference)


def test_a_winner_is_measured_once_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1.0)
    for rows in (600, 700, 1000):
        fxfuse.reset()  # as in another process
        call = linear_call(rows, [0])
        assert [winner(call, fast(call)) for _ in range(2)] == ["other"] * 2
    assert clock.calls == 1
    for file in folder.path().iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    assert winner(call, fast(call)) == "other" and clock.calls == 1  # from memory
    fxfuse.reset()
    assert winner(call, fast(call)) == "other" and clock.calls == 2


def test_the_name_of_no_candidate_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call, clock = linear_call(64), Clock(monkeypatch, 1.0)
    inline = candidate("inline", 1.0, OPS[call.target].reference)
    key = measure.key_of(call, [inline, fast(call)], read(None, None), current_recipe())
    winners.keep(key, winners.Winner("os.system", {"os.system": 0.0}))
    assert winner(call, fast(call)) == "other" and clock.calls == 1


@pytest.mark.parametrize("level", ["quick", "max"])
def test_measuring_ends_after_a_while(level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(monkeypatch, measure.SECONDS[level] / 2)
    caplog.set_level(logging.INFO, "fxfuse")

    def run(width: int) -> str:
        call = linear_call(64, width=width)
        inline = candidate("inline", 1.0, OPS[call.target].reference)
        return measure.fastest(call, [inline, fast(call)], read(None, {"autotune": level}), current_recipe())[0].name

    assert [run(width) for width in (16, 32, 48, 64, 16)] == ["other", "other", "inline", "inline", "other"]
    assert clock.calls == 2
    lines = [record.getMessage() for record in caplog.records if record.name == "fxfuse.measure"]
    assert lines == [
        "fxfuse.linear_act.default: measuring 2 candidates (inline, other)",
        "fxfuse.linear_act.default: other wins (other 0.5000 ms, inline 1.0000 ms)",
        "fxfuse.linear_act.default: measuring 2 candidates (inline, other)",
        "fxfuse.linear_act.default: other wins (other 0.5000 ms, inline 1.0000 ms)",
        f"measuring took {clock.now:.0f} s, autotune={level!r} allows {clock.now:.0f} s in one process: "
        "operators not measured yet are inlined",
    ]
    measure.forget()
    assert [run(width) for width in (16, 48)] == ["other", "other"] and clock.calls == 3


def test_a_measurement_that_fails_counts_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    call = linear_call(64)

    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel image")

    Clock(monkeypatch, 1.0)
    with pytest.raises(RuntimeError, match="no kernel image"):
        winner(call, candidate("broken", 0.1, broken))
    assert measure._Spent.seconds == 1.0 and not list(folder.path().iterdir())


def test_off_reads_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it looked")

    monkeypatch.setattr(choose, "_on_gpu", lambda _: True)
    monkeypatch.setattr(measure, "fastest", never)
    monkeypatch.setattr(winners, "find", never)
    call = linear_call(64)
    op = OPS[call.target]
    assert op.candidates
    assert choose._chosen(call, op, read(None, {"autotune": "off", "strict": True}), current_recipe(), [])[0].name == "inline"
    with pytest.raises(fxfuse.LoweringError, match="it looked"):
        choose._chosen(call, op, read(None, {"strict": True}), current_recipe(), [])


def test_the_report_says_how_a_lowering_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times, the winner's first, and why the others may not run; every operator of a region has its line."""
    Clock(monkeypatch, 0.0)
    monkeypatch.setattr(choose, "_on_gpu", lambda _: True)
    call = linear_call(64)
    third = Candidate("third", lambda **_: "too wide", fast(call).function)
    op = dataclasses.replace(OPS[call.target], candidates=[fast(call), third])
    op = dataclasses.replace(op, reference=candidate("inline", 1.0, op.reference).function)
    chosen, how = choose._chosen(call, op, read(None, {"strict": True}), current_recipe(), [])
    assert chosen.name == "other" and how == "other 0.5000 ms, inline 1.0000 ms; not third: too wide"
    alone = dataclasses.replace(op, candidates=op.candidates[1:])
    assert choose._chosen(call, alone, read(None, {}), current_recipe(), [])[1] == "inline; not third: too wide"
    assert choose._chosen(call, alone, read(None, {"autotune": "off"}), current_recipe(), [])[1] == ""
    region = report_samples.fused(after=("linear_act", "getitem"))
    assert choose._with_kernel(region, {"linear_act": "other"}, {"linear_act": how}).choices == (how,)
    report = fxfuse.Report([report_samples.graph("joint", (report_samples.fused(choices=("linear_act: " + how,)),))])
    assert "kernels (the chosen one first)\n  linear_act: other 0.5000 ms" in str(report)
    assert "not third: too wide" in report._repr_mimebundle_()["text/html"]
    assert fxfuse.Report.from_json(report.to_json()) == report


def test_what_was_rounded_on_the_way_is_allowed_for() -> None:
    """A result in fp32 of operands in bf16, such as a router gradient, is no more exact than they are."""

    def sums(factor: float) -> Candidate:
        return candidate(f"{factor}", 0.5, lambda x: x.float() * factor)

    inline = sums(1.0)
    assert set(times(inline, sums(1.002), dtype=BF16)) == {"1.0", "1.002"}
    for factor, dtype in ((1.2, BF16), (1.002, F32)):
        with pytest.warns(fxfuse.FxfuseWarning, match="its result is wrong"):
            assert set(times(inline, sums(factor), dtype=dtype)) == {"1.0"}
