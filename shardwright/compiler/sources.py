"""What can be compiled: a module, a training step, or a graph; and where its tensors are.

Preparing a call gives one graph of operators whose stored values all have a tensor: the program's
own where it has one on the device, so that what a run changes is changed in the program; else one
that is made here and handed to the program before the first run. It changes nothing of the
program's.

A training step becomes one graph for one device by the way that pipelines take: a plan of one slot.
Its inputs are the captured ones in their order, but for the count of dropout's draws, which is
state here and continues with each run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.building.slots import Live, Localized, SlotGraph, live_parts
from shardwright.building.update import localize_step
from shardwright.compiler.guards import GuardedParts
from shardwright.compiler.replay import Mode
from shardwright.errors import DeviceError, ExecError, InputError, PlanError, WeightError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.execute import check_input
from shardwright.ir.graph import is_step, without_collection
from shardwright.ir.structure import Arguments, describe_arguments, flatten_call, leaves
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype
from shardwright.planning import PreparedStep
from shardwright.planning.assemble import step_of
from shardwright.planning.mesh_plan import plan_over_mesh
from shardwright.planning.options import StepOptions
from shardwright.planning.rules import PIPELINE
from shardwright.torch_internals import note_step
from shardwright.tracing import CapturedStep, capture, capture_step
from shardwright.tracing.closures import find_closure
from shardwright.tracing.dropout import RNG
from shardwright.tracing.rates import Rates

Described = tuple[Arguments, list[Tensor]]
"""A call: how it folds, and its tensors."""


def _nothing() -> None:
    """A program that never puts other tensors in the place of its own needs nothing."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call of a program as a graph.

    graph
        Its inputs are the call's tensors and the learning rates; ``tensors`` has every stored
        value's.
    arguments
        How the call folds into these tensors.
    rates
        What the other inputs are, and the schedulers that a step moves on; None where it has none.
    begin
        What is done before each run.
    """

    graph: IRGraph
    arguments: Arguments
    rates: Rates | None = None
    begin: Callable[[], None] = _nothing

    @property
    def names(self) -> list[str]:
        """The names of the call's tensors."""
        return [leaf.name for leaf in leaves(self.arguments)]

    @property
    def rate_inputs(self) -> list[int]:
        """The inputs that are learning rates: they stand before what ``**kwargs`` take."""
        rates = set() if self.rates is None else self.rates.values.keys()
        return [v for v in self.graph.inputs if self.graph.values[v].name in rates]

    @property
    def call_inputs(self) -> list[int]:
        """The inputs that are the call's tensors, in its order."""
        rates = set(self.rate_inputs)
        return [value_id for value_id in self.graph.inputs if value_id not in rates]


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module; its parameters and buffers are the graph's."""

    model: nn.Module
    mode: Mode = "inference"

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Described:
        """A call of the module's forward."""
        return describe_arguments(self.model.forward, args, kwargs)

    def prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> Prepared:
        """The module's graph."""
        graph = capture(self.model, tuple(args), kwargs)
        for value in graph.stored():
            graph.tensors[value.id] = _own(value, graph.tensors.get(value.id), device)
        assert graph.in_structure is not None
        return Prepared(graph, graph.in_structure)

    def tensors(self) -> Sequence[Tensor]:
        """Parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    def parts(self) -> GuardedParts:
        """The module."""
        return GuardedParts([self.model])


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph, which is for one set of shapes."""

    graph: IRGraph
    mode: Mode = "inference"

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Described:
        """A call of the graph. Raises InputError where the shapes are others."""
        graph = self.graph
        if graph.in_structure is None:
            raise ExecError(f"the graph {graph.name!r} has no structure of inputs; finish it first")
        tensors = flatten_call(graph.in_structure, args, kwargs)
        pairs = zip(graph.inputs, leaves(graph.in_structure), tensors, strict=True)
        for value_id, leaf, tensor in pairs:
            check_input(graph.values[value_id], leaf.name, tensor)
        return graph.in_structure, tensors

    def prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> Prepared:
        """The graph with its tensors, those of state that begins with zeros made."""
        arguments, _ = self.describe(args, kwargs)
        for value in self.graph.stored():
            own = self.graph.tensors.get(value.id)
            if own is None and value.init == "zeros":
                own = _zeros(value, device)
            self.graph.tensors[value.id] = _own(value, own, device)
        return Prepared(self.graph, arguments)

    def tensors(self) -> Sequence[Tensor]:
        """The stored values that have contents."""
        return list(self.graph.tensors.values())

    def parts(self) -> GuardedParts:
        """A graph depends on nothing else."""
        return GuardedParts()


