"""What the situation tests share: one block with a joint and a forward fusion, and a comparison with its eager twin."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse

FUSED = {"linear_gelu": 1, "linear_add": 1}
"""What fires in one ``Block``."""


class Block(nn.Module):
    """Two linears with a GELU between them, and a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) + x


def rows(*shape: int, grad: bool = True) -> Tensor:
    """Normal input of this shape (default (6, 16))."""
    return torch.randn(*(shape or (6, 16))).requires_grad_(grad)


def compiled(
    model: Callable[..., Any], *, fullgraph: bool = True, dynamic: bool | None = None, **options: Any
) -> Callable[..., Any]:
    """The model through fxfuse, run by torch itself."""
    return torch.compile(model, backend="fxfuse", fullgraph=fullgraph, dynamic=dynamic, options={"lower": "eager", **options})


def grads_of(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The gradients of the input and of every parameter."""
    return [x.grad, *[p.grad for p in model.parameters()]]


def step(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Run, take the backward of a weighted sum if there is one; outputs, the input afterwards, and all gradients."""
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    out = call(leaf)
    outputs = list(out) if isinstance(out, tuple) else [out]
    loss = sum((o.double() * torch.linspace(0.5, 1.5, o.numel()).reshape(o.shape)).sum() for o in outputs if o.requires_grad)
    if isinstance(loss, Tensor):
        loss.backward()
    grads = [None if g is None else g.clone() for g in grads_of(model, leaf)]
    return [o.detach() for o in outputs] + [leaf.detach(), *grads]


def assert_same(got: list[Tensor | None], want: list[Tensor | None], tolerance: float = 1e-5) -> None:
    """Equal in what is missing, dtypes, shapes and strides; values to within ``tolerance``."""
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g is None) == (w is None), f"value {i}"
        if g is not None and w is not None:
            assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride()), f"value {i}"
            torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance)


def check(
    model: nn.Module,
    x: Tensor,
    fuses: Mapping[str, int] = FUSED,
    *,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
    tolerance: float = 1e-5,
    **options: Any,
) -> fxfuse.Report:
    """Compile the model and compare one step with its deep copy; ``wrap`` is what the caller does around both."""
    eager = copy.deepcopy(model)
    seed = torch.randint(1 << 30, ()).item()
    torch.manual_seed(seed)
    got = step(wrap(compiled(model, **options)), model, x)
    report = fxfuse.Report.merge(fxfuse.reports())
    torch.manual_seed(seed)
    assert_same(got, step(wrap(eager), eager, x), tolerance)
    assert_fused(report, fuses)
    return report


def assert_fused(report: fxfuse.Report, fuses: Mapping[str, int]) -> None:
    """Exactly these fusions fired, and nothing failed."""
    counts: dict[str, int] = {}
    for f in report.fused:
        counts[f.name] = counts.get(f.name, 0) + 1
    assert counts == dict(fuses), f"{counts}; {[(m.name, m.reason) for m in report.missed if m.progress == 1]}"
    assert not report.failures


def frames() -> int:
    """How many graphs Dynamo has captured since the last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
