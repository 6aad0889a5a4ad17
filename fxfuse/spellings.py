"""Which constructor of ``values`` each aten spelling stands for, and the conditions under which it does.

An operator without an entry, or whose condition fails, is keyed by its own name and *all* its arguments, defaults filled in
and nothing dropped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from .values import EXPAND, SQUARE, Arg, Env, Table, is_power_of_two, is_size, is_tensor, operand, ref, size, sizes, value

aten = torch.ops.aten
prims = torch.ops.prims
CAST = prims.convert_element_type.default

COPIES = frozenset(
    {aten.alias.default, aten.clone.default, aten.detach.default, aten.contiguous.default, aten.lift_fresh_copy.default}
)
VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.unsqueeze.default,
        aten.flatten.using_ints,
    }
)
PERMUTES = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
LAYOUT_ONLY = VIEWS | COPIES | PERMUTES | {aten.expand.default}
"""Operators that move no information: their result holds the elements of their operand."""
OTHER_RANK = frozenset({aten.select_backward.default, aten.unsqueeze_copy.default})
"""Operators whose ``dim`` does not count the dimensions of their first argument."""
SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
COLLECTIVE_NAMESPACES = frozenset({"_c10d_functional", "c10d_functional", "c10d", "_dtensor", "fsdp"})


def number_graph(graph: Graph, strict: bool = False) -> Table:
    """The value table of a graph."""
    table = Table(strict)
    for node in graph.nodes:
        if node.op != "output":
            number(table, node)
    return table


def number(table: Table, node: Node) -> int:
    """Give a node its class."""
    c = evaluate(table, node, table.class_of.__getitem__)
    table.assign(node, c)
    return c


def evaluate(table: Table, node: Node, env: Env) -> int:
    """The class of ``node`` when its arguments have the classes of ``env``."""
    if node.op != "call_function":
        return table.unique("input", node)
    if is_opaque(node.target):
        table.mutated.update(mutated_arguments(node))
        return table.unique("opaque", node)
    if any(n in table.mutated for n in node.all_input_nodes):
        return table.unique("opaque", node)
    return _class_of_call(table, node, env)


def is_opaque(target: Any) -> bool:
    """Whether two calls with equal arguments may still differ: random, mutating, collective, asserting, higher-order."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(operator, getattr(target, "__name__", ""), None) is not target and not _is_size_function(target)
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable:
        return True
    return target.namespace in COLLECTIVE_NAMESPACES or len(target._schema.returns) == 0


def _is_size_function(target: Any) -> bool:
    return target in (torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_ite, torch.sym_sum)


def is_mutating(node: Node) -> bool:
    """Whether a call writes to an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def mutated_arguments(node: Node) -> Iterator[Node]:
    """The argument nodes that a call writes to, with every node whose memory they may share."""
    for written in _aliased_arguments(node):
        yield from _sharing_memory(written)


def _aliased_arguments(node: Node) -> list[Node]:
    """The arguments whose memory a call writes to, or that its result may share."""
    if node.target in LAYOUT_ONLY or node.target is operator.getitem:
        return node.all_input_nodes
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found: list[Node] = []
    for schema, (_, argument) in zip(node.target._schema.arguments, arguments(node), strict=True):
        if schema.alias_info is not None:
            found += [a for a in (argument if isinstance(argument, (list, tuple)) else [argument]) if isinstance(a, Node)]
    return found


def _sharing_memory(node: Node) -> Iterator[Node]:
    pending = [node]
    seen: set[Node] = set()
    while pending:
        n = pending.pop()
        if n not in seen:
            seen.add(n)
            yield n
            pending += _aliased_arguments(n)
            pending += [u for u in n.users if n in _aliased_arguments(u)]


def arguments(node: Node) -> list[tuple[str, Any]]:
    """A call's arguments by name, in schema order, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [(str(i), a) for i, a in enumerate(node.args)] + sorted(node.kwargs.items())
    named = []
    for i, parameter in enumerate(node.target._schema.arguments):
        if i < len(node.args):
            named.append((parameter.name, node.args[i]))
        else:
            named.append((parameter.name, node.kwargs.get(parameter.name, parameter.default_value)))
    return named


