"""Trace a replacement, forward and backward, and check that it fits the region that it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from . import compat
from .pattern import Traced, refake, same_shape_and_dtype, trace_forward, trace_joint
from .region import Context, Refusal, Region, is_backward
from .spellings import LAYOUT_ONLY
from .values import is_tensor, metadata, value


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Traced forward and, in training, backward."""

    forward: Traced
    forward_nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    saved: tuple[Any, ...] = ()
    backward: Traced | None = None
    backward_nodes: tuple[Node, ...] = ()
    gradients: tuple[Any, ...] = ()


def trace(context: Context, region: Region) -> Replacement:
    metas = region.metas
    if region.fusion.side == "joint" and region.fusion.explicit:
        return _trace_explicit(context, region, metas)
    if region.trained:
        return _trace_differentiable(context, region, metas)
    return _trace_rewrite(context, region, metas)


def check(region: Region, replacement: Replacement) -> Refusal | None:
    """Why a replacement cannot stand for the region, or None."""
    return _outputs_fit(region, replacement) or _gradients_fit(region, replacement)


def _trace_rewrite(context: Context, region: Region, metas: Sequence[Any]) -> Replacement:
    fusion, wanted = region.fusion, region.wanted
    traced = context.traces.get(
        (fusion.id, fusion.identity, "rewrite", region.scalars, wanted, context.recipe),
        metas,
        lambda: trace_forward(
            lambda *t: fusion.call_rewrite(t, region.scalars, wanted), metas, context.decompositions, forbid_guards=True
        ),
    )
    return Replacement(traced, _calls(traced), traced.outputs)


def _trace_differentiable(context: Context, region: Region, metas: Sequence[Any]) -> Replacement:
    """One trace of the rewrite and its gradients: what ran before the gradient was asked for is the forward."""
    assert region.tangent is not None
    fusion, tangent = region.fusion, value(region.tangent)
    traced = context.traces.get(
        (fusion.id, fusion.identity, "joint rewrite", region.scalars, region.mask, context.recipe),
        [*metas, tangent],
        lambda: trace_joint(
            lambda *t: fusion.call_rewrite(t, region.scalars),
            metas,
            region.mask,
            tangent,
            context.decompositions,
            forbid_guards=True,
        ),
    )
    forward = tuple(n for n in _calls(traced) if n in traced.forward)
    backward = tuple(n for n in _calls(traced) if n not in traced.forward)
    used_later = {a for n in backward for a in n.all_input_nodes}
    saved = tuple(n for n in forward if n in used_later and is_tensor(n) and not _is_known(n, traced))
    gradients = tuple(g for g, m in zip(traced.grads, region.mask, strict=True) if m)
    return Replacement(traced, forward, traced.outputs[:1], saved, traced, backward, gradients)


def _is_known(node: Node, traced: Traced) -> bool:
    """Whether a value is the output, or an input in another layout: keeping it costs nothing."""
    while node.op == "call_function" and node.target in LAYOUT_ONLY and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "placeholder" or node is traced.outputs[0]


def _trace_explicit(context: Context, region: Region, metas: Sequence[Any]) -> Replacement:
    fusion, scalars, save = region.fusion, region.scalars, region.trained

    def forward(*tensors: Any) -> tuple[Any, ...]:
        out, saved = fusion.call_forward(tensors, scalars, save)
        return (out, *saved) if save else (out,)

    traced = context.traces.get(
        (fusion.id, fusion.identity, "forward", scalars, save, context.recipe),
        metas,
        lambda: trace_forward(forward, metas, context.decompositions, forbid_guards=True),
    )
    if not save:
        return Replacement(traced, _calls(traced), traced.outputs)
    saved_metas = [value(o) for o in traced.outputs[1:]]
    mode = compat.fake_mode_of([value(region.root)])
    count = len(metas)

    def backward(*tensors: Any) -> tuple[Any, ...]:
        inputs, saved, grad = tensors[:count], tensors[count:-1], tensors[-1]
        gradients = fusion.call_backward(grad, inputs, scalars, saved, region.mask)
        return tuple(g for g, m in zip(gradients, region.mask, strict=True) if m)

    assert region.tangent is not None
    everything = [*metas, *[refake(m, mode) for m in saved_metas], value(region.tangent)]
    back = context.traces.get(
        (fusion.id, fusion.identity, "backward", scalars, region.mask, context.recipe),
        everything,
        lambda: trace_forward(backward, everything, context.decompositions, forbid_guards=True),
    )
    return Replacement(traced, _calls(traced), traced.outputs[:1], traced.outputs[1:], back, _calls(back), back.outputs)


def _calls(traced: Traced) -> tuple[Node, ...]:
    return tuple(n for n in traced.graph.nodes if n.op not in ("placeholder", "output"))


def _outputs_fit(region: Region, replacement: Replacement) -> Refusal | None:
    """The new outputs must have the replaced values' shape, dtype, stride and device."""
    for node in (*replacement.forward_nodes, *replacement.backward_nodes):
        if node.op != "call_function":
            return Refusal(
                f"the replacement holds a constant of its own ({node.target}): pass it in or make it with torch.full", region.root
            )
    required = len(region.outputs)
    if len(replacement.outputs) < required:
        return Refusal(f"the replacement returns {len(replacement.outputs)} outputs, the pattern {required}", region.root)
    for k, (out, nodes) in enumerate(zip(replacement.outputs, region.outputs, strict=False)):
        for node in nodes:
            fits = _fits_transposed if k in region.transposed else _fits
            if not is_tensor(out) or not fits(out, node):
                return Refusal(f"the replacement's output is {_describe(out)}, the replaced value {_describe(node)}", node)
    for node, (k, shape) in region.extras.items():
        out = replacement.outputs[k] if k < len(replacement.outputs) else None
        if not is_tensor(out) or (shape is None and metadata(value(out)) != metadata(value(node))):
            return Refusal(f"extra output {k} is {_describe(out)}, the replaced value {_describe(node)}", node)
    return None


def _fits(out: Node, node: Node) -> bool:
    return metadata(value(out)) == metadata(value(node))


def _fits_transposed(out: Node, node: Node) -> bool:
    """Whether an output, transposed, may stand for ``node``."""
    seen = value(out)
    return (
        seen.dim() == 2
        and same_shape_and_dtype(seen.t(), value(node))
        and (leaves_the_graph(node) or value(node).is_contiguous())
    )


def leaves_the_graph(node: Node) -> bool:
    """Whether a value only leaves the backward: autograd takes it with any strides."""
    return is_backward(node) and all(u.op == "output" for u in node.users)


def _gradients_fit(region: Region, replacement: Replacement) -> Refusal | None:
    rows = [row for row in region.gradients if row]
    for gradient, row, dims in zip(replacement.gradients, rows, region.gradient_layouts, strict=True):
        seen = value(row[0]) if dims is None else value(row[0]).permute(dims)
        if not is_tensor(gradient) or not same_shape_and_dtype(value(gradient), seen):
            return Refusal(f"the replacement's gradient is {_describe(gradient)}, the replaced one {_describe(row[0])}", row[0])
    return None


def _describe(node: Any) -> str:
    m = metadata(value(node)) if isinstance(node, Node) else None
    return (
        "missing"
        if m is None
        else f"[{', '.join(m[0])}] {str(m[2]).removeprefix('torch.')} with strides ({', '.join(m[1])}) on {m[3]}"
    )
