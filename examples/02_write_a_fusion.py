"""Write a fusion, from the pattern to the report.

    python examples/02_write_a_fusion.py

A fusion is a plain function that says what to look for, and another that says what to put there. fxfuse compares the two
when they are registered, so a wrong one never reaches a model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxfuse

# ---------------------------------------------------------------------------------------------------------------------
# 1. Something to put there. On a GPU this would launch a kernel of yours; to fxfuse any torch.library op looks the same.


@torch.library.custom_op("example::squared_relu_linear", mutates_args=())
def squared_relu_linear_op(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """relu(x @ w.T + b) ** 2: x (..., K), w (N, K), b (N,) -> (..., N)."""
    return F.linear(x, w, b).relu_().square_()


@squared_relu_linear_op.register_fake
def _(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


# ---------------------------------------------------------------------------------------------------------------------
# 2. What to look for, and when it is allowed. The argument names are the holes: any tensor of the graph may fill one.


@fxfuse.register_forward_fusion
def squared_relu_linear(x, w, b):
    """relu(x @ w.T + b) ** 2 in one kernel."""
    return F.relu(F.linear(x, w, b)) ** 2


@squared_relu_linear.check
def _(m: fxfuse.Match):
    if m.x.shape[-1] % 16:
        return m.reject(f"in_features {m.x.shape[-1]} is not a multiple of 16")


@squared_relu_linear.rewrite
def _(x, w, b):
    return squared_relu_linear_op(x, w, b)


# ---------------------------------------------------------------------------------------------------------------------
# 3. A wrong rewrite is refused on the spot, with the first input on which it differs.


def register_a_wrong_one() -> None:
    @fxfuse.register_forward_fusion
    def squared_relu_linear_wrong(x, w, b):
        return F.relu(F.linear(x, w, b)) ** 2

    @squared_relu_linear_wrong.rewrite
    def _(x, w, b):
        return F.relu(F.linear(x, w, b) ** 2)  # the square of a negative number is positive


# ---------------------------------------------------------------------------------------------------------------------
# 4. A model. It knows nothing of all this; one of its layers is written in another way, another has an odd size.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.odd = nn.Linear(32, 64), nn.Linear(64, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x)) ** 2
        x = (x @ self.second.weight.T + self.second.bias).relu().square()  # another spelling: the same values
        return torch.relu(self.odd(x)).pow(2)


def main() -> None:
    try:
        register_a_wrong_one()
    except fxfuse.PatternError as error:
        print(f"a wrong rewrite:\n  {type(error).__name__}: {error}\n")

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(4, 10, 32)
    # The built-in library knows this pattern too (linear_relu2); "only" leaves the place to ours.
    compiled = torch.compile(model, backend="fxfuse", options={"lower": "eager", "fusions": {"only": ["squared_relu_linear"]}})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))

    report = fxfuse.last_report()
    print(report)
    print(f"\n{report.why_not('squared_relu_linear')}")
    assert report.count("squared_relu_linear") == 2


if __name__ == "__main__":
    main()
