"""TransformerEngine's matrix for dense operators, on plain PyTorch code: shapes, data, tolerances, and one comparison.

Many sites share one compilation: a site is a function of leaves of its own, so that each is one region of the graph.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fxfuse

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
WEIGHTS = ((64, 32), (3, 5), (128, 128))
INPUTS = ((-1,), (5, 1, -1), (4, 2, 4, -1), (128, -1))
SCALES = (1.0, 0.0, -2.5, 3.5)
TOLERANCES = {FP32: (1.3e-6, 1e-5), BF16: (1.6e-2, 1e-5), FP16: (1e-3, 1e-5)}
"""Relative and absolute, against fp64; matrix products in fp32 get fp16's there (TF32), which a CPU does not need."""


def uniform(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    """Uniform over (0, 1), already rounded to ``dtype``: the fp64 reference sees the very same numbers."""
    return torch.rand(shape).to(dtype).requires_grad_(grad)


def filled(shape: Sequence[int], width: int) -> tuple[int, ...]:
    """A shape with its -1 replaced."""
    return tuple(width if s == -1 else s for s in shape)


def share(shapes: Sequence[Any], dtype: torch.dtype) -> Sequence[Any]:
    """A third of the shapes for each dtype: together the dtypes cover them all."""
    return shapes[list(DTYPES.values()).index(dtype) :: len(DTYPES)]


def subsets(count: int) -> Iterator[tuple[bool, ...]]:
    """Every combination of which tensors need a gradient."""
    yield from itertools.product((True, False), repeat=count)


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the model, with the fusions that must fire there."""

    label: str
    fn: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    fuses: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that its tolerance goes by."""
        return self.tensors[0].dtype


def site(
    label: str, fn: Callable[..., Tensor], shapes: Iterable[Sequence[int]], dtype: torch.dtype, *fuses: str, **more: Any
) -> Site:
    """A site with fresh data; ``grads`` says which tensors need a gradient (default: all)."""
    shapes = list(shapes)
    grads = more.get("grads", (True,) * len(shapes))
    tensors = tuple(uniform(*s, dtype=dtype, grad=g) for s, g in zip(shapes, grads, strict=True))
    return Site(label, fn, tensors, fuses)


@dataclasses.dataclass(frozen=True)
class Result:
    """Outputs and gradients of all sites."""

    outputs: list[Tensor]
    grads: list[list[Tensor | None]]


def run(sites: Sequence[Site], call: Callable[..., Any], cotangents: Sequence[Tensor], *, double: bool = False) -> Result:
    """Run every site on copies of its tensors and, if there are cotangents, backward."""

    def leaf(t: Tensor) -> Tensor:
        copy = t.detach().clone()
        return (copy.double() if double else copy).requires_grad_(t.requires_grad)

    arguments = [[leaf(t) for t in s.tensors] for s in sites]
    outputs = call(arguments)
    asked = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=False) if o.requires_grad]
    if asked:
        torch.autograd.backward([o for o, _ in asked], [c for _, c in asked])
    return Result([o.detach() for o in outputs], [[t.grad for t in a] for a in arguments])


def check(sites: Sequence[Site], *, train: bool = True, also: Mapping[str, int] | None = None, **options: Any) -> fxfuse.Report:
    """Compile all sites into one graph; compare with fp64 and count fusions: those of the sites, ``also``, and no other."""

    def model(arguments: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        return [s.fn(*a) for s, a in zip(sites, arguments, strict=True)]

    mode = contextlib.nullcontext() if train else torch.inference_mode()
    compiled = torch.compile(model, backend="fxfuse", fullgraph=True, options={"lower": "eager", **options})
    with torch.no_grad():
        shapes = [o.shape for o in model([s.tensors for s in sites])]
    cotangents = [uniform(*shape, dtype=s.dtype, grad=False) for s, shape in zip(sites, shapes, strict=True)] if train else []
    with mode:
        got = run(sites, compiled, cotangents)
    report = fxfuse.last_report()
    compare(sites, got, run(sites, model, cotangents), run(sites, model, cotangents, double=True))
    wanted = collections.Counter(name for s in sites for name in s.fuses) + collections.Counter(also or {})
    fused = collections.Counter(f.name for f in report.fused)
    assert fused == wanted, f"only in the report: {fused - wanted}; only expected: {wanted - fused}"
    assert not report.failures
    return report


def compare(sites: Sequence[Site], got: Result, eager: Result, exact: Result) -> None:
    """Values by ``excess``; gradients where eager has them and nowhere else; dtypes and strides as eager's."""
    for i, s in enumerate(sites):
        pairs = [("output", got.outputs[i], eager.outputs[i], exact.outputs[i])]
        for j, grads in enumerate(zip(got.grads[i], eager.grads[i], exact.grads[i], strict=True)):
            pairs.append((f"gradient {j}", *grads))
        for what, mine, theirs, true in pairs:
            assert (mine is None) == (theirs is None), f"{s.label}: {what} is {'missing' if mine is None else 'not None'}"
            if mine is None or theirs is None or true is None:
                continue
            assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride()), f"{s.label}: {what}"
            units, own = excess(mine, true, s.dtype), excess(theirs, true, s.dtype)
            assert units <= max(1.0, 1.5 * own), f"{s.label}: {what} is {units:.2f} tolerances from fp64, eager {own:.2f}"


def excess(value: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """The largest error in units of TransformerEngine's tolerance; more than 1 is allowed only where eager is as far off."""
    if not value.numel():
        return 0.0
    relative, absolute = TOLERANCES[dtype]
    units = (value.double() - exact).abs() / (absolute + relative * exact.abs())
    return units.max().item()
