"""From a model and example arguments to an IRGraph.

The graph is functional and flat, and its ``run`` gives what the model gives. The model is
afterwards what it was before, on every path, and whatever cannot be captured is a CaptureError with
the program's line.

    structure        the call is flattened into tensors        ir.structure, flat
    trace            the flat model runs on fake tensors           tracer
    functionalize    its program becomes nodes, in one pass        functionalize
    finish           ends are named, dead nodes dropped            boundary
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from shardwright.errors import CaptureError, GraphError, InputError
from shardwright.ir.builder import Builder
from shardwright.ir.graph import Captured, IRGraph
from shardwright.ir.structure import Arguments, Tree, describe_arguments, flatten_call, rebuild
from shardwright.ir.values import IRValue
from shardwright.tracing.boundary import TracedGraph, contents_of
from shardwright.tracing.flat import FlatModel, check_wrapped
from shardwright.tracing.origins import constructor_arguments
from shardwright.tracing.program_set import Dynamic, ProgramSet
from shardwright.tracing.tracer import one_at_a_time, trace_program


@overload
def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> IRGraph: ...


@overload
def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    dynamic: Dynamic,
    buckets: Mapping[str, Sequence[int]] | None = None,
) -> ProgramSet: ...


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    dynamic: Dynamic | None = None,
    buckets: Mapping[str, Sequence[int]] | None = None,
) -> IRGraph | ProgramSet:
    """Capture the graph of ``model(*args, **kwargs)`` for tensors of these shapes and dtypes.

    The contents of tensors are not read. Shapes, strings, numbers and None become part of the
    graph. The graph shares the model's parameters and buffers, and is called as the model is:
    ``graph.run(*args, **kwargs)``. ``graph.updates`` lists the buffers that the model changes.

    A model created under `empty_weights` is captured without contents. ``name`` names the graph,
    by default after the model's class.

    With ``dynamic`` the result is a `ProgramSet`, which has a graph for each combination of sizes.
    ``dynamic`` names the dimensions of inputs that vary, ``{"x": {0: "batch", 1: "length"}}``, or
    has further calls of other sizes, tuples of positional or dicts of keyword arguments. Sizes are
    padded up to those in ``buckets``, by name; to powers of two by default.

    Raises CaptureError if the model cannot be captured, with the line and what to do.
    """
    if dynamic is None and buckets is None:
        return _captured(model, args, kwargs, name)
    if dynamic is None:
        raise CaptureError("buckets are of sizes that vary; name these with dynamic=")
    arguments, tensors = _take_apart(model, args, kwargs or {})
    make = partial(_captured, name=name)
    return ProgramSet(make, model, arguments, tensors, dynamic, buckets)


def _captured(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, name: str | None
) -> IRGraph:
    """The graph of one call."""
    with one_at_a_time():  # Another capture of this model may have other tensors in its place.
        arguments, tensors = _take_apart(model, args, kwargs or {})
        flat = FlatModel(model, arguments)
        contents = contents_of(model)
        program = trace_program(flat, tensors)
        graph = TracedGraph(name or type(model).__name__, flat, program, contents).finish(3)
        graph.training = model.training
        graph.captured = Captured(_copied(model), program.calls, torch.is_grad_enabled())
    return graph


def _copied(model: nn.Module) -> nn.Module | None:
    """The model as it is now, with the same tensors; None where it cannot be copied."""
    held = [item for module in model.modules() for item in vars(module).values()]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [item for item in held if isinstance(item, torch.Tensor)]
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except Exception:  # whatever objects of the user's raise
        return None


def _take_apart(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Arguments, list[torch.Tensor]]:
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes an nn.Module, found a {type(model).__name__}; put the function into "
            "the forward of a module"
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{path or 'the model'} is a script module, which does not run in Python; give "
                "the module it was made from"
            )
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_wrapped(path, tensor)
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}; give positional arguments as a tuple, as in "
            "capture(model, (x,))"
        )
    try:
        return describe_arguments(model.forward, args, kwargs)
    except InputError as error:
        raise CaptureError(f"{type(model).__name__}.forward: {error}") from None


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build models without memory for their weights.

        with sw.empty_weights():
            model = MyModel(config)

    Parameters registered inside, by this thread, are on the meta device; tied ones stay tied. A
    capture traces them as if they were on the device of the arguments. Buffers are created as
    usual, because a checkpoint may not hold them.
    """
    here = threading.get_ident()
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def empty(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or threading.get_ident() != here:
            return None  # registered as it is
        return _without_contents(param, seen)

    register: Any = register_module_parameter_registration_hook  # torch types it as giving None
    hook = register(empty)
    try:
        yield
    finally:
        hook.remove()


def _without_contents(
    param: nn.Parameter, seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]]
) -> nn.Parameter:
    """The same parameter on meta: one for one, as long as the original lives."""
    if param.is_meta or is_lazy(param):
        return param
    original, empty = seen.get(id(param), (None, None))
    if empty is None or original is None or original() is not param:
        empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        empty.__dict__.update(param.__dict__)
        seen[id(param)] = (weakref.ref(param), empty)
    return empty


