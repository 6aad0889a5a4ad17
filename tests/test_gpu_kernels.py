"""The kernels of every path on a GPU against their twins in fp64, and the grouped operators that are made of them.

    python3 -m pytest tests/test_gpu_kernels.py -m gpu -q -p no:cacheprovider -W default \\
        --noconftest -c /dev/null --rootdir=.

Memory is poisoned before every test: what a kernel does not write is NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent / "kernels"))
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "patterns"))

import contract
import reference_moe
from contract import BF16, ENDS, F16, F32, LAYOUTS, STORED, VARIANTS, Case
from moe_blocks import EXPERTS, unmasked
from torch import Tensor

import fxfuse
from fxfuse import choose, kernels, measure
from fxfuse.kernels import hopper_launch
from fxfuse.ops import define, grouped_kernels
from fxfuse.ops.grouped_mlp import _grouped_mlp, _grouped_mlp_backward

pytestmark = pytest.mark.gpu
PATHS = dict.fromkeys(kernels.PATHS)
"""The paths under test. One that refuses a case (by ``NotImplementedError``) is skipped there."""
paths = pytest.mark.parametrize("path", PATHS)
dtypes = pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "fp16", "fp32"])
every_end = pytest.mark.parametrize("ends", ENDS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
stored = pytest.mark.parametrize("stored", STORED)
NAN = float("nan")


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    torch.manual_seed(0)
    define.forget_failed_launches()
    poison()
    yield
    assert not define._failed, f"a kernel failed to launch and its twin ran: {define._failed}"


def poison() -> None:
    """Fill free memory with NaN: small blocks, middle ones, a large one."""
    held = [torch.full((size,), NAN, device="cuda") for size in (*[2**7] * 64, *[2**14] * 32, *[2**20] * 8, 2**28)]
    del held


MATRICES = {"up": (0, 2, 3), "matmul": (0, 1), "dh": (0, 2, 4, 5), "wgrad": (0, 1)}
"""Which arguments of a function are the matrices that the Hopper path may refuse."""


def functions(path: str) -> Any:
    module = kernels.path(path)
    given = {name: getattr(module, name) for name in module.__all__}
    asked = given if path == "portable" else {name: asking(name, function) for name, function in given.items()}
    return SimpleNamespace(**{name: second(function) for name, function in asked.items()})


def second(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result of the second call: the first one prepares what the second launches."""

    def call(*args: Any, **options: Any) -> Any:
        function(*args, **options)
        return function(*args, **options)

    return call


