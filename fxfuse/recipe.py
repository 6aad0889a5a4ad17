"""Recipes: how a plan computes, as one frozen value that is part of the plan's key; and which one is in force."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.fx.traceback import annotate

from . import changes
from .errors import RecipeError

_lock = threading.Lock()
_interned: weakref.WeakValueDictionary[Any, Recipe] = weakref.WeakValueDictionary()


class _Interned(type):
    """Equal recipes are one object: comparing two is comparing identities."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        names = [f.name for f in dataclasses.fields(cls) if f.init]  # pyright: ignore[reportArgumentType]
        unknown = [n for n in kwargs if n not in names]
        if unknown or len(args) > len(names):
            raise RecipeError(f"{cls.__name__} has no field {unknown[0] if unknown else len(names) + 1!r}; it has {names}")
        made = super().__call__(*args, **kwargs)
        with _lock:
            return _interned.setdefault(made.identity, made)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Recipe(metaclass=_Interned):
    """The graph's own dtypes, computed as the fields say.

    Two recipes of one class with equal fields are the same object, also after copying and pickling. ``repr`` names the fields
    that are not at their default; evaluated, it gives the recipe back.

    Args:
        numerics: ``"default"`` lets spellings that round differently (``mm`` then ``add`` against ``addmm`` in bf16)
            stand for each other; ``"strict"`` keeps them apart and keeps explicit casts as rounding points.
        activation_memory: ``"save"`` or ``"recompute"`` what a joint fusion's backward needs.
        deterministic: only lowerings that give the same bits on every run.
        backward_override: for quantised recipes: run the backward in ``"high_precision"``, on what the forward was given
            before quantisation, or on the ``"dequantized"`` operands of the forward.

    Raises:
        RecipeError: a field has a value that it does not take.
    """

    numerics: str = "default"
    activation_memory: str = "save"
    deterministic: bool = False
    backward_override: str | None = None

    CHOICES: ClassVar[dict[str, tuple[Any, ...]]] = {
        "numerics": ("default", "strict"),
        "activation_memory": ("save", "recompute"),
        "deterministic": (False, True),
        "backward_override": (None, "high_precision", "dequantized"),
    }
    """The values of fields that take few."""
    SHORT_NAME: ClassVar[str] = "default"
    """Stands for the recipe with all fields at their defaults, as in ``use_recipe("default")``."""

    identity: tuple[Any, ...] = dataclasses.field(init=False)
    """The class and every field."""
    key: str = dataclasses.field(init=False)
    """``repr``, computed once."""
    _hash: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        fields = {f.name: getattr(self, f.name) for f in self.fields()}
        for name, value in fields.items():
            self._check(name, value)
        changed = (f"{f.name}={fields[f.name]!r}" for f in self.fields() if fields[f.name] != f.default)
        object.__setattr__(self, "identity", (type(self), *fields.items()))
        object.__setattr__(self, "key", f"{type(self).__name__}({', '.join(changed)})")
        object.__setattr__(self, "_hash", hash(self.identity))

    def _check(self, name: str, value: Any) -> None:
        """Raise RecipeError where a field does not take a value."""
        choices = self.CHOICES.get(name)
        if choices is not None and not any(value == c and type(value) is type(c) for c in choices):
            raise self.wrong(name, value, f"one of {', '.join(map(repr, choices))}")

    @classmethod
    def wrong(cls, name: str, value: Any, takes: str) -> RecipeError:
        """The error for a field's value."""
        return RecipeError(f"{cls.__name__}({name}={value!r}): {name} takes {takes}")

    @classmethod
    def fields(cls) -> list[dataclasses.Field[Any]]:
        """The fields that a recipe is made with."""
        return [f for f in dataclasses.fields(cls) if f.init]

    def replace(self, **changes: Any) -> Any:
        """The same recipe with some fields changed."""
        return type(self)(**{**{f.name: getattr(self, f.name) for f in self.fields()}, **changes})

    def unsupported(self) -> str | None:
        """What this machine lacks to run the recipe, or None."""
        return None

    @property
    def quantized(self) -> bool:
        """Whether operands of matrix products are quantised."""
        return False

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Recipe) and self.identity == other.identity)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.key

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self), {f.name: getattr(self, f.name) for f in self.fields()})


def _made(cls: type[Recipe], fields: dict[str, Any]) -> Recipe:
    return cls(**fields)


# ------------------------------------------------------------------------------------------------ by name


_runs_here: set[Recipe] = set()
"""Recipes of which this machine is known to lack nothing."""


def short_names() -> dict[str, Callable[[], Recipe]]:
    """What makes the recipe that a short name stands for."""
    found: dict[str, Callable[[], Recipe]] = {"strict": lambda: Recipe(numerics="strict")}
    for cls in _all_classes():
        if "SHORT_NAME" in vars(cls):
            found[cls.SHORT_NAME] = cls
    return found


def as_recipe(value: Any, where: str = "recipe") -> Recipe:
    """A recipe that runs here, or the recipe with this short name.

    Raises:
        RecipeError: it is neither, or this machine cannot run it.
    """
    if isinstance(value, Recipe):
        recipe = value
    elif isinstance(value, type) and issubclass(value, Recipe):
        raise RecipeError(f"{where}: got the class {value.__name__}, an instance is needed: {value.__name__}()")
    else:
        names = short_names()
        if not isinstance(value, str) or value not in names:
            raise RecipeError(f"{where}: {value!r} is not a fxfuse.Recipe nor one of the short names {sorted(names)}")
        recipe = names[value]()
    if recipe not in _runs_here:
        lacking = recipe.unsupported()
        if lacking is not None:
            raise RecipeError(f"{where}: {recipe!r} cannot run here: {lacking}")
        _runs_here.add(recipe)
    return recipe


