"""Compare a fusion's rewrite with its pattern on a grid of inputs: what is wrong is refused when it is registered.

A result may be as far from the fp64 reference as three times the pattern itself in the same dtype, plus a rounding allowance;
NaN and infinities must sit at the same places. Joint fusions are compared in all their gradients too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .errors import PatternError, warn_once
from .fp8_recipes import Float8BlockScaling, Float8CurrentScaling
from .fusion import Fusion, Match, runs_under
from .ops.grouped_mm import reference_grouped_mm
from .pattern import as_tuple
from .recipe import Recipe, current_recipe, in_force
from .samples import SIZES, Example, Slot, fill_scalars, shape_of

ALLOWANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
QUANTIZED_ALLOWANCE = 0.125
"""Under a recipe that quantises: e4m3 has three bits of mantissa, e5m2 two."""
ALIGNED = {"m": 32, "k": 64, "n": 96, "i": 128, "b": 2, "e": 2}
"""Multiples of 32: for rewrites whose check asks for aligned sizes."""
SCALARS = (0.75, -2.5, 3.0, 0.3)


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid."""

    dtype: torch.dtype = torch.float64
    sizes: Mapping[str, int] = dataclasses.field(default_factory=lambda: dict(SIZES))
    layout: str = "dense"
    values: str = "normal"
    scalars: tuple[float, ...] = SCALARS

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {self.layout}, {self.values} values"


def grid(scalars: int = 0) -> Iterator[Case]:
    """Each of dtype, size, layout, kind of values and numbers for ``scalars`` scalar holes varied by itself."""
    yield Case()
    yield from (Case(dtype=d) for d in (torch.float32, torch.bfloat16, torch.float16))
    for changed in ({"m": 1}, {"m": 0}, {"m": 17, "k": 3}, {"k": 1}, {"m": 1, "k": 1}, {"b": 1}, {"m": 3, "k": 33}):
        yield Case(sizes={**SIZES, **changed})
    for changed in ({"n": 12, "i": 6}, {"n": 1}, dict.fromkeys(SIZES, 6)):
        yield Case(sizes={**SIZES, **changed})
    yield from (Case(dtype=d, sizes=ALIGNED) for d in (torch.float64, torch.float32, torch.bfloat16))
    yield from (Case(layout=layout) for layout in ("transposed", "expanded", "offset"))
    yield from (Case(values=v) for v in ("integers", "one NaN", "one inf", "one -inf", "large"))
    if scalars:
        yield from (Case(scalars=tuple(SCALARS[i:] + SCALARS[:i])) for i in range(1, len(SCALARS)))
        yield Case(scalars=(0.0,) * len(SCALARS))


def verify(fusion: Fusion) -> None:
    """Compare the rewrite with the pattern, under each recipe that the fusion is for.

    Raises:
        PatternError: naming the fusion, its file and line, and the first input on which they differ.
    """
    compared, missing = 0, ""
    seen: set[Any] = set()
    cases = itertools.product(_recipes(fusion), fusion.examples, grid(sum(h.scalar for h in fusion.holes)))
    for recipe, example, case in cases:
        shapes = tuple(s and (shape_of(s, case.sizes), s.dtype.is_floating_point) for s in example)
        key = recipe, shapes, case.dtype, case.layout, case.values, case.scalars
        if key in seen or (recipe.quantized and case.values.startswith("one")):
            continue  # an example of fixed sizes; what is not finite reaches all that shares its scale
        seen.add(key)
        try:
            with in_force(recipe):
                compared += _compare(fusion, _inputs(example, case), case)
        except _NoKernel as error:
            missing = missing or f"{error} ({case})"
    if missing:
        warn_once(f"fusion {fusion.name!r} at {fusion.source} could not be checked on this machine: {missing}")
    elif not compared:
        raise PatternError(
            f"fusion {fusion.name!r} at {fusion.source}: its check refuses every input on which the pattern runs; "
            "pass example={...}"
        )


def _recipes(fusion: Fusion) -> list[Recipe]:
    """The current one, or of those that the fusion is for one of each kind."""
    if fusion.recipes is None:
        return [current_recipe()]
    kinds = [Recipe(), Recipe(numerics="strict"), Float8CurrentScaling()]
    if Float8BlockScaling.__name__ in fusion.recipes:
        kinds.append(Float8BlockScaling())
    return [r for r in kinds if runs_under(fusion.recipes, r)] or [current_recipe()]


def sample(fusion: Fusion) -> list[Any]:
    """Random float32 arguments on which the pattern runs, in the pattern's order."""
    tensors = _inputs(fusion.examples[0], Case(dtype=torch.float32))
    return fill_scalars(fusion.holes, tensors, SCALARS)


class _NoKernel(Exception):
    """The rewrite has no kernel for the devices of this machine."""


class _Fault(Exception):
    """Something is wrong with a rewrite that its results do not show."""


# ------------------------------------------------------------------------------------------------ inputs


