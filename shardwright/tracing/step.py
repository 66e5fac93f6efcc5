"""`compile_ir`: from a training step and example inputs to an IRGraph.

The graph has the forward's operators at the level of `capture`, and a marker for each backward,
zeroing, clipping and optimizer's step, in the program's order. Nothing is computed, and the
caller's parameters, gradients, optimizers, schedulers, buffers, random numbers and Python objects
are afterwards what they were, on every path.

    find             models, optimizers and tensors the step closes over     closures, step_model
    trace            the step runs on fake tensors and leaves effects        tracer, recorder
    functionalize    its program becomes nodes, effects become markers       boundary, effects
    dropout          becomes a function of place and a counter               dropout
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from shardwright.errors import CaptureError, InputError
from shardwright.ir.graph import IRGraph, live_values
from shardwright.ir.operators import is_marker
from shardwright.ir.structure import (
    Arguments,
    CallArguments,
    describe_arguments,
    leaves,
    with_keyword,
)
from shardwright.ir.values import IRValue
from shardwright.torch_internals import schedulers_in
from shardwright.tracing.boundary import TracedGraph
from shardwright.tracing.closures import find_closure, unchanged
from shardwright.tracing.dropout import philox_dropout
from shardwright.tracing.effects import EffectEmitter, hyper_parameters
from shardwright.tracing.failures import CaptureWarning, line_before
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.recorder import Recorder
from shardwright.tracing.step_model import ROOTS, StepModel
from shardwright.tracing.tracer import TracedProgram, one_at_a_time, trace_program


@dataclass(frozen=True)
class Rate:
    """A learning rate that the graph reads, and the constants beside it.

    ``input`` is its name among the graph's inputs. ``marker`` is the group's step in the graph, and
    ``constants`` are the hyper-parameters that the graph holds.
    """

    input: str
    optimizer: Optimizer
    group: int
    marker: str
    constants: Mapping[str, Any]

    @property
    def value(self) -> float:
        """The rate that the optimizer has now."""
        return float(self.optimizer.param_groups[self.group]["lr"])

    def changed(self) -> dict[str, Any]:
        """The optimizer's hyper-parameters that are no longer those of the graph."""
        now = hyper_parameters(self.marker, self.optimizer.param_groups[self.group])
        return {name: now[name] for name, value in self.constants.items() if now[name] != value}


@dataclass(frozen=True)
class CapturedStep:
    """A step's graph, and the objects of the program that belong to it.

    ``parameters`` are the program's own tensors by the graph's names, ``rates`` are in the order
    of the graph's inputs, ``schedulers`` in the order in which the step calls them.
    """

    graph: IRGraph
    parameters: dict[str, torch.Tensor]
    rates: tuple[Rate, ...]
    schedulers: tuple[LRScheduler, ...]

    def optimized(self) -> Iterator[tuple[str, torch.Tensor, Optimizer]]:
        """Each parameter that an optimizer of the step updates, with its name."""
        names = {id(tensor): name for name, tensor in self.parameters.items()}
        for rate in self.rates:
            for parameter in rate.optimizer.param_groups[rate.group]["params"]:
                if id(parameter) in names:
                    yield names[id(parameter)], parameter, rate.optimizer


def compile_ir(
    step_fn: Callable[..., Any],
    *example_inputs: Any,
    name: str = "train_step",
    seed: int = 0,
    **example_kwargs: Any,
) -> IRGraph:
    """Capture the graph of a training step, ``step_fn(*example_inputs, **example_kwargs)``.

    ``step_fn`` is written for one device: it computes a loss, calls ``backward()``, an optimizer's
    ``step()`` and ``zero_grad()``, and reaches its models and optimizers as any Python function
    does. It runs once on fake tensors: nothing is computed, and the caller's state does not change.
    The graph takes the input tensors and, by keyword, a learning rate (``lr``, f64[]) for each
    parameter group that is stepped. ``seed`` seeds its dropout.

    Raises CaptureError if the step cannot be captured, with the line and what to do.
    """
    captured = capture_step(step_fn, example_inputs, example_kwargs, name=name, seed=seed)
    for scheduler in captured.schedulers:
        if cycle := momentum_cycle(scheduler):
            warnings.warn(_CYCLES.format(cycle=cycle), CaptureWarning, stacklevel=2)
    return captured.graph


