"""Why did it not fuse? Eight models that come near a built-in fusion, and what the report says about each.

    python examples/03_why_not.py

``fxfuse.explain`` plans without running a kernel, so this works without a GPU and without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import fxfuse

x, r = torch.randn(8, 32), torch.randn(8, 64)
w, w2, b = torch.randn(64, 32), torch.randn(64, 32), torch.randn(64)


def value_used_elsewhere(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = F.linear(x, w, b)
    return F.gelu(hidden), hidden.amax()


def cast_in_between(x: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b).double())


def scaled_first(x: Tensor) -> Tensor:
    return F.silu(2.0 * F.linear(x, w, b))


def view_in_between(x: Tensor) -> Tensor:
    return F.linear(x, w).view(4, 2, 64) + r.view(2, 4, 64).transpose(0, 1)


def gate_of_another_input(x: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x.flip(0), w2)


def dropout_before_the_residual(x: Tensor) -> Tensor:
    return r + F.dropout(F.linear(x, w, b), 0.1)


def changed_in_place(x: Tensor) -> Tensor:
    hidden = F.linear(x, w, b)
    hidden[:, 0] = 0.0
    return F.gelu(hidden)


def addmm_with_alpha(x: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, x, w.T, alpha=0.5))


CASES: dict[Callable[..., object], str] = {
    value_used_elsewhere: "linear_gelu",
    cast_in_between: "linear_gelu",
    scaled_first: "linear_silu",
    view_in_between: "linear_add",
    gate_of_another_input: "gated_mlp_silu",
    dropout_before_the_residual: "linear_add",
    changed_in_place: "linear_gelu",
    addmm_with_alpha: "linear_gelu",
}


def main() -> None:
    for function, fusion in CASES.items():
        report = fxfuse.explain(function)(x)
        print(f"{function.__name__}\n{report.why_not(fusion)}\n")


if __name__ == "__main__":
    main()
