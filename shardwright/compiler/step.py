"""A captured training step as one graph for one device: forward, backward and update.

Backward and optimizer markers become operators as they do in pipelines (a plan of one slot,
`localize_step`). Inputs are the captured ones in their order, but for the count of dropout's draws,
which is state here and goes on with each run. Stored values have the program's tensors where these
exist, and begin with zeros where the first step makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.building.slots import Live, Localized, SlotGraph, live_parts
from shardwright.building.update import localize_step
from shardwright.errors import PlanError
from shardwright.ir import Builder, IRGraph, IRNode, IRValue
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.graph import is_step, without_collection
from shardwright.planning import PreparedStep
from shardwright.planning.assemble import step_of
from shardwright.planning.mesh_plan import plan_over_mesh
from shardwright.planning.options import StepOptions
from shardwright.planning.rules import PIPELINE
from shardwright.tracing import CapturedStep
from shardwright.tracing.dropout import RNG


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
