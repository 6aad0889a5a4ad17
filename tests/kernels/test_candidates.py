"""The kernels as candidates of the grouped operators: the same results as the references, from operators with right fakes.

On a CPU the twins run, in fp64; what the kernels themselves compute is the subject of ``test_interpreted``.
"""

from __future__ import annotations

import inspect
from typing import Any

import contract
import pytest
import torch
from moe_checks import EXACT, ODD, VARIED
from reference_moe import BF16, F64, LAYOUTS, ROUTINGS, Block
from torch import Tensor

import fxfuse
from fxfuse import choose, kernels, measure
from fxfuse.kernels import reference
from fxfuse.ops import grouped_eager, grouped_kernels
from fxfuse.ops.define import OPS

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo instantiates ``autograd.Function``."""
ALL = {**VARIED, **LAYOUTS}
every_block = pytest.mark.parametrize("fields", ALL.values(), ids=ALL)


def arguments(block: Block) -> dict[str, Any]:
    """Of ``fxfuse::grouped_mlp``."""
    x, w_gate, w_down, ids, p, w_up, b_gate, b_down = (None if t is None else t.detach() for t in block.inputs())
    layout = "plain" if not block.gated else "separate" if block.separate else block.layout
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down, "b_gate": b_gate, "b_down": b_down}
    kind = {"act": block.activation, "layout": layout, "limit": block.limit, "alpha": block.alpha}
    return {"x": x, "ids": ids, "p": p, "ends": None, **weights, **kind, "first": block.weights_first, "save": True}


def backward_arguments(forward: dict[str, Any], saved: tuple[Tensor | None, ...], save: bool) -> dict[str, Any]:
    """Of ``fxfuse::grouped_mlp_backward``, everything trains."""
    h, u, order, inverse, ends = saved
    there = [forward[n] is not None for n in ("x", "p", "w_gate", "w_up", "w_down", "b_gate", "b_down")]
    more = {"grad": torch.randn_like(forward["x"]), "order": order, "inverse": inverse, "ends": ends, "mask": there}
    more |= {"h": h if save else None, "u": u if save and forward["w_up"] is not None else None}
    found = {**forward, **more}
    return {a.name: found[a.name] for a in torch.ops.fxfuse.grouped_mlp_backward.default._schema.arguments}


def candidate(name: str, by: str = "triton") -> Any:
    """The function of a candidate of ``fxfuse::<name>``, and the reference."""
    op = OPS[getattr(torch.ops.fxfuse, name).default]
    return next(c.function for c in op.candidates if c.name == by), op.reference


def assert_same(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], used: int | None = None, skipped: tuple[int, ...] = ()
) -> None:
    """Values, and what a graph relies on; ``skipped`` outputs only up to row ``used``."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride()), i
        g, w = (g[:used], w[:used]) if i in skipped else (g, w)
        assert (g.double() - w.double()).norm() <= EXACT * w.double().norm(), i


@pytest.mark.parametrize("by", ["triton", "hopper"])
@pytest.mark.parametrize("routing", ["some_outside", "nobody", "one_busy"])
@every_block
def test_block_forward_and_backward(fields: dict[str, Any], routing: str, by: str) -> None:
    forward = arguments(Block(routing=routing, **fields))
    function, reference = candidate("grouped_mlp", by)
    want = reference(**forward)
    used = int(want[5][-1])
    assert_same(function(**forward), want, used, skipped=(1, 2))
    silent = {**forward, "save": False}
    assert_same(function(**silent), reference(**silent))
    function, reference = candidate("grouped_mlp_backward", by)
    for save in (True, False):
        backward = backward_arguments(forward, want[1:], save)
        assert_same(function(**backward), reference(**backward))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@every_block
