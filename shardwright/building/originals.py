"""The program's own inputs and outputs: what the file's metadata say of them.

A graph has the shapes of one microbatch, the file those of the whole batch. Slices are microbatch
0's, which lies at the beginning of the batch, so that they are the slots' slices as they stand; an
input of the whole batch, which is read once a step, is a slice of the same original.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import shardwright.pipeline as pl
from shardwright.building.slots import Part
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.structure import leaves
from shardwright.planning.step import Step


@dataclass(frozen=True, slots=True)
class Originals:
    """Inputs and outputs of a graph that is run ``microbatches`` times a step.

    ``dims`` has the dimension along which they lie, for the inputs and outputs that have one;
    ``whole`` takes an input of the whole batch to the input whose microbatches it holds.
    """

    graph: IRGraph
    microbatches: int = 1
    dims: Mapping[int, int] = field(default_factory=dict)
    whole: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of_step(cls, step: Step, microbatches: int) -> Originals:
        """Those of a training step."""
        return cls(step.graph, microbatches, step.dims, step.whole)

    @property
    def inputs(self) -> dict[str, int]:
        """Value ids of the inputs by name."""
        assert self.graph.in_structure is not None
        names = [leaf.name for leaf in leaves(self.graph.in_structure)]
        return dict(zip(names, self.graph.inputs, strict=True))

    @property
    def outputs(self) -> list[tuple[str, int]]:
        """Names and value ids of the outputs."""
        return list(zip(self.graph.output_names, self.graph.outputs, strict=True))

    def slice_of_input(self, value_id: int, part: Part) -> pl.MetadataTensorSlice:
        """What a slot takes of an input, of a microbatch or of the whole batch."""
        value = self.graph.values[self.whole.get(value_id, value_id)]
        return slice_of(value, value.name, part)

    def metadata(
        self,
        inputs: dict[str, pl.MetadataTensorSlice],
        outputs: dict[str, pl.MetadataTensorSlice],
    ) -> pl.Metadata:
        """The file's metadata, with the slices that the pipeline takes and gives."""
        graph = self.graph
        assert graph.in_structure is not None
        assert graph.out_structure is not None
        wholes = pl.MetadataTensors(
            self._originals(self.inputs.items()), self._originals(self.outputs)
        )
        return pl.Metadata(
            tensors=wholes,
            tensor_slices=pl.MetadataTensorSlices(inputs, outputs),
            structure=pl.Structure(inputs=graph.in_structure, outputs=graph.out_structure),
        )

    def _originals(self, named: Iterable[tuple[str, int]]) -> dict[str, pl.MetadataTensor]:
        return {
            name: pl.MetadataTensor(
                shape=self._whole_shape(value_id),
                dtype=self.graph.values[value_id].dtype,  # type: ignore[arg-type]
                idx=i,
            )
            for i, (name, value_id) in enumerate(named)
        }

    def _whole_shape(self, value_id: int) -> tuple[int, ...]:
        shape = [*self.graph.values[value_id].shape]
        if value_id in self.dims:
            shape[self.dims[value_id]] *= self.microbatches
        return tuple(shape)

    def cut(self) -> pl.Microbatches:
        """How the step's batch is cut."""
        named = [*self.inputs.items(), *self.outputs]
        dims = {name: self.dims[value_id] for name, value_id in named if value_id in self.dims}
        return pl.Microbatches(self.microbatches, dims)


def slice_of(value: IRValue, origin: str, part: Part) -> pl.MetadataTensorSlice:
    """What a tensor is of an original input or output."""
    return pl.MetadataTensorSlice(
        placements=part.ranges,
        origin=origin,
        dtype=value.dtype,  # type: ignore[arg-type]
        device=part.device,
    )
