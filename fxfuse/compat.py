"""The only file that touches private torch APIs: one function each, checked on torch 2.11.0, 2.13.0 and 2.14.1.

Imports are local: importing fxfuse loads neither ``torch._dynamo`` nor ``torch._inductor``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

REGISTRY = "torch._dynamo.backends.registry"

#: Every private name used below, for ``probe``.
PRIVATE_NAMES: dict[str, str] = {
    "compile_fx": "torch._inductor.compile_fx:compile_fx",
    "aot_autograd": "torch._dynamo.backends.common:aot_autograd",
    "partitioner": "torch._functorch.partitioners:min_cut_rematerialization_partition",
    "compile_fx_inner": "torch._inductor.compile_fx:compile_fx_inner",
    "decompositions": "torch._inductor.decomposition:select_decomp_table",
    "stop_recomputation": "torch.utils.checkpoint:_StopRecomputationError",
    "dynamo_exceptions": "torch._dynamo.exc:TorchDynamoException",
    "graph_pass": "torch._inductor.custom_graph_pass:CustomGraphPass",
    "inductor_config": "torch._inductor.config:joint_custom_pre_pass",
    "mode_options": "torch._inductor:list_mode_options",
    "stable_topological_sort": "torch._inductor.pattern_matcher:stable_topological_sort",
    "functorch_config": "torch._functorch.config:enable_autograd_cache",
    "functionalize": "torch._subclasses.functional_tensor:dispatch_functionalize",
    "proxy_mode": "torch.fx.experimental.proxy_tensor:get_proxy_mode",
    "fake_mode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "tracing_context": "torch._guards:TracingContext",
    "tracing": "torch._guards:tracing",
    "config_module": "torch.utils._config_module:install_config_module",
    "structured_trace": "torch._logging._internal:trace_structured",
    "backend_registry": f"{REGISTRY}:_BACKENDS",
    "disable_autocast": "torch._C:_DisableAutocast",
    "cudagraph_reset": "torch._inductor.cudagraph_trees:reset_cudagraph_trees",
    "graph_task": "torch._C:_current_graph_task_id",
    "no_dispatch_modes": "torch.utils._python_dispatch:_disable_current_modes",
    "new_tensors": "torch._C._dynamo.guards:_empty_strided_cuda",
    "tensor_guards": "torch._C._dynamo.guards:TensorGuards",
}


def probe() -> dict[str, bool]:
    """Which private torch names exist here."""

    def present(where: str) -> bool:
        module, _, attribute = where.partition(":")
        try:
            return hasattr(importlib.import_module(module), attribute)
        except ImportError:
            return False

    return {name: present(where) for name, where in PRIVATE_NAMES.items()}


def announce_backend(name: str, entry_point: Any) -> None:
    """Make ``name`` known to a Dynamo that has already looked for entry points (before that, entry points suffice)."""
    registry = sys.modules.get(REGISTRY)
    if registry is not None:
        registry._BACKENDS.setdefault(name, entry_point)


# ------------------------------------------------------------------------------------------------ compiling


def compile_fx(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    inner_compile: Callable[..., Any],
    config_patches: dict[str, Any],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Inductor's entry. It takes ownership of ``gm``."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    # A hit in AOTAutograd's cache would skip our pass, and with it the report.
    with functorch_config.patch(enable_autograd_cache=False):
        compiled = compile_fx(
            gm, example_inputs, inner_compile=inner_compile, config_patches=config_patches, decompositions=decompositions
        )
    assert callable(compiled)  # the other kinds of output are those of ahead-of-time packages
    return compiled


def aot_eager(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    transform: Callable[[Graph], None],
    compile_graph: Callable[..., Any],
    decompositions: dict[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """AOTAutograd without Inductor: the same joint graph, the same partitioner, and torch runs what comes out."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def transform_all(module: GraphModule) -> None:
        for child in module.children():
            if isinstance(child, GraphModule):
                transform_all(child)
        transform(module.graph)
        module.recompile()

    def partition(joint: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        transform_all(joint)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def inference(graph: GraphModule, inputs: Sequence[Any]) -> Any:
        transform_all(graph)
        return compile_graph(graph, inputs)

    compiler = aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=lambda graph, inputs: compile_graph(graph, inputs, is_backward=True),
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(enable_autograd_cache=False):
        return compiler(gm, example_inputs)


def compile_fx_inner(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Inductor's compiler of one forward or backward graph.

    By now no deferred operator is left, so the cache key may name the stock table; our own does not pickle.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    if "get_decomp_fn" in kwargs:
        kwargs["get_decomp_fn"] = select_decomp_table
    return compile_fx_inner(gm, example_inputs, **kwargs)


def lower_by_realizing(op: Any) -> None:
    """Have Inductor compute the argument of ``op`` into a buffer of its own, where it would compute it anew in each user.

    The buffer has the strides of the graph: Inductor would choose them by what is read.
    """
    from torch._inductor.ir import ExternKernel
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    def realized(x: Any) -> Any:
        x.realize()
        return ExternKernel.require_exact_strides(x, V.graph.current_node.meta["val"].stride())

    if op not in lowerings:
        register_lowering(op, type_promotion_kind=None)(realized)


def drops_roundings() -> bool:
    """Whether Inductor passes over a cast that is to round; torch 2.13 and 2.14 do not, 2.11 does."""
    from torch._inductor.fx_passes import joint_graph

    return not hasattr(joint_graph, "_is_lossless_fp_widening_cast")


def empty_strided(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] | None:
    """What Inductor's code makes tensors with, on the current device of this kind; None where there is no such function."""
    from torch._C._dynamo import guards

    return getattr(guards, f"_empty_strided_{device.type}", None)


def guards_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors have the metadata of these, and their types: in a tenth of the time that reading it takes."""
    from torch._C._dynamo import guards

    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    make: Any = guards.TensorGuards  # in 2.11 to 2.14; typed as if it took single sizes
    return make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def is_control_flow(error: BaseException) -> bool:
    """Whether an exception is torch steering itself and must pass: Dynamo (restart, skip this frame), or a checkpoint that
    stops its recomputation early, from inside the compiled call that it recomputes."""
    from torch._dynamo.exc import TorchDynamoException
    from torch.utils.checkpoint import _StopRecomputationError

    return isinstance(error, (TorchDynamoException, _StopRecomputationError))


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """``function(*args)`` under Inductor's calling convention: one list, emptied by the callee."""

    def call(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return function(*values)

    return as_boxed(call)


def as_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments as one list."""
    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def decompositions(**settings: Any) -> dict[Any, Callable[..., Any]]:
    """Inductor's decomposition table for the current configuration with some ``settings`` changed."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    with config.patch(settings):
        return dict(select_decomp_table())


def graph_pass(function: Callable[[Graph], None], uuid: Any) -> Any:
    """A graph pass whose identity is part of Inductor's cache keys."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            function(graph)

        def uuid(self) -> Any:
            return uuid

    return Pass()


def inductor_passes(value: Any) -> tuple[Any, ...]:
    """A pass configuration value (None, one pass, several) as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def inductor_setting(name: str) -> Any:
    """The current value of one Inductor configuration key."""
    from torch._inductor import config

    return getattr(config, name)


def inductor_settings() -> Mapping[str, Any]:
    """Every Inductor configuration key with its current value."""
    from torch._inductor import config

    return config.get_config_copy() if hasattr(config, "get_config_copy") else config.shallow_copy_dict()


def mode_options(mode: str) -> dict[str, Any]:
    """Inductor's configuration for a ``mode=`` of torch.compile."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def mode_names() -> list[str]:
    """Every ``mode=`` that torch.compile knows."""
    from torch._inductor import list_mode_options

    return ["default", *list_mode_options()]


def reset_cudagraphs() -> None:
    """Drop recorded CUDA graphs, as torch.compiler.reset does for Inductor."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    if module is not None:
        module.reset_cudagraph_trees()


def sort_graph(graph: Graph) -> None:
    """Stable topological sort."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


# ------------------------------------------------------------------------------------------------ tracing


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The fake mode of the first fake tensor among ``values``, or None."""
    return next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)


def new_fake_mode() -> Any:
    """A fake mode without symbolic shapes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


class ShapeGuardError(RuntimeError):
    """A trace specialised a symbolic size."""


@contextlib.contextmanager
def tracing(args: Sequence[Any], *, forbid_guards: bool) -> Iterator[None]:
    """Where functions of fake ``args`` are traced: under their fake mode, with no ambient autocast, grad or inference mode.

    Shape guards are dropped, or with ``forbid_guards`` a ShapeGuardError.
    """
    mode = fake_mode_of(args) or new_fake_mode()
    env = mode.shape_env
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_quiet_tracing_context(mode))
        if env is not None and not forbid_guards:
            stack.enter_context(env.suppress_guards())
        if env is not None and forbid_guards:
            stack.enter_context(no_new_guards(mode))
        stack.enter_context(mode)
        yield


def trace(
    function: Callable[..., Any], args: Sequence[Any], table: Mapping[Any, Callable[..., Any]], *, forbid_guards: bool
) -> Graph:
    """The functional aten graph of ``function`` on fake ``args``, dead code included."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing(args, forbid_guards=forbid_guards):
        return make_fx(
            dispatch_functionalize(function, FunctionalTensorMode()),
            decomposition_table=dict(table),
            _allow_non_fake_inputs=True,
        )(*args).graph


def dispatch_mode(call: Callable[..., Any]) -> Any:
    """Where an operator ``op`` on fake tensors becomes ``call(op, args, kwargs)``; inside ``call`` operators run as usual."""
    from torch.utils._python_dispatch import TorchDispatchMode

    device = torch.ops.prim.device.default

    class Mode(TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls) -> bool:  # what another thread runs meanwhile is none of its business
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is device:  # autograd asks all the time
                return args[0].fake_device
            return call(func, args, kwargs or {})

    return Mode()


def is_composite(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether autograd would have run an operator as the smaller ones that it is made of."""
    from torch.utils._python_dispatch import autograd_would_have_decomposed

    if not _can_decompose(op):
        return False
    given = [*args, *kwargs.values()]
    tensors = [t for a in given for t in (a if isinstance(a, (list, tuple)) else [a]) if isinstance(t, torch.Tensor)]
    return autograd_would_have_decomposed(op, tensors)


@functools.cache
def _can_decompose(op: Any) -> bool:
    return op._can_decompose()


def storage(tensor: torch.Tensor) -> int:
    """Names the memory of a tensor as long as that lives; fake tensors have theirs too."""
    return tensor.untyped_storage()._cdata


def without_history(tensor: Any) -> Any:
    """A fake tensor as it is, without the autograd graph that made it."""
    from torch.fx.experimental.proxy_tensor import snapshot_fake

    return snapshot_fake(tensor)


def traced_so_far() -> int:
    """How many nodes the trace in progress has."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


@contextlib.contextmanager
def no_new_guards(mode: Any) -> Iterator[None]:
    """Raise ShapeGuardError if the body specialises a symbolic size, and take the guard back."""
    env = mode.shape_env if mode is not None else None
    if env is None:
        yield
        return
    known = len(env.guards)
    kept = {name: dict(getattr(env, name)) for name in ("replacements", "axioms", "var_to_range") if hasattr(env, name)}
    yield
    if len(env.guards) != known:
        text = str(env.guards[known].expr)
        del env.guards[known:]
        for name, content in kept.items():
            getattr(env, name).clear()
            getattr(env, name).update(content)
        raise ShapeGuardError(text)


@contextlib.contextmanager
def _quiet_tracing_context(mode: Any) -> Iterator[None]:
    """Keep a trace inside a pass from touching the compile in progress."""
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(mode)):
        yield


def fake_inputs(example_inputs: Sequence[Any]) -> list[Any]:
    """Dynamo's example inputs as fakes of the compile in progress: what is static stays static, and no memory is held.

    Where nothing is dynamic Dynamo hands over real tensors, and what it knows of their sizes is gone when it has finished.
    """
    context = tracing_context()
    mode = None if context is None else context.fake_mode
    if context is None or mode is None:
        return list(example_inputs)

    def fake(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or getattr(t, "fake_mode", None) is mode:
            return t
        known = context.tensor_to_context.get(t)
        source = None if known is None else known.tensor_source
        return mode.from_tensor(t, static_shapes=known is None or None, symbolic_context=known, source=source, trace=False)

    return [fake(t) for t in example_inputs]


@contextlib.contextmanager
def late_tracing(context: Any) -> Iterator[None]:
    """Stand in for Dynamo's tracing context when a plan is built after Dynamo has finished."""
    from torch._guards import TracingContext, tracing

    fresh = TracingContext(context.fake_mode)
    for name in (
        "params_flat",
        "params_flat_unwrap_subclasses",
        "params_unwrapped_to_flat_index",
        "tensor_to_context",
        "force_unspec_int_unbacked_size_like",
        "hop_dispatch_set_cache",
        "module_context",
    ):
        if hasattr(context, name):
            setattr(fresh, name, getattr(context, name))
    with tracing(fresh):
        yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Under Dynamo's lock: one compile at a time in a process, as some flags of a trace are global.

    One says that something is traced, for which compiled calls of other threads would be refused. From 2.13 on another one says
    that this is a compilation, and they are not; before, they run as they are written.
    """
    from torch._dynamo.convert_frame import compile_lock

    if hasattr(torch.compiler, "_compile_session_context"):
        let = torch.compiler._compile_session_context()
    else:
        let = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with compile_lock, let:
        yield


def in_backward() -> bool:
    """Whether this thread is inside a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def saved_for_backward(gm: GraphModule) -> list[Any] | None:
    """What a forward graph, as AOTAutograd hands it on, returns for its backward beside the model's own results.

    None where there is no metadata of the graph. Inputs and views of them are left out, of views of one value one stands for all.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return None
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    returned = [n.meta.get("val") for n in output.args[0][metadata.num_forward :] if isinstance(n, torch.fx.Node)]
    inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
    known = {storage(t) for t in inputs if isinstance(t, torch.Tensor)}
    kept = {storage(t): t for t in returned if isinstance(t, torch.Tensor)}
    return [t for memory, t in kept.items() if memory not in known]


def tracing_context() -> Any:
    """Dynamo's tracing context, or None outside a compile."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


@contextlib.contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run real tensors in the middle of a trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Run real tensors, and compile other things, in the middle of a compile."""
    from torch._guards import tracing

    with without_dispatch_modes(), tracing(None):
        yield


UNKNOWN_SIZE = 4096
"""Stands for a size that is known only at run time."""


def size_hint(s: Any) -> int:
    """A representative number for a size."""
    if isinstance(s, torch.SymInt):
        return int(s.node.hint) if s.node.hint is not None else UNKNOWN_SIZE
    return int(s)


def size_with(s: torch.SymInt, change: Callable[[int], int]) -> int:
    """The number that a size is when each of its symbols is a changed representative number."""
    import sympy

    expression, environment = s.node.expr, s.node.shape_env
    hints = environment.backed_var_to_val if hasattr(environment, "backed_var_to_val") else environment.var_to_val  # torch 2.11
    changed = {q: sympy.Integer(change(int(hints.get(q, UNKNOWN_SIZE)))) for q in expression.free_symbols}
    return int(expression.xreplace(changed))


def compiled_by_inductor(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """``function(*args, **kwargs)`` as Inductor compiles it, as a call without arguments."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree as pytree

    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, a in enumerate(flat) if isinstance(a, torch.Tensor)]

    def call(*tensors: Any) -> Any:
        filled = list(flat)
        for i, t in zip(places, tensors, strict=True):
            filled[i] = t
        a, k = pytree.tree_unflatten(filled, spec)
        return pytree.tree_leaves(function(*a, **k))

    tensors = [flat[i] for i in places]
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in tensors]
    from .ops.define import MATERIALIZED

    lower_by_realizing(MATERIALIZED)
    with mode:  # scalars become tensors of this mode too
        gm = make_fx(call, decomposition_table=decompositions(), _allow_non_fake_inputs=True)(*fakes)
    compiled = compile_fx_inner(gm, fakes)
    return lambda: compiled(list(tensors))


def known_true(condition: Any) -> bool:
    """Whether ``condition`` holds for every size, adding no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def shape_guards(mode: Any) -> int:
    """How many shape guards the mode's environment holds."""
    return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0


def new_guard_check(mode: Any, known: int, placeholders: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
    """A check of the guards added since there were ``known``, for a plan that was built after Dynamo froze its own."""
    env = mode.shape_env if mode is not None else None
    if env is None or len(env.guards) == known:
        return None
    code = env.produce_guards_expression(list(placeholders), guards=env.guards[known:])
    if code is None:
        return None
    return lambda args: bool(env.evaluate_guards_expression(code, list(args)))


# ------------------------------------------------------------------------------------------------ the rest


def install_config_module(module: Any) -> None:
    """Turn a module of annotated settings into a configuration module with ``patch`` and environment twins."""
    from torch.utils._config_module import install_config_module

    install_config_module(module)


def config_entry(default: Any, env_name: str) -> Any:
    """One setting with an environment twin."""
    from torch.utils._config_module import Config

    return Config(default=default, env_name_default=env_name)


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """An artifact for TORCH_TRACE (tlparse); ``payload`` runs only when tracing is on."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