def asking(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the Hopper path that refuses what its candidate refuses before it is traced."""

    def call(*args: Any, **options: Any) -> Any:
        given = {str(i): args[i] for i in MATRICES.get(name, ())}
        experts = next((t.shape[0] for t in given.values() if t is not None and t.dim() == 3), 1)
        rows = max((t.shape[0] for t in given.values() if t is not None and t.dim() == 2), default=0)
        reason = hopper_launch.supported(torch.cuda.get_device_capability(), triton.__version__, rows, experts, **given)
        if given and reason is not None:
            raise NotImplementedError(reason)
        return function(*args, **options)

    return call


def checked(check: Callable[..., None], path: str, *args: Any) -> None:
    try:
        check(functions(path), *args)
    except NotImplementedError as refusal:
        pytest.skip(str(refusal))


def on_gpu(**fields: Any) -> Case:
    return Case(device="cuda", **{"hidden": 128, "inner": 64, "dtype": BF16, **fields})


# ------------------------------------------------------------------------------------------------ one kernel at a time


@paths
@layouts
@stored
@dtypes
def test_up(path: str, dtype: torch.dtype, layout: str, stored: str) -> None:
    checked(contract.check_up, path, on_gpu(dtype=dtype, layout=layout, stored=stored))


@paths
@layouts
@stored
@dtypes
def test_dh(path: str, dtype: torch.dtype, layout: str, stored: str) -> None:
    checked(contract.check_dh, path, on_gpu(dtype=dtype, layout=layout, stored=stored))


@paths
@stored
@dtypes
@pytest.mark.parametrize("transposed", [True, False])
def test_matmul(path: str, dtype: torch.dtype, stored: str, transposed: bool) -> None:
    checked(contract.check_matmul, path, on_gpu(dtype=dtype, stored=stored), transposed)


@paths
@pytest.mark.parametrize(("hidden", "inner"), [(40, 9), (9, 40), (136, 72), (768, 2880), (1, 1)])
@layouts
def test_odd_widths(path: str, hidden: int, inner: int, layout: str) -> None:
    case = on_gpu(hidden=hidden, inner=inner, layout=layout)
    checked(contract.check_up, path, case)
    checked(contract.check_dh, path, case)
    checked(contract.check_matmul, path, case, True)
    checked(contract.check_matmul, path, case, False)
    checked(contract.check_wgrad, path, case)
    checked(contract.check_bias, path, case)


@paths
@every_end
@pytest.mark.parametrize("gathers", [True, False])
def test_every_kind_of_groups(path: str, ends: str, gathers: bool) -> None:
    case = on_gpu(ends=ends, gathers=gathers, biases=gathers, weights=gathers, save=gathers)
    checked(contract.check_up, path, case)
    checked(contract.check_dh, path, case)
    checked(contract.check_matmul, path, case, True)
    checked(contract.check_matmul, path, case, False)


@paths
@every_end
@dtypes
def test_sums_over_rows(path: str, ends: str, dtype: torch.dtype) -> None:
    for gathers in (True, False):
        case = on_gpu(ends=ends, dtype=dtype, gathers=gathers, weights=gathers)
        checked(contract.check_wgrad, path, case)
        checked(contract.check_bias, path, case)


@paths
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["concat", "plain"])
def test_activations(path: str, layout: str, variant: str) -> None:
    case = on_gpu(layout=layout, dtype=F16, **VARIANTS[variant])
    checked(contract.check_up, path, case)
    checked(contract.check_dh, path, case)


@paths
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts"),
    [(0, 2, 3), (5, 0, 3), (1, 1, 1), (71, 3, 5), (8191, 8, 128), (32768, 8, 256), (9, 2, 1024), (3000, 4, 1000)],
)
def test_route(path: str, tokens: int, chosen: int, experts: int, dtype: torch.dtype) -> None:
    checked(contract.check_route, path, contract.random_ids(tokens, chosen, experts, "cuda", dtype), experts)


@paths
@dtypes
@pytest.mark.parametrize("weights", [None, F32, BF16], ids=["unweighted", "fp32 weights", "bf16 weights"])
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(0, 2, 3), (1, 1, 1), (71, 8, 5), (2, 0, 3)])
def test_combine(path: str, dtype: torch.dtype, weights: torch.dtype | None, tokens: int, chosen: int, experts: int) -> None:
    for fields in ({"hidden": 2880}, {"hidden": 40, "biases": False}):
        checked(contract.check_combine, path, on_gpu(dtype=dtype, **fields), tokens, chosen, experts, weights)


@paths
@dtypes
@pytest.mark.parametrize("weights", [None, F32, BF16], ids=["unweighted", "fp32 weights", "bf16 weights"])
@pytest.mark.parametrize(("tokens", "chosen"), [(0, 2), (2, 0), (1, 1), (71, 8), (1025, 4)])
def test_spread(path: str, dtype: torch.dtype, weights: torch.dtype | None, tokens: int, chosen: int) -> None:
    for hidden, inner in ((2880, 2880), (2048, 40), (1, 9)):
        checked(contract.check_spread, path, on_gpu(dtype=dtype, hidden=hidden, inner=inner), tokens, chosen, weights)


# ------------------------------------------------------------------------------------------------ sizes of real models

BLOCKS = {
    "Qwen3, T 8191": {"tokens": 8191, "chosen": 8, "experts": 128, "hidden": 2048, "inner": 768},
    "GPT-OSS, T 1023": {"tokens": 1023, "chosen": 4, "experts": 32, "hidden": 2880, "inner": 2880},
    "Qwen3, T 64": {"tokens": 64, "chosen": 8, "experts": 128, "hidden": 2048, "inner": 768},
    "Qwen3, T 1": {"tokens": 1, "chosen": 8, "experts": 128, "hidden": 2048, "inner": 768},
    "Qwen3, zipf, T 2048": {"tokens": 2048, "chosen": 8, "experts": 128, "hidden": 2048, "inner": 768, "routing": "zipf"},
}


def routed(tokens: int, chosen: int, experts: int, routing: str = "balanced", **_: int) -> tuple[int, list[int]]:
    """Rows and ends of a routing."""
    ids = reference_moe.ROUTINGS[routing](tokens, chosen, experts)
    return ids.numel(), torch.bincount(ids.flatten(), minlength=experts).cumsum(0).tolist()


@paths
@pytest.mark.parametrize("name", BLOCKS)
def test_real_sizes(path: str, name: str) -> None:
    sizes = BLOCKS[name]
    oss = {"layout": "interleaved", "stored": "columns", "limit": 7.0, "alpha": 1.702} if "OSS" in name else {}
    case = on_gpu(at=routed(**sizes), hidden=sizes["hidden"], inner=sizes["inner"], biases=bool(oss), **oss)
    checked(contract.check_up, path, case)
    poison()
    checked(contract.check_matmul, path, case, True)
    checked(contract.check_matmul, path, case, False)
    poison()
    checked(contract.check_dh, path, case)
    checked(contract.check_wgrad, path, case)
    checked(contract.check_bias, path, case)
    checked(contract.check_combine, path, case, sizes["tokens"], sizes["chosen"], sizes["experts"], F32)


@paths
def test_more_than_two_to_the_31_elements_in_a_weight(path: str) -> None:
    """Only the last expert works: what it computes is what it computes alone."""
    experts, hidden, inner = 40, 4096, 6720  # 2.2e9 elements of w_gate and of its gradient
    f, kind = functions(path), ("silu", "concat", None, None)
    w = torch.zeros(experts, 2 * inner, hidden, device="cuda", dtype=BF16)
    w[-1].normal_(std=hidden**-0.5)
    x = torch.randn(150, hidden, device="cuda").to(BF16)
    ends = torch.tensor([0] * (experts - 1) + [150], dtype=torch.int32, device="cuda")
    one = ends[-1:].clone()
    a, h, _ = f.up(x, None, w, None, None, ends, *kind, True)
    alone = f.up(x, None, w[-1:].clone(), None, None, one, *kind, True)
    assert torch.equal(a, alone[0]) and torch.equal(h, alone[1]) and a.abs().sum() > 0
    rows = f.matmul(h, w, ends, transposed=False, bias=None, zero_tail=True)
    assert torch.equal(rows, f.matmul(h, w[-1:].clone(), one, transposed=False, bias=None, zero_tail=True))
    down = w.view(experts, hidden, 2 * inner)  # as many elements, other widths
    saved = torch.randn(150, 4 * inner, device="cuda").to(BF16)
    got = f.dh(x, None, down, None, saved, None, ends, *kind)
    for i, (g, o) in enumerate(zip(got, f.dh(x, None, down[-1:].clone(), None, saved, None, one, *kind), strict=True)):
        # the row sums (2) are of tiles, and fewer rows an expert are cut into other tiles
        assert torch.equal(g, o) if i != 2 else contract.error(g.sum(1), o.sum(1)) < 1e-6, i
    del down, got, saved, rows
    dw = f.wgrad(h, x, None, None, ends)
    assert dw.numel() > 2**31 and torch.equal(dw[-1:], f.wgrad(h, x, None, None, one)) and not dw[:-1].any()


@paths
def test_more_than_two_to_the_31_elements_are_spread(path: str) -> None:
    tokens, chosen = 2**17, 8
    grad, inverse = torch.randn(tokens, 2064, device="cuda").to(BF16), torch.randperm(tokens * chosen, device="cuda")
    got, *_ = functions(path).spread(grad, None, None, inverse, chosen)
    assert got.numel() > 2**31 and all(torch.equal(got[at], grad) for at in inverse.view(tokens, chosen).t())


# ------------------------------------------------------------------------------------------------ every function, for properties


def calls(path: str) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Each function of a path, called on T 300, K 4, E 8, H 256, I 128."""
    f, case = functions(path), on_gpu(at=routed(300, 4, 8), hidden=256, inner=128)
    x, gather = case.tokens(256)
    w, w_down, ends = case.weight(256, 256), case.weight(256, 128), case.offsets()
    h, p = case.sorted_rows(256), torch.rand(1200, device="cuda")
    ids = contract.random_ids(300, 4, 8, "cuda")
    order, _, inverse, counted = f.route(ids, 8)
    dp = torch.randn(3, 1200, device="cuda").t()
    kind = ("silu", "concat", None, None)
    return {
        "up": lambda: f.up(x, gather, w, None, None, ends, *kind, True)[:2],
        "matmul": lambda: (f.matmul(h, w, ends, transposed=True, bias=None, zero_tail=True),),
        "dh": lambda: f.dh(x, gather, w_down, p, h, None, ends, *kind),
        "wgrad": lambda: (f.wgrad(h, x, None, gather, ends),),
        "bias_gradient": lambda: (f.bias_gradient(x, ends, p, gather),),
        "route": lambda: f.route(ids, 8),
        "combine": lambda: (f.combine(h, p.view(300, 4), None, ids, inverse, counted, x),),
        "sorted_pairs": lambda: f.sorted_pairs(order, p.view(300, 4), 4),
        "spread": lambda: f.spread(x[:300], x[300:600], p.view(300, 4), inverse, 4),
        "router_gradient": lambda: (f.router_gradient(dp, ids, inverse, BF16),),
    }


FUNCTIONS = ("up", "matmul", "dh", "wgrad", "bias_gradient", "route", "combine", "sorted_pairs", "spread", "router_gradient")
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@paths
@every_function
def test_same_bits_twice(path: str, name: str) -> None:
    call = calls(path)[name]
    first = call()
    poison()
    assert same_bits(call(), first)


@paths
def test_a_side_stream(path: str) -> None:
    """Its operand is there only after what the side stream did before."""
    f, case = functions(path), on_gpu()
    values, w, ends = case.sorted_rows(64), case.weight(128, 64), case.offsets()
    want = f.matmul(values, w, ends, transposed=True, bias=None, zero_tail=True)
    late, stream = torch.zeros_like(values), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(values)
        got = f.matmul(late, w, ends, transposed=True, bias=None, zero_tail=True)
    stream.synchronize()
    assert torch.equal(got, want)


@paths
@every_function
def test_no_host_sync(path: str, name: str) -> None:
    call = calls(path)[name]
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@paths
@every_function
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_gpu_that_is_not_current(path: str, name: str) -> None:
    with torch.cuda.device(1):
        call = calls(path)[name]  # on device 1
        first = call()
        torch.cuda.synchronize()
    assert all(t.device.index == 1 for t in first) and torch.cuda.current_device() == 0
    assert same_bits(call(), first)


@paths
def test_tf32_only_where_it_is_allowed(path: str) -> None:
    case = on_gpu(dtype=F32, hidden=256, inner=256)
    a, w = case.normal(case.rows, 256), case.weight(256, 256)

    def off() -> float:
        try:
            got = functions(path).matmul(a, w, case.offsets(), transposed=True, bias=None, zero_tail=True)
        except NotImplementedError as refusal:
            pytest.skip(str(refusal))
        return contract.error(got, contract.reference.matmul(a.double(), w.double(), case.offsets(), transposed=True))

    assert off() < 1e-6
    torch.set_float32_matmul_precision("high")
    try:
        assert off() < 2e-3
    finally:
        torch.set_float32_matmul_precision("highest")


# ------------------------------------------------------------------------------------------------ the operators made of them


def candidate_names() -> list[str]:
    return sorted({c.name for op, *_ in grouped_kernels.PASSES for c in op.candidates})


def block(dtype: torch.dtype, layout: str, tokens: int = 97) -> dict[str, Any]:
    """Arguments of ``fxfuse::grouped_mlp`` with H 128, I 64, E 8, K 2."""
    kinds = {
        "concat": {},
        "interleaved": {"limit": 0.7, "alpha": 1.702},
        "separate": {"separate": True},
        "plain": {"gated": False},
    }
    fields = {**kinds[layout], **({"layout": "interleaved"} if layout == "interleaved" else {})}
    made = reference_moe.Block(
        tokens=tokens, experts=8, width=128, inner=64, dtype=dtype, routing="some_outside", router=F32, **fields
    )
    x, w_gate, w_down, ids, p, w_up, b_gate, b_down = (None if t is None else t.detach().cuda() for t in made.inputs())
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down, "b_gate": b_gate, "b_down": b_down}
    weights = {n: w if w is None or w.dim() < 3 else w * w.shape[-1] ** -0.5 for n, w in weights.items()}
    kind = {"act": "silu", "layout": layout, "limit": made.limit, "alpha": made.alpha}
    return {"x": x, "ids": ids, "p": p, "ends": None, **weights, **kind, "first": False, "save": True}


