"""Regions: slices of a graph between a pattern's outputs and its inputs, and what may happen to them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .fusion import Fusion
from .pattern import Decompositions, TraceCache
from .recipe import Recipe, region_of, region_recipe
from .spellings import COPIES, LAYOUT_ONLY, is_mutating, is_opaque, number_graph
from .values import Table, is_size, is_tensor, sizes, value

aten = torch.ops.aten
DONE = "fxfuse_region"
"""Meta key of every node that a replacement inserted: no later fusion looks into it, so the pass is idempotent."""
CHEAP = frozenset(getattr(aten, name).default for name in ("silu", "gelu", "relu", "sigmoid", "tanh"))
"""Pointwise operators that may stay behind when an extra output of the replacement feeds them."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a place that looked right is left alone."""

    reason: str
    node: Node
    untried: bool = False
    """The guess was so far off that the pattern does not run on it: no news beside another guess's refusal."""


@dataclasses.dataclass
class Context:
    """One rewriting of one graph."""

    graph: Graph
    table: Table
    decompositions: Decompositions
    recipe: Recipe
    traces: TraceCache = dataclasses.field(default_factory=TraceCache)
    consumed: set[Node] = dataclasses.field(default_factory=set)
    """Nodes that replacements have made useless."""
    has_backward: bool = False
    backward_by_sequence: dict[Any, list[Node]] = dataclasses.field(default_factory=dict)
    """Backward nodes by autograd's sequence number: a hint where a cotangent is."""
    outermost: bool = True
    """Whether nodes outside of all regions are this context's."""

    @classmethod
    def of(cls, graph: Graph, decompositions: Decompositions, recipe: Recipe, inside: Context | None = None) -> Context:
        """For the part of a graph that uses ``recipe``: of ``inside``'s graph the regions that chose it."""
        table = number_graph(graph, recipe.numerics == "strict")
        if inside is None:
            return cls(graph, table, decompositions, recipe)
        return cls(graph, table, decompositions, recipe, inside.traces, outermost=False)

    def is_for(self, node: Node) -> bool:
        """Whether a node is to be computed with this context's recipe."""
        key = region_of(node)
        if key is None:
            return self.outermost
        return region_recipe(key) is self.recipe

    def __post_init__(self) -> None:
        for node in self.graph.nodes:
            if is_backward(node):
                self.has_backward = True
                self.backward_by_sequence.setdefault(node.meta.get("seq_nr"), []).append(node)


Dims = tuple[int, ...]


def seen_values(nodes: Sequence[Node | None], layouts: Sequence[Dims | None]) -> list[Any]:
    """The fake values of some nodes, each with its dimensions reordered."""
    values = [None if n is None else value(n) for n in nodes]
    return [v if v is None or dims is None else v.permute(dims) for v, dims in zip(values, layouts, strict=True)]


def inverse(dims: Dims) -> Dims:
    """The order of dimensions that undoes another."""
    return tuple(dims.index(i) for i in range(len(dims)))


@dataclasses.dataclass
class Region:
    """A proven match, ready to be spliced."""

    fusion: Fusion
    root: Node
    inputs: list[Node | None]
    scalars: tuple[float, ...]
    outputs: list[list[Node]]
    """For each required output, the nodes that hold it (output 0: the root alone)."""
    forward: set[Node]
    gone: set[Node]
    """Nodes that nothing uses once outputs, extras and gradients are rerouted."""
    extras: dict[Node, tuple[int, Any]] = dataclasses.field(default_factory=dict)
    """Interior nodes that are used outside: (which output, the shape of a view of it or None)."""
    backward: set[Node] = dataclasses.field(default_factory=set)
    mask: tuple[bool, ...] = ()
    tangent: Node | None = None
    gradients: list[list[Node]] = dataclasses.field(default_factory=list)
    """For each input, the contributions to its gradient that are replaced."""
    layouts: Sequence[Dims | None] = ()
    """For each input, the dimensions in the order in which the fusion sees them, where that is not the node's own."""

    transposed: frozenset[int] = frozenset()
    """The required outputs that the model holds as the transposition of what the fusion returns."""

    @property
    def roots(self) -> list[Node]:
        """Every node of every required output."""
        return [n for nodes in self.outputs for n in nodes]

    @property
    def metas(self) -> list[Any]:
        """The fake values of the inputs, as the fusion sees them."""
        return seen_values(self.inputs, self.layouts)

    @property
    def gradient_layouts(self) -> list[Dims | None]:
        """The layouts of the inputs whose gradient is replaced."""
        return [dims for dims, row in zip(self.layouts, self.gradients, strict=False) if row]

    @property
    def trained(self) -> bool:
        """Whether a backward is replaced too."""
        return self.tangent is not None

    @property
    def wanted(self) -> tuple[bool, ...]:
        """For each extra output, whether somebody outside uses it."""
        first = len(self.outputs)
        used = {k for k, _ in self.extras.values()}
        return tuple(k in used for k in range(first, first + self.fusion.extra))


