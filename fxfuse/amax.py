"""The history of largest magnitudes by which ``DelayedScaling`` scales, kept beside a model's parameters.

A line of a history is one quantised operand of one graph: ``[multiplier, the format's largest value, this step's largest
magnitude, the ones before ...]``, fp32. A captured graph gets its history as one more input, so one compiled graph serves many
layers, each with its own: histories are found by the graph's first parameter. Every training forward begins a step: the
multipliers are computed from the steps before. Inference begins none, nor does recomputing a forward in the backward; but a
forward that was run without gradients, as reentrant checkpointing does, is counted when it is recomputed, and ends its step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from . import compat
from .errors import LoweringError, RecipeError
from .fp8_recipes import DelayedScaling
from .ops.define import library
from .recipe import from_key
from .region import graphs_of, is_backward
from .values import is_tensor, value

INPUT = "fxfuse_amax"
MULTIPLIER, LARGEST, NOW = range(3)
"""Columns of a history; the steps before come after ``NOW``."""
PREFIX = "fxfuse_amax."
"""Begins the keys of histories in a state dict."""

library.define("recorded_multiplier(Tensor history, Tensor amax, int line, float largest, bool record) -> Tensor")


def _recorded_multiplier(history: Tensor, amax: Tensor, line: int, largest: float, record: bool) -> Tensor:
    kept = history.data[line]  # autograd keeps the history for the backward, and need not know that it goes on
    if record:  # each line is of one node, and recording twice is recording once: no other node sees the change
        kept[LARGEST] = largest
        kept[NOW] = torch.fmax(kept[NOW], torch.where(amax.isfinite(), amax, 0))
    return kept[MULTIPLIER].clone()


library.impl("recorded_multiplier", _recorded_multiplier, "CompositeExplicitAutograd")
library.impl("recorded_multiplier", lambda history, *_: history.new_empty(()), "Meta")


def advance(history: Tensor, recipe: DelayedScaling) -> None:
    """Begin a step: new multipliers, and one more step in the past."""
    if recipe.reduce_amax and torch.distributed.is_available() and torch.distributed.is_initialized():
        now = history[:, NOW].contiguous()
        torch.distributed.all_reduce(now, torch.distributed.ReduceOp.MAX)
        history[:, NOW] = now
    steps = history[:, NOW:]
    amax = steps[:, 0] if recipe.amax_compute_algo == "most_recent" else steps.amax(1)
    found = (history[:, LARGEST] / amax).clamp(max=2.0**126) * 2.0**-recipe.margin
    history[:, MULTIPLIER] = torch.where(amax > 0, found, history[:, MULTIPLIER])
    steps.copy_(steps.roll(1, 1))
    history[:, NOW] = 0


# ------------------------------------------------------------------------------------------------ where they are kept


@dataclasses.dataclass
class _History:
    tensor: Tensor
    restored: bool = False
    """It came from a state dict and nothing has run with it since."""
    begun: bool = False
    """The latest forward outside of a backward was a training one: what is recomputed has been counted."""


_histories: Any = WeakIdKeyDictionary()
"""By parameter: histories by hash of the graph and key of the recipe."""


def _of(owner: Any, code: str, recipe: DelayedScaling, lines: int, device: torch.device) -> _History:
    kept: dict[tuple[str, str], _History] = _histories.setdefault(owner, {})
    found = kept.get((code, recipe.key))
    if found is None:
        others = [k for (c, k), h in kept.items() if c == code and h.restored]
        if others:
            raise RecipeError(
                f"the restored state dict has the history of {others[0]}, this call uses {recipe!r}: use the recipe that it was "
                "saved with, or load the state dict without it (fxfuse.reset() forgets what was loaded)"
            )
        found = kept[code, recipe.key] = _History(_new(lines, recipe, device))
    if found.tensor.shape[0] < lines or found.tensor.device != device:
        grown = _new(max(lines, found.tensor.shape[0]), recipe, device)
        grown[: found.tensor.shape[0]] = found.tensor
        found.tensor = grown
    found.restored = False
    return found


def _new(lines: int, recipe: DelayedScaling, device: Any) -> Tensor:
    history = torch.zeros(lines, NOW + 1 + recipe.amax_history_len, device=device)
    history[:, MULTIPLIER] = 1
    return history


def forget() -> None:
    """Drop every history."""
    _histories.clear()


# ------------------------------------------------------------------------------------------------ in a captured graph


def wanted(recipes: Sequence[Any]) -> DelayedScaling | None:
    """The recipe whose histories a graph needs.

    Raises:
        RecipeError: there are two.
    """
    found = list(dict.fromkeys(r for r in recipes if isinstance(r, DelayedScaling)))
    if len(found) > 1:
        raise RecipeError(f"one graph cannot use both {found[0]!r} and {found[1]!r}: its history has one length")
    return found[0] if found else None


class Keeper:
    """Gives a graph its history: an input when it is captured, the tensor when it runs."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any], recipe: DelayedScaling, code: str) -> None:
        self.recipe, self.code, self.training = recipe, code, False
        tensors = [t for t in example_inputs if isinstance(t, Tensor)]
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        joins = [n for g in graphs_of(gm) for n in g.nodes if n.op.startswith("call") and len(n.all_input_nodes) > 1]
        self.lines = 5 * len(joins) + 1
        """At least as many as there will be quantised operands: two in the forward of a linear, up to three in its backward."""
        mode = compat.fake_mode_of(tensors) or compat.new_fake_mode()
        with mode:
            self.fake = _new(self.lines, recipe, self.device)
        last = [n for n in gm.graph.nodes if n.op == "placeholder"]
        with gm.graph.inserting_after(last[-1]) if last else gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            node = gm.graph.placeholder(INPUT)
        node.meta["example_value"] = self.fake
        gm.recompile()

    def bind(self, graph: Graph) -> None:
        """Give every quantised operand of a rewritten graph its line."""
        asked = [n for n in graph.nodes if n.op == "call_function" and n.target is torch.ops.fxfuse.delayed_multiplier.default]
        if not asked:
            return
        inputs = [n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith(("primals_", "arg"))]
        if not inputs or not is_tensor(inputs[-1]) or tuple(value(inputs[-1]).shape) != tuple(self.fake.shape):
            raise LoweringError("DelayedScaling reaches into a nested graph (torch.cond and the like), which has no history")
        if len(asked) > self.lines:
            raise LoweringError(f"{len(asked)} operands are quantised, the history has {self.lines} lines")
        self.training = any(is_backward(n) for n in graph.nodes)
        for line, node in enumerate([n for n in asked if not is_backward(n)] + [n for n in asked if is_backward(n)]):
            amax, largest = node.args
            with graph.inserting_before(node):
                args = (inputs[-1], amax, line, largest, self.training)
                new = graph.call_function(torch.ops.fxfuse.recorded_multiplier.default, args)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)

    def run(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with the history of the layer that it is called for."""
        of_none = nn.Parameter(torch.zeros(()))  # where a graph has no parameters, its one history lives as long as the plan

        def call(*args: Any) -> Any:
            owner = next((a for a in args if isinstance(a, nn.Parameter)), of_none)
            history = _of(owner, self.code, self.recipe, self.lines, self.device)
            if compat.in_backward():
                result = compiled(*args, history.tensor.data)
                if self.training and not history.begun:
                    advance(history.tensor, self.recipe)
                return result
            history.begun = self.training
            if self.training:
                advance(history.tensor, self.recipe)
            return compiled(*args, history.tensor.data)

        return call


# ------------------------------------------------------------------------------------------------ state dicts


def track_amax(model: nn.Module) -> None:
    """Let ``model.state_dict()`` hold the histories of ``DelayedScaling`` and ``load_state_dict`` restore them, bit for bit.

    Call it once, before saving or loading; in any order with ``torch.compile``.

    Raises:
        RecipeError: from ``load_state_dict``: a history does not fit its recipe or names no parameter of the model; from the
            first call afterwards: it uses another recipe than the restored one.
    """
    model.register_state_dict_post_hook(_save)
    model.register_load_state_dict_pre_hook(_load)


def _save(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, parameter in model.named_parameters():
        for (code, key), history in _histories.get(parameter, {}).items():
            state[f"{prefix}{PREFIX}{name}|{code}|{key}"] = history.tensor.clone()


def _load(model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parameters = dict(model.named_parameters())
    read = []
    for full in [k for k in state if k.startswith(prefix + PREFIX)]:
        name, code, key = full.removeprefix(prefix + PREFIX).split("|")
        recipe, tensor = from_key(key, f"state dict entry {full!r}"), state[full]
        fits = isinstance(recipe, DelayedScaling) and tensor.dim() == 2 and tensor.shape[1] == NOW + 1 + recipe.amax_history_len
        if not fits or tensor.dtype != torch.float32:
            raise RecipeError(f"state dict entry {full!r} is {tuple(tensor.shape)} {tensor.dtype}, not a history of {recipe!r}")
        if name not in parameters:
            raise RecipeError(f"state dict entry {full!r}: the model has no parameter {name!r}")
        read.append((full, parameters[name], code, recipe.key, tensor))
    if read:
        for owner in parameters.values():
            _histories.pop(owner, None)
    for full, owner, code, key, tensor in read:
        del state[full]
        _histories.setdefault(owner, {})[code, key] = _History(tensor.detach().to(owner.device).clone(), restored=True)
