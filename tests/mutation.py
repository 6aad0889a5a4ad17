"""Mutants of the value rules: each condition forced to hold and to fail, each link of a chain dropped, each rule taken away."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from fxfuse import spellings, values

SOURCES = {m.__name__: Path(m.__file__ or "").read_text() for m in (values, spellings)}
CODE = {name: compile(source, name, "exec") for name, source in SOURCES.items()}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one expression."""

    module: str
    function: str
    line: int
    column: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}:{self.line} {self.function}: {self.before} -> {self.after}"

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it, wherever it stands."""
        return self.function, self.before, self.after


def mutants() -> list[Mutant]:
    """Every mutant of every condition in ``values`` and ``spellings``, in the order of the source."""
    found: dict[tuple[Any, ...], Mutant] = {}
    for module, source in SOURCES.items():
        for function in _functions(ast.parse(source)):
            for mutant in _of_function(module, *function):
                found.setdefault((mutant.module, mutant.line, mutant.column, mutant.before, mutant.after), mutant)
    return list(found.values())


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for top in tree.body:
        if isinstance(top, ast.FunctionDef):
            yield top.name, top
        elif isinstance(top, ast.ClassDef):
            yield from ((f"{top.name}.{f.name}", f) for f in top.body if isinstance(f, ast.FunctionDef))


def _of_function(module: str, name: str, function: ast.AST) -> Iterator[Mutant]:
    def mutant(node: ast.expr, after: str) -> Mutant:
        return Mutant(module, name, node.lineno, node.col_offset, ast.unparse(node), after)

    for node in ast.walk(function):
        for condition in _conditions(node):
            yield mutant(condition, "True")
            yield mutant(condition, "False")
        if isinstance(node, ast.Compare):
            yield from (mutant(node, after) for after in _weaker(node))


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    """The conditions that a node of the syntax tree holds, each part of a compound one by itself."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("all", "any"):
        yield from (a.elt for a in node.args if isinstance(a, ast.GeneratorExp))
    elif isinstance(node, (ast.Return, ast.Assign)) and isinstance(node.value, ast.Compare):
        yield node.value


def _weaker(compare: ast.Compare) -> Iterator[str]:
    """A chain without one of its links; a choice without one of its members."""
    chain = [compare.left, *compare.comparators]
    if len(chain) == 3:
        for i, j in ((0, 1), (1, 2), (0, 2)):
            yield ast.unparse(ast.Compare(chain[i], [compare.ops[min(i, 1)]], [chain[j]]))
    choice = compare.comparators[-1]
    if isinstance(compare.ops[-1], (ast.In, ast.NotIn)) and isinstance(choice, ast.Tuple):
        for i in range(len(choice.elts)):
            rest = ast.Tuple([e for k, e in enumerate(choice.elts) if k != i], ast.Load())
            yield ast.unparse(ast.Compare(compare.left, compare.ops, [rest]))


class _Replace(ast.NodeTransformer):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def visit(self, node: ast.AST) -> ast.AST:
        m = self.mutant
        if isinstance(node, ast.expr) and (node.lineno, node.col_offset) == (m.line, m.column) and ast.unparse(node) == m.before:
            return ast.copy_location(ast.parse(m.after, mode="eval").body, node)
        return self.generic_visit(node)


def planted(mutant: Mutant) -> tuple[Any, Any]:
    """``values`` and ``spellings`` with the mutant in one of them."""
    tree = ast.fix_missing_locations(_Replace(mutant).visit(ast.parse(SOURCES[mutant.module])))
    return _load({mutant.module: compile(tree, f"<{mutant}>", "exec")})


def edited(module: str, before: str, after: str) -> tuple[Any, Any]:
    """``values`` and ``spellings`` with a piece of source text replaced.

    Raises:
        ValueError: the text is not there exactly once.
    """
    source = SOURCES[module]
    if source.count(before) != 1:
        raise ValueError(f"{module} has {before!r} {source.count(before)} times")
    return _load({module: compile(source.replace(before, after), f"<{module}>", "exec")})


def without_rule(target: Any) -> tuple[Any, Any]:
    """``values`` and ``spellings`` with an operator's rule taken away."""
    changed = _load({})
    del changed[1]._RULES[target]
    return changed


def _load(changed: dict[str, types.CodeType]) -> tuple[Any, Any]:
    """Fresh copies of both modules, not known to anyone else."""
    copies: dict[str, types.ModuleType] = {}
    with mock.patch.dict(sys.modules):
        for name, code in CODE.items():
            module = types.ModuleType(name)
            module.__dict__["__package__"] = "fxfuse"
            copies[name] = sys.modules[name] = module
            exec(changed.get(name, code), module.__dict__)
    return copies[values.__name__], copies[spellings.__name__]