def graphs_of(gm: GraphModule) -> list[Graph]:
    """A captured graph and those inside it: checkpointed regions and branches are graphs of their own."""
    return [m.graph for m in gm.modules() if isinstance(m, GraphModule)]


def is_backward(node: Node) -> bool:
    """Whether the node belongs to the backward pass of a joint graph."""
    return node.meta.get("partitioner_tag") == "is_backward"


def slice_back(roots: Iterable[Node], stop: Callable[[Node], bool]) -> tuple[set[Node], set[Node]]:
    """The nodes that ``roots`` are computed from, up to ``stop``; and the boundary where the walk ended."""
    starts = set(roots)
    inside: set[Node] = set()
    boundary: set[Node] = set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node in inside or node in boundary:
            continue
        ends = (stop(node) and node not in starts) or node.op != "call_function" or is_size(value(node)) or DONE in node.meta
        if ends:
            boundary.add(node)
        else:
            inside.add(node)
            pending += node.all_input_nodes
    return inside, boundary


def without_users(nodes: set[Node], rerouted: set[Node], layouts: set[Node]) -> set[Node]:
    """Those of ``nodes`` that become useless when ``rerouted`` are read from elsewhere, by outside users and by ``layouts``."""
    gone: set[Node] = set()
    for node in sorted(nodes, reverse=True):
        if all(user in gone or (node in rerouted and (user not in nodes or user in layouts)) for user in node.users):
            gone.add(node)
    return gone


def layout_source(node: Node, classes: set[int], table: Table) -> bool:
    """Whether a node only rearranges a value of one of these classes."""
    while table.class_of.get(node) not in classes:
        if node.op != "call_function" or node.target not in LAYOUT_ONLY or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return True


def transposed(c: int, table: Table) -> int | None:
    """The class of a matrix transposed; None for anything else."""
    shape = table.shapes[c]
    return table.permute(c, [1, 0]) if shape is not None and len(shape) == 2 else None


def is_constant(node: Node, classes: set[int], table: Table) -> bool:
    """Whether no input of the graph or of the region enters a node."""
    seen: set[Node] = set()
    pending = [node]
    while pending:
        n = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if is_tensor(n) and (n.op != "call_function" or table.class_of.get(n) in classes or is_opaque(n.target)):
            return False
        pending += n.all_input_nodes
    return True


def survivors(region: Region, classes: set[int], layouts: set[Node], table: Table) -> list[Node]:
    """Nodes of the region that would stay alive although the replacement does not offer their value."""
    gradient_nodes = {n for row in region.gradients for n in row}
    fine = region.gone | set(region.roots) | gradient_nodes | layouts | set(region.extras)
    left = []
    for node in region.forward | region.backward:
        if node in fine or not is_tensor(node) or not value(node).is_floating_point():
            continue
        if any(is_tensor(a) for a in node.all_input_nodes) and not is_constant(node, classes, table):
            left.append(node)
    return left


def mutation_between(nodes: Iterable[Node], last: Node) -> Node | None:
    """A mutating operator between the first of ``nodes`` and ``last``: moving reads across it could change them."""
    first = min(nodes)
    node = first
    while node is not last and node.op != "output":
        if is_mutating(node):
            return node
        node = node.next
    return None


def cycle(inputs: Sequence[Node | None], roots: Sequence[Node], forward: set[Node]) -> Node | None:
    """A root that an input depends on."""
    first, targets = min(roots), set(roots)
    seen: set[Node] = set()
    pending = [n for n in inputs if n is not None and n not in forward]
    while pending:
        node = pending.pop()
        if node in seen or node < first:
            continue
        seen.add(node)
        if node in targets:
            return node
        pending += node.all_input_nodes
    return None


def extra_places(region: Region, outputs: Sequence[int], table: Table) -> dict[Node, tuple[int, Any]]:
    """Interior nodes whose value, or a view of whose value, is one of the fusion's extra outputs."""
    first = len(region.outputs)
    found: dict[Node, tuple[int, Any]] = {}
    for node in region.forward:
        if node is region.root or not is_tensor(node):
            continue
        for k in range(first, len(outputs)):
            c = outputs[k]
            if table.class_of[node] == c:
                found[node] = (k, None)
            elif node.target not in COPIES and _is_view_of(table, node, c):
                found[node] = (k, value(node).shape)
    return found


def _is_view_of(table: Table, node: Node, c: int) -> bool:
    v = value(node)
    if node.target in LAYOUT_ONLY or table.dtypes[c] != v.dtype:
        return False
    count: Any = 1
    for s in table.shape(c):
        count = count * s
    return sizes([v.numel()]) == sizes([count]) and table.view(c, v.shape) == table.class_of[node]


def operator_names(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The aten operators of some nodes, in graph order, without pure layout."""
    return tuple(
        str(n.target)
        for n in sorted(nodes)
        if n.op == "call_function" and n.target not in LAYOUT_ONLY and n.target is not operator.getitem and is_tensor(n)
    )