# --- layer by layer -------------------------------------------------------------------------------


class Model:
    """A graph written layer by layer; `builder` is there for single operators between.

        model = Model("mlp")
        x = model.input("x", (4, 8))
        model.add(nn.Linear(8, 16))
        model.add(nn.GELU())
        graph = model.finish()

    A layer is an `nn.Module`, which is captured on tensors like its inputs, or any object with
    ``emit(builder, x)``, which writes its nodes itself. One tensor is one value, so a layer that is
    added twice, or two layers with tied weights, share their stored values; these have the names
    that the same layers would have in an `nn.Sequential`.
    """

    def __init__(self, name: str = "model") -> None:
        self.builder = Builder(name)
        self._paths: list[str] = []
        self._stored: dict[int, IRValue] = {}
        self._last: IRValue | Sequence[IRValue] = []
        self._result: Tree | None = None

    def input(self, name: str, shape: Sequence[int], dtype: str = "f32") -> IRValue:
        """An input of the graph; the first layer reads all inputs before it."""
        value = self.builder.input(name, shape, dtype)
        if not self._paths:
            self._last = [*_listed(self._last), value]
        return value

    def add(self, layer: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Append ``layer``, called with ``args`` and ``kwargs``; values stand in place of tensors.

        Without arguments the layer reads the result of the previous one. ``name`` is the path of
        its stored values and modules, by default the number of the layer. Returns the layer's
        result. Raises GraphError, and CaptureError if a module cannot be captured.
        """
        path = str(len(self._paths)) if name is None else name
        if path in self._paths:
            raise GraphError(f"a layer {path!r} was added before; give another name=")
        if not args and not kwargs:
            args = tuple(_listed(self._last))
        if callable(getattr(layer, "emit", None)):
            with self.builder.scope(path, _class_name(layer)):
                result = self._last = layer.emit(self.builder, *args, **kwargs)
            self._result = None
        elif isinstance(layer, nn.Module):
            result = self._inline(layer, path, args, kwargs)
        else:
            raise GraphError(
                f"layer {path!r} is a {type(layer).__name__}; a layer is an nn.Module or has "
                "emit(builder, x)"
            )
        self._paths.append(path)
        return result

    def finish(self, outputs: IRValue | Sequence[IRValue] | None = None) -> IRGraph:
        """The finished graph, which returns ``outputs``, by default what the last layer gave."""
        if outputs is not None:
            return self.builder.finish(outputs)
        return self.builder.finish(self._last, out_structure=self._result)

    def _inline(
        self, layer: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Capture ``layer`` and append its graph under ``path``."""
        examples = _Examples(layer)
        example_args, example_kwargs = examples.of(args), examples.of(kwargs)
        graph = capture(layer, example_args, example_kwargs)
        assert graph.in_structure is not None
        assert graph.out_structure is not None
        tensors = flatten_call(graph.in_structure, example_args, example_kwargs)
        inputs = [examples.values[id(tensor)] for tensor in tensors]
        with self.builder.scope(path, _class_name(layer), constructor_arguments(layer)):
            outputs = self.builder.inline(
                graph, inputs, prefix=path, stored=self._shared(graph, path)
            )
        self._last, self._result = outputs, graph.out_structure
        return rebuild(graph.out_structure, outputs)

    def _shared(self, graph: IRGraph, path: str) -> dict[int, IRValue]:
        """The stored values of a layer's graph as values here, made where they are new."""
        found: dict[int, IRValue] = {}
        for value in graph.stored():
            tensor = graph.tensors[value.id]
            if id(tensor) not in self._stored:
                self._stored[id(tensor)] = self.builder.copy_value(graph, value, prefix=path)
            else:
                known = self._stored[id(tensor)]
                known.names += tuple(f"{path}.{name}" for name in value.names)
            found[value.id] = self._stored[id(tensor)]
        return found


class _Examples:
    """Tensors like values, where a layer computes; ``values`` are the values by tensor's id."""

    def __init__(self, layer: nn.Module) -> None:
        parameter = next(layer.parameters(), None)
        held = parameter is not None and not parameter.is_meta
        self.device = parameter.device if parameter is not None and held else torch.device("cpu")
        self.values: dict[int, IRValue] = {}
        self.tensors: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        """``value`` with a tensor of its own for each value in it."""
        if isinstance(value, IRValue):
            tensor = value.meta.empty(self.device)
            self.tensors.append(tensor)  # keeps its id
            self.values[id(tensor)] = value
            return tensor
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return value


def _listed(values: IRValue | Sequence[IRValue]) -> Sequence[IRValue]:
    return [values] if isinstance(values, IRValue) else values


def _class_name(layer: object) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