def test_results_in_other_dtypes(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """The twins round where the kernels do; each result is laid out as the reference's."""

    def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert (g.shape, g.dtype, g.stride()) == (w.shape, w.dtype, w.stride()), i
            assert g.numel() == 0 or contract.error(g, w) < 3 * contract.TOLERANCE[dtype], i

    forward = arguments(Block(dtype=dtype, width=64, inner=32, tokens=21, **{**fields, "limit": None}))
    function, reference = candidate("grouped_mlp")
    want = reference(**forward)
    check(function(**forward), want)
    function, reference = candidate("grouped_mlp_backward")
    backward = backward_arguments(forward, want[1:], True)
    check(function(**backward), reference(**backward))


@every_block
def test_ends_that_are_given(fields: dict[str, Any]) -> None:
    forward = arguments(Block(**fields))
    function, reference = candidate("grouped_mlp")
    forward["ends"] = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    assert_same(function(**forward), reference(**forward), 9, skipped=(1, 2))


@pytest.mark.parametrize("missing", range(7))
def test_gradients_that_nobody_wants(missing: int) -> None:
    forward = arguments(Block(separate=False))
    _, *saved = candidate("grouped_mlp")[1](**forward)
    function, reference = candidate("grouped_mlp_backward")
    backward = backward_arguments(forward, tuple(saved), True)
    for mask in ([i != missing and m for i, m in enumerate(backward["mask"])], [i == missing for i in range(7)]):
        wanted = {**backward, "mask": [m and t for m, t in zip(mask, backward["mask"], strict=True)]}
        assert_same(function(**wanted), reference(**wanted))


@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (3, 0), (1, 1)])
def test_hardly_any_rows(tokens: int, chosen: int) -> None:
    forward = arguments(Block(tokens=tokens, chosen=chosen))
    function, reference = candidate("grouped_mlp")
    want = reference(**forward)
    assert_same(function(**forward), want)
    function, reference = candidate("grouped_mlp_backward")
    backward = backward_arguments(forward, want[1:], True)
    assert_same(function(**backward), reference(**backward))


@pytest.mark.parametrize("ends", [[2, 2, 6, 9], [0, 0, 0, 0], [0, 10, 10, 10]])
@every_block
def test_experts_alone(fields: dict[str, Any], ends: list[int]) -> None:
    both = arguments(Block(**fields))
    forward = {n: v for n, v in both.items() if n not in ("x", "ids", "p", "first")}
    forward |= {"rows": torch.randn(10, ODD["width"], dtype=F64), "ends": torch.tensor(ends, dtype=torch.int32)}
    function, reference = candidate("grouped_experts")
    want = reference(**forward)
    assert_same(function(**forward), want, ends[-1], skipped=(1, 2))
    there = [forward[n] is not None for n in ("rows", "w_gate", "w_up", "w_down", "b_gate", "b_down")]
    backward = {n: v for n, v in forward.items() if n != "save"} | {"grad": torch.randn_like(want[0]), "mask": there}
    function, reference = candidate("grouped_experts_backward")
    for h, u in ((want[1], want[2] if forward["w_up"] is not None else None), (None, None)):
        assert_same(function(**backward, h=h, u=u), reference(**backward, h=h, u=u))


@pytest.mark.parametrize("contiguous", ["rows", "columns"])
def test_weight_gradients_are_laid_out_as_the_weights(contiguous: str) -> None:
    forward = arguments(Block())
    if contiguous == "columns":
        for n in ("w_gate", "w_down"):
            forward[n] = forward[n].transpose(1, 2).contiguous().transpose(1, 2)
    _, *saved = candidate("grouped_mlp")[1](**forward)
    backward = backward_arguments(forward, tuple(saved), True)
    got = candidate("grouped_mlp_backward")[0](**backward)
    assert got[2].stride() == forward["w_gate"].stride() and got[4].stride() == forward["w_down"].stride()


# ------------------------------------------------------------------------------------------------ the kernels' operators


