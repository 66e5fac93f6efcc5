"""How long each step of a slot takes, and what memory it needs.

In come a pipeline and what its supertasks, or the nodes of their graphs, cost; out come seconds and
footprints. Equal supertasks are looked at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from shardwright.clusters import DeviceModel
from shardwright.costs.cost import Costs
from shardwright.costs.tasks import TaskTimes
from shardwright.engine.overwriting import Overwriting
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Document, SuperTask
from shardwright.simulation.footprint import Footprint, Home, footprint

PASSES = {"zero": 1, "copy": 2, "stack": 2}
"""How often work that stands in no file moves the bytes of its tensors."""
MOST_FOOTPRINTS = 2000
_FOOTPRINTS: dict[Hashable, Footprint] = {}
"""By what they depend on: candidates of one search have most of their tasks alike."""


@dataclass(slots=True)
class TaskWork:
    """What the steps of a pipeline's slots take, by `TaskTimes` or by node `Costs`."""

    document: Document
    costs: TaskTimes | Costs
    device: DeviceModel
    graphs: TaskGraphs
    _seconds: dict[Hashable, float] = field(default_factory=dict)

    def seconds(self, task: str) -> float:
        """Seconds of one run of a compute supertask."""
        if isinstance(self.costs, TaskTimes):
            return self.costs.seconds(task)
        key = self.graphs.key(task)
        if key not in self._seconds:
            graph = self.graphs.of(task)
            costs = self.costs
            self._seconds[key] = sum(costs.node(graph, node).forward for node in graph.nodes)
        return self._seconds[key]

    def moving(self, does: str, nbytes: int) -> float:
        """Seconds of work that stands in no file, on tensors of so many bytes."""
        return PASSES[does] * nbytes / self.device.bandwidth

    def footprint(self, task: str, memory: Overwriting, *, first: bool) -> Footprint:
        """What one run needs; measured bytes beside the outputs go before those that are seen."""
        spec = self.document.supertasks[task]
        if self.is_lowered(task):
            return self._lowered(spec, memory)
        zeros = memory.zeros if first else frozenset[str]()
        over = [
            (spec.inputs.index(old), spec.outputs.index(new)) for new, old in memory.over.items()
        ]
        fresh = sorted(map(spec.outputs.index, memory.fresh))
        zeroed = sorted(map(spec.inputs.index, zeros))
        key = (self.graphs.key(task), tuple(over), tuple(fresh), tuple(zeroed))
        if key not in _FOOTPRINTS:
            if len(_FOOTPRINTS) >= MOST_FOOTPRINTS:
                _FOOTPRINTS.clear()
            _FOOTPRINTS[key] = self._found(task, over, fresh, zeroed)
        found = _FOOTPRINTS[key]
        if isinstance(self.costs, TaskTimes):
            measured = self.costs.temporary_bytes(task) + found.left
            return found._replace(most=max(found.most, measured))
        return found

    def is_lowered(self, task: str) -> bool:
        """Whether a supertask's program is planned where it is loaded; it then lets nothing go."""
        return self.document.supertasks[task].kind == "dfg"

    def kept(self, tasks: Iterable[str]) -> int:
        """Bytes that the programs of a slot's supertasks have for themselves, run or not.

        Lowered ones run on one arena, as large as the largest of them needs.
        """
        lowered = [task for task in tasks if self.is_lowered(task)]
        if not lowered or not isinstance(self.costs, TaskTimes):
            return 0
        times = self.costs
        return max(map(times.temporary_bytes, lowered)) + sum(map(times.kept_bytes, lowered))

    def _lowered(self, spec: SuperTask, memory: Overwriting) -> Footprint:
        """All that is not made in an input's memory has its own."""
        homes = [
            Home(spec.inputs.index(memory.over[name]))
            if name in memory.over
            else Home(None, k, self.document.tensors[name].nbytes)
            for k, name in enumerate(spec.outputs)
        ]
        found = Footprint(0, tuple(homes))
        return found._replace(most=found.left)

    def _found(
        self,
        task: str,
        over: Sequence[tuple[int, int]],
        fresh: Sequence[int],
        zeroed: Sequence[int],
    ) -> Footprint:
        graph = self.graphs.of(task)
        donated = {graph.inputs[old]: graph.outputs[new] for old, new in over}
        return footprint(graph, donated, [graph.inputs[old] for old in zeroed], fresh)
