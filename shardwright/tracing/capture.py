"""`capture`: from a model and example arguments to an IRGraph.

Comes in: a module and a call of it. Goes out: a functional, flat graph whose ``run`` gives what
the model gives. What always holds: the model is afterwards what it was before, on every path, and
whatever cannot be captured is a CaptureError with the program's line.

    structure   the call is taken apart into tensors       ir.structure, flat
    export      torch.export traces the flat model         export, empty_weights
    translate   its program becomes nodes, in one pass     translate
    finish      ends are named, dead nodes dropped         here
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from shardwright.errors import CaptureError, InputError
from shardwright.ir.builder import Builder
from shardwright.ir.dtypes import dtype_name
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Arguments, describe_arguments, leaves
from shardwright.ir.values import IRValue
from shardwright.tracing.dead_code import remove_dead_code
from shardwright.tracing.emitter import Emitter
from shardwright.tracing.export import export_flat
from shardwright.tracing.failures import CaptureWarning, line_before
from shardwright.tracing.flat import PREFIX, FlatModel
from shardwright.tracing.memory import Owner, Place
from shardwright.tracing.translate import Translator


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> IRGraph:
    """The graph of ``model(*args, **kwargs)``, for tensors of these shapes and dtypes.

    Contents of the arguments are not looked at; shapes, strings, numbers and None become part of
    the graph. The graph shares the model's parameters and buffers, and is called as the model is:
    ``graph.run(*args, **kwargs)``. Buffers that the model changes are ``graph.updates``.

    A model built under `empty_weights` is captured without contents. ``name`` names the graph,
    by default after the model's class.

    Raises CaptureError where the model cannot be a graph, with the line and what to do.
    """
    arguments, tensors = _take_apart(model, args, kwargs or {})
    flat = FlatModel(model, arguments)
    contents = _contents(model)
    program = export_flat(flat, tensors)
    return _Capture(name or type(model).__name__, flat, program, contents).graph()


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
    if not isinstance(args, (tuple, list)):
        raise CaptureError(
            f"args is a {type(args).__name__}; give positional arguments as a tuple, as in "
            "capture(model, (x,))"
        )
    try:
        return describe_arguments(model.forward, args, kwargs)
    except InputError as error:
        raise CaptureError(f"{type(model).__name__}.forward: {error}") from None


class _Stored:
    """A parameter, buffer or constant of the model: its contents and all its names."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.names: list[str] = []


def _contents(model: nn.Module) -> dict[str, _Stored]:
    """Parameters and buffers by name; tied ones are the same object under several names."""
    found: dict[int, _Stored] = {}
    by_name: dict[str, _Stored] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            stored = found.setdefault(id(tensor), _Stored(tensor))
            stored.names.append(name)
            by_name[name] = stored
    return by_name