def doubled(arguments: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(arguments, contract.exact(list(arguments.values())), strict=True))


@pytest.mark.parametrize("name", candidate_names())
@layouts
@dtypes
def test_candidates_are_as_near_to_fp64_as_the_reference(name: str, dtype: torch.dtype, layout: str) -> None:
    arguments = block(dtype, layout)
    forward, backward = (next(c for c in op.candidates if c.name == name) for op in (_grouped_mlp, _grouped_mlp_backward))
    if (why := forward.refuses(**arguments)) is not None:
        pytest.skip(why)
    got, usual = forward.function(**arguments), _grouped_mlp.reference(**arguments)
    true = _grouped_mlp.reference(**doubled(arguments))
    assert contract.error(got[0], true[0]) <= 1.5 * contract.error(usual[0], true[0]) + 1e-6
    assert all(torch.equal(g, t) for g, t in zip(got[3:], true[3:], strict=True))
    shared = {n: v for n, v in arguments.items() if n not in ("ends", "save")}
    mask = [arguments[n] is not None for n in ("x", "p", "w_gate", "w_up", "w_down", "b_gate", "b_down")]
    shared |= {"grad": torch.randn_like(arguments["x"]), "order": true[3], "inverse": true[4], "ends": true[5], "mask": mask}
    shared |= {"h": usual[1], "u": usual[2] if arguments["w_up"] is not None else None}
    got, usual = backward.function(**shared), _grouped_mlp_backward.reference(**shared)
    true = _grouped_mlp_backward.reference(**doubled(shared))
    for i, (g, u, t) in enumerate(zip(got, usual, true, strict=True)):
        assert g.stride() == u.stride()
        assert contract.error(g, t) <= 1.5 * contract.error(u, t) + 1e-5, i


