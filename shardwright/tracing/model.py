"""Model: a graph written layer by layer.

    model = Model("mlp")
    x = model.input("x", (4, 8))
    model.add(nn.Linear(8, 16))
    model.add(nn.GELU())
    graph = model.finish()

A layer is an `nn.Module`, which is captured on tensors like its inputs, or any object with
``emit(builder, x)``, which writes its nodes itself. What always holds: one tensor is one value, so
a layer that is added twice, or two layers with tied weights, share their stored values; and stored
values have the names that the same layers would have in an `nn.Sequential`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwright.errors import GraphError
from shardwright.ir.builder import Builder
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Tree, flatten_call, rebuild
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype
from shardwright.ir.values import IRValue
from shardwright.tracing.capture import capture


class Model:
    """Layers are added one after the other; `builder` is there for single operators between."""

    def __init__(self, name: str = "model") -> None:
        self.builder = Builder(name)
        self._paths: list[str] = []
        self._stored: dict[int, IRValue] = {}
        self._last: IRValue | Sequence[IRValue] = []
        self._result: Tree | None = None

    def input(self, name: str, shape: Sequence[int], dtype: str = "f32") -> IRValue:
        """A value that the caller gives; the first layer reads all inputs before it."""
        value = self.builder.input(name, shape, dtype)
        if not self._paths:
            self._last = [*_listed(self._last), value]
        return value

    def add(self, layer: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        """What ``layer`` gives for ``args`` and ``kwargs``, with values in place of tensors.

        Without arguments the layer reads what the last one gave. ``name`` is the path of its
        stored values and modules, by default the number of the layer.
        Raises GraphError, and CaptureError where a module cannot be captured.
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
        with self.builder.scope(path, _class_name(layer)):
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
            strides = value.strides or contiguous_strides(value.shape)
            dtype = torch_dtype(value.dtype)
            tensor = torch.empty_strided(value.shape, strides, dtype=dtype, device=self.device)
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
