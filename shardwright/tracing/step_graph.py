"""From an exported step to a graph: marks become markers, rates inputs, gradients state.

Comes in: the calls of a step function, and the records of its marks. Goes out: the
step's graph. What always holds: a gradient that exists before the step is state only if something
that the step leaves behind depends on it, and then it has an update.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.errors import CaptureError
from shardwright.ir.graph import IRGraph
from shardwright.ir.operators import is_marker
from shardwright.ir.structure import Arguments, leaves, with_keyword
from shardwright.ir.values import IRValue
from shardwright.tracing.dead_code import live_values
from shardwright.tracing.export import Program
from shardwright.tracing.exported import ExportedGraph
from shardwright.tracing.failures import line_before
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.markers import Markers
from shardwright.tracing.recorder import Recorder
from shardwright.tracing.step_model import ROOTS


class StepGraph(ExportedGraph):
    """One exported step on its way to a graph."""

    def __init__(self, name: str, flat: FlatModel, program: Program, recorder: Recorder) -> None:
        model, parameters = recorder.model, recorder.parameters
        super().__init__(
            name, flat, program, model.contents, ROOTS, model.constants, updates_parameters=True
        )
        self.model, self.parameters = model, parameters
        self.markers = Markers(
            self.emitter, self.memory, recorder.records, model.originals, parameters.carried
        )
        self.translator.marked = self.markers.translate

    def updates(self, outputs: Sequence[IRValue], rest: Sequence[IRValue]) -> dict[int, int]:
        """Updates of buffers, parameters, optimizers' state, and gradients that go on."""
        count = len(self.flat.outcome.assigned)
        _check_gradients(self.builder.graph)
        updates = super().updates(outputs, rest) | self.markers.updates()
        before = {name: self._gradient_before(name) for name in self.parameters.left}
        gradients = {value.id for value in before.values()}
        updates = {old: new for old, new in updates.items() if old not in gradients}
        left = rest[count:]
        after = dict(zip(self.parameters.existing(self.parameters.left), left, strict=True))
        needed = [*(value.id for value in (*outputs, *left)), *updates, *updates.values()]
        live = live_values(self.builder.graph, needed)
        for name, value in before.items():
            if value.id in live:
                last = after.get(name) or self.markers.zeros_like(value)
                updates[value.id] = last.id
        return updates

    def _gradient_before(self, name: str) -> IRValue:
        """The state that is a parameter's gradient before the step."""
        stored = self.model.gradient_state(name)
        if stored is None:
            return self.markers.gradients[name]
        place = self.boundary.place_of(stored)
        assert place is not None
        return place.first

    def arguments(self) -> Arguments:
        """The call's structure, with the learning rates as keywords; orders the graph's inputs."""
        rates = {rate.input: rate.value for rate in self.markers.rates}
        arguments = self.flat.arguments
        for name in rates:
            _check_free(arguments, name)
            arguments = with_keyword(arguments, name)
        given = iter(self.boundary.input_ids)
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
