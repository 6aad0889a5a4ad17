"""Every case of value numbering. Importing a module of cases collects them."""

from __future__ import annotations

from importlib import import_module

from value_case import CASES

__all__ = ["CASES"]

for subject in ("layout", "linear", "pointwise", "other", "symbolic"):
    import_module(f"value_cases_{subject}")