def target_name(target: Any) -> str:
    """The operator's name as it appears in keys."""
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _class_of_call(table: Table, node: Node, env: Env) -> int:
    """The class of a pure call."""
    if isinstance(value(node), torch.Tensor):
        rule = _RULES.get(node.target)
        c = rule(table, node, env) if rule is not None else None
        if c is not None:
            return c
    return _generic(table, node, env)


def _generic(table: Table, node: Node, env: Env) -> int:
    key: list[Arg] = []
    for name, argument in arguments(node):
        if name in ("pin_memory", "requires_grad"):
            continue
        if name == "dim" and node.target not in OTHER_RANK and node.args and is_tensor(node.args[0]):
            rank = max(value(node.args[0]).dim(), 1)
            if is_size(argument):
                argument = argument % rank
            elif isinstance(argument, (list, tuple)):
                argument = [d % rank for d in argument]
        key.append(_argument(argument, env))
    v = value(node)
    tensor = isinstance(v, torch.Tensor)
    return table.intern((target_name(node.target), *key), v.shape if tensor else None, v.dtype if tensor else None)


def _argument(a: Any, env: Env) -> Arg:
    if isinstance(a, Node):
        v = value(a)
        return ("i", size(v)) if is_size(v) else ref(env(a))
    if is_size(a):
        return ("i", size(a))
    if isinstance(a, (list, tuple)):
        return ("l", tuple(_argument(x, env) for x in a))
    return ("k", None) if a is None else ("k", f"{type(a).__name__} {a}")


def _number(a: Any) -> float | None:
    """A Python number (not a bool, not symbolic)."""
    return float(a) if isinstance(a, (int, float)) and not isinstance(a, bool) else None


def _sizes_of(a: Any) -> Any:
    return value(a) if isinstance(a, Node) else a


# ------------------------------------------------------------------------------------------------ the rules

Rule = Callable[[Table, Node, Env], "int | None"]


def _copy(table: Table, node: Node, env: Env) -> int | None:
    return env(operand(node, 0))


def _view(table: Table, node: Node, env: Env) -> int | None:
    return table.view(env(operand(node, 0)), value(node).shape)


def _permute(table: Table, node: Node, env: Env) -> int | None:
    rank = value(node).dim()
    dims = list(range(rank))
    if node.target is aten.permute.default:
        dims = list(operand(node, 1))
    elif node.target is aten.t.default:
        dims.reverse()
    elif rank:
        i, j = operand(node, 1), operand(node, 2)
        dims[i], dims[j] = dims[j], dims[i]
    return table.permute(env(operand(node, 0)), dims)


def _expand(table: Table, node: Node, env: Env) -> int | None:
    return table.expand(env(operand(node, 0)), value(node).shape)


def _cast(table: Table, node: Node, env: Env) -> int | None:
    c = env(operand(node, 0))
    return c if table.dtypes[c] == value(node).dtype else None


def _mm(table: Table, node: Node, env: Env) -> int | None:
    return table.matmul(env(operand(node, 0)), env(operand(node, 1)))


def _bmm(table: Table, node: Node, env: Env) -> int | None:
    """A batch of one, or one matrix for the whole batch, is a linear."""
    a, b = env(operand(node, 0)), env(operand(node, 1))
    if size(value(node).shape[0]) == "1":
        product = table.matmul(table.view(a, table.shape(a)[1:]), table.view(b, table.shape(b)[1:]))
        return table.view(product, value(node).shape)
    if table.head(b) == EXPAND and sizes(table.shape(table.operand(b, 0))) == sizes(table.shape(b)[1:]):
        return table.matmul(a, table.operand(b, 0))
    return None


