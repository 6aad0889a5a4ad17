"""The structural hash of a captured graph: everything that matters is in it, and it is the same in every process."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from fxfuse.plan import structural_hash

GRAPHS = """
import torch, torch.nn.functional as F

def base(x, w, b): return F.gelu(F.linear(x, w, b)) * 0.1 + x.sum()
def other_constant(x, w, b): return F.gelu(F.linear(x, w, b)) * 0.1000001 + x.sum()
def other_operator(x, w, b): return F.relu(F.linear(x, w, b)) * 0.1 + x.sum()
def other_keyword(x, w, b): return F.gelu(F.linear(x, w, b), approximate="tanh") * 0.1 + x.sum()
def integer_for_float(x, w, b): return F.gelu(F.linear(x, w, b)) * 1 + x.sum()
def float_for_integer(x, w, b): return F.gelu(F.linear(x, w, b)) * 1.0 + x.sum()
def swapped_operands(x, w, b): return x.sum() + F.gelu(F.linear(x, w, b)) * 0.1
def sliced(x, w, b): return F.gelu(F.linear(x, w, b))[1:] * 0.1 + x.sum()
def sliced_further(x, w, b): return F.gelu(F.linear(x, w, b))[2:] * 0.1 + x.sum()
def cast(x, w, b): return F.gelu(F.linear(x, w, b)).to(torch.bfloat16) + x.sum()
def cast_elsewhere(x, w, b): return F.gelu(F.linear(x, w, b)).to(torch.float16) + x.sum()
def branch(x, w, b): return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,)) + w.sum() + b.sum()
def other_branch(x, w, b): return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 4, (x,)) + w.sum() + b.sum()
FUNCTIONS = {k: v for k, v in globals().items() if getattr(v, "__module__", 0) == __name__ and callable(v)}

def hashed(fn, *args, dynamic=False):
    from fxfuse.plan import structural_hash
    found = []
    def backend(gm, inputs):
        found.append(structural_hash(gm))
        return gm.forward
    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return found[0]

def inputs(n=6, dtype=torch.float32, grad=False):
    return [torch.ones(s, dtype=dtype, requires_grad=grad) for s in ((n, 16), (32, 16), (32,))]
"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The functions above as a module, importable here and in another process."""
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "hashed_graphs.py").write_text(GRAPHS)
    sys.path.insert(0, str(folder))
    try:
        import hashed_graphs

        yield hashed_graphs
    finally:
        sys.path.remove(str(folder))
        del sys.modules["hashed_graphs"]


def test_constants_operators_and_bodies_are_part_of_the_hash(graphs: Any) -> None:
    names = [n for n in graphs.FUNCTIONS if n not in ("hashed", "inputs")]
    found = {n: graphs.hashed(graphs.FUNCTIONS[n], *graphs.inputs()) for n in names}
    assert len(names) == 13 and len(set(found.values())) == len(names), found


def test_metadata_is_part_of_the_hash(graphs: Any) -> None:
    x, w, b = graphs.inputs()
    variants = {
        "base": [x, w, b],
        "other_size": [*graphs.inputs(7)],
        "trained": [*graphs.inputs(grad=True)],
        "partly_trained": [x, w.clone().requires_grad_(), b],
        "double": [*graphs.inputs(dtype=torch.float64)],
        "transposed": [x.t().contiguous().t(), w, b],
        "meta": [t.to("meta") for t in (x, w, b)],
    }
    found = {n: graphs.hashed(graphs.base, *args) for n, args in variants.items()}
    assert len(set(found.values())) == len(variants), found


def test_dynamic_sizes_hash_alike_whatever_they_are(graphs: Any) -> None:
    found = {graphs.hashed(graphs.base, *graphs.inputs(n), dynamic=True) for n in (6, 9, 40)}
    assert len(found) == 1
    assert graphs.hashed(graphs.base, *graphs.inputs(6)) not in found


def test_one_symbol_for_two_sizes_is_not_two_symbols(graphs: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()

    same = graphs.hashed(fn, torch.ones(6, 5), torch.ones(6, 5), dynamic=True)
    other = graphs.hashed(fn, torch.ones(6, 5), torch.ones(7, 8), dynamic=True)
    assert same != other


def test_names_and_lines_are_not_part_of_the_hash() -> None:
    def trace(fn: Callable[..., Tensor]) -> str:
        return structural_hash(torch.fx.symbolic_trace(fn))

    assert trace(lambda x: (x + 1).relu()) == trace(lambda some_other_name: (some_other_name + 1).relu())
    assert trace(lambda x: (x + 1).relu()) != trace(lambda x: (x + 1.0).relu())


def test_hash_is_the_same_in_another_process(graphs: Any) -> None:
    names = ["base", "branch"]
    code = (
        "import hashed_graphs as g\n"
        f"for n in {names!r}:\n"
        "    print(g.hashed(g.FUNCTIONS[n], *g.inputs()), g.hashed(g.FUNCTIONS[n], *g.inputs(), dynamic=True))\n"
    )
    here = [" ".join(graphs.hashed(graphs.FUNCTIONS[n], *graphs.inputs(), dynamic=d) for d in (False, True)) for n in names]
    path = os.pathsep.join([str(Path(graphs.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == here


def test_hash_does_not_touch_the_graph() -> None:
    gm: GraphModule = torch.fx.symbolic_trace(lambda x: (x + 1).relu())
    before = gm.code
    assert structural_hash(gm) == structural_hash(copy.deepcopy(gm))
    assert gm.code == before