class _Capture:
    """One capture at work: the ends of the graph, around the translator."""

    def __init__(
        self, name: str, flat: FlatModel, program: ExportedProgram, contents: dict[str, _Stored]
    ) -> None:
        self.flat = flat
        self.program = program
        self.contents = contents
        self.builder = Builder(name)
        self.emitter = Emitter(self.builder)
        self.translator = Translator(self.emitter)
        self.memory = self.translator.memory
        self.inputs: list[Place] = []
        self.stored: dict[int, Place] = {}

    def graph(self) -> IRGraph:
        """The finished graph."""
        roots = self._roots()
        places = self.translator.walk(self.program.graph_module, roots)
        self.emitter.records = torch.is_grad_enabled()
        values = [self.emitter.seen(self.memory.read(place)) for place in places]
        outcome = self.flat.outcome
        assert outcome.result is not None
        count = sum(1 for _ in leaves(outcome.result))
        updates = self._updates() | self._assigned(outcome.assigned, values[count:])
        self._check_inputs()
        needed = [value.id for value in values[:count]] + [*updates, *updates.values()]
        remove_dead_code(self.builder.graph, needed)
        return self.builder.finish(
            values[:count],
            in_structure=self.flat.arguments,
            out_structure=outcome.result,
            updates=updates,
        )

    # --- what exists before the first node --------------------------------------------------

    def _roots(self) -> list[Place]:
        """A place for each placeholder of the program, in order."""
        names = (leaf.name for leaf in leaves(self.flat.arguments))
        placeholders = self.program.graph.find_nodes(op="placeholder")
        specs = self.program.graph_signature.input_specs
        return [
            self._input(next(names), node.meta["val"])
            if spec.kind is InputKind.USER_INPUT
            else self._stored_value(spec, node.meta["val"])
            for spec, node in zip(specs, placeholders, strict=True)
        ]

    def _input(self, name: str, spec: torch.Tensor) -> Place:
        value = self.builder.input(
            name,
            spec.shape,
            dtype_name(spec.dtype),
            strides=spec.stride(),
            device=str(spec.device),
        )
        self._let_flow(value)
        place = self.memory.root(spec, value, "input", name)
        self.inputs.append(place)
        return place

    def _stored_value(self, entry: InputSpec, spec: torch.Tensor) -> Place:
        """A parameter, a buffer or a constant; a tied one is the same place again."""
        if entry.kind not in _ROLES or entry.target is None:
            raise CaptureError(
                "the model computes with an object that a graph cannot hold, such as a "
                "torch.Generator or a script object; use tensors, and the default generator with "
                "torch.manual_seed"
            )
        name = entry.target.removeprefix(f"{PREFIX}.")
        role = _ROLES[entry.kind]
        stored = self.contents.get(name) or self._constant(name, entry.target)
        if id(stored) not in self.stored:
            value = self.builder.stored(role, stored.names[0], stored.tensor, names=stored.names)
            if stored.tensor.requires_grad:
                self._let_flow(value)
            self.stored[id(stored)] = self.memory.root(spec, value, role, name)
        return self.stored[id(stored)]

    def _let_flow(self, value: IRValue) -> None:
        """Gradients flow from ``value`` on, unless the capture itself stands under no_grad."""
        if torch.is_grad_enabled():
            self.emitter.let_flow(value)

    def _constant(self, name: str, target: str) -> _Stored:
        tensor = self.program.constants[target]
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
            raise CaptureError(
                f"the model computes with {name!r}, a tensor without contents that is neither "
                "parameter nor buffer; register it as a buffer and build the model inside "
                "`with sw.empty_weights():`"
            )
        self.contents[name] = stored = _Stored(tensor)
        stored.names.append(name)
        return stored

    # --- what is left after the last node ---------------------------------------------------

    def _updates(self) -> dict[int, int]:
        """The buffers that were written to, with their last contents."""
        return {
            place.first.id: self.memory.read(place).id
            for place in self.stored.values()
            if place.storage.version
        }

    def _assigned(self, names: Sequence[str], values: list[IRValue]) -> dict[int, int]:
        """The buffers that the model replaced, with the tensors it replaced them by."""
        updates = {}
        for name, value in zip(names, values, strict=True):
            place = self.stored[id(self.contents[name])]
            old = place.first
            if (value.shape, value.dtype) != (old.shape, old.dtype):
                raise CaptureError(
                    f"the model assigns {value.dtype}{list(value.shape)} to its buffer {name!r}, "
                    f"which is {old.dtype}{list(old.shape)}; a buffer keeps its shape and dtype"
                )
            updates[old.id] = value.id
        return updates

    def _check_inputs(self) -> None:
        """Report inputs that the model writes to: a graph leaves its inputs alone."""
        for storage in (place.storage for place in self.inputs):
            where = f"{line_before(storage.written)}the model writes to its input {storage.name!r}"
            if storage.seen < storage.version:
                raise CaptureError(
                    f"{where} and never reads it again, so that only its caller sees the change; "
                    "a graph leaves its inputs alone, so return the new tensor"
                )
            if storage.version:
                warnings.warn(
                    f"{where}; the graph computes the same and leaves the caller's tensor alone",
                    CaptureWarning,
                    stacklevel=4,
                )


_ROLES: dict[InputKind, Owner] = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}
