"""The quick tracer gives what the full one gives, and leaves to it whatever it does not record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

import fxfuse
from fxfuse import compat, recorder
from fxfuse.deferred import capture_table
from fxfuse.fusion import Fusion
from fxfuse.pattern import as_tuple
from fxfuse.samples import SENTINELS, Example, shape_of
from fxfuse.spellings import evaluate
from fxfuse.values import Table, metadata, value

FUSIONS = [f for f in fxfuse.list_fusions() if isinstance(f, Fusion)]
TABLE = capture_table({})


def fakes(example: Example, train: bool) -> list[Any]:
    """Fake tensors of an example's shapes; floats need gradients in training."""
    with compat.new_fake_mode():
        return [
            None
            if slot is None
            else torch.empty(shape_of(slot), dtype=slot.dtype, requires_grad=train and slot.dtype.is_floating_point)
            for slot in example
        ]


def quick(function: Callable[..., Any], args: list[Any]) -> Graph:
    with compat.tracing(args, forbid_guards=False):
        return recorder.Recorder(TABLE).record(function, args)


def full(function: Callable[..., Any], args: list[Any]) -> Graph:
    return compat.trace(function, args, TABLE, forbid_guards=False)


def results(graph: Graph, table: Table, inputs: dict[str, int]) -> list[Any]:
    """Class and metadata of each result."""
    graph.eliminate_dead_code()
    classes: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            table.class_of[node] = classes[node] = inputs.setdefault(node.name, len(table.keys))
            if inputs[node.name] == len(table.keys):
                table.unique("input", node)
        elif node.op != "output":
            classes[node] = evaluate(table, node, classes.__getitem__)
    output = next(n for n in graph.nodes if n.op == "output")
    return [None if r is None else (classes[r], metadata(value(r))) for r in output.args[0]]


def assert_same(function: Callable[..., Any], args: list[Any]) -> None:
    """Both tracers' results are the same values, of the same shapes, strides and dtypes."""
    table, inputs = Table(strict=True), {}
    assert results(quick(function, args), table, inputs) == results(full(function, args), table, inputs)


def differentiated(fusion: Fusion, given: list[bool]) -> Callable[..., Any]:
    """The pattern with its gradients for a cotangent of ones."""
    scalars = SENTINELS[: sum(h.scalar for h in fusion.holes)]

    def run(*tensors: Tensor) -> tuple[Any, ...]:
        rest = iter(tensors)
        outputs = as_tuple(fusion.call_pattern([next(rest) if g else None for g in given], scalars))
        wanted = [t for t in tensors if t.requires_grad]
        if not outputs[0].requires_grad:
            return outputs
        return (*outputs, *torch.autograd.grad(outputs[0], wanted, torch.ones_like(outputs[0]), allow_unused=True))

    return run


@pytest.mark.parametrize("fusion", FUSIONS, ids=lambda f: f.name)
def test_built_in_patterns(fusion: Fusion) -> None:
    for example in fusion.examples:
        for train in (False, True) if fusion.side == "joint" else (False,):
            args = fakes(example, train)
            assert_same(differentiated(fusion, [a is not None for a in args]), [a for a in args if a is not None])


MATRIX, INTEGERS = ((4, 6), torch.float32), ((4,), torch.int64)


def tensors(*kinds: tuple[tuple[int, ...], torch.dtype]) -> list[Any]:
    with compat.new_fake_mode():
        return [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]


def assigned(target: Tensor, index: Tensor, values: Tensor) -> Tensor:
    target[index] = values
    return target


def named(y: Tensor, how: Callable[[Tensor], Any]) -> tuple[Tensor, ...]:
    other = y.detach()
    how(y)
    return y * 1, other * 2


def again(y: Tensor) -> tuple[Tensor, ...]:
    before = y * 2
    y.add_(1)
    return before, y, y * 2