def _addmm(table: Table, node: Node, env: Env) -> int | None:
    named = dict(arguments(node))
    if named["beta"] != 1 or named["alpha"] != 1:
        return None
    v = value(node)
    b, product = env(operand(node, 0)), table.matmul(env(operand(node, 1)), env(operand(node, 2)))
    if table.takes_bias(product, b):
        return table.with_bias(product, b)
    if sizes(table.shape(b)) == sizes(v.shape) and table.dtypes[b] == v.dtype and not table.strict:
        return table.add(product, b, v.shape, v.dtype)
    return None


def _add(table: Table, node: Node, env: Env) -> int | None:
    x, y, v = operand(node, 0), operand(node, 1), value(node)
    if dict(arguments(node))["alpha"] != 1:
        return None
    return table.add(env(x), env(y), v.shape, v.dtype) if is_tensor(y) else _with_float(table, node, env, ("i", "1"))


def _with_float(table: Table, node: Node, env: Env, *rest: Arg) -> int | None:
    """A floating-point tensor and a number: an integer is a float there."""
    c, k, v = env(operand(node, 0)), operand(node, 1), value(node)
    if not isinstance(k, int) or k != float(k) or not v.dtype.is_floating_point:
        return None
    return table.intern((target_name(node.target), ref(c), _argument(float(k), env), *rest), v.shape, v.dtype)


def _mul(table: Table, node: Node, env: Env) -> int | None:
    x, y, v = operand(node, 0), operand(node, 1), value(node)
    if is_tensor(y):
        return table.mul(env(x), env(y), v.shape, v.dtype)
    k = _number(y)
    if k is None or not v.dtype.is_floating_point:
        return None
    c = env(x)
    return table.scale(c, k) if table.dtypes[c] == v.dtype else None


def _div(table: Table, node: Node, env: Env) -> int | None:
    k = _number(operand(node, 1))
    if k is None or not is_power_of_two(k):
        return None
    c = env(operand(node, 0))
    return table.scale(c, 1 / k) if table.dtypes[c] == value(node).dtype else None


def _pow(table: Table, node: Node, env: Env) -> int | None:
    k, c, v = _number(operand(node, 1)), env(operand(node, 0)), value(node)
    if k not in (1, 2):
        return _with_float(table, node, env)
    if not v.dtype.is_floating_point or table.dtypes[c] != v.dtype:
        return None  # an integer to the power of a float
    return c if k == 1 else table.intern((SQUARE, ref(c)), v.shape, v.dtype)


def _sum(table: Table, node: Node, env: Env) -> int | None:
    named, c, v = dict(arguments(node)), env(operand(node, 0)), value(node)
    if table.dtypes[c] != v.dtype:
        return None
    return table.colsum(c, named["dim"], v.shape, v.dtype)


def _getitem(table: Table, node: Node, env: Env) -> int | None:
    source, i = operand(node, 0), operand(node, 1)
    if source.target not in SPLITS or i < 0:
        return None
    shape = value(node).shape
    dim = dict(arguments(source))["dim"] % len(shape)
    step = operand(source, 1)
    start = sum((_sizes_of(s) for s in step[:i]), 0) if isinstance(step, (list, tuple)) else i * _sizes_of(step)
    return table.slice(env(operand(source, 0)), dim, start, shape[dim])


def _slice(table: Table, node: Node, env: Env) -> int | None:
    named, shape = dict(arguments(node)), value(node).shape
    if named["step"] != 1:
        return None
    dim = named["dim"] % len(shape)
    start = 0 if named["start"] is None else _sizes_of(named["start"])
    return table.slice(env(operand(node, 0)), dim, start, shape[dim])


