"""Window fusions: a static method over a list of operators, for code ported from operator fusers.

Every single-use chain of operators is handed to it, in forward order also in the backward pass. What it returns is proved and
spliced as any other fusion: the chain becomes a pattern, the returned operators its rewrite.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils import _pytree as pytree

from . import registry
from .errors import PatternError
from .fusion import Fusion
from .guess import Guess
from .pattern import with_operands
from .recipe import Recipe
from .region import DONE, Context, is_backward
from .samples import Hole
from .spellings import LAYOUT_ONLY
from .values import ADD, LINEAR, MUL, SCALE, SQUARE, UNIQUE, is_tensor, value


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor that enters a chain from the side: shape, dtype and device of a value of the graph."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    value_class: int = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Op:
    """One operator of a chain: ``function(x, *args)`` with x the result of the operator before it.

    Args:
        name: "linear", "add", "mul", "scale", "square", or an aten operator's name such as "gelu".
        function: any traceable function.
        args: tensors from the side (``Input``, taken from the operators that were handed in) and constants.
        shape, dtype: of the result, for operators that were handed in.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    shape: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None

    def __call__(self, x: Any, *args: Any) -> Any:
        return self.function(x, *args)


class WindowFusion:
    """Base of window fusions: set ``window`` and define ``fuse``."""

    window: ClassVar[int] = 2

    @staticmethod
    def fuse(ops: list[Op], *, recipe: Recipe) -> list[Op] | None:
        """The operators to run instead of ``ops``, or None to leave them alone."""
        raise NotImplementedError


