"""Value numbering, rule by rule: equal where a rule's conditions hold, different where one of them is broken."""

from __future__ import annotations

import pytest
import torch
from value_case import Case
from value_cases import CASES
from value_checks import CHECKS, Check
from value_meaning import Run

from fxfuse import spellings, values
from fxfuse.spellings import evaluate, is_opaque, number_graph

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_classes_of(case: Case, strict: bool) -> None:
    assert list(case.failures(number_graph, strict)) == []


@every_case
def test_numbers_are_what_the_case_says(case: Case) -> None:
    """A case that expects two classes is of no use if nothing distinguishes them."""
    assert case.equal is (case.same or case.alike)


@pytest.mark.parametrize("case", [c for c in CASES if c.strict and c.traced_with is None and "write" not in c.rule], ids=str)
def test_one_strict_class_is_one_rounding(case: Case) -> None:
    """In bfloat16 these numbers round at every step, and sums of them are exact in float32, so no summation order shows."""
    program, nodes = case.traced
    seen = program.run([t.bfloat16() if t.is_floating_point() else t for t in case.inputs])
    if all(seen[n].dtype is torch.bfloat16 for n in nodes):
        run = Run(seen, exact=True)
        assert run.number[nodes[0]] == run.number[nodes[1]]


def test_numbering_again_gives_the_same_classes() -> None:
    for case in CASES:
        graph = case.traced[0].graph
        table = number_graph(graph)
        count = len(table.keys)
        for node in graph.nodes:
            if node.op == "call_function" and not is_opaque(node.target) and not table.mutated:
                assert evaluate(table, node, table.class_of.__getitem__) == table.class_of[node], case
        assert len(table.keys) == count, case


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_check(check: Check) -> None:
    check(values, spellings)