@pytest.mark.parametrize("save", [True, False])
@every_block
def test_the_operators_say_what_they_return(fields: dict[str, Any], save: bool) -> None:
    forward = {**arguments(Block(**fields)), "save": save}
    _, *saved = candidate("grouped_mlp")[1](**{**forward, "save": True})
    backward = backward_arguments(forward, tuple(saved), save)
    rows, ends = torch.randn(9, 40, dtype=F64), torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    shared = {n: v for n, v in forward.items() if n not in ("x", "ids", "p", "ends", "first")}
    experts = {"rows": rows, "ends": ends, **shared}
    _, h, u = candidate("grouped_experts")[1](**{**experts, "save": True})
    there = [True, *[forward[n] is not None for n in ("w_gate", "w_up", "w_down", "b_gate", "b_down")]]
    again = {
        "grad": torch.randn_like(rows),
        **experts,
        "h": h if save else None,
        "u": u if save and forward["w_up"] is not None else None,
    }
    again = {**again, "mask": there}
    calls = {
        "grouped_mlp": forward,
        "grouped_mlp_backward": backward,
        "grouped_experts": experts,
        "grouped_experts_backward": again,
    }
    for name, named in calls.items():
        operator = getattr(torch.ops.fxfuse, f"{name}_kernels").default
        args = [named[a.name] for a in operator._schema.arguments[:-1]]
        torch.library.opcheck(operator, (*args, "portable"), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.inductor
def test_the_operators_in_a_graph_of_inductors() -> None:
    """They return as many tensors as there are results that somebody asked for."""
    forward = arguments(Block(dtype=torch.float32))
    function, back = candidate("grouped_mlp")[0], candidate("grouped_mlp_backward")[0]
    names = list(backward_arguments(forward, (None,) * 5, True))
    there = [forward[n] is not None for n in ("x", "p", "w_gate", "w_up", "w_down", "b_gate", "b_down")]

    def training(**named: Any) -> tuple[Tensor, ...]:
        out, h, _, order, inverse, ends = function(**named)
        saved = {"h": h, "u": None, "order": order, "inverse": inverse, "ends": ends, "mask": there}
        more = {**named, **saved, "grad": out.detach().cos()}
        gradients = back(**{n: more[n] for n in names})
        return (out, *[t for t, wanted in zip(gradients, there, strict=True) if wanted])

    def inference(**named: Any) -> Tensor:
        return function(**{**named, "save": False})[0]

    for graph in (training, inference):
        got = torch.compile(graph, backend="inductor", fullgraph=True)(**forward)
        torch.testing.assert_close(got, graph(**forward))


@pytest.mark.parametrize("inner", [2047, 2048])
def test_rows_before_a_wide_first_linear(inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are gathered once where that is faster, and the results are those of the reference."""
    forward, spread = arguments(Block(inner=inner)), []
    real = reference.spread
    monkeypatch.setattr(reference, "spread", lambda *args: spread.append(args) or real(*args))
    function, exact = candidate("grouped_mlp", "hopper")
    want = exact(**forward)
    assert_same(function(**forward), want, int(want[5][-1]), skipped=(1, 2))
    assert len(spread) == (inner == 2048)


def test_every_path_has_every_function() -> None:
    products = {"tile_list", "up", "matmul", "dh", "wgrad"}
    functions = products | {"route", "combine", "bias_gradient", "sorted_pairs", "spread", "router_gradient"}
    for path in (kernels.twins(), *map(kernels.path, kernels.PATHS)):
        assert functions <= set(dir(path)), path
        for name in products - {"tile_list"}:
            tiles = inspect.signature(getattr(path, name)).parameters["tiles"]
            assert tiles.kind is tiles.KEYWORD_ONLY and tiles.default is None, (path, name)


# ------------------------------------------------------------------------------------------------ when they may run


def refusal(**changes: Any) -> str | None:
    return grouped_kernels.refusal(**{**arguments(Block(dtype=BF16)), **changes})


def test_what_they_refuse() -> None:
    assert refusal() is None
    assert "not with torch.float64" in (refusal(p=torch.rand(5, 2, dtype=F64)) or "")
    assert "up to 1024 experts" in (refusal(w_down=torch.empty(1025, 2, 2)) or "")


def test_what_runs_where_nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference for what no kernel takes, plain Triton for few rows an expert, Gluon for many where it may run."""
    few, many = (arguments(Block(dtype=BF16, tokens=n, width=64, inner=32)) for n in (5, 64))
    assert grouped_eager.path_for(arguments(Block())) is None
    assert grouped_eager.path_for(few) == grouped_eager.path_for(many) == "portable"
    monkeypatch.setattr(grouped_eager, "hopper_refusal", lambda **_: None)
    assert (grouped_eager.path_for(few), grouped_eager.path_for(many)) == ("portable", "hopper")
    op = OPS[torch.ops.fxfuse.grouped_mlp.default]
    for forward in (few, many, arguments(Block())):
        for got, want in zip(op.eager[0](*forward.values())[:1], op.reference(**forward)[:1], strict=True):
            assert contract.error(got, want) < 2e-2


@pytest.mark.inductor
@pytest.mark.parametrize("routing", [n for n in ROUTINGS if n != "nobody"])
def test_a_compiled_block_runs_them(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real graph and Inductor, as on a GPU where they are the fastest."""
    monkeypatch.setattr(choose, "_on_gpu", lambda node: True)
    monkeypatch.setattr(measure, "fastest", lambda node, candidates, *_: (candidates[-1], "forced"))
    ran: set[str] = set()

    def watched(name: str) -> Any:
        twin = getattr(reference, name)

        def call(*args: Any, **options: Any) -> Any:
            ran.add(name)
            return twin(*args, **options)

        return call

    block = Block(dtype=torch.float32, routing=routing, tokens=7)
    call = block.of(fxfuse.ops.grouped_mlp)
    args = block.inputs()
    leaves = [a for a in args if a is not None and a.requires_grad]

    def step(function: Any) -> list[Tensor]:
        out = function(*args)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    want = step(call)
    for name in ("route", "up", "matmul", "combine", "dh", "wgrad", "bias_gradient"):
        monkeypatch.setattr(reference, name, watched(name))
    got = step(torch.compile(call, backend="fxfuse", dynamic=False))
    assert ran == {"route", "up", "matmul", "combine", "dh", "wgrad", "bias_gradient"}
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