PLAIN: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "composite operators below autograd": (lambda x: (torch.ops.aten.softplus_backward(x.cos(), x, 1, 20),), [MATRIX]),
    "several results": (lambda x: (*x.split([1, 3]), *x.max(-1)), [MATRIX]),
    "numbers and dtypes": (lambda x: (x.to(torch.bfloat16) * 2 + x.sum(dtype=torch.float64),), [MATRIX]),
    "factories": (lambda x: (torch.arange(4, device=x.device) + x.new_zeros(4) + torch.full_like(x[:, 0], 3),), [MATRIX]),
    "fresh tensors mutated": (lambda x: (x.cos().add_(1).mul_(x).relu_().masked_fill_(x > 0, 2).clamp_(max=3),), [MATRIX]),
    "fresh tensors assigned to": (
        lambda x, i: (assigned(torch.empty_like(i), i, torch.arange(4, device=x.device)),),
        [MATRIX, INTEGERS],
    ),
    "an alias mutated": (lambda x: named(x.cos(), lambda y: y.mul_(3)), [MATRIX]),
    "fresh tensors filled": (lambda x: (x.exp().zero_(), x.exp().fill_(3), x.exp().copy_(x[0])), [MATRIX]),
    "a value before and after": (lambda x: again(x.sin()), [MATRIX]),
    "an argument and nothing": (lambda x: (x, None, x.t()), [MATRIX]),
    "lists of indices": (lambda x, i: (x[i], x[:, None, i], torch.cat([x, x[i]])), [MATRIX, INTEGERS]),
    "norms": (lambda x: (torch.nn.functional.layer_norm(x, [6]), torch.nn.functional.rms_norm(x, [6])), [MATRIX]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_functions(name: str) -> None:
    function, kinds = PLAIN[name]
    assert_same(function, tensors(*kinds))


@pytest.mark.gpu
def test_backward_in_autograds_thread_of_a_gpu() -> None:
    """There autograd runs in another thread than the tracer."""

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.gelu(torch.nn.functional.linear(x, w)).clamp(-1, 1)
        return (y, *torch.autograd.grad(y, [x, w], torch.ones_like(y)))

    with compat.new_fake_mode():
        args = [torch.empty(shape, device="cuda", requires_grad=True) for shape in ((6, 8), (4, 8))]
    assert_same(run, args)


CONSTANT = torch.ones(6)


def mutated(y: Tensor, how: Callable[[Tensor], Any]) -> tuple[Tensor, ...]:
    view = y.view(-1)
    how(y)
    return y * 1, view * 1


ODD: dict[str, Callable[..., Any]] = {
    "an argument mutated": lambda x: (x.add_(1),),
    "a view mutated": lambda x: mutated(x.clone(), lambda y: y[0].add_(1)),
    "a tensor mutated that has a view": lambda x: mutated(x.clone(), lambda y: (y.t(), y.add_(1))),
    "a promoting mutation": lambda x: (x.bfloat16().mul_(x),),
    "a random mutation": lambda x: (torch.empty_like(x).bernoulli_(0.5),),
    "a constant": lambda x: (x + torch.tensor([1.0] * 6),),
    "a tensor from elsewhere": lambda x: (x + CONSTANT,),
    "a value": lambda x: (x * x.sum().item(),),
    "a higher-order operator": lambda x: (torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_not_plain_is_not_recorded(name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017  whatever it is, the full tracer is asked
        quick(ODD[name], tensors(MATRIX))


@pytest.mark.parametrize(
    "name", ["an argument mutated", "a view mutated", "a tensor mutated that has a view", "a random mutation", "a constant"]
)
def test_what_is_not_plain_is_traced_in_full(name: str) -> None:
    got = recorder.trace(ODD[name], tensors(MATRIX), TABLE, forbid_guards=False)
    assert [str(n.target) for n in got.nodes] == [str(n.target) for n in full(ODD[name], tensors(MATRIX)).nodes]


def test_symbolic_sizes_are_traced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("recorded")

    seen: list[bool] = []

    def backend(gm: Any, args: Any) -> Any:
        x = next(n.meta["example_value"] for n in gm.graph.nodes if isinstance(n.meta.get("example_value"), Tensor))
        graph = recorder.trace(lambda t: (t.cos(),), [x], TABLE, forbid_guards=False)
        seen.append(any("cos" in str(n.target) for n in graph.nodes))
        return gm.forward

    monkeypatch.setattr(recorder.Recorder, "record", refuse)
    torch.compile(lambda x: x.sin(), backend=backend, dynamic=True)(torch.ones(5, 3))
    assert seen == [True]


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        recorder.trace(lambda x: (x / (1 // 0),), tensors(MATRIX), TABLE, forbid_guards=False)
