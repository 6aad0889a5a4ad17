"""Wrong arguments of ``fxfuse.ops.grouped_mlp`` and ``grouped_linear``: the error names the argument and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_moe import ARGUMENTS, Block
from torch import Tensor

import fxfuse
from fxfuse.ops import grouped_linear, grouped_mlp

PACKED = Block(tokens=5, chosen=2, experts=4, width=40, inner=9, dtype=torch.float32)
SEPARATE = Block(tokens=5, chosen=2, experts=4, width=40, inner=9, dtype=torch.float32, separate=True)
SHAPES = {
    "x": ((5, 40), "(any, any)"),
    "w_gate_up": ((4, 18, 40), "(4, 18, 40)"),
    "w_down": ((4, 40, 9), "(any, 40, any)"),
    "expert_ids": ((5, 2), "(5, any)"),
    "router_weights": ((5, 2), "(5, 2)"),
    "w_up": ((4, 9, 40), "(4, 9, 40)"),
    "bias_gate_up": ((4, 18), "(4, 18)"),
    "bias_down": ((4, 40), "(4, 40)"),
}
WEIGHTS = [name for name in ARGUMENTS if name not in ("x", "expert_ids", "router_weights")]
FLOATS = [name for name in ARGUMENTS if name != "expert_ids"]


def arguments(name: str = "") -> dict[str, Any]:
    """A right call that has the argument ``name``."""
    block = SEPARATE if name == "w_up" else PACKED
    return {n: a if a is None else a.detach() for n, a in zip(ARGUMENTS, block.inputs(), strict=True)}


def resized(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    return t.new_zeros(shape)


def assert_refused(text: str, **changes: Any) -> None:
    """The whole text: no more and no less."""
    name = next(iter(changes), "")
    with pytest.raises(ValueError) as caught:
        grouped_mlp(**{**arguments(name), **changes})
    assert str(caught.value) == f"grouped_mlp: {text}"


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("more", [True, False], ids=["rank_too_high", "rank_too_low"])
def test_wrong_rank(name: str, more: bool) -> None:
    shape, expected = SHAPES[name]
    wrong = (1, *shape) if more else shape[1:]
    assert_refused(f"{name} is {wrong}; expected {expected}", **{name: resized(arguments(name)[name], wrong)})


@pytest.mark.parametrize("name", SHAPES)
def test_a_number_of_no_dimension(name: str) -> None:
    assert_refused(f"{name} is (); expected {SHAPES[name][1]}", **{name: resized(arguments(name)[name], ())})


SIZES = {
    "x-0": ((6, 40), "expert_ids is (5, 2); expected (6, any)"),
    "x-1": ((5, 41), "w_down is (4, 40, 9); expected (any, 41, any)"),
    "w_gate_up-0": ((3, 18, 40), "w_gate_up is (3, 18, 40); expected (4, 18, 40)"),
    "w_gate_up-1": ((4, 9, 40), "w_gate_up is (4, 9, 40); expected (4, 18, 40)"),
    "w_gate_up-2": ((4, 18, 41), "w_gate_up is (4, 18, 41); expected (4, 18, 40)"),
    "w_gate_up-transposed": ((4, 40, 18), "w_gate_up is (4, 40, 18); expected (4, 18, 40)"),
    "w_down-0": ((3, 40, 9), "w_gate_up is (4, 18, 40); expected (3, 18, 40)"),
    "w_down-1": ((4, 41, 9), "w_down is (4, 41, 9); expected (any, 40, any)"),
    "w_down-2": ((4, 40, 8), "w_gate_up is (4, 18, 40); expected (4, 16, 40)"),
    "w_down-transposed": ((4, 9, 40), "w_down is (4, 9, 40); expected (any, 40, any)"),
    "expert_ids-0": ((6, 2), "expert_ids is (6, 2); expected (5, any)"),
    "expert_ids-1": ((5, 3), "router_weights is (5, 2); expected (5, 3)"),
    "router_weights-0": ((6, 2), "router_weights is (6, 2); expected (5, 2)"),
    "router_weights-1": ((5, 1), "router_weights is (5, 1); expected (5, 2)"),
    "w_up-0": ((1, 9, 40), "w_up is (1, 9, 40); expected (4, 9, 40)"),
    "w_up-1": ((4, 18, 40), "w_up is (4, 18, 40); expected (4, 9, 40)"),
    "w_up-2": ((4, 9, 41), "w_up is (4, 9, 41); expected (4, 9, 40)"),
    "bias_gate_up-0": ((1, 18), "bias_gate_up is (1, 18); expected (4, 18)"),
    "bias_gate_up-1": ((4, 9), "bias_gate_up is (4, 9); expected (4, 18)"),
    "bias_down-0": ((1, 40), "bias_down is (1, 40); expected (4, 40)"),
    "bias_down-1": ((4, 18), "bias_down is (4, 18); expected (4, 40)"),
}


@pytest.mark.parametrize("case", SIZES)
def test_wrong_size(case: str) -> None:
    name, (shape, text) = case.split("-")[0], SIZES[case]
    assert_refused(text, **{name: resized(arguments(name)[name], shape)})


def test_no_experts() -> None:
    assert_refused(
        "w_down is (0, 40, 9); expected one expert or more", w_down=torch.zeros(0, 40, 9), w_gate_up=torch.zeros(0, 18, 40)
    )


@pytest.mark.parametrize("gated", [False, True], ids=["ungated", "separate"])
def test_a_packed_weight_where_gate_and_up_are_not_packed(gated: bool) -> None:
    w_up = {"w_up": arguments("w_up")["w_up"]} if gated else {}
    packed = {"w_gate_up": torch.zeros(4, 18, 40), "bias_gate_up": None}
    assert_refused("w_gate_up is (4, 18, 40); expected (4, 9, 40)", **packed, **w_up, gated=gated)


@pytest.mark.parametrize("name", WEIGHTS)
def test_mixed_dtypes(name: str) -> None:
    wrong = arguments(name)[name].to(torch.bfloat16)
    assert_refused(f"{name} is torch.bfloat16; expected torch.float32, the dtype of x", **{name: wrong})


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("name", FLOATS)
def test_not_real_floats(name: str, dtype: torch.dtype) -> None:
    expected = "torch.float32, the dtype of x" if name in WEIGHTS else "a floating-point tensor"
    assert_refused(f"{name} is {dtype}; expected {expected}", **{name: arguments(name)[name].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.bool, torch.float32], ids=str)
def test_ids_of_another_dtype(dtype: torch.dtype) -> None:
    ids = torch.zeros(5, 2, dtype=dtype)
    assert_refused(f"expert_ids is {dtype}; expected torch.int64 or torch.int32", expert_ids=ids)


@pytest.mark.parametrize("name", [n for n in ARGUMENTS if n != "x"])
def test_another_device(name: str) -> None:
    assert_refused(f"{name} is on meta; expected cpu, where x is", **{name: arguments(name)[name].to("meta")})


def test_only_x_on_another_device() -> None:
    assert_refused("w_gate_up is on cpu; expected meta, where x is", x=torch.zeros(5, 40, device="meta"))


@pytest.mark.parametrize("name", ["swish", "SiLU", "", None])
def test_unknown_activation(name: Any) -> None:
    known = "gelu, gelu_tanh, silu, relu, relu2, sigmoid, tanh, quick_gelu"
    assert_refused(f"activation {name!r} is unknown; there are {known}", activation=name)


@pytest.mark.parametrize("layout", ["packed", "separate", "plain", None])
def test_unknown_layout(layout: Any) -> None:
    assert_refused(f"layout is {layout!r}; expected 'concat' or 'interleaved'", layout=layout)


@pytest.mark.parametrize("change", [{"w_up": torch.zeros(4, 9, 40)}, {"alpha": 1.702}], ids=["w_up", "alpha"])
def test_what_needs_a_gate(change: dict[str, Any]) -> None:
    assert_refused("gated=False takes neither w_up nor alpha", gated=False, **change)


def test_one_bias_for_two_weights() -> None:
    changes = {"w_up": arguments("w_up")["w_up"], "w_gate_up": arguments("w_up")["w_gate_up"], "bias_gate_up": torch.zeros(4, 9)}
    assert_refused("bias_gate_up goes with one weight for gate and up, not with w_up", **changes)


def test_values_of_ids_are_read_in_debug_only() -> None:
    ids = torch.tensor([[0, 1], [2, 3], [-1, 0], [1, 2], [4, 0]])
    grouped_mlp(**{**arguments(), "expert_ids": ids})
    with fxfuse.config.patch(debug=True):
        assert_refused("expert_ids is -1 at its least; expected ids in [0, 4)", expert_ids=ids)
        grouped_mlp(**{**arguments(), "expert_ids": ids.clamp(0)})  # 4 stands for nobody


# ------------------------------------------------------------------------------------------------ grouped linear


def linear_arguments(**changes: Any) -> dict[str, Any]:
    ends = torch.tensor([2, 2, 5, 7], dtype=torch.int32)
    return {"x": torch.zeros(7, 6), "w": torch.zeros(4, 3, 6), "offs": ends, "b": torch.zeros(4, 3), **changes}


LINEAR = {
    "x-vector": (torch.zeros(6), "x is (6,); expected (any, any)"),
    "x-batched": (torch.zeros(1, 7, 6), "x is (1, 7, 6); expected (any, any)"),
    "x-width": (torch.zeros(7, 5), "w is (4, 3, 6); expected (any, any, 5)"),
    "x-integer": (torch.zeros(7, 6, dtype=torch.int64), "x is torch.int64; expected a floating-point tensor"),
    "x-dtype": (torch.zeros(7, 6, dtype=torch.float64), "w is torch.float32; expected torch.float64, the dtype of x"),
    "x-device": (torch.zeros(7, 6, device="meta"), "w is on cpu; expected meta, where x is"),
    "w-matrix": (torch.zeros(3, 6), "w is (3, 6); expected (any, any, 6)"),
    "w-transposed": (torch.zeros(4, 6, 3), "w is (4, 6, 3); expected (any, any, 6)"),
    "w-groups": (torch.zeros(5, 3, 6), "offs is (4,); expected (5,)"),
    "w-dtype": (torch.zeros(4, 3, 6, dtype=torch.float16), "w is torch.float16; expected torch.float32, the dtype of x"),
    "w-device": (torch.zeros(4, 3, 6, device="meta"), "w is on meta; expected cpu, where x is"),
    "offs-matrix": (torch.zeros(1, 4, dtype=torch.int32), "offs is (1, 4); expected (4,)"),
    "offs-starts_too": (torch.zeros(5, dtype=torch.int32), "offs is (5,); expected (4,)"),
    "offs-dtype": (torch.zeros(4, dtype=torch.int64), "offs is torch.int64; expected torch.int32"),
    "offs-device": (torch.zeros(4, dtype=torch.int32, device="meta"), "offs is on meta; expected cpu, where x is"),
    "b-vector": (torch.zeros(3), "b is (3,); expected (4, 3)"),
    "b-width": (torch.zeros(4, 6), "b is (4, 6); expected (4, 3)"),
    "b-dtype": (torch.zeros(4, 3, dtype=torch.float64), "b is torch.float64; expected torch.float32, the dtype of x"),
    "b-device": (torch.zeros(4, 3, device="meta"), "b is on meta; expected cpu, where x is"),
}


@pytest.mark.parametrize("case", LINEAR)
def test_wrong_argument_of_grouped_linear(case: str) -> None:
    wrong, text = LINEAR[case]
    with pytest.raises(ValueError) as caught:
        grouped_linear(**linear_arguments(**{case.split("-")[0]: wrong}))
    assert str(caught.value) == f"grouped_linear: {text}"


def test_no_groups() -> None:
    with pytest.raises(ValueError) as caught:
        grouped_linear(torch.zeros(7, 6), torch.zeros(0, 3, 6), torch.zeros(0, dtype=torch.int32))
    assert str(caught.value) == "grouped_linear: w is (0, 3, 6); expected one group or more"


@pytest.mark.parametrize("values", [[2, 1, 5, 7], [-1, 2, 5, 7], [2, 2, 5, 8]], ids=["descending", "negative", "past_the_end"])
def test_values_of_offs_are_read_in_debug_only(values: list[int]) -> None:
    args = linear_arguments(offs=torch.tensor(values, dtype=torch.int32))
    with fxfuse.config.patch(debug=True), pytest.raises(ValueError) as caught:
        grouped_linear(**args)
    assert str(caught.value) == f"grouped_linear: offs is {values}; expected ascending row numbers in [0, 7]"


def test_right_offs_pass_in_debug() -> None:
    with fxfuse.config.patch(debug=True):
        assert grouped_linear(**linear_arguments()).shape == (7, 3)
        assert grouped_linear(**linear_arguments(offs=torch.zeros(4, dtype=torch.int32))).shape == (7, 3)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_debug_reads_no_values_while_compiling() -> None:
    def fn(x: Tensor, w: Tensor, offs: Tensor, b: Tensor) -> Tensor:
        return grouped_linear(x, w, offs, b)

    with fxfuse.config.patch(debug=True):
        compiled = torch.compile(fn, backend="fxfuse", fullgraph=True, options={"lower": "eager"})
        assert compiled(*linear_arguments().values()).shape == (7, 3)