def from_key(key: str, where: str) -> Recipe:
    """The recipe with this ``key`` (or short name).

    Raises:
        RecipeError: there is no such recipe.
    """
    if key in short_names():
        return as_recipe(key, where)
    classes = {cls.__name__: cls for cls in _all_classes()}

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            return classes[node.func.id](**{str(k.arg): read(k.value) for k in node.keywords})
        return ast.literal_eval(node)

    try:
        recipe = read(ast.parse(key, mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        recipe = key
    return as_recipe(recipe, where)


def _all_classes() -> list[type[Any]]:
    from .fp8_recipes import MMParams  # with its module the other recipes

    classes: list[type[Any]] = [Recipe]
    for cls in classes:
        classes += cls.__subclasses__()
    return [*classes, MMParams]


# ------------------------------------------------------------------------------------------------ which one is in force


_default: Recipe = Recipe()
active: contextvars.ContextVar[Recipe | None] = contextvars.ContextVar("fxfuse_recipe", default=None)
"""What ``use_recipe`` entered in this thread and task."""


def current_recipe() -> Recipe:
    """The recipe that a compiled call would use now, in this thread and task."""
    return active.get() or _default


def set_default_recipe(recipe: Recipe | str) -> None:
    """The recipe of every thread and task that has not entered ``use_recipe``."""
    global _default
    _default = as_recipe(recipe, "set_default_recipe")
    changes.touch()


@torch.compiler.assume_constant_result  # Dynamo calls it as it traces
def _refuse_inside_compiled() -> None:
    raise RecipeError(
        "use_recipe was entered inside a compiled function, where it cannot choose the plan that is being built; "
        "enter it around the compiled call, or use fxfuse.recipe_region(recipe) inside"
    )


class use_recipe(contextlib.ContextDecorator):
    """Compiled calls inside use ``recipe``: another plan, not another Dynamo compilation.

    A context manager and a decorator; around compiled calls, not inside them (``recipe_region``). It holds for this thread and
    task. A backward uses the recipe of its forward.

    Raises:
        RecipeError: not a recipe, or one that this machine cannot run; entered inside a compiled function.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        if torch.compiler.is_dynamo_compiling():  # False wherever Dynamo is not reading this line
            _refuse_inside_compiled()
        self._recipe = recipe if isinstance(recipe, Recipe) and recipe in _runs_here else as_recipe(recipe, "use_recipe")
        self._tokens: list[contextvars.Token[Recipe | None]] = []

    def __enter__(self) -> Recipe:
        if torch.compiler.is_dynamo_compiling():
            _refuse_inside_compiled()
        self._tokens.append(active.set(self._recipe))
        return self._recipe

    def __exit__(self, *error: object) -> None:
        active.reset(self._tokens.pop())


@contextlib.contextmanager
def in_force(recipe: Recipe) -> Iterator[None]:
    """``recipe`` is the current one while a plan for it is built."""
    token = active.set(recipe)
    try:
        yield
    finally:
        active.reset(token)


# ------------------------------------------------------------------------------------------------ inside a compiled function


REGION = "fxfuse_recipe"
"""Key of the annotation that a node of a captured graph has when a region chose its recipe."""


def recipe_region(recipe: Recipe | str) -> contextlib.AbstractContextManager[Any]:
    """What is computed inside, in a compiled function, uses ``recipe``, and so does its backward.

    Dynamo traces it: ``with fxfuse.recipe_region(recipe): y = self.layer(x)`` neither breaks the graph nor depends on what is
    active around the call. The region decides for its part of the graph, whatever ``use_recipe`` says outside. A fusion does
    not reach across the border of a region. In eager mode nothing happens.

    Args:
        recipe: made outside of the compiled function, or a short name.

    Raises:
        RecipeError: when the plan is built: not a recipe, or one that this machine cannot run.
    """
    return annotate({REGION: recipe.key if isinstance(recipe, Recipe) else recipe})


def region_of(node: torch.fx.Node) -> str | None:
    """The key of the recipe that a region chose for a node."""
    custom = node.meta.get("custom")
    return custom.get(REGION) if isinstance(custom, dict) else None


@functools.cache  # asked for every node of a region
def region_recipe(key: str) -> Recipe:
    """The recipe of the regions with this key; RecipeError where it is none, or cannot run here."""
    return from_key(key, "recipe_region")


def region_recipes(*graphs: torch.fx.Graph) -> list[Recipe]:
    """The recipes that regions of some graphs chose, each once, in order."""
    keys = (region_of(node) for graph in graphs for node in graph.nodes)
    return list(dict.fromkeys(region_recipe(key) for key in keys if key is not None))


# ------------------------------------------------------------------------------------------------ recomputing a forward


carried: contextvars.ContextVar[bool] = contextvars.ContextVar("fxfuse_carried", default=False)
"""Whether the recipe that is active was carried into a recomputation."""


class _Carry(use_recipe):
    """Enter the recipe of a forward again as it is recomputed."""

    def __enter__(self) -> Recipe:
        self._carried = carried.set(True)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        carried.reset(self._carried)


def checkpoint_context() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """``context_fn`` for ``torch.utils.checkpoint.checkpoint`` around a compiled call: it is recomputed with its own recipe.

    The recomputation runs in the backward, where ``use_recipe`` of the forward has ended::

        checkpoint(compiled_block, x, use_reentrant=False, context_fn=fxfuse.checkpoint_context)

    With ``use_reentrant=True`` torch takes no ``context_fn``: pin the recipe with ``options={"recipe": ...}``.
    """
    return contextlib.nullcontext(), _Carry(current_recipe())