@dataclass(slots=True)
class StepSource:
    """A training step: forward, backward and update are one graph.

    ``made`` are stored values that the program does not have, by name: state that the first step
    makes, and the count of dropout's draws. All captures share them.
    """

    step_fn: Callable[..., Any]
    seed: int = 0
    mode: Mode = "train"
    made: dict[str, Tensor] = field(default_factory=dict)

    def describe(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Described:
        """A call of the step."""
        return describe_arguments(self.step_fn, args, kwargs)

    def prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> Prepared:
        """The whole step."""
        arguments, _ = self.describe(args, kwargs)
        captured = capture_step(self.step_fn, args, kwargs, seed=self.seed)
        graph = whole_step(captured, device.type)
        for value in graph.stored():
            graph.tensors[value.id] = self._tensor(value, graph.tensors.get(value.id), device)
        names = {value.names[0] for value in graph.stored()}
        made = {name: tensor for name, tensor in self.made.items() if name in names}
        rates = Rates(captured.rates, None, captured.schedulers)
        return Prepared(graph, arguments, rates, StateBinding.of(captured, names, made))

    def tensors(self) -> Sequence[Tensor]:
        """What the step closes over: parameters first."""
        closure = find_closure(self.step_fn)
        parameters = (p for module in closure.modules.values() for p in module.parameters())
        return [*parameters, *closure.tensors.values()]

    def parts(self) -> GuardedParts:
        """The modules and optimizers that the step closes over."""
        closure = find_closure(self.step_fn)
        modules, optimizers = closure.modules.values(), closure.optimizers.values()
        return GuardedParts([*modules], [*optimizers], closure.functions, trains=True)

    def _tensor(self, value: IRValue, own: Tensor | None, device: torch.device) -> Tensor:
        """Where a stored value lies."""
        name = value.names[0]
        if own is not None and (own.device == device or value.role != "state"):
            self.made.pop(name, None)
            return _own(value, own, device)
        if name not in self.made:
            self.made[name] = _zeros(value, device)
            if own is not None:
                self.made[name].copy_(own)
        return self.made[name]


def _own(value: IRValue, tensor: Tensor | None, device: torch.device) -> Tensor:
    """The program's tensor, if it is where the program runs. Raises DeviceError, WeightError."""
    name = value.names[0]
    if tensor is None or tensor.is_meta:
        raise WeightError(
            f"{value.role} {name!r} has no contents (the model was built on the meta device); "
            "load them before the model is compiled"
        )
    if tensor.device != device:
        raise DeviceError(
            f"{value.role} {name!r} is on {tensor.device}, but the program is compiled for "
            f"{device}; move the model there first, or give device={str(tensor.device)!r}"
        )
    return tensor.detach()


def _zeros(value: IRValue, device: torch.device) -> Tensor:
    strides = value.strides or contiguous_strides(value.shape)
    dtype = torch_dtype(value.dtype)
    return torch.empty_strided(value.shape, strides, dtype=dtype, device=device).zero_()


@dataclass(frozen=True, slots=True)
class StateBinding:
    """Gradients and state that a plan is bound to, kept where the program looks for them.

    Others may put other tensors there between two runs: ``zero_grad()``, a loaded state, an eager
    step, another compiled one. Called before each run, this takes over what they have come to have.
    """

    gradients: Sequence[tuple[Tensor, Tensor]]
    """Parameters and their gradients."""
    states: Sequence[tuple[Optimizer, Tensor, Mapping[str, Tensor]]]
    """Of each parameter its optimizer, and its state by key."""

    @classmethod
    def of(
        cls, captured: CapturedStep, names: Collection[str], made: Mapping[str, Tensor]
    ) -> StateBinding:
        """Those stored values of a step, by ``names``, that are made here or the program's now."""
        gradients = []
        for name, parameter in captured.parameters.items():
            gradient = made.get(f"grad.{name}", parameter.grad)
            if f"grad.{name}" in names and gradient is not None:
                gradients.append((parameter, gradient))
        keys: dict[str, list[str]] = {}
        for stored in names:
            owner, _, key = stored.rpartition(".")
            keys.setdefault(owner, []).append(key)
        states = []
        for name, parameter, optimizer in captured.optimized():
            owner, held = f"optimizer.{name}", optimizer.state.get(parameter, {})
            found = {key: made.get(f"{owner}.{key}", held.get(key)) for key in keys.get(owner, ())}
            tensors = {key: t for key, t in found.items() if isinstance(t, Tensor)}
            states.append((optimizer, parameter, tensors))
        return cls(gradients, states)

    def __call__(self) -> None:
        """Put in place what is not."""
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:
                _take_contents(gradient, parameter.grad)
                parameter.grad = gradient
        for optimizer, parameter, state in self.states:
            held = optimizer.state[parameter] if state else {}
            for key, tensor in state.items():
                if held.get(key) is not tensor:
                    _take_contents(tensor, held.get(key))
                    held[key] = tensor
            note_step(optimizer)


@torch.no_grad()
def _take_contents(tensor: Tensor, found: Any) -> None:
    """What the program has instead; where it has nothing, it begins with zeros."""
    if isinstance(found, Tensor):
        tensor.copy_(found)
    else:
        tensor.fill_(found if isinstance(found, int | float) else 0)


Source = ModuleSource | GraphSource | StepSource
"""A program that can be prepared for calls of several shapes.

mode
    Whether a run changes what it is run with.
describe
    A call taken apart. Raises InputError.
prepare
    A call as a graph. Raises CaptureError, DeviceError, WeightError.
tensors
    Tensors of the program: where they are, it runs.
parts
    What of the program a capture depends on beside its arguments.
"""


def source_of(program: nn.Module | IRGraph | Callable[..., Any], seed: int = 0) -> Source:
    """What a program is. Raises InputError where it is none of these."""
    if isinstance(program, nn.Module):
        return ModuleSource(program)
    if isinstance(program, IRGraph):
        return GraphSource(program, "train" if program.updates else "inference")
    if callable(program) and not isinstance(program, type):
        return StepSource(program, seed)
    found = program if isinstance(program, type) else type(program)
    raise InputError(
        "compile takes an nn.Module, an IRGraph, or a function that runs a step of training; "
        f"found {found!r}. Tasks of a pipeline are lowered by sw.lower"
    )


# --- a training step as one graph for one device --------------------------------------------------


@without_collection()
def whole_step(captured: CapturedStep, device_kind: str = "cpu") -> IRGraph:
    """The graph of a step on one device of this kind.

    Raises PlanError where the step has not one backward, GraphError where an operator has no
    gradient.
    """
    if not is_step(captured.graph):
        raise PlanError(
            f"the step {captured.graph.name!r} calls no backward; a step computes a loss, calls "
            "its backward() and lets an optimizer step. A forward is compiled as a module"
        )
    captured.graph.check()
    planned = plan_over_mesh(captured.graph, {PIPELINE: 1}, PIPELINE, ("d0",), StepOptions())
    step = step_of(captured.graph, planned)
    localized = localize_step(step, planned, device_kind)
    return _WholeStep(captured.graph, step, localized).written()


class _WholeStep:
    """Writes the one slot of a localized step as a graph of its own."""

    def __init__(self, captured: IRGraph, step: PreparedStep, localized: Localized) -> None:
        ((self._device, self._slot),) = localized.slots.items()
        self._captured = captured
        self._step = step
        self._localized = localized
        self._builder = Builder(captured.name)
        self._here: dict[int, int] = {}
        """Values of the slot to values of the graph that is written."""

    def written(self) -> IRGraph:
        """The graph."""
        live = live_parts(self._localized)[self._device]
        updates = self._updates(live)
        draws = self._inputs()
        self._stored({*live.values, *updates})
        for node in _live_nodes(self._slot, live):
            self._builder.copy_node(self._slot.builder.graph, node, self._here)
        found = {self._here[old]: self._here[new] for old, new in updates.items()}
        if draws is not None:
            (after,) = self._builder.call("aten._foreach_add.Scalar", [draws], 1)
            found[draws.id] = after.id
        return self._builder.finish(
            [self._here[part.value] for (part,) in self._localized.outputs],
            out_structure=self._captured.out_structure,
            updates=found,
        )

    def _updates(self, live: Live) -> Mapping[int, int]:
        """Stored values of the slot to their new contents, where these are made."""
        return {
            old.value: new.value for old, new in self._localized.updates if new.value in live.wanted
        }

    def _inputs(self) -> IRValue | None:
        """Declare the inputs; gives the count of draws, if the step has one."""
        declared: dict[int, int] = {}
        draws = None
        drops = any(node.op == DROPOUT for node in self._captured.nodes)
        pairs = zip(self._step.graph.inputs, self._captured.inputs, strict=True)
        for value_id, original in pairs:
            value = self._captured.values[original]
            if drops and value.name == RNG:
                draws = self._builder.copy_value(self._captured, value, role="state")
                draws.names, draws.init = (RNG,), "zeros"
                declared[value_id] = draws.id
            else:
                declared[value_id] = self._builder.copy_value(self._captured, value).id
        for value_id, parts in self._localized.inputs.items():
            for part in parts:
                self._here[part.value] = declared[self._step.whole.get(value_id, value_id)]
        return draws

    def _stored(self, used: set[int]) -> None:
        """Declare the stored values that are used, with the program's tensors."""
        contents = {
            value.names[0]: self._captured.tensors[value.id]
            for value in self._captured.stored()
            if value.id in self._captured.tensors
        }
        graph = self._slot.builder.graph
        for value in graph.stored():
            if value.id not in used:
                continue
            copy = self._builder.copy_value(graph, value)
            copy.placements = None
            self._here[value.id] = copy.id
            if (tensor := contents.get(value.names[0])) is not None:
                self._builder.graph.tensors[copy.id] = tensor


def _live_nodes(slot: SlotGraph, live: Live) -> Iterator[IRNode]:
    return (item for item in slot.items if isinstance(item, IRNode) and item.id in live.nodes)
