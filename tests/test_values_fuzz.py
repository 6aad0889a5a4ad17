"""Two values of one class are equal: in value, shape and dtype, in random programs in which many spellings meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fuzz_families import copies, sigmoid_derivatives
from fuzz_programs import generate, with_specials
from program_writer import Program
from torch.fx import Graph, GraphModule
from value_meaning import Run, misread, unequal

from fxfuse.deferred import capture_table
from fxfuse.spellings import number_graph

CHUNKS, CHUNK = 12, 40
chunks = pytest.mark.parametrize("chunk", range(CHUNKS))


def seeds(chunk: int, count: int = CHUNK) -> range:
    return range(chunk * count, (chunk + 1) * count)


def disagreements(graph: Graph, run: Run, strict: bool) -> Iterator[str]:
    """Where the table of a graph is contradicted by a run of it, by its members and by what its keys say."""
    table = number_graph(graph, strict)
    yield from unequal(table, run)
    if not table.mutated:
        yield from misread(table, run)


@chunks
def test_values_of_one_class_are_equal(chunk: int) -> None:
    for seed in seeds(chunk):
        program = generate(seed)
        run = Run(program.run())
        for strict in (False, True):
            assert list(disagreements(program.graph, run, strict)) == [], f"seed {seed}"


@chunks
def test_nan_and_infinities_are_at_the_same_places(chunk: int) -> None:
    """But for the derivative of SiLU, some of whose spellings make NaN of an infinite gradient."""
    for seed in seeds(chunk, CHUNK // 2):
        program = generate(seed, without=[sigmoid_derivatives])
        run = Run(program.run(with_specials(program.inputs, seed)))
        assert list(disagreements(program.graph, run, seed % 2 == 0)) == [], f"seed {seed}"


@chunks
def test_values_of_one_strict_class_have_the_same_bits(chunk: int) -> None:
    """Sums of bfloat16 integers are exact in float32: whatever differs here rounds at other steps, not in another order."""
    for seed in seeds(chunk, CHUNK // 2):
        program = generate(seed, torch.bfloat16)
        run = Run(program.run(), exact=True)
        assert list(unequal(number_graph(program.graph, strict=True), run)) == [], f"seed {seed}"


@chunks
def test_random_numbers_and_written_memory_are_never_merged(chunk: int) -> None:
    for seed in seeds(chunk, CHUNK // 2):
        program = generate(seed, impure=True)
        assert list(disagreements(program.graph, Run(program.run()), strict=False)) == [], f"seed {seed}"


def joint_program(program: Program, seed: int) -> Program | None:
    """The program with the gradients of its last values, as AOTAutograd captures it."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    graph = program.graph
    floating = [n for n in graph.nodes if n.op == "call_function" and getattr(n.meta["val"], "dtype", None) is torch.float64]
    graph.output(tuple(graph.call_function(torch.ops.aten.mul.Tensor, (n, 1.5)) for n in floating[-6:]))
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in program.inputs]
    module = GraphModule({}, graph)
    if not any(out.requires_grad for out in module(*leaves)):
        return None
    joint = aot_export_joint_simple(module.forward, leaves, trace_joint=True, decompositions=capture_table({})).graph
    tangents = [n.meta["val"].shape for n in joint.nodes if n.op == "placeholder"][len(program.inputs) :]
    generator = torch.Generator().manual_seed(seed)
    return Program(joint, (*program.inputs, *(torch.randint(-3, 4, s, generator=generator).double() for s in tangents)))


@pytest.mark.parametrize("seed", range(16))
def test_values_of_one_class_are_equal_in_forward_and_backward(seed: int) -> None:
    program = joint_program(generate(seed, without=[copies, sigmoid_derivatives]), seed)
    if program is None:
        return
    run = Run(program.run())
    for strict in (False, True):
        assert list(disagreements(program.graph, run, strict)) == []


def test_spellings_meet() -> None:
    """A generator in which nothing is spelled twice would prove nothing."""
    merged = respelled = 0
    for seed in range(40):
        table = number_graph(generate(seed).graph)
        for members in table.members.values():
            merged += len(members) - 1 if members else 0
            respelled += len({n.target for n in members if n.op == "call_function"}) - 1 if members else 0
    assert merged > 40 * 10
    assert respelled > 40 * 2
