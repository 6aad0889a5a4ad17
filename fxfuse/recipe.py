"""Recipes: how a plan computes, as one frozen value that is part of the plan's key."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

from . import changes
from .errors import RecipeError

_CHOICES: dict[str, tuple[Any, ...]] = {
    "numerics": ("default", "strict"),
    "activation_memory": ("save", "recompute"),
    "deterministic": (False, True),
    "backward_override": (None, "high_precision", "dequantized"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The graph's own dtypes, computed as the fields say.

    Args:
        numerics: ``"default"`` lets spellings that round differently (``mm`` then ``add`` against ``addmm`` in bf16)
            stand for each other; ``"strict"`` keeps them apart and keeps explicit casts as rounding points.
        activation_memory: ``"save"`` or ``"recompute"`` what a joint fusion's backward needs.
        deterministic: only lowerings that give the same bits on every run.
        backward_override: for quantised recipes: run the backward in ``"high_precision"`` or on ``"dequantized"`` values.

    Raises:
        RecipeError: a field has a value that it does not take.
    """

    numerics: str = "default"
    activation_memory: str = "save"
    deterministic: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is a or (value == a and type(value) is type(a)) for a in allowed):
                raise RecipeError(f"{type(self).__name__}({name}={value!r}): {name} takes one of {', '.join(map(repr, allowed))}")

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed."""
        unknown = set(changes) - {f.name for f in dataclasses.fields(self)}
        if unknown:
            raise RecipeError(
                f"{type(self).__name__} has no field {sorted(unknown)[0]!r}; it has {[f.name for f in dataclasses.fields(self)]}"
            )
        return dataclasses.replace(self, **changes)


_BY_NAME: dict[str, Recipe] = {"default": Recipe(), "strict": Recipe(numerics="strict")}
_default: Recipe = _BY_NAME["default"]
active: contextvars.ContextVar[Recipe | None] = contextvars.ContextVar("fxfuse_recipe", default=None)
"""What ``use_recipe`` entered in this thread and task."""


def as_recipe(value: Any, where: str = "recipe") -> Recipe:
    """A recipe, or the recipe with this short name."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]
    if isinstance(value, type) and issubclass(value, Recipe):
        raise RecipeError(f"{where}: got the class {value.__name__}, an instance is needed: {value.__name__}()")
    raise RecipeError(f"{where}: {value!r} is not a fxfuse.Recipe nor one of the short names {sorted(_BY_NAME)}")


def current_recipe() -> Recipe:
    """The recipe that a compiled call would use now, in this thread and task."""
    return active.get() or _default


def set_default_recipe(recipe: Recipe | str) -> None:
    """The recipe of every thread and task that has not entered ``use_recipe``."""
    global _default
    _default = as_recipe(recipe, "set_default_recipe")
    changes.touch()


@contextlib.contextmanager
def use_recipe(recipe: Recipe | str) -> Iterator[Recipe]:
    """Compiled calls inside use ``recipe``: another plan, not another Dynamo compilation."""
    chosen = as_recipe(recipe, "use_recipe")
    token = active.set(chosen)
    try:
        yield chosen
    finally:
        active.reset(token)
