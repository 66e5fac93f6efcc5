"""Where a graph begins and ends: inputs and stored values before it, updates after it.

Comes in: an exported program, and what the tensors are that it takes beside its inputs. Goes out:
a `TensorView` for each of the program's placeholders, and, once it is translated, which stored
values have new contents. What always holds: one tensor is one value, whatever its names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir.tensor_meta import dtype_name
from shardwright.ir.values import IRValue
from shardwright.torch_internals import unsaved_buffers
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.export import TracedProgram
from shardwright.tracing.failures import CaptureWarning, line_before
from shardwright.tracing.memory import Owner, ProgramMemory, TensorView
from shardwright.tracing.wrapped import parts_of


@dataclass(eq=False)
class StoredTensor:
    """A tensor that exists before the program: its contents and all its names.

    ``role`` is None where it follows from how the module holds the tensor.
    ``persistent`` says whether a checkpoint holds it.
    """

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    role: Owner | None = None
    persistent: bool = True


def contents_of(model: nn.Module) -> dict[str, StoredTensor]:
    """Parameters and buffers by name; tied ones are the same object under several names."""
    found: dict[int, StoredTensor] = {}
    by_name: dict[str, StoredTensor] = {}
    unsaved = set(_unsaved(model))
    for named in (model.named_parameters, model.named_buffers):
        for path, tensor in named(remove_duplicate=False):
            for name, part in parts_of(path, tensor):
                stored = found.setdefault(id(part), StoredTensor(part))
                stored.names.append(name)
                by_name[name] = stored
    for stored in found.values():
        stored.persistent = not unsaved.issuperset(stored.names)
    return by_name


def _unsaved(model: nn.Module) -> Iterator[str]:
    """The names of buffers that no checkpoint holds."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name in unsaved_buffers(module):
            yield f"{path}.{name}" if path else name


class Boundary:
    """The ends of one graph.

    ``contents`` are its stored tensors by the names in the program, and ``constants`` names for
    tensors that the program merely uses, by id.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        memory: ProgramMemory,
        program: TracedProgram,
        contents: Mapping[str, StoredTensor],
        constants: Mapping[int, str],
    ) -> None:
        self._builder = emitter.builder
        self._emitter = emitter
        self._memory = memory
        self._program = program
        self._contents = dict(contents)
        self._constants = constants
        self._found: dict[int, StoredTensor] = {}
        self._inputs: list[TensorView] = []
        self._places: dict[int, TensorView] = {}

    # --- what exists before the first node --------------------------------------------------

    def roots(self, input_names: Iterable[str]) -> list[TensorView]:
        """A place for each placeholder of the program, in order. Raises CaptureError."""
        specs = (node.meta["val"] for node in self._program.graph.find_nodes(op="placeholder"))
        stored = [
            self._stored_value(self._contents[path], role, spec)
            for (path, role), spec in zip(self._program.stored, specs, strict=False)
        ]
        return stored + [
            self._input(name, spec) for name, spec in zip(input_names, specs, strict=True)
        ]

    def constant(self, target: str) -> TensorView:
        """A place for a tensor that the program merely uses. Raises CaptureError."""
        if target not in self._program.constants:
            raise CaptureError(
                "the model computes with an object that a graph cannot hold, such as a "
                "torch.Generator or a script object; use tensors, and the default generator with "
                "torch.manual_seed"
            )
        name, tensor, spec = self._program.constants[target]
        by_id = {id(stored.tensor): stored for stored in self._contents.values()}
        if id(tensor) in by_id:
            return self._places[id(by_id[id(tensor)])]
        if tensor.is_meta:
            raise CaptureError(
                f"the model computes with {name!r}, a tensor without contents that is neither "
                "parameter nor buffer; register it as a buffer and build the model inside "
                "`with sw.empty_weights():`"
            )
        name = self._constants.get(id(tensor), name)
        stored = self._found.setdefault(id(tensor), StoredTensor(tensor, [name]))
        return self._stored_value(stored, "constant", spec)

    @property
    def input_ids(self) -> list[int]:
        """The values of the inputs, in the order of their names."""
        return [place.first.id for place in self._inputs]

    def place_of(self, stored: StoredTensor) -> TensorView | None:
        """Where a stored tensor stands; None where the program does not take it."""
        return self._places.get(id(stored))

    def _input(self, name: str, spec: torch.Tensor) -> TensorView:
        value = self._builder.input(
            name,
            spec.shape,
            dtype_name(spec.dtype),
            strides=spec.stride(),
            device=str(spec.device),
        )
        self._let_flow(value)
        place = self._memory.root(spec, value, "input", name)
        self._inputs.append(place)
        return place

    def _stored_value(self, stored: StoredTensor, role: Owner, spec: torch.Tensor) -> TensorView:
        """A parameter, a buffer or a constant; a tied one is the same place again."""
        if id(stored) not in self._places:
            role = stored.role or role
            value = self._builder.stored(
                role,
                stored.names[0],
                stored.tensor,
                names=stored.names,
                persistent=stored.persistent,
            )
            if stored.tensor.requires_grad:
                self._let_flow(value)
            self._places[id(stored)] = self._memory.root(spec, value, role, stored.names[0])
        return self._places[id(stored)]

    def _let_flow(self, value: IRValue) -> None:
        """Gradients flow from ``value`` on, unless the capture itself stands under no_grad."""
        if torch.is_grad_enabled():
            self._emitter.let_flow(value)

    # --- what is left after the last node ---------------------------------------------------

    def updates(self) -> dict[int, int]:
        """The stored values that were written to, with their last contents."""
        return {
            place.first.id: self._memory.read(place).id
            for place in self._places.values()
            if place.storage.version
        }

    def assigned(self, names: Sequence[str], values: Sequence[IRValue]) -> dict[int, int]:
        """The buffers that the model replaced, with the tensors it replaced them by."""
        updates = {}
        for name, value in zip(names, values, strict=True):
            place = self._places[id(self._contents[name])]
            old = place.first
            if (value.shape, value.dtype) != (old.shape, old.dtype):
                raise CaptureError(
                    f"the model assigns {value.dtype}{list(value.shape)} to its buffer {name!r}, "
                    f"which is {old.dtype}{list(old.shape)}; a buffer keeps its shape and dtype"
                )
            updates[old.id] = value.id
        return updates

    def check_inputs(self, stacklevel: int) -> None:
        """Report inputs that the model writes to: a graph leaves its inputs alone."""
        for storage in (place.storage for place in self._inputs):
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
                    stacklevel=stacklevel + 1,
                )
