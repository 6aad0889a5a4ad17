"""What one ``torch.compile`` call asked for, checked."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from . import compat, config, registry
from .errors import OptionError, RecipeError
from .recipe import Recipe, as_recipe

CHOICES: dict[str, tuple[str, ...]] = {
    "lower": ("auto", "eager"),
    "autotune": ("off", "quick", "max"),
    "verify": ("off", "first", "always"),
}
OWN = ("recipe", "fusions", "lower", "autotune", "strict", "expect", "verify")
OUR_PASS = "joint_custom_pre_pass"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Checked options; ``inductor`` is passed on."""

    recipe: Recipe | None
    only: tuple[str, ...] | None
    without: tuple[str, ...]
    lower: str
    autotune: str
    strict: bool
    expect: Mapping[str, int] | None
    verify: str
    inductor: Mapping[str, Any]
    user_passes: tuple[Any, ...] = ()


def read(mode: str | None, options: Mapping[str, Any] | None) -> Settings:
    """Settings from ``mode=`` and ``options=`` of torch.compile, over ``fxfuse.config``.

    Raises:
        OptionError: an unknown key, mode or fusion name, or a value of the wrong type.
    """
    given = dict(options or {})
    own = {name: given.pop(name) if name in given else getattr(config, name) for name in OWN}
    inductor = _mode(mode)
    inductor.update(_inductor_options(given))
    if inductor.get("max_autotune") and "autotune" not in (options or {}):
        own["autotune"] = "max"
    for name, allowed in CHOICES.items():
        if own[name] not in allowed:
            raise OptionError(f"option {name!r}: got {own[name]!r}, expected one of {', '.join(map(repr, allowed))}")
    only, without = _fusions(_parsed("fusions", own["fusions"]))
    passes = inductor.pop(OUR_PASS, None) if OUR_PASS in inductor else compat.inductor_setting(OUR_PASS)
    return Settings(
        _recipe(own["recipe"]),
        only,
        without,
        own["lower"],
        own["autotune"],
        _flag("strict", own["strict"]),
        _expect(_parsed("expect", own["expect"])),
        own["verify"],
        inductor,
        compat.inductor_passes(passes),
    )


def _mode(mode: str | None) -> dict[str, Any]:
    names = compat.mode_names()
    if mode is None or mode == "default":
        return {}
    if mode == "lite":
        raise OptionError("mode 'lite' switches off the graph passes that fxfuse is one of; use backend='inductor' for it")
    if mode not in names:
        raise OptionError(f"mode {mode!r} is unknown{_suggest(mode, names)}")
    return compat.mode_options(mode)


def _inductor_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not ours, checked as torch.compile(backend="inductor") checks them."""
    known = compat.inductor_settings()
    checked: dict[str, Any] = {}
    for key, wanted in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise OptionError(f"option {key!r} is unknown{_suggest(name, [*OWN, *known])}")
        have = known[name]
        if name != OUR_PASS and have is not None and wanted is not None and type(wanted) is not type(have):
            raise OptionError(f"option {key!r}: got {wanted!r} of type {type(wanted).__name__}, expected {type(have).__name__}")
        checked[name] = wanted
    if checked.get("use_joint_graph_passes") is False:
        raise OptionError("option 'use_joint_graph_passes': False switches off the hook that fxfuse works in; leave it on")
    return checked


def _suggest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return (
        f"; did you mean {close[0]!r}?" if close else f"; fxfuse takes {', '.join(OWN)} and every key of torch._inductor.config"
    )


def _parsed(name: str, v: Any) -> Any:
    """A mapping that may come as JSON from the environment."""
    if not isinstance(v, str):
        return v
    try:
        return json.loads(v)
    except json.JSONDecodeError as error:
        raise OptionError(f"option {name!r}: {v!r} is not JSON ({error})") from error


def _flag(name: str, v: Any) -> bool:
    if not isinstance(v, bool):
        raise OptionError(f"option {name!r}: got {v!r}, expected True or False")
    return v


def _recipe(v: Any) -> Recipe | None:
    try:
        return None if v is None else as_recipe(v, "option 'recipe'")
    except RecipeError as error:
        raise OptionError(str(error)) from error


def _fusions(v: Any) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    if v is None:
        return None, ()
    if not isinstance(v, Mapping) or not set(v) <= {"only", "disable"}:
        raise OptionError(f"option 'fusions': got {v!r}, expected {{'only': [names], 'disable': [names]}}")
    for key, names in v.items():
        if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(n, str) for n in names):
            raise OptionError(f"option 'fusions': {key!r} is {names!r}, expected a list of names")
    for name in [*(v.get("only") or ()), *(v.get("disable") or ())]:
        if not registry.is_known(name):
            raise OptionError(f"option 'fusions': no fusion is named {name!r}{registry.suggestion(name)}")
    only = v.get("only")
    return None if only is None else tuple(only), tuple(v.get("disable") or ())


def _expect(v: Any) -> Mapping[str, int] | None:
    if v is None:
        return None
    if not isinstance(v, Mapping) or not all(isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in v.values()):
        raise OptionError(f"option 'expect': got {v!r}, expected {{fusion name: count}}")
    for name in v:
        if not registry.is_known(name):
            raise OptionError(f"option 'expect': no fusion is named {name!r}{registry.suggestion(name)}")
    return dict(v)