def _inputs(example: Example, case: Case) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(20)
    return [None if slot is None else _tensor(slot, case, generator, i) for i, slot in enumerate(example)]


def _tensor(slot: Slot, case: Case, generator: torch.Generator, index: int) -> torch.Tensor:
    shape = shape_of(slot, {**case.sizes})
    if slot.dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if slot.values is not None:
        return torch.tensor(slot.values, dtype=slot.dtype).view(shape)
    if not slot.dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator, dtype=slot.dtype)
    t = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.values == "integers":
        t = torch.randint(-3, 4, shape, generator=generator).double()
    elif case.values == "large":
        t = t * 30
    elif t.numel() and (case.values == "one NaN" or (index == 0 and case.values.startswith("one"))):
        # a NaN in each argument, in other rows and columns: each alone must be seen
        t.view(-1)[(t.numel() // 2, 0, -1)[index % 3]] = float(case.values.removeprefix("one "))
    return _laid_out(t.to(case.dtype), case.layout)


def _laid_out(t: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed" and t.dim() >= 2:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and t.dim() >= 2 and t.shape[0] > 1:
        return t[:1].expand(t.shape)
    if layout == "offset" and t.dim() >= 1:
        padded = t.new_zeros([*t.shape[:-1], t.shape[-1] + 3])
        padded[..., 1 : 1 + t.shape[-1]] = t
        return padded[..., 1 : 1 + t.shape[-1]]
    return t


# ------------------------------------------------------------------------------------------------ comparing


def _compare(fusion: Fusion, inputs: Sequence[torch.Tensor | None], case: Case) -> int:
    """1 if the case was compared, 0 if the pattern or the check does not take it."""
    scalars = case.scalars[: sum(h.scalar for h in fusion.holes)]
    try:
        plain = _Result.of_pattern(fusion, inputs, scalars, case)
        with _DoubleKernels():
            exact = _Result.of_pattern(fusion, [_double(t) for t in inputs], scalars, case)
    except Exception:  # the pattern itself refuses: nothing to compare
        return 0
    names = [h.name for h in fusion.tensor_holes]
    match = Match(dict(zip(names, inputs, strict=True)), plain.outputs[0], current_recipe())
    if fusion.allows(match) is not None:
        return 0
    before = [None if t is None else t.clone() for t in inputs]
    masks = [plain.mask] if case != Case() else _masks(plain.mask)
    for mask in masks:
        try:
            new = _Result.of_rewrite(fusion, inputs, scalars, mask, case)
        except _Fault as error:
            raise _wrong(fusion, inputs, case, str(error)) from None
        except Exception as error:
            if _is_missing_kernel(error):
                raise _NoKernel(str(error).splitlines()[0]) from error
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            raise _wrong(fusion, inputs, case, f"the rewrite raises where the pattern runs: {first}") from error
        _check_same(fusion, inputs, case, plain, exact, new, mask)
    for name, old, t in zip(names, before, inputs, strict=True):
        if old is not None and t is not None and not torch.equal(old.nan_to_num(), t.nan_to_num()):
            raise _wrong(fusion, inputs, case, f"the rewrite changes its argument {name}")
    return 1


class _DoubleKernels(TorchFunctionMode):
    """In fp64, run what torch has no fp64 kernel for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm") and args[0].dtype is torch.float64:
            return reference_grouped_mm(args[0], args[1], kwargs["offs"])
        return func(*args, **kwargs)


def _masks(full: Sequence[bool]) -> list[tuple[bool, ...]]:
    """All gradients, each alone, and all but each."""
    given = [i for i, f in enumerate(full) if f]
    alone = [tuple(j == i for j in range(len(full))) for i in given]
    others = [tuple(f and j != i for j, f in enumerate(full)) for i in given if len(given) > 2]
    return [tuple(full), *alone, *others]


def _double(t: torch.Tensor | None) -> torch.Tensor | None:
    return t.double() if t is not None and t.is_floating_point() else t


def _is_missing_kernel(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, NotImplementedError) or any(word in text for word in ("CUDA", "cuda", "Triton", "triton"))


@dataclasses.dataclass
class _Result:
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    mask: tuple[bool, ...]

    @staticmethod
    def of_pattern(fusion: Fusion, inputs: Sequence[Any], scalars: Sequence[float], case: Case) -> _Result:
        return _differentiated(fusion, lambda t: fusion.call_pattern(t, scalars), inputs, None, case)

    @staticmethod
    def of_rewrite(
        fusion: Fusion, inputs: Sequence[Any], scalars: Sequence[float], mask: tuple[bool, ...], case: Case
    ) -> _Result:
        if not fusion.explicit:
            wanted = (True,) * fusion.extra
            return _differentiated(fusion, lambda t: fusion.call_rewrite(t, scalars, wanted), inputs, mask, case)
        with torch.no_grad():
            out, saved = fusion.call_forward(inputs, scalars, True)
            alone, _ = fusion.call_forward(inputs, scalars, False)
            gradients: Sequence[Any] = [None] * len(mask)
            if any(mask):
                cotangent = _cotangent(out, case)
                gradients = fusion.call_backward(cotangent, inputs, scalars, saved, mask)
                if not torch.equal(cotangent.nan_to_num(), _cotangent(out, case).nan_to_num()):
                    raise _Fault("the backward changes the gradient that it is given")
        return _Result([out, alone], list(gradients), mask)


def _differentiated(fusion: Fusion, call: Callable[[list[Any]], Any], inputs: Sequence[Any], mask: Any, case: Case) -> _Result:
    floating = tuple(t is not None and t.is_floating_point() for t in inputs)
    if fusion.side != "joint":
        with torch.no_grad():
            return _Result(list(as_tuple(call(list(inputs)))), [], (False,) * len(inputs))
    wanted = floating if mask is None else mask
    leaves = [t.detach().requires_grad_(w) if t is not None else None for t, w in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        out = as_tuple(call(leaves))[0]
        asked = [t for t, w in zip(leaves, wanted, strict=True) if t is not None and w]
        found = iter(
            torch.autograd.grad(out, asked, _cotangent(out, case), allow_unused=True)
            if asked and out.requires_grad
            else [None] * len(asked)
        )
    return _Result([out.detach()], [next(found) if w else None for w in wanted], tuple(wanted))


def _cotangent(out: torch.Tensor, case: Case) -> torch.Tensor:
    cotangent = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device)
    if case.values == "one NaN" and out.numel():
        cotangent[out.numel() // 3] = math.nan
    return _laid_out(cotangent.reshape(out.shape), case.layout)


def _check_same(
    fusion: Fusion, inputs: Sequence[Any], case: Case, plain: _Result, exact: _Result, new: _Result, mask: Sequence[bool]
) -> None:
    names = [f"output {i}" for i in range(len(plain.outputs))]
    if len(new.outputs) != len(plain.outputs) + fusion.explicit:
        raise _wrong(fusion, inputs, case, f"the rewrite returns {len(new.outputs)} outputs, the pattern {len(plain.outputs)}")
    pairs: list[tuple[str, Any, Any, Any]] = list(zip(names, plain.outputs, exact.outputs, new.outputs, strict=False))
    if fusion.explicit:
        pairs.append(("output 0 with save=False", plain.outputs[0], exact.outputs[0], new.outputs[1]))
    for hole, needed, old, true, got in zip(
        fusion.tensor_holes, mask, plain.gradients, exact.gradients, new.gradients, strict=False
    ):
        if needed and old is not None:
            pairs.append((f"the gradient of {hole.name}", old, true, got))
    for name, old, true, got in pairs:
        problem = _difference(old, true, got, case.dtype)
        if problem:
            raise _wrong(fusion, inputs, case, f"{name} {problem}")


def _difference(old: torch.Tensor, true: torch.Tensor, got: Any, dtype: torch.dtype) -> str:
    """What is wrong with ``got`` where the pattern gave ``old`` and the fp64 reference is ``true``; empty if nothing."""
    if not isinstance(got, torch.Tensor):
        return f"is {type(got).__name__}, not a tensor"
    if got.shape != old.shape or got.dtype != old.dtype:
        return f"is {tuple(got.shape)} {got.dtype}, the pattern's {tuple(old.shape)} {old.dtype}"
    if not got.is_floating_point():
        return "" if torch.equal(got, old) else "differs"
    for what, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        if not torch.equal(test(got), test(old)):
            return f"has {what} at other places"
    finite = torch.isfinite(old) & torch.isfinite(true)
    scale = max(true[finite].abs().max().item(), 1e-30) if finite.any() else 1.0
    error = _distance(got, true, finite) / scale
    own = _distance(old, true, finite) / scale
    allowed = 3 * own + (QUANTIZED_ALLOWANCE if current_recipe().quantized else ALLOWANCE.get(dtype, 1e-9))
    if math.isnan(error) or error > allowed:
        return f"has relative error {error:.2g} (the pattern itself {own:.2g}, allowed {allowed:.2g})"
    return ""


def _distance(a: torch.Tensor, b: torch.Tensor, where: torch.Tensor) -> float:
    return (a.double() - b.double())[where].abs().max().item() if where.any() else 0.0


def _wrong(fusion: Fusion, inputs: Sequence[Any], case: Case, what: str) -> PatternError:
    given, numbers = iter(inputs), iter(case.scalars)
    shapes = ", ".join(f"{h.name}={next(numbers) if h.scalar else _shape(next(given))}" for h in fusion.holes)
    return PatternError(
        f"fusion {fusion.name!r} at {fusion.source}: {what}, on {shapes} ({case}); "
        "mend the rewrite, refuse such inputs in .check, or pass check_on_register=False"
    )


def _shape(t: torch.Tensor | None) -> list[int] | None:
    return None if t is None else list(t.shape)