@pytest.mark.parametrize("name", candidate_names())
def test_a_cuda_graph_with_changing_routing(name: str) -> None:
    arguments = block(BF16, "concat", 256)
    forward = next(c for c in _grouped_mlp.candidates if c.name == name)
    if (why := forward.refuses(**arguments)) is not None:
        pytest.skip(why)
    forward.function(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward.function(**arguments)[0]
    for seed in range(4):
        torch.manual_seed(seed)
        arguments["ids"].copy_(contract.random_ids(256, 2, 8, "cuda") if seed else torch.full_like(arguments["ids"], 3))
        graph.replay()
        assert contract.error(out, _grouped_mlp.reference(**doubled(arguments))[0]) < 2e-2


@pytest.mark.parametrize("dtype", [F16, F32], ids=["fp16", "fp32"])
def test_the_usual_lowering_of_other_dtypes_needs_no_host(dtype: torch.dtype) -> None:
    """The loops over experts are these kernels then."""
    arguments = {**block(dtype, "concat")}
    torch.ops.fxfuse.grouped_mlp(*arguments.values())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = torch.ops.fxfuse.grouped_mlp(*arguments.values())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    true = _grouped_mlp.reference(**doubled(arguments))
    assert contract.error(got[0], true[0]) < (1e-2 if dtype is F16 else 1e-5)


@pytest.mark.parametrize("name", candidate_names())
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_model_with_this_lowering(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forced(node: Any, candidates: Any, *_: Any) -> Any:
        return next((c for c in candidates if c.name == name), candidates[0]), "forced"

    torch._dynamo.reset()
    monkeypatch.setattr(choose, "_fastest", forced)
    run = torch.compile(unmasked, backend="fxfuse", fullgraph=True, dynamic=dynamic)
    for tokens in (127, 1023):
        torch.manual_seed(tokens)
        x, p = torch.randn(tokens, 128, device="cuda").to(BF16), torch.rand(tokens, 2, device="cuda").to(BF16)
        w = (torch.randn(EXPERTS, 144, 128, device="cuda") * 128**-0.5).to(BF16)
        w_down = (torch.randn(EXPERTS, 128, 72, device="cuda") * 72**-0.5).to(BF16)
        ids = reference_moe.zipf(tokens, 2, EXPERTS).cuda()
        steps = []
        for function, args in ((run, (x, p, w, w_down)), (unmasked, (x, p, w, w_down))):
            steps.append(trained(function, args, ids))
        true = trained(
            lambda x, i, p, u, d: reference_moe.per_expert(x, u, d, i, p), [t.double() for t in (x, p, w, w_down)], ids
        )
        for got, usual, exact in zip(*steps, true, strict=True):
            assert contract.error(got, exact) <= 1.5 * contract.error(usual, exact) + 1e-4
    assert {f.kernel for f in fxfuse.last_report().fused} == {name}


def in_fp64(x: Tensor, ids: Tensor, p: Tensor, w: Tensor, w_down: Tensor) -> Tensor:
    return reference_moe.per_expert(x, w, w_down, ids, p)


def trained(function: Callable[..., Tensor], args: Any, ids: Tensor) -> list[Tensor]:
    """Output and gradients."""
    leaves = [a.detach().requires_grad_() for a in args]
    x, p, *weights = leaves
    out = function(x, ids, p, *weights)
    grad = torch.linspace(0.5, 1.5, out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_measuring_takes_a_right_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing forced: the measurement compiles, compares and times each, and no candidate of ours is found wrong."""
    seen: list[dict[str, float]] = []
    times = measure._times

    def kept(*args: Any) -> dict[str, float]:
        seen.append(times(*args))
        return seen[-1]

    torch._dynamo.reset()
    monkeypatch.setattr(measure, "_times", kept)
    monkeypatch.setattr(fxfuse.config, "cache_dir", str(tmp_path))
    measure.forget()
    run = torch.compile(unmasked, backend="fxfuse", fullgraph=True, dynamic=False)
    x, p = torch.randn(512, 256, device="cuda").to(BF16), torch.rand(512, 2, device="cuda").to(BF16)
    w, w_down = (torch.randn(EXPERTS, n, m, device="cuda").to(BF16) for n, m in ((256, 256), (256, 128)))
    trained(run, (x, p, w, w_down), reference_moe.balanced(512, 2, EXPERTS).cuda())
    assert len(seen) == 2 and all({"inline", "triton", "hopper"} == set(t) for t in seen), seen
