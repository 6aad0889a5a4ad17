"""Gated halves of an MLP over TransformerEngine's shapes: SwiGLU, GeGLU (erf and tanh), ReGLU; two weights or one packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import te
import torch
import torch.nn.functional as F
from te import BF16, DTYPES, FP32, INPUTS, WEIGHTS, Site, filled
from torch import Tensor

import fxfuse

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": F.relu,
}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def separate(kind: str, dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, int], bias: bool, **more: object) -> Site:
    """Gate and up have a weight (and a bias) each."""
    act = KINDS[kind]

    def fn(x: Tensor, w_gate: Tensor, w_up: Tensor, b_gate: Tensor | None = None, b_up: Tensor | None = None) -> Tensor:
        return act(F.linear(x, w_gate, b_gate)) * F.linear(x, w_up, b_up)

    shapes = [filled(x, w[1]), w, w] + [(w[0],)] * 2 * bias
    return te.site(f"{kind} {dtype} {shapes} {more}", fn, shapes, dtype, f"gated_mlp_{kind}", **more)


def packed(kind: str, dtype: torch.dtype, x: tuple[int, ...], w: tuple[int, int], bias: bool, **more: object) -> Site:
    """One weight with rows [gate; up]."""
    act = KINDS[kind]

    def fn(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        gate, up = F.linear(x, w, b).chunk(2, -1)
        return act(gate) * up

    shapes = [filled(x, w[1]), (2 * w[0], w[1])] + [(2 * w[0],)] * bias
    return te.site(f"packed {kind} {dtype} {shapes} {more}", fn, shapes, dtype, f"gated_mlp_packed_{kind}", **more)


SHAPES = [(x, w, (x, w) != ((-1,), (3, 5))) for x in INPUTS for w in WEIGHTS]


@dtypes
@kinds
def test_separate_weights(kind: str, dtype: torch.dtype) -> None:
    te.check([separate(kind, dtype, *s) for s in (SHAPES if (kind, dtype) == ("silu", BF16) else te.share(SHAPES, dtype))])


@dtypes
@kinds
def test_packed_weight(kind: str, dtype: torch.dtype) -> None:
    te.check([packed(kind, dtype, *s) for s in (SHAPES if (kind, dtype) == ("silu", BF16) else te.share(SHAPES, dtype))])


@pytest.mark.parametrize("make", [separate, packed])
@kinds
def test_every_subset_of_gradients(kind: str, make: Callable[..., Site]) -> None:
    count = 3 if make is separate else 2
    sites = [make(kind, BF16, (5, 1, -1), (64, 32), False, grads=g) for g in te.subsets(count)]
    one_or_all = [g for g in te.subsets(2 * count - 1) if sum(g) in (1, 2 * count - 1)] if kind == "silu" else []
    te.check([*sites, *[make(kind, FP32, (5, 1, -1), (64, 32), True, grads=g) for g in one_or_all]])


@kinds
def test_inference(kind: str) -> None:
    shapes = [(dtype, shape) for dtype in DTYPES.values() for shape in te.share(SHAPES, dtype)[::2]]
    te.check([make(kind, dtype, *shape) for make in (separate, packed) for dtype, shape in shapes], train=False)


SPELLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "chunk": lambda h: F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "split": lambda h: F.silu(h.split(16, -1)[0]) * h.split(16, -1)[1],
    "slices": lambda h: F.silu(h[..., :16]) * h[..., 16:],
    "up_first_in_the_product": lambda h: h[..., 16:] * F.silu(h[..., :16]),
    "x_sigmoid_x": lambda h: h[..., :16] * torch.sigmoid(h[..., :16]) * h[..., 16:],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_packed_spellings(name: str) -> None:
    fn = SPELLINGS[name]
    te.check([te.site(name, lambda x, w: fn(F.linear(x, w)), [(4, 2, 8), (32, 8)], BF16, "gated_mlp_packed_silu")])


NOT_GATED: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], tuple[str, ...]]] = {
    "second_half_is_the_gate": (lambda x, w: F.glu(F.linear(x, w), -1), [(8, 16), (32, 16)], ()),
    "other_input": (
        lambda x, y, w, v: F.silu(F.linear(x, w)) * F.linear(y, v),
        [(8, 16), (8, 16), (32, 16), (32, 16)],
        ("linear_silu",),
    ),
    "quarter": (lambda x, w: F.silu(F.linear(x, w)[:, :8]) * F.linear(x, w)[:, 8:16], [(8, 16), (32, 16)], ()),
    "sum_instead_of_product": (
        lambda x, w, v: F.silu(F.linear(x, w)) + F.linear(x, v),
        [(8, 16), (32, 16), (32, 16)],
        ("linear_silu", "linear_add"),
    ),
    "gate_alone_is_broadcast": (
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v),
        [(8, 16), (1, 16), (32, 16)],
        ("linear_silu",),
    ),
}


@pytest.mark.parametrize("name", NOT_GATED)
def test_what_is_no_gated_mlp_is_not_fused_as_one(name: str) -> None:
    fn, shapes, fuses = NOT_GATED[name]
    report = fxfuse.testing.assert_matches_eager(fn, [te.uniform(*s, dtype=FP32) for s in shapes])
    assert not report.count("gated_mlp*") and not report.failures
    assert {f.name for f in report.fused} >= set(fuses)


def test_gate_used_outside_refuses_with_its_reason() -> None:
    def fn(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        gate = F.silu(F.linear(x, w))
        return gate * F.linear(x, v), gate

    report = fxfuse.testing.assert_matches_eager(fn, [te.uniform(*s, dtype=FP32) for s in ((8, 16), (32, 16), (32, 16))])
    assert report.count("gated_mlp_silu") == 0
    assert "used outside" in report.why_not("gated_mlp_silu")
    assert report.count("linear_silu") == 1
