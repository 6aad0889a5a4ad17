"""Fusions: what to look for, when it is allowed, what to put there; and the decorators that register them."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import changes, registry
from .errors import PatternError
from .recipe import Recipe
from .samples import Example, Hole, explicit_examples, fill_scalars, find_examples, holes_of, name_of

_ids = itertools.count()


class Rejection:
    """What ``Match.reject`` returns."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Match:
    """One place where a pattern was found. Attributes named as the holes are fake tensors: shape, dtype, stride, device.

    ``out`` is the fake tensor of the replaced value, ``recipe`` the recipe in force, ``source`` the user's line.
    """

    def __init__(self, holes: Mapping[str, Any], out: Any, recipe: Recipe, source: str = "") -> None:
        self._holes = dict(holes)
        self.out = out
        self.recipe = recipe
        self.source = source

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_holes"][name]
        except KeyError:
            raise AttributeError(
                f"the pattern has no argument {name!r}; it has {list(self.__dict__.get('_holes', ()))}"
            ) from None

    def reject(self, reason: str) -> Rejection:
        """Refuse this place, with a sentence that a person can act on. Return the result from the check."""
        return Rejection(reason)


class Fusion:
    """A registered fusion, made by the decorators.

    Its hooks ``check``, ``rewrite``, ``forward`` and ``backward`` are decorators too.
    """

    def __init__(
        self,
        pattern: Callable[..., Any],
        side: str,
        *,
        name: str | None = None,
        recipes: Sequence[str] | None = None,
        extra: int = 0,
        example: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        requires: Sequence[Any] = (),
        check_on_register: bool = True,
        holes: tuple[Hole, ...] | None = None,
    ) -> None:
        self.id = next(_ids)
        self.pattern = pattern
        self.side = side
        self.name = name or pattern.__name__
        self.recipes = tuple(recipes) if recipes is not None else None
        self.extra = extra
        self.requires = tuple(one if isinstance(one, tuple) else (one,) for one in requires)
        self.holes: tuple[Hole, ...] = holes_of(pattern) if holes is None else holes
        self.pack = registry.loading_pack()
        self.check_on_register = check_on_register
        self._example = example
        self._check: Callable[[Match], Any] | None = None
        self._rewrite: Callable[..., Any] | None = None
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None

    @classmethod
    def composed(
        cls,
        pattern: Callable[..., Any],
        rewrite: Callable[..., Any],
        side: str,
        *,
        name: str,
        recipes: Sequence[str] | None,
        holes: tuple[Hole, ...],
        identity: str,
        source: str,
    ) -> Fusion:
        """A fusion of one place, made from a chain of operators; it is not registered and has no examples."""
        fusion = cls(pattern, side, name=name, recipes=recipes, holes=holes, check_on_register=False)
        fusion._rewrite = rewrite
        fusion.__dict__.update(identity=identity, source=source)
        return fusion

    def __repr__(self) -> str:
        return f"<{self.side} fusion {self.name!r} at {self.source}>"

    # -------------------------------------------------------------------------------------- what it is

    @functools.cached_property
    def source(self) -> str:
        """``file:line`` of the pattern."""
        code = getattr(self.pattern, "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else "(unknown)"

    @property
    def ready(self) -> bool:
        """Whether it says what to put in the pattern's place."""
        return self._rewrite is not None or (self._forward is not None and self._backward is not None)

    @property
    def tensor_holes(self) -> tuple[Hole, ...]:
        """The holes that tensors fill, in order."""
        return tuple(h for h in self.holes if not h.scalar)

    @property
    def explicit(self) -> bool:
        """Whether it is a joint fusion with its own forward and backward."""
        return self._forward is not None

    @functools.cached_property
    def examples(self) -> list[Example]:
        """Shapes on which the pattern runs."""
        if self._example is None:
            return find_examples(self.pattern, self.holes)
        given = [self._example] if isinstance(self._example, Mapping) else self._example
        return explicit_examples(self.pattern, self.holes, given)

    @functools.cached_property
    def identity(self) -> str:
        """A hash of everything that decides what the fusion does: part of the plan key and of Inductor's cache keys."""
        text = [self.name, self.side, str(self.recipes), str(self.extra)]
        text += [_source_text(f) for f in (self.pattern, self._check, self._rewrite, self._forward, self._backward) if f]
        return hashlib.sha256("\0".join(text).encode()).hexdigest()[:16]

    def allows(self, match: Match) -> str | None:
        """Why the fusion's own check refuses a place, or None."""
        verdict = self._check(match) if self._check is not None else None
        if isinstance(verdict, Rejection):
            return verdict.reason
        if isinstance(verdict, str):
            return verdict
        return "its check said no" if verdict is False else None

    # -------------------------------------------------------------------------------------- calling its parts

    def call_pattern(self, tensors: Sequence[Any], scalars: Sequence[float]) -> Any:
        """The pattern on tensor and scalar holes."""
        return self.pattern(*fill_scalars(self.holes, tensors, scalars))

    def call_rewrite(self, tensors: Sequence[Any], scalars: Sequence[float], wanted: Sequence[bool] = ()) -> Any:
        """The rewrite; ``wanted`` says which extra outputs somebody needs, for a rewrite that asks."""
        assert self._rewrite is not None
        keywords = {"wanted": tuple(wanted)} if self.extra and "wanted" in inspect.signature(self._rewrite).parameters else {}
        return self._rewrite(*fill_scalars(self.holes, tensors, scalars), **keywords)

    def call_forward(self, tensors: Sequence[Any], scalars: Sequence[float], save: bool) -> tuple[Any, tuple[Any, ...]]:
        """A joint fusion's forward: the output, and what it saves."""
        assert self._forward is not None
        result = self._forward(*fill_scalars(self.holes, tensors, scalars), save=save)
        out, saved = result if isinstance(result, tuple) else (result, ())
        return out, tuple(saved) if isinstance(saved, (tuple, list)) else (saved,)

    def call_backward(
        self, grad: Any, tensors: Sequence[Any], scalars: Sequence[float], saved: Sequence[Any], mask: Sequence[bool]
    ) -> tuple[Any, ...]:
        """A joint fusion's backward: one gradient per tensor hole, None where ``mask`` is False."""
        assert self._backward is not None
        arguments = fill_scalars(self.holes, tensors, scalars)
        gradients = self._backward(grad, *arguments, *saved, mask=tuple(mask))
        gradients = tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,)
        if len(gradients) != len(mask):
            raise PatternError(
                f"fusion {self.name!r}: backward returned {len(gradients)} gradients for {len(mask)} tensor arguments"
            )
        return tuple(g if m else None for g, m in zip(gradients, mask, strict=True))

    # -------------------------------------------------------------------------------------- hooks

    def check(self, function: Callable[[Match], Any]) -> Callable[[Match], Any]:
        """Say when the fusion is allowed: ``return match.reject(reason)`` refuses a place."""
        self._check = function
        return self._changed(function)

    def rewrite(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Say what to put there: a traceable function of the same arguments; for a joint fusion, differentiable.

        Raises:
            PatternError: other argument names, or other results than the pattern's.
        """
        self._require_names(function, [h.name for h in self.holes], allowed=("wanted",))
        self._rewrite = function
        return self._finish(function)

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A joint fusion's forward: ``(*arguments, *, save) -> (out, saved tuple)``."""
        self._require_joint("forward")
        self._require_names(function, [h.name for h in self.holes], allowed=("save",), needed=("save",))
        self._forward = function
        return self._finish(function)

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A joint fusion's backward: ``(grad, *arguments, *saved, *, mask) -> gradients``, one per tensor argument."""
        self._require_joint("backward")
        names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        wanted = [h.name for h in self.holes]
        if names[1 : 1 + len(wanted)] != wanted:
            raise self._refuse(f"backward takes ({', '.join(names)}); it needs (grad, {', '.join(wanted)}, *saved, *, mask)")
        self._backward = function
        return self._finish(function)

    def unregister(self) -> None:
        """Take it out: compiled models run without it from their next call on."""
        registry.remove(self)

    def verify(self) -> None:
        """Compare the rewrite with the pattern on a grid of inputs; run when it is registered.

        Raises:
            PatternError: naming the first input that differs.
        """
        from .verification import verify

        verify(self)

    def sample_inputs(self) -> list[Any]:
        """Random float32 arguments, in the pattern's order, on which the pattern runs."""
        from .verification import sample

        return sample(self)

    def _finish(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.ready and self.check_on_register:
            try:
                self.verify()
            except PatternError:
                self.unregister()
                raise
        return self._changed(function)

    def _changed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.__dict__.pop("identity", None)
        changes.touch()
        return function

    def _require_joint(self, hook: str) -> None:
        if self.side != "joint":
            raise self._refuse(f".{hook} belongs to register_forward_backward_fusion; a {self.side} fusion takes .rewrite")

    def _require_names(
        self, function: Callable[..., Any], names: list[str], allowed: Sequence[str] = (), needed: Sequence[str] = ()
    ) -> None:
        got = list(inspect.signature(function).parameters)
        plain = [n for n in got if n not in allowed]
        if plain != names or any(n not in got for n in needed):
            extra = f", *, {', '.join(needed)}" if needed else ""
            raise self._refuse(
                f"{name_of(function)} takes ({', '.join(got)}); the pattern's arguments are ({', '.join(names)}{extra})"
            )

    def _refuse(self, why: str) -> PatternError:
        self.unregister()
        return PatternError(f"fusion {self.name!r} at {self.source}: {why}")


def _source_text(function: Callable[..., Any]) -> str:
    """Source and closure of a function: what decides its behaviour, as text that is stable across processes."""
    code = getattr(function, "__code__", None)
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = code.co_code.hex() + repr(code.co_consts) if code else repr(function)
    cells = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
    values = [v for v in cells if isinstance(v, (int, float, str, bool, tuple, type(None)))]
    names = [_source_text(v) for v in cells if inspect.isfunction(v)]
    return "\0".join([text, repr(values), *names])


def runs_under(recipes: Sequence[str] | None, recipe: Recipe) -> bool:
    """Whether a fusion for these recipes may fire under one.

    They are names of classes, "default" (the graph's own dtypes), "strict" (numerics) or "quantized".
    """
    names = [type(recipe).__name__]
    names += ["default"] if type(recipe) is Recipe else []
    names += ["strict"] if recipe.numerics == "strict" else []
    names += ["quantized"] if recipe.quantized else []
    return recipes is None or any(name in recipes for name in names)


# ------------------------------------------------------------------------------------------------ decorators


def _register(side: str, target: Any, prepend: bool, **settings: Any) -> Any:
    def decorate(pattern: Any) -> Any:
        from .window import WindowFusion, window_fusion

        if inspect.isclass(pattern) and issubclass(pattern, WindowFusion):
            fusion = window_fusion(pattern, side, name=settings.get("name"), recipes=settings.get("recipes"))
        elif callable(pattern):
            fusion = Fusion(pattern, side, **settings)
            fusion.examples  # noqa: B018  a pattern that runs on nothing is refused here
        else:
            raise PatternError(f"register a function or a WindowFusion class, not {pattern!r}")
        registry.add(fusion, prepend)
        return fusion

    return decorate if target is None else decorate(target)


def register_forward_fusion(
    target: Any = None,
    /,
    *,
    prepend: bool = False,
    recipes: Sequence[str] | None = None,
    name: str | None = None,
    extra: int = 0,
    example: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    requires: Sequence[Any] = (),
    check_on_register: bool = True,
) -> Any:
    """Register a fusion of the forward pass; decorates the function to look for.

    Args:
        prepend: try it before the fusions registered so far.
        recipes: names of recipe classes under which it may fire (all by default), or "default", "strict", "quantized".
        name: the fusion's name (the function's by default).
        extra: how many of the pattern's last outputs are interior values that the rewrite also returns, so that they may
            be used outside (in training: saved for the backward).
        example: by argument name: names of dimensions ("m k"), a shape or a tensor; spares the search for shapes. Several
            examples where the pattern takes several forms (a tensor in another dtype adds casts, for instance).
        requires: operators (``torch.ops.aten.mm.default``) that a graph must hold for the fusion to be looked for at all; a
            tuple stands for any one of its operators. Spares the compile of a model without them the pattern's trace.
        check_on_register: compare the rewrite with the pattern when it is registered.

    Raises:
        PatternError: the pattern cannot be traced, its name is taken, or (from ``.rewrite``) the rewrite is wrong.
    """
    return _register(
        "forward",
        target,
        prepend,
        recipes=recipes,
        name=name,
        extra=extra,
        example=example,
        requires=requires,
        check_on_register=check_on_register,
    )


def register_backward_fusion(
    target: Any = None,
    /,
    *,
    prepend: bool = False,
    recipes: Sequence[str] | None = None,
    name: str | None = None,
    extra: int = 0,
    example: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    requires: Sequence[Any] = (),
    check_on_register: bool = True,
) -> Any:
    """Register a fusion of the backward pass: a function over gradients, such as ``lambda dy, w, r: dy @ w + r``.

    The arguments are those of ``register_forward_fusion``.
    """
    return _register(
        "backward",
        target,
        prepend,
        recipes=recipes,
        name=name,
        extra=extra,
        example=example,
        requires=requires,
        check_on_register=check_on_register,
    )


def register_forward_backward_fusion(
    target: Any = None,
    /,
    *,
    prepend: bool = False,
    recipes: Sequence[str] | None = None,
    name: str | None = None,
    example: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    requires: Sequence[Any] = (),
    check_on_register: bool = True,
) -> Any:
    """Register a joint fusion: it replaces a forward region and the backward that autograd derived from it.

    Give it a differentiable ``.rewrite``, or ``.forward`` and ``.backward`` that say what is saved. The other arguments are
    those of ``register_forward_fusion``.
    """
    return _register(
        "joint",
        target,
        prepend,
        recipes=recipes,
        name=name,
        example=example,
        requires=requires,
        check_on_register=check_on_register,
    )
