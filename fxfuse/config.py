"""Settings with environment twins.

``fxfuse.config.strict = True``, ``with fxfuse.config.patch(strict=True)`` and ``FXFUSE_STRICT=1`` set the same setting.
``options=`` of torch.compile goes before ``patch``, ``patch`` before assignment, assignment before the environment.
``settings`` checks the values where they are used.
"""

import sys
from typing import TYPE_CHECKING, Any

from .compat import config_entry, install_config_module

recipe: str | None = config_entry(None, "FXFUSE_RECIPE")
"""A recipe's short name that every compiled model is pinned to."""
fusions: str | None = config_entry(None, "FXFUSE_FUSIONS")
"""``{"only": [names], "disable": [names]}`` as a dict, or as JSON (in the environment)."""
lower: str = config_entry("auto", "FXFUSE_LOWER")
"""``"auto"``, or ``"eager"``: run rewritten graphs with torch itself."""
autotune: str = config_entry("quick", "FXFUSE_AUTOTUNE")
"""``"off"``, ``"quick"`` or ``"max"``: how lowerings are chosen."""
strict: bool = config_entry(False, "FXFUSE_STRICT")
"""Raise where a fusion fails, instead of running unfused."""
expect: str | None = config_entry(None, "FXFUSE_EXPECT")
"""``{fusion name: count}`` (JSON in the environment): raise when the counts differ."""
verify: str = config_entry("off", "FXFUSE_VERIFY")
"""``"off"``, ``"first"`` or ``"always"``: run fused graphs beside their unfused form and compare."""
debug: bool = config_entry(False, "FXFUSE_DEBUG")
"""Extra checks that read values on the host."""
packs: str | None = config_entry(None, "FXFUSE_PACKS")
"""Comma-separated names of pattern packs to load besides the built-in one."""
cache_dir: str | None = config_entry(None, "FXFUSE_CACHE_DIR")
"""The folder that winners of measurements are kept in; by default ``$XDG_CACHE_HOME/fxfuse``, or ``~/.cache/fxfuse``."""

if TYPE_CHECKING:

    def patch(*args: Any, **kwargs: Any) -> Any: ...


install_config_module(sys.modules[__name__])
