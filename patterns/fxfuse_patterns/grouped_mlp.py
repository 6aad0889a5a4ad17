"""The grouped MLP of mixture-of-experts models as one joint fusion: route, up, activation, down, combine.

A fusion's name is ``grouped_mlp[<block>, <experts>]``: how rows are routed and combined, and what an expert computes.
Patterns are put together from the two tables below; a pattern's holes are those of its block and of its experts.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fxfuse

from .activations import ACTIVATIONS, SILU

aten = torch.ops.aten
FIELDS = ("w_gate", "w_up", "w_down", "b_gate", "b_down")
"""The tensors of ``fxfuse.ops.Experts``, in order."""
Holes = Mapping[str, Any]
Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""``(rows (S, M), w (E, N, M), b (E, N) or None) -> (S, N)``: each row with its own expert's weight and bias."""
Compute = Callable[[Tensor, Linear], Tensor]
"""What the experts do with their rows: ``(rows (S, H), linear) -> (S, H)``."""


def _linear(ends: Tensor, lines: Callable[[Tensor], Tensor], masked: Callable[[Tensor], Tensor] = lambda h: h) -> Linear:
    """``lines(b)`` gives each row its expert's line of b; ``masked`` zeroes the rows of no expert."""

    def linear(rows: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = F.grouped_mm(rows.to(w.dtype), w.transpose(-2, -1), offs=ends)
        return masked(y if b is None else y + lines(b))

    return linear


# ------------------------------------------------------------------------------------------------ blocks


def _sorted(h: Holes, experts: int, compute: Compute) -> Tensor:
    eid, order = torch.sort(h["ids"].reshape(-1))
    y = compute(_rows(h, order), _linear(_count(eid, experts), lambda b: b[eid]))
    return _restore(h, y, order)


def _masked(h: Holes, experts: int, compute: Compute) -> Tensor:
    eid, order = torch.sort(h["ids"].reshape(-1))
    ends = _count(eid, experts)
    outside = (eid >= experts).unsqueeze(-1)
    eid = eid.clamp(max=experts - 1)
    rows = _rows(h, order).masked_fill(outside, 0.0)
    return _restore(h, compute(rows, _linear(ends, lambda b: b[eid], lambda t: t.masked_fill(outside, 0.0))), order)


def _counted(h: Holes, experts: int, compute: Compute) -> Tensor:
    order = torch.sort(h["ids"].reshape(-1))[1]
    return _restore(h, compute(_rows(h, order), _linear(h["ends"], lambda b: b)), order)


def _scattered(h: Holes, experts: int, compute: Compute) -> Tensor:
    order, scores = _by_argsort(h)
    y = compute(_rows(h, order), _linear(h["ends"], lambda b: b)).type_as(h["x"])
    return _scatter(h, (y.to(torch.float32) * scores).to(y.dtype), order)


def _weights_first(h: Holes, experts: int, compute: Compute) -> Tensor:
    order, scores = _by_argsort(h)
    rows = _rows(h, order)
    y = compute((rows.to(torch.float32) * scores).to(rows.dtype), _linear(h["ends"], lambda b: b)).type_as(h["x"])
    return _scatter(h, y, order)


def _rows(h: Holes, order: Tensor) -> Tensor:
    return h["x"][order // h["ids"].shape[1]]


def _count(eid: Tensor, experts: int) -> Tensor:
    counted = eid.float() if eid.device.type in ("cpu", "mps") else eid.int()
    return torch.cumsum(torch.histc(counted, bins=experts, min=0, max=experts - 1), dim=0, dtype=torch.int32)


def _restore(h: Holes, y: Tensor, order: Tensor) -> Tensor:
    weighted = y * h["p"].reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return weighted[inverse].view(*h["ids"].shape, y.shape[-1]).sum(dim=1).to(h["x"].dtype)


def _by_argsort(h: Holes) -> tuple[Tensor, Tensor]:
    order = torch.argsort(h["ids"].view(-1), stable=True)
    return order, h["p"].view(-1)[order].reshape(-1, 1)


def _scatter(h: Holes, y: Tensor, order: Tensor) -> Tensor:
    tokens = (order // h["ids"].shape[1]).reshape(-1, 1).expand(-1, h["x"].shape[1])
    return torch.zeros_like(h["x"]).scatter_add(0, tokens, y)


def _experts(h: Holes, experts: int, compute: Compute) -> Tensor:
    return compute(h["x"], _linear(h["ends"], lambda b: b))


@dataclasses.dataclass(frozen=True)
class Block:
    """How rows are routed and combined."""

    compute: Callable[[Holes, int, Compute], Tensor]
    needs: tuple[Any, ...]
    """Operators that a graph must hold for it to be looked for."""
    holes: tuple[str, ...] = ("x", "ids", "p", "ends")
    """x (T, H), ids (T, K), p (T, K) and ends (E,), unless it counts the rows of each expert itself."""
    weights_first: bool = False

    @property
    def counts(self) -> bool:
        """Whether it counts the rows of each expert itself; else any ``ends`` will do, and biases are not looked for."""
        return "ends" not in self.holes

    @property
    def routes(self) -> bool:
        """Whether it is more than the experts alone."""
        return "ids" in self.holes


BLOCKS: dict[str, Block] = {
    "masked": Block(_masked, (aten.histc.default, aten.ge.Scalar), ("x", "ids", "p")),
    "sorted": Block(_sorted, (aten.histc.default,), ("x", "ids", "p")),
    "counted": Block(_counted, (aten.index_put.default,)),
    "scattered": Block(_scattered, (aten.scatter_add.default,)),
    "weights first": Block(_weights_first, (aten.scatter_add.default,), weights_first=True),
    "experts": Block(_experts, (), ("x", "ends")),
}
"""masked, sorted: transformers' grouped experts, with ids past the last expert zeroed after each step and without.
counted: the same with the rows counted in any way. scattered, weights first: torchtitan's experts. experts: the part without
routing, where a graph break hides the rest or somebody else needs a value in between."""


# ------------------------------------------------------------------------------------------------ experts


def _packed(w: Holes, act: Callable[[Tensor], Tensor], rows: Tensor, linear: Linear) -> Tensor:
    gate, up = linear(rows, w["w_gate_up"], w.get("b_gate_up")).chunk(2, -1)
    return linear(act(gate) * up, w["w_down"], w.get("b_down"))


def _separate(w: Holes, act: Callable[[Tensor], Tensor], rows: Tensor, linear: Linear) -> Tensor:
    gate, up = linear(rows, w["w_gate"], None), linear(rows, w["w_up"], None)
    return linear(act(gate) * up, w["w_down"], None)


def _plain(w: Holes, act: Callable[[Tensor], Tensor], rows: Tensor, linear: Linear) -> Tensor:
    return linear(act(linear(rows, w["w_up"], w.get("b_up"))), w["w_down"], w.get("b_down"))


def _clamp(w: Holes, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.clamp(max=w["limit"]), up.clamp(min=-w["limit"], max=w["limit"])


def _clamped(w: Holes, act: Callable[[Tensor], Tensor], rows: Tensor, linear: Linear) -> Tensor:
    h = linear(rows, w["w_gate_up"], w.get("b_gate_up"))
    gate, up = _clamp(w, h[..., ::2], h[..., 1::2])
    return linear((up + 1) * (gate * torch.sigmoid(gate * w["alpha"])), w["w_down"], w.get("b_down"))


def _clamped_halves(w: Holes, act: Callable[[Tensor], Tensor], rows: Tensor, linear: Linear) -> Tensor:
    gate, up = _clamp(w, *linear(rows, w["w_gate_up"], w.get("b_gate_up")).chunk(2, -1))
    return linear((up + 1) * (gate * torch.sigmoid(gate * w["alpha"])), w["w_down"], w.get("b_down"))


def _clamped_packed(w: Holes, act: Callable[[Tensor], Tensor], rows: Tensor, linear: Linear) -> Tensor:
    gate, up = _clamp(w, *linear(rows, w["w_gate_up"], w.get("b_gate_up")).chunk(2, -1))
    return linear(act(gate) * up, w["w_down"], w.get("b_down"))


@dataclasses.dataclass(frozen=True)
class Layout:
    """An expert's weights: by hole, the field of ``Experts`` that it fills and the shape of an example."""

    compute: Callable[[Holes, Callable[[Tensor], Tensor], Tensor, Linear], Tensor]
    weights: dict[str, tuple[str, tuple[int, ...]]]
    biases: dict[str, tuple[str, tuple[int, ...]]]
    activations: dict[str, tuple[Any, ...]]
    """With the operators that a graph must hold."""
    layout: str
    scalars: tuple[str, ...] = ()


GATES = {"silu": (), "gelu": (aten.gelu.default,), "gelu_tanh": (aten.gelu.default,)}
"""silu is looked for in every graph, so that another activation is a near miss."""
CLAMP = (aten.clamp.default, aten.clamp_max.default)
PACKED = {"w_gate_up": ("w_gate", (4, 48, 32)), "w_down": ("w_down", (4, 32, 24))}
PACKED_BIASES = {"b_gate_up": ("b_gate", (4, 48)), "b_down": ("b_down", (4, 32))}
LAYOUTS: dict[str, Layout] = {
    "packed": Layout(
        _packed,
        PACKED,
        PACKED_BIASES,
        GATES,
        "concat",
    ),
    "separate": Layout(
        _separate,
        {"w_gate": ("w_gate", (4, 24, 32)), "w_up": ("w_up", (4, 24, 32)), "w_down": ("w_down", (4, 32, 24))},
        {},
        GATES,
        "separate",
    ),
    "clamped": Layout(
        _clamped,
        PACKED,
        PACKED_BIASES,
        {"silu": (aten.sigmoid.default, CLAMP)},
        "interleaved",
        ("limit", "alpha"),
    ),
    "clamped halves": Layout(
        _clamped_halves,
        PACKED,
        PACKED_BIASES,
        {"silu": (aten.sigmoid.default, CLAMP)},
        "concat",
        ("limit", "alpha"),
    ),
    "clamped packed": Layout(_clamped_packed, PACKED, PACKED_BIASES, {"silu": (SILU, CLAMP)}, "concat", ("limit",)),
    "plain": Layout(
        _plain,
        {"w_up": ("w_gate", (4, 24, 32)), "w_down": ("w_down", (4, 32, 24))},
        {"b_up": ("b_gate", (4, 24)), "b_down": ("b_down", (4, 32))},
        {
            "relu2": (aten.relu.default, aten.pow.Tensor_Scalar),
            "silu": (aten.silu.default,),
            "gelu": (aten.gelu.default,),
            "gelu_tanh": (aten.gelu.default,),
        },
        "plain",
    ),
}
"""packed: gate and up are halves of one linear. separate: a weight each. clamped: they alternate, are clamped, and up counts
from one (GPT-OSS). clamped halves: the same of two halves (MiniMax-M3). clamped packed: halves that are clamped (DeepSeek-V4).
plain: no gate."""


# ------------------------------------------------------------------------------------------------ registration


def _examples(
    holes: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]], biases: Mapping[str, tuple[int, ...]]
) -> list[dict[str, Any]]:
    """Without biases and with them; x and router weights in the experts' dtype and in fp32."""
    bf16, fp32 = torch.bfloat16, torch.float32
    routing: dict[str, Any] = {
        "x": torch.zeros(6 if "ids" in holes else 12, 32, dtype=bf16),
        "ids": torch.tensor([[0, 3], [1, 0], [3, 1], [0, 1], [3, 0], [1, 3]]),  # expert 2 is idle
        "ends": torch.tensor([4, 8, 8, 12], dtype=torch.int32),
    }
    tensors = {name: routing[name] for name in holes if name != "p"}
    tensors |= {name: torch.zeros(shape, dtype=bf16) for name, shape in shapes.items()}
    lines = {name: torch.zeros(shape, dtype=bf16) for name, shape in biases.items()}
    forms = [dict.fromkeys(lines), lines] if lines else [lines]
    inputs = [{"x": routing["x"].to(dtype)} for dtype in (bf16, fp32)]
    routers = [{"p": torch.zeros(6, 2, dtype=dtype)} for dtype in (bf16, fp32)] if "p" in holes else [{}]
    return [{**tensors, **form, **x, **router} for form in forms for x in inputs for router in routers]


def _signature(function: Callable[..., Any], names: list[tuple[str, Any, Any]], around: tuple[str, ...], only: str) -> None:
    """Give a function of ``*args`` the arguments that its fusion looks for."""
    kinds = inspect.Parameter
    leading = [kinds(name, kinds.POSITIONAL_OR_KEYWORD) for name in around]
    holes = [kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=d, annotation=a) for n, d, a in names]
    rest = [kinds("saved", kinds.VAR_POSITIONAL)] if around else []
    keyword = [kinds(only, kinds.KEYWORD_ONLY)] if only else []
    if around or only:
        holes = [hole.replace(default=kinds.empty) for hole in holes]
    function.__signature__ = inspect.Signature([*leading, *holes, *rest, *keyword])  # type: ignore[attr-defined]


def register(block_name: str, block: Block, layout_name: str, layout: Layout, kind: str) -> None:
    """Register one block around one kind of experts."""
    none, empty = None, inspect.Parameter.empty
    biases = layout.biases if block.counts else {}
    names = [(n, empty, empty) for n in (*block.holes, *layout.weights)]
    names += [(n, empty, float) for n in layout.scalars] + [(n, none, empty) for n in biases]
    order = [n for n, _, _ in names]
    fields = {hole: field for hole, (field, _) in {**layout.weights, **biases}.items()}

    def pattern(*args):
        h = dict(zip(order, args, strict=False))
        return block.compute(h, h["w_down"].shape[0], lambda rows, linear: layout.compute(h, ACTIVATIONS[kind], rows, linear))

    _signature(pattern, names, (), "")
    fusion = fxfuse.register_forward_backward_fusion(
        name=f"grouped_mlp[{block_name}, {layout_name}{'' if 'alpha' in layout.scalars else ' ' + kind}]",
        example=_examples(
            block.holes,
            {hole: shape for hole, (_, shape) in layout.weights.items()},
            {hole: shape for hole, (_, shape) in biases.items()},
        ),
        requires=(aten._grouped_mm.default, *block.needs, *layout.activations[kind]),
        check_on_register=False,
    )(pattern)

    def experts(h: Holes) -> fxfuse.ops.Experts:
        weights = {**dict.fromkeys(FIELDS), **{field: h.get(hole) for hole, field in fields.items()}}
        cls = fxfuse.ops.ScaledExperts if fxfuse.current_recipe().quantized else fxfuse.ops.Experts
        return cls(**weights, act=kind, layout=layout.layout, limit=h.get("limit"), alpha=h.get("alpha"))

    def told(h: Holes) -> dict[str, Any]:
        return {"ends": h.get("ends"), "weights_first": block.weights_first}

    def forward(*args, save):
        h = dict(zip(order, args, strict=True))
        recompute = fxfuse.current_recipe().activation_memory == "recompute"
        if not block.routes:
            return fxfuse.ops.grouped_experts_forward(h["x"], h["ends"], experts(h), save=save, recompute=recompute)
        return fxfuse.ops.grouped_mlp_forward(h["x"], h["ids"], h["p"], experts(h), save=save, recompute=recompute, **told(h))

    def backward(grad, *args, mask):
        h, saved = dict(zip(order, args, strict=False)), args[len(order) :]
        tensors = [hole for hole in order if hole not in layout.scalars]
        wanted = {fields.get(hole, hole): m for hole, m in zip(tensors, mask, strict=True)}
        slots = ("x", *(["p"] if block.routes else []), *FIELDS)
        needed = [wanted.get(s, False) for s in slots]
        if block.routes:
            found = fxfuse.ops.grouped_mlp_backward(grad, h["x"], h["ids"], h["p"], experts(h), saved, needed, **told(h))
        else:
            found = fxfuse.ops.grouped_experts_backward(grad, h["x"], h["ends"], experts(h), saved, needed)
        gradients = dict(zip(slots, found, strict=True))
        return tuple(gradients.get(fields.get(hole, hole)) for hole in tensors)

    def check(m: fxfuse.Match) -> Any:
        if m.recipe.numerics == "strict":
            return m.reject("it rounds once where the model's casts round several times, and numerics is strict")
        if block.routes and (m.ids.dim() != 2 or m.p.shape != m.ids.shape or m.x.shape[0] != m.ids.shape[0]):
            shapes = f"x {tuple(m.x.shape)}, ids {tuple(m.ids.shape)} and router weights {tuple(m.p.shape)}"
            return m.reject(f"{shapes} are not (T, H), (T, K) and (T, K)")
        refused = fxfuse.ops.scaled_experts_refusal(m.recipe, *m.w_down.shape[1:]) if m.recipe.quantized else None
        return m.reject(refused) if refused else None

    _signature(forward, names, (), "save")
    _signature(backward, names, ("grad",), "mask")
    fusion.check(check)
    fusion.forward(forward)
    fusion.backward(backward)


for _block_name, _block in BLOCKS.items():
    for _layout_name, _layout in LAYOUTS.items():
        for _kind in _layout.activations:
            register(_block_name, _block, _layout_name, _layout, _kind)
