"""Planned training steps run slot by slot in one process, several in a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwright.building.update import localize_step
from shardwright.ir import IRGraph
from shardwright.planning import Plan
from shardwright.planning.assemble import step_of
from tests.building.slot_runs import EACH, SlotRun


class StepRun:
    """A planned step on its slots; `step` runs it on a whole batch."""

    def __init__(self, graph: IRGraph, plan: Plan) -> None:
        self.whole = step_of(graph, plan)
        self.count = plan.training.microbatches
        self.localized = localize_step(self.whole, plan)
        self.shapes = {value.names[0]: value.shape for value in graph.stored()}
        self.run = SlotRun(self.localized)
        contents = {v.names[0]: graph.tensors[v.id].detach() for v in graph.stored() if not v.init}
        self.run.load(contents)
        self.each = [part for part in self.localized.updates if self.run.phase(part[1]) in EACH]

    def step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loss of a step on inputs of the whole batch, by name."""
        graph, dims = self.whole.graph, self.whole.dims
        for old, _ in self.each:
            if self.localized.slots[old.device].value(old.value).init:
                self.run.value(old).zero_()
        microbatches = [
            {
                v: given.chunk(self.count, dims[v])[i] if v in dims else given
                for v in graph.inputs
                for given in [inputs[graph.values[v].name]]
            }
            for i in range(self.count)
        ]
        whole = {v: inputs[graph.values[part].name] for v, part in self.whole.whole.items()}
        self.run.step(microbatches, whole)
        return self.run.value(self.localized.outputs[0][0])

    def stored(self, roles=("param", "buffer")) -> dict[str, Tensor]:
        """Parameters and buffers, put together; every slot that holds a part holds the same."""
        found: dict[str, Tensor] = {}
        for old, _ in self.localized.updates:
            value = self.localized.slots[old.device].value(old.value)
            if value.role not in roles:
                continue
            tensor = self.run.value(old)
            name = value.names[0]
            if name not in found:
                found[name] = torch.full(self.shapes[name], torch.nan, dtype=torch.float64)
            box = tuple(slice(*span) for span in value.placements or ())
            held = found[name][box]
            fresh = torch.where(held.isnan(), tensor, held)
            assert torch.equal(fresh, tensor.to(fresh.dtype)), f"copies of {name} differ"
            found[name][box] = fresh
        assert not any(tensor.isnan().any() for tensor in found.values())
        return found