class Windows:
    """A registered window fusion; the same surface as ``Fusion`` where registry and rewriting need it."""

    ready = True
    requires: tuple[tuple[Any, ...], ...] = ()

    def __init__(self, cls: type[WindowFusion], side: str, name: str | None, recipes: Sequence[str] | None) -> None:
        self.cls, self.side = cls, side
        self.pattern = cls
        self.name = name or cls.__name__
        self.recipes = tuple(recipes) if recipes is not None else None
        self.pack = registry.loading_pack()
        try:
            text = inspect.getsource(cls)
            self.source = f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
        except (OSError, TypeError):
            text, self.source = f"{cls.__module__}.{cls.__qualname__}", "(unknown)"
        self.identity = hashlib.sha256(f"{self.name}\0{side}\0{self.recipes}\0{text}".encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"<{self.side} window fusion {self.name!r} at {self.source}>"

    def unregister(self) -> None:
        """Take it out: compiled models run without it from their next call on."""
        registry.remove(self)

    def guesses(self, context: Context, roots: Sequence[Node]) -> Iterator[tuple[Node, Guess]]:
        """A guess at every root where ``fuse`` wants something else than what is there."""
        for root in roots:
            if root._erased or root in context.consumed or DONE in root.meta or is_backward(root) != (self.side == "backward"):
                continue
            if not context.is_for(root):
                continue
            for chain in _chains(context, root, self.cls.window):
                guess = self._guess(context, root, chain)
                if guess is not None:
                    yield root, guess

    def _guess(self, context: Context, root: Node, chain: _Chain) -> Guess | None:
        forward_order = list(reversed(chain.ops)) if self.side == "backward" else list(chain.ops)
        answer = self.cls.fuse(forward_order, recipe=context.recipe)
        if answer is None:
            return None
        if not isinstance(answer, (list, tuple)) or not all(isinstance(op, Op) for op in answer) or not answer:
            raise PatternError(
                f"window fusion {self.name!r} at {self.source}: fuse must return a list of fxfuse.Op or None, not {answer!r}"
            )
        new = list(reversed(answer)) if self.side == "backward" else list(answer)
        if all(a is b for a, b in zip(new, chain.ops, strict=False)) and len(new) == len(chain.ops):
            return None
        return _as_guess(self, root, chain, new)


def window_fusion(cls: type[WindowFusion], side: str, *, name: str | None, recipes: Sequence[str] | None) -> Windows:
    """The registered form of a WindowFusion class.

    Raises:
        PatternError: ``window`` or ``fuse`` is missing or of the wrong kind.
    """
    where = f"window fusion {cls.__name__}"
    if not isinstance(cls.window, int) or cls.window < 1:
        raise PatternError(f"{where}: window is {cls.window!r}, expected a number of operators")
    if cls.fuse is WindowFusion.fuse:
        raise PatternError(f"{where} defines no fuse(ops, *, recipe)")
    parameters = inspect.signature(cls.fuse).parameters
    if list(parameters) != ["ops", "recipe"]:
        raise PatternError(f"{where}: fuse takes ({', '.join(parameters)}), expected a static method (ops, *, recipe)")
    return Windows(cls, side, name, recipes)


# ------------------------------------------------------------------------------------------------ chains


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Operators from the first to the last executed, and the class of what enters the first."""

    ops: tuple[Op, ...]
    entry: int


def _chains(context: Context, root: Node, length: int) -> Iterator[_Chain]:
    """Chains of ``length`` operators that end at ``root``: at a binary operator either operand may be the chain."""
    c = context.table.class_of[root]
    for op, operand in _steps(context, root, c):
        if length == 1:
            yield _Chain((op,), operand)
            continue
        for node in _single_use(context, operand, root):
            for shorter in _chains(context, node, length - 1):
                yield _Chain((*shorter.ops, op), shorter.entry)


def _single_use(context: Context, c: int, user: Node) -> list[Node]:
    """The node of a class that only ``user`` (through layout) reads in its own pass."""
    nodes = [n for n in context.table.members.get(c, ()) if n < user and n.op == "call_function"]
    same_pass = [n for n in nodes if is_backward(n) == is_backward(user)]
    readers = {u for n in same_pass for u in n.users if u.target not in LAYOUT_ONLY and is_backward(u) == is_backward(user)}
    return [max(same_pass)] if same_pass and len(readers) <= 1 else []


def _steps(context: Context, node: Node, c: int) -> list[tuple[Op, int]]:
    """The operator at a class with each operand that may be the chain: ``(op, class of that operand)``."""
    table, key = context.table, context.table.keys[c]
    if key[0] in UNIQUE:
        return []

    def make(name: str, function: Callable[..., Any], *side: Any) -> Op:
        args = tuple(_input(context, a) if isinstance(a, int) and not isinstance(a, bool) else a for a in side)
        return Op(name, function, args, tuple(table.shape(c)), table.dtypes[c])

    if key[0] == LINEAR:
        x, w, b = table.linear_parts(c)
        return [(make("linear", F.linear, w, b), x)]
    if key[0] in (ADD, MUL):
        a, b = table.operand(c, 0), table.operand(c, 1)
        function = torch.add if key[0] == ADD else torch.mul
        return [(make(key[0], function, q), p) for p, q in ((a, b), (b, a))]
    if key[0] == SCALE:
        return [(make("scale", torch.mul, table.factor(c)), table.operand(c, 0))]
    if key[0] == SQUARE:
        return [(make("square", torch.square), table.operand(c, 0))]
    return _generic_step(context, node, c)


def _generic_step(context: Context, node: Node, c: int) -> list[tuple[Op, int]]:
    """Any other aten operator: its first tensor argument is the chain."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target in LAYOUT_ONLY:
        return []
    flat, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    places = [i for i, a in enumerate(flat) if isinstance(a, Node)]
    if not places or not all(is_tensor(flat[i]) for i in places):
        return []
    call = with_operands(node.target, flat, spec, places)
    classes = [context.table.class_of[flat[i]] for i in places]
    side = tuple(_input(context, k) for k in classes[1:])
    name = node.target._schema.name.split("::")[-1]
    return [(Op(name, call, side, tuple(value(node).shape), value(node).dtype), classes[0])]


def _input(context: Context, c: int) -> Input:
    node = next(iter(context.table.members.get(c, ())), None)
    device = value(node).device if node is not None else torch.device("cpu")
    dtype = context.table.dtypes[c]
    assert dtype is not None
    return Input(tuple(context.table.shape(c)), dtype, device, c)


# ------------------------------------------------------------------------------------------------ as a fusion

_numbers = itertools.count()


def _as_guess(windows: Windows, root: Node, chain: _Chain, new: Sequence[Op]) -> Guess:
    """The chain as a pattern, the new operators as its rewrite."""
    classes = [chain.entry]
    for op in (*chain.ops, *new):
        classes += [a.value_class for a in op.args if isinstance(a, Input) and a.value_class not in classes]

    def composed(ops: Sequence[Op]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            known = dict(zip(classes, tensors, strict=True))
            x = tensors[0]
            for op in ops:
                x = op.function(x, *[known[a.value_class] if isinstance(a, Input) else a for a in op.args])
            return x

        return run

    fusion = Fusion.composed(
        composed(chain.ops),
        composed(new),
        windows.side,
        name=windows.name,
        recipes=windows.recipes,
        holes=tuple(Hole(f"x{i}") for i in range(len(classes))),
        identity=f"{windows.identity}:{next(_numbers)}",
        source=windows.source,
    )
    return Guess(fusion, root, list(classes), ())