def _slice_scatter(table: Table, node: Node, env: Env) -> int | None:
    named, shape = dict(arguments(node)), value(node).shape
    dim = named["dim"] % len(shape)
    whole, start, end = shape[dim], named["start"] or 0, named["end"]
    fixed = isinstance(whole, int) and isinstance(start, int) and (end is None or isinstance(end, int))
    zeros = env(operand(node, 0))
    if not fixed or named["step"] != 1 or table.constant_of(zeros) != 0 or start < 0 or (end is not None and end < 0):
        return None
    if table.dtypes[env(operand(node, 1))] != value(node).dtype:
        return None
    return table.pad(env(operand(node, 1)), dim, start, whole if end is None else min(whole, end), whole, shape)


def _constant_pad(table: Table, node: Node, env: Env) -> int | None:
    named, shape = dict(arguments(node)), value(node).shape
    padding = list(named["pad"])
    used = [i for i in range(0, len(padding), 2) if padding[i] != 0 or padding[i + 1] != 0]
    if named["value"] != 0 or len(used) != 1 or not all(isinstance(p, int) and p >= 0 for p in padding):
        return None
    dim = len(shape) - 1 - used[0] // 2
    whole = shape[dim]
    if not isinstance(whole, int):
        return None
    return table.pad(env(operand(node, 0)), dim, padding[used[0]], whole - padding[used[0] + 1], whole, shape)


def _cat(table: Table, node: Node, env: Env) -> int | None:
    v = value(node)
    parts = [env(part) for part in operand(node, 0)]
    if any(table.dtypes[p] != v.dtype or len(table.shape(p)) != v.dim() for p in parts):
        return None
    dim = dict(arguments(node))["dim"] % v.dim()
    return _padded_piece(table, parts, dim, v.shape) or table.cat(parts, dim, v.shape, v.dtype)


def _padded_piece(table: Table, parts: list[int], dim: int, shape: Any) -> int | None:
    """One piece between zeros is that piece padded (the backward of one half of a split)."""
    pieces = [i for i, p in enumerate(parts) if table.constant_of(p) != 0]
    extents = [table.shape(p)[dim] for p in parts]
    if len(pieces) != 1 or len(parts) == 1 or not all(isinstance(e, int) for e in extents):
        return None
    start = sum(extents[: pieces[0]])
    return table.pad(parts[pieces[0]], dim, start, start + extents[pieces[0]], sum(extents), shape)


def _full(table: Table, node: Node, env: Env) -> int | None:
    """full, full_like, zeros and their like, and scalar_tensor: one number everywhere."""
    named = dict(arguments(node))
    k: Any = 0
    if "fill_value" in named:
        k = named["fill_value"]
    elif "s" in named:
        k = named["s"]
    number = _number(k)
    v = value(node)
    if number is None or (isinstance(k, int) and number != k):
        return None  # an integer that no float is
    return table.fill(number, v.shape, v.dtype, v.device)


def _where(table: Table, node: Node, env: Env) -> int | None:
    v = value(node)
    a, b = env(operand(node, 1)), env(operand(node, 2))
    short, other = table.unfilled(a, b, v.shape, v.dtype), table.unfilled(b, a, v.shape, v.dtype)
    return table.where(env(operand(node, 0)), short, other, v.shape, v.dtype)


def _masked_fill(table: Table, node: Node, env: Env) -> int | None:
    k, v = _number(operand(node, 2)), value(node)
    c = env(operand(node, 0))
    if k is None:
        return None
    return table.where(env(operand(node, 1)), table.constant(k, v.dtype), c, v.shape, v.dtype)


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(COPIES, _copy),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(PERMUTES, _permute),
    aten.expand.default: _expand,
    CAST: _cast,
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    aten.addmm.default: _addmm,
    aten.add.Tensor: _add,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.pow.Tensor_Scalar: _pow,
    aten.sum.dim_IntList: _sum,
    operator.getitem: _getitem,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.constant_pad_nd.default: _constant_pad,
    aten.cat.default: _cat,
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.zeros.default: _full,
    aten.zeros_like.default: _full,
    aten.new_zeros.default: _full,
    aten.new_full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
}
