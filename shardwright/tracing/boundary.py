"""Where a graph begins and ends: inputs and stored values before it, outputs and updates after it.

One tensor is one value, whatever its names. Nodes that nothing needs are dropped, and every stored
value that the program changed is among the updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir.builder import Builder
from shardwright.ir.graph import IRGraph, remove_dead_code
from shardwright.ir.structure import Arguments, leaves
from shardwright.ir.tensor_meta import dtype_name
from shardwright.ir.values import IRValue
from shardwright.torch_internals import unsaved_buffers
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.failures import CaptureWarning, line_before
from shardwright.tracing.flat import PREFIX, FlatModel, parts_of
from shardwright.tracing.functionalize import Functionalizer
from shardwright.tracing.memory import Owner, TensorView
from shardwright.tracing.origins import Scopes
from shardwright.tracing.tracer import TracedProgram
from shardwright.tracing.unmerge import unmerge_linear


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


class TracedGraph:
    """A traced program on its way to a graph.

    ``contents`` are the tensors it holds, by their paths behind the prefix; ``roots`` are the
    paths before those of the program's modules, ``constants`` names for other tensors that it uses,
    by id. ``updates_parameters`` says that it may write to its parameters.
    """

    def __init__(
        self,
        name: str,
        flat: FlatModel,
        program: TracedProgram,
        contents: Mapping[str, StoredTensor],
        roots: tuple[str, ...] = (PREFIX,),
        constants: Mapping[int, str] | None = None,
        *,
        updates_parameters: bool = False,
    ) -> None:
        self.flat = flat
        self.builder = Builder(name)
        self.emitter = GraphEmitter(self.builder)
        self.functionalizer = Functionalizer(
            self.emitter, Scopes(flat, roots), updates_parameters=updates_parameters
        )
        self.memory = self.functionalizer.memory
        self.inputs: list[TensorView] = []
        self._program = program
        self._contents = contents
        self._constants = constants or {}
        self._found: dict[int, StoredTensor] = {}
        self._stored: dict[int, TensorView] = {}

    def finish(self, stacklevel: int) -> IRGraph:
        """The graph; warnings are of the line ``stacklevel`` frames up, 1 being the caller's.

        Raises CaptureError.
        """
        given = self._given(leaf.name for leaf in leaves(self.flat.arguments))
        returned = self.functionalizer.walk(self._program.graph, given, self._constant)
        self.emitter.records = torch.is_grad_enabled()
        values = [self.emitter.seen(self.memory.read(tensor)) for tensor in returned]
        result = self.flat.result
        assert result is not None
        count = sum(1 for _ in leaves(result))
        outputs, rest = values[:count], values[count:]
        updates = self.updates(outputs, rest)
        self._check_inputs(stacklevel + 1)
        needed = [value.id for value in outputs] + [*updates, *updates.values()]
        remove_dead_code(self.builder.graph, needed)
        self.functionalizer.backwards.check()
        unmerge_linear(self.builder.graph, needed)
        return self.builder.finish(
            outputs, in_structure=self.arguments(), out_structure=result, updates=updates
        )

    def arguments(self) -> Arguments:
        """The structure of the graph's inputs."""
        return self.flat.arguments

    def updates(self, outputs: Sequence[IRValue], rest: Sequence[IRValue]) -> dict[int, int]:
        """What replaces stored values, by id: those written to, and buffers that were assigned.

        ``rest`` is what the program returns behind its result.
        """
        updates = {
            tensor.first.id: self.memory.read(tensor).id
            for tensor in self._stored.values()
            if tensor.storage.version
        }
        for name, value in zip(self.flat.assigned, rest, strict=False):
            old = self._stored[id(self._contents[name])].first
            if (value.shape, value.dtype) != (old.shape, old.dtype):
                raise CaptureError(
                    f"the model assigns {value.dtype}{list(value.shape)} to its buffer {name!r}, "
                    f"which is {old.dtype}{list(old.shape)}; a buffer keeps its shape and dtype"
                )
            updates[old.id] = value.id
        return updates

    def value_before(self, stored: StoredTensor) -> IRValue:
        """The value of a stored tensor before the program."""
        return self._stored[id(stored)].first

    # --- what exists before the first node --------------------------------------------------

    def _given(self, input_names: Iterable[str]) -> list[TensorView]:
        """The tensors of the program's placeholders, in order. Raises CaptureError."""
        specs = (node.meta["val"] for node in self._program.graph.find_nodes(op="placeholder"))
        stored = [
            self._stored_value(self._contents[path], role, spec)
            for (path, role), spec in zip(self._program.stored, specs, strict=False)
        ]
        self.inputs = [
            self._input(name, spec) for name, spec in zip(input_names, specs, strict=True)
        ]
        return stored + self.inputs

    def _constant(self, target: str) -> TensorView:
        """A tensor that the program merely uses. Raises CaptureError."""
        if target not in self._program.constants:
            raise CaptureError(
                "the model computes with an object that a graph cannot hold, such as a "
                "torch.Generator or a script object; use tensors, and the default generator with "
                "torch.manual_seed"
            )
        name, tensor, spec = self._program.constants[target]
        by_id = {id(stored.tensor): stored for stored in self._contents.values()}
        if id(tensor) in by_id:
            return self._stored[id(by_id[id(tensor)])]
        if tensor.is_meta:
            raise CaptureError(
                f"the model computes with {name!r}, a tensor without contents that is neither "
                "parameter nor buffer; register it as a buffer and build the model inside "
                "`with sw.empty_weights():`"
            )
        name = self._constants.get(id(tensor), name)
        stored = self._found.setdefault(id(tensor), StoredTensor(tensor, [name]))
        return self._stored_value(stored, "constant", spec)

    def _input(self, name: str, spec: torch.Tensor) -> TensorView:
        dtype, device = dtype_name(spec.dtype), str(spec.device)
        value = self.builder.input(name, spec.shape, dtype, strides=spec.stride(), device=device)
        self._let_flow(value)
        return self.memory.root(spec, value, "input", name)

    def _stored_value(self, stored: StoredTensor, role: Owner, spec: torch.Tensor) -> TensorView:
        """A parameter, a buffer or a constant; a tied one is the same tensor again."""
        if id(stored) not in self._stored:
            role = stored.role or role
            value = self.builder.stored(
                role,
                stored.names[0],
                stored.tensor,
                names=stored.names,
                persistent=stored.persistent,
            )
            if stored.tensor.requires_grad:
                self._let_flow(value)
            self._stored[id(stored)] = self.memory.root(spec, value, role, stored.names[0])
        return self._stored[id(stored)]

    def _let_flow(self, value: IRValue) -> None:
        """Gradients flow from ``value`` on, unless the capture itself is under no_grad."""
        if torch.is_grad_enabled():
            self.emitter.let_flow(value)

    # --- what is left after the last node ---------------------------------------------------

    def _check_inputs(self, stacklevel: int) -> None:
        """Report inputs that the model writes to: a graph leaves its inputs alone."""
        for storage in (tensor.storage for tensor in self.inputs):
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