def capture_step(
    step_fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "train_step",
    seed: int = 0,
) -> CapturedStep:
    """As `compile_ir`, with the program's objects that belong to the graph."""
    arguments, tensors = _take_apart(step_fn, args, kwargs or {})
    closure = find_closure(step_fn)
    with one_at_a_time(), unchanged(closure) as changed:
        recorder = Recorder(StepModel(closure), closure)
        flat = _FlatStep(step_fn, recorder, arguments)
        program = trace_program(flat, tensors, stacklevel=3)
    for variable in dict.fromkeys(changed):
        warnings.warn(_CHANGES.format(name=variable), CaptureWarning, stacklevel=2)
    step = StepGraph(name, flat, program, recorder)
    graph = philox_dropout(step.finish(stacklevel=3), seed)
    if recorder.idle_optimizers and not updates_parameters(graph):
        raise CaptureError(_NO_STEP.format(names=", ".join(recorder.idle_optimizers)))
    rates = (
        Rate(name, group.optimizer, group.index, group.op, group.attrs)
        for name, group, _ in step.effects.rates
    )
    return CapturedStep(graph, recorder.model.originals, tuple(rates), tuple(recorder.scheduled))


def momentum_cycle(scheduler: LRScheduler) -> str | None:
    """What a scheduler changes beside the learning rate, in words; None if it is known of none."""
    for each in schedulers_in(scheduler):
        if isinstance(each, (OneCycleLR, CyclicLR)) and each.cycle_momentum:
            name = "betas[0]" if each.use_beta1 else "momentum"
            for index, group in enumerate(each.optimizer.param_groups):
                low, high = group["base_momentum"], group["max_momentum"]
                if low != high:
                    return (
                        f"the {type(each).__name__} moves {name} of parameter group {index} "
                        f"between {low} and {high} (cycle_momentum=True, which is torch's default)"
                    )
    return None


def updates_parameters(graph: IRGraph) -> bool:
    """Whether a step changes a parameter, by an optimizer or by hand."""
    return any(graph.values[value_id].role == "param" for value_id in graph.updates)


_NO_STEP = (
    "the step computes gradients and holds the optimizer {names}, but takes no step with it in the "
    "call that was recorded: a graph does at every step what this call did, so nothing would be "
    "trained; call optimizer.step() in every call of the step function, and let microbatches= add "
    "up gradients in place of a count of calls"
)
_CYCLES = (
    "{cycle}, and the graph holds it as a constant: of what a scheduler changes, only the learning "
    "rate is an input; make the scheduler with cycle_momentum=False, or run the step by sw.compile"
)
_CHANGES = (
    "the step changes {name!r}, which is no tensor, while it is recorded: the graph does at every "
    "step what this call did, so whatever depends on {name!r} (a count, a branch, a list to read "
    "later) belongs outside of the step"
)


def _take_apart(
    step_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Arguments, list[torch.Tensor]]:
    if not callable(step_fn):
        raise CaptureError(f"compile_ir takes a function, found {step_fn!r}")
    try:
        return describe_arguments(step_fn, args, kwargs)
    except InputError as error:
        name = getattr(step_fn, "__qualname__", type(step_fn).__qualname__)
        raise CaptureError(f"{name}: {error}") from None


class _FlatStep(FlatModel):
    """A step function as a module of flat tensors."""

    returns_tensors = False

    def __init__(
        self, step_fn: Callable[..., Any], recorder: Recorder, arguments: Arguments
    ) -> None:
        super().__init__(recorder.model, arguments)
        self.step_fn = step_fn
        self.recorder = recorder

    def run(self, call: CallArguments) -> Any:
        with self.recorder.recording():
            return self.step_fn(*call.args, **call.kwargs)

    def rest(self) -> list[torch.Tensor]:
        """The gradients that the next step may read."""
        parameters = self.recorder.parameters
        return parameters.gradients(parameters.left)


# --- the step as a graph --------------------------------------------------------------------------
#
# A gradient that exists before the step is state only if something that the step leaves behind
# depends on it, and then it has an update.


