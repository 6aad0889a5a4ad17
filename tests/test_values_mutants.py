"""The tests of value numbering are strong enough: whatever condition, rule or body is broken, one of them notices.

Conditions are found in the sources, so a new one is tested from the day it is written. A mutant is caught by a check, by a
case or by a random program; one that is not is either listed below with the reason why it changes nothing, or a hole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fuzz_programs import generate
from mutation import Mutant, edited, mutants, planted, without_rule
from program_writer import Program
from value_cases import CASES
from value_checks import CHECKS
from value_meaning import Run, misread, unequal

from fxfuse.spellings import _RULES

PROGRAMS = 24
PATIENCE = 6
"""A mutant that takes so many times longer than the original does not end, and so counts as caught."""
AGAIN = 0.5
"""CPU seconds after which a signal that was lost comes again."""

WITHOUT_EFFECT = {
    ("size", "isinstance(x, torch.SymInt)", "False"): "a SymInt prints as its expression",
    ("size", "expression.is_number", "False"): "so does a number",
    ("Table.slice", "isinstance(start, int)", "True"): "the slice itself has compared its start with zero",
    ("Table.slice", "isinstance(whole, int)", "True"): "and with the extent",
    ("Table._joined_pads", "not isinstance(extent, int)", "False"): "a pad has a fixed extent, so has a cat of its shape",
    ("Table._joined_pads", "isinstance(extent, int)", "True"): "as above",
    ("_aliased_arguments", "isinstance(a, Node)", "True"): "what is written to is a node",
    ("_number", "not isinstance(a, bool)", "True"): "True is one in every rule; it stays a constant of its own",
    ("_number", "isinstance(a, bool)", "False"): "as above",
    ("_addmm", "sizes(table.shape(b)) == sizes(v.shape)", "True"): "narrows: a row is added as well",
    ("_addmm", "table.dtypes[b] == v.dtype", "True"): "addmm takes one dtype",
    ("_constant_pad", "not isinstance(whole, int)", "False"): "narrows: sizes that are symbols are compared by name",
    ("_constant_pad", "isinstance(whole, int)", "True"): "as above",
    ("_padded_piece", "len(parts) == 1", "False"): "narrows: a cat of one is padded by nothing",
    ("_padded_piece", "not all((isinstance(e, int) for e in extents))", "False"): "narrows, as for a pad",
    ("_padded_piece", "all((isinstance(e, int) for e in extents))", "True"): "as above",
    ("_padded_piece", "isinstance(e, int)", "True"): "as above",
}

VALUES, SPELLINGS = "fxfuse.values", "fxfuse.spellings"
BODIES = [
    (VALUES, 'intern((kind, ("u", len(self.keys)))', 'intern((kind, ("u", 0))'),
    (VALUES, "[inner[d] for d in dims]", "[dims[d] for d in inner]"),
    (VALUES, "[kept.index(d) for d in moving]", "[moving.index(d) for d in kept]"),
    (VALUES, "return self.expand(self.permute(base, [1, 0]), new)", "return self.expand(base, new)"),
    (VALUES, "return self.linear(w, x, None)", "return self.linear(x, w, None)"),
    (VALUES, "return self.linear(a, self.permute(b, [1, 0]), None)", "return self.linear(a, b, None)"),
    (VALUES, "(SLICE, ref(c), (\"i\", str(dim)), ", "(SLICE, ref(c), (\"i\", '0'), "),
    (VALUES, "max(whole + start, 0)", "max(start, 0)"),
    (VALUES, "start = min(start, whole)", "start = start"),
    (VALUES, "sorted(d % rank for d in", "sorted(d for d in"),
    (VALUES, "return self.scale(a, 2.0)", "return self.scale(a, 3.0)"),
    (VALUES, "a, b = sorted((a, b))\n        if not self.strict", "if not self.strict"),
    (VALUES, "return self.cat([other[1], piece[1]], d, shape, dtype)", "return self.cat([piece[1], other[1]], d, shape, dtype)"),
    (VALUES, "offset += extent", "offset = extent"),
    (VALUES, '("aten.silu_backward.default", ref(g), ref(x))', '("aten.silu_backward.default", ref(x), ref(g))'),
    (VALUES, "shape, dtype), self.factor(p))", "shape, dtype), 1.0)"),
    (VALUES, "return self.where(self.operand(mask, 0), b, a,", "return self.where(self.operand(mask, 0), a, b,"),
    (VALUES, '(CONST, ("k", repr(float(k))), ("k", f"dtype {dtype}"))', '(CONST, ("k", repr(float(k))))'),
    (VALUES, "(FULL, ref(c), dims, ", "(FULL, ref(c), "),
    (VALUES, "(PAD, ref(c), *place)", "(PAD, ref(c), *place[:2])"),
    (VALUES, '(CAT, ("l", tuple(ref(p) for p in parts)), ("i", str(dim)))', '(CAT, ("l", tuple(ref(p) for p in parts)))'),
    (VALUES, "return self.operand(a, 0) if decides else a", "return self.operand(a, 0)"),
    (SPELLINGS, 'COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", ', "COLLECTIVE_NAMESPACES = frozenset({"),
    (SPELLINGS, "OTHER_RANK = frozenset({aten.select_backward.default, ", "OTHER_RANK = frozenset({"),
    (SPELLINGS, ", aten.unsqueeze_copy.default})", "})"),
    (SPELLINGS, "table.mutated.update(mutated_arguments(node))", "pass"),
    (SPELLINGS, "pending += _aliased_arguments(n)", "pass"),
    (SPELLINGS, "pending += [u for u in n.users if n in _aliased_arguments(u)]", "pass"),
    (SPELLINGS, "argument = argument % rank", "pass"),
    (SPELLINGS, "argument = [d % rank for d in argument]", "pass"),
    (SPELLINGS, "dims[i], dims[j] = dims[j], dims[i]", "pass"),
    (SPELLINGS, "dims.reverse()", "pass"),
    (SPELLINGS, "table.scale(c, 1 / k)", "table.scale(c, k)"),
    (SPELLINGS, "for s in step[:i]", "for s in step[: i + 1]"),
    (SPELLINGS, "i * _sizes_of(step)", "(i + 1) * _sizes_of(step)"),
    (SPELLINGS, "min(whole, end)", "end"),
    (SPELLINGS, "whole - padding[used[0] + 1]", "whole"),
    (SPELLINGS, "len(shape) - 1 - used[0] // 2", "used[0] // 2"),
    (SPELLINGS, "start = sum(extents[: pieces[0]])", "start = 0"),
    (SPELLINGS, "table.constant(k, v.dtype), c, v.shape", "c, table.constant(k, v.dtype), v.shape"),
    (SPELLINGS, "short, other, v.shape", "other, short, v.shape"),
]  # fmt: skip


@functools.cache
def programs() -> list[tuple[Program, Run]]:
    generated = [generate(seed, impure=seed % 5 == 4) for seed in range(PROGRAMS)]
    return [(p, Run(p.run())) for p in generated]


@functools.cache
def patience() -> float:
    """CPU seconds for one mutant."""
    from fxfuse import spellings, values

    for case in CASES:
        assert case.run  # traced once
    programs()
    start = time.process_time()
    assert next(failures(values, spellings), None) is None
    return PATIENCE * (time.process_time() - start)


class DoesNotEnd(BaseException):
    """The time for one mutant is up."""


@contextlib.contextmanager
def cpu_time(seconds: float) -> Iterator[None]:
    """Raise ``DoesNotEnd`` in what runs longer.

    Where the signal interrupts a callback (of the garbage collector, a finaliser), Python reports the exception and drops it: the
    report is not a failure of the test, and the signal comes again.
    """

    def stop(*_: Any) -> None:
        raise DoesNotEnd

    def report(dropped: Any) -> None:
        if dropped.exc_type is not DoesNotEnd:
            told(dropped)

    before, told = signal.signal(signal.SIGVTALRM, stop), sys.unraisablehook
    sys.unraisablehook = report
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        sys.unraisablehook = told


def test_the_time_ends_also_what_a_callback_interrupts() -> None:
    class Slow:
        def __del__(self) -> None:
            while time.process_time() < until:
                pass

    until = time.process_time() + 0.1
    with pytest.raises(DoesNotEnd), cpu_time(0.05):
        Slow()  # the first signal is lost in the finaliser
        while True:
            pass


def failures(values: Any, spellings: Any) -> Iterator[str]:
    """What checks, cases and programs have to say."""
    for check in CHECKS:
        check(values, spellings)
    for case, strict in itertools.product(CASES, (False, True)):
        yield from case.failures(spellings.number_graph, strict)
    for (program, run), strict in itertools.product(programs(), (False, True)):
        table = spellings.number_graph(program.graph, strict)
        yield from unequal(table, run)
        if not table.mutated:
            yield from misread(table, run)


def is_caught(values: Any, spellings: Any) -> bool:
    """Whether a check, a case or a program fails, or anything raises."""
    limit = patience()
    try:
        with cpu_time(limit):
            return next(failures(values, spellings), None) is not None
    except (Exception, DoesNotEnd):
        return True


def by_function() -> dict[str, list[Mutant]]:
    groups: dict[str, list[Mutant]] = {}
    for mutant in mutants():
        groups.setdefault(mutant.function, []).append(mutant)
    return groups


GROUPS = by_function()


@pytest.mark.parametrize("function", GROUPS)
def test_every_condition_matters(function: str) -> None:
    survivors = {m.key for m in GROUPS[function] if not is_caught(*planted(m))}
    assert survivors == {key for key in WITHOUT_EFFECT if key[0] == function}


def test_every_exception_is_of_a_condition_that_exists() -> None:
    assert set(WITHOUT_EFFECT) <= {m.key for group in GROUPS.values() for m in group}


@pytest.mark.parametrize("target", sorted(_RULES, key=str), ids=str)
def test_every_rule_matters(target: Any) -> None:
    assert is_caught(*without_rule(target))


@pytest.mark.parametrize(("module", "before", "after"), BODIES, ids=[before for _, before, _ in BODIES])
def test_every_body_matters(module: str, before: str, after: str) -> None:
    assert is_caught(*edited(module, before, after))
