"""fxfuse: ``torch.compile(model, backend="fxfuse")`` fuses what it knows, in the forward and in the backward.

Only names are here. Importing fxfuse loads neither ``torch._dynamo`` nor ``torch._inductor``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "config": "config",
    "ops": "ops",
    "experts": "experts",
    "testing": "testing",
    "explain": "explanation:explain",
    "last_report": "dispatch:last_report",
    "reports": "dispatch:reports",
    "plan_info": "dispatch:plan_info",
    "reset": "resetting:reset",
    "Report": "report:Report",
    "Fused": "report:Fused",
    "Missed": "report:Missed",
    "Recipe": "recipe:Recipe",
    "Float8CurrentScaling": "fp8_recipes:Float8CurrentScaling",
    "Float8BlockScaling": "fp8_recipes:Float8BlockScaling",
    "DelayedScaling": "fp8_recipes:DelayedScaling",
    "MXFP8BlockScaling": "fp8_recipes:MXFP8BlockScaling",
    "NVFP4BlockScaling": "fp8_recipes:NVFP4BlockScaling",
    "MMParams": "fp8_recipes:MMParams",
    "track_amax": "amax:track_amax",
    "use_recipe": "recipe:use_recipe",
    "recipe_region": "recipe:recipe_region",
    "checkpoint_context": "recipe:checkpoint_context",
    "set_default_recipe": "recipe:set_default_recipe",
    "current_recipe": "recipe:current_recipe",
    "register_forward_fusion": "fusion:register_forward_fusion",
    "register_backward_fusion": "fusion:register_backward_fusion",
    "register_forward_backward_fusion": "fusion:register_forward_backward_fusion",
    "Fusion": "fusion:Fusion",
    "Match": "fusion:Match",
    "WindowFusion": "window:WindowFusion",
    "Op": "window:Op",
    "disable": "registry:disable",
    "list_fusions": "registry:list_fusions",
    "load_pack": "registry:load_pack",
    "CacheError": "errors:CacheError",
    "FusionCountError": "errors:FusionCountError",
    "FxfuseError": "errors:FxfuseError",
    "FxfuseWarning": "errors:FxfuseWarning",
    "LoweringError": "errors:LoweringError",
    "OptionError": "errors:OptionError",
    "PatternError": "errors:PatternError",
    "RecipeError": "errors:RecipeError",
}

if TYPE_CHECKING:
    from . import config as config
    from . import experts as experts
    from . import ops as ops
    from . import testing as testing
    from .amax import track_amax as track_amax
    from .dispatch import last_report as last_report
    from .dispatch import plan_info as plan_info
    from .dispatch import reports as reports
    from .errors import CacheError as CacheError
    from .errors import FusionCountError as FusionCountError
    from .errors import FxfuseError as FxfuseError
    from .errors import FxfuseWarning as FxfuseWarning
    from .errors import LoweringError as LoweringError
    from .errors import OptionError as OptionError
    from .errors import PatternError as PatternError
    from .errors import RecipeError as RecipeError
    from .explanation import explain as explain
    from .fp8_recipes import DelayedScaling as DelayedScaling
    from .fp8_recipes import Float8BlockScaling as Float8BlockScaling
    from .fp8_recipes import Float8CurrentScaling as Float8CurrentScaling
    from .fp8_recipes import MMParams as MMParams
    from .fp8_recipes import MXFP8BlockScaling as MXFP8BlockScaling
    from .fp8_recipes import NVFP4BlockScaling as NVFP4BlockScaling
    from .fusion import Fusion as Fusion
    from .fusion import Match as Match
    from .fusion import register_backward_fusion as register_backward_fusion
    from .fusion import register_forward_backward_fusion as register_forward_backward_fusion
    from .fusion import register_forward_fusion as register_forward_fusion
    from .recipe import Recipe as Recipe
    from .recipe import checkpoint_context as checkpoint_context
    from .recipe import current_recipe as current_recipe
    from .recipe import recipe_region as recipe_region
    from .recipe import set_default_recipe as set_default_recipe
    from .recipe import use_recipe as use_recipe
    from .registry import disable as disable
    from .registry import list_fusions as list_fusions
    from .registry import load_pack as load_pack
    from .report import Fused as Fused
    from .report import Missed as Missed
    from .report import Report as Report
    from .resetting import reset as reset
    from .window import Op as Op
    from .window import WindowFusion as WindowFusion
else:
    __all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fxfuse' has no attribute {name!r}")
    module, _, attribute = _WHERE[name].partition(":")
    loaded = importlib.import_module(f"{__name__}.{module}")
    found = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = found  # a submodule of the same name would otherwise shadow it
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


def _register() -> None:
    from .checkout import register

    register()


_register()