class StepGraph(TracedGraph):
    """One traced step on its way to a graph."""

    def __init__(
        self, name: str, flat: FlatModel, program: TracedProgram, recorder: Recorder
    ) -> None:
        model, parameters = recorder.model, recorder.parameters
        super().__init__(
            name, flat, program, model.contents, ROOTS, model.constants, updates_parameters=True
        )
        self.model, self.parameters = model, parameters
        self.effects = EffectEmitter(
            self.emitter, self.memory, recorder.recorded, model.originals, parameters.carried
        )
        self.functionalizer.effects = self.effects.emit

    def updates(self, outputs: Sequence[IRValue], rest: Sequence[IRValue]) -> dict[int, int]:
        """Updates of buffers, parameters, optimizers' state, and gradients that go on."""
        count = len(self.flat.assigned)
        _check_gradients(self.builder.graph)
        updates = super().updates(outputs, rest) | self.effects.updates()
        before = {name: self._gradient_before(name) for name in self.parameters.left}
        gradients = {value.id for value in before.values()}
        updates = {old: new for old, new in updates.items() if old not in gradients}
        left = rest[count:]
        after = dict(zip(self.parameters.existing(self.parameters.left), left, strict=True))
        needed = [*(value.id for value in (*outputs, *left)), *updates, *updates.values()]
        live = live_values(self.builder.graph, needed)
        for name, value in before.items():
            if value.id in live:
                last = after.get(name) or self.effects.zeros_like(value)
                updates[value.id] = last.id
        return updates

    def _gradient_before(self, name: str) -> IRValue:
        """The state that is a parameter's gradient before the step."""
        stored = self.model.gradient_state(name)
        if stored is None:
            return self.effects.gradients[name]
        return self.value_before(stored)

    def arguments(self) -> Arguments:
        """The call's structure, with the learning rates as keywords; orders the graph's inputs."""
        rates = {rate.input: rate.value for rate in self.effects.rates}
        arguments = self.flat.arguments
        for name in rates:
            _check_free(arguments, name)
            arguments = with_keyword(arguments, name)
        given = (tensor.first.id for tensor in self.inputs)
        self.builder.graph.inputs = [
            rates[leaf.name].id if leaf.name in rates else next(given) for leaf in leaves(arguments)
        ]
        return arguments


def _check_gradients(graph: IRGraph) -> None:
    """Raise CaptureError where a gradient would flow through what has none in a graph."""
    flowing = {value.id for value in graph.values.values() if value.role == "param"}
    for node in graph.nodes:
        if node.op != "aten.detach.default" and not flowing.isdisjoint(node.inputs):
            flowing.update(node.outputs)
    wanted: set[int] = set()
    for node in reversed(graph.nodes):
        if node.op == "Backward":
            wanted.update(node.inputs)
        elif not is_marker(node.op) and not wanted.isdisjoint(node.outputs):
            advice = _NO_GRADIENT.get(node.op.rpartition(".")[0])
            reached = not flowing.isdisjoint(node.inputs) and node.attrs.get("sparse", True)
            if advice is not None and reached:
                raise CaptureError(f"{line_before(node.source)}{advice}")
            if node.op != "aten.detach.default":
                wanted.update(node.inputs)


_SPARSE = (
    "an embedding with sparse=True has sparse gradients, and a graph's tensors are dense: leave "
    "sparse=True out"
)
_QUANTILE = (
    "torch resizes tensors in the gradient of a quantile, which a graph cannot: take it under "
    "torch.no_grad(), or interpolate between elements of x.sort().values"
)
_NO_GRADIENT = {
    "aten.embedding": _SPARSE,
    "aten.embedding_bag": _SPARSE,
    "aten.quantile": _QUANTILE,
    "aten.nanquantile": _QUANTILE,
}


def _check_free(arguments: Arguments, name: str) -> None:
    parameters = {parameter.name for parameter in arguments.parameters}
    if name in parameters | {leaf.name for leaf in leaves(arguments)}:
        raise CaptureError(
            f"the step function has an argument {name!r}, which is the graph's name for the "
            "learning rate that the optimizer reads; give the argument another name"
        )
