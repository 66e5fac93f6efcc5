"""Where the contents of stored values lie: in the user's checkpoint, or beside the pipeline.

With ``weights=`` each parameter is a reference into that file (or into a shard of its index); what
no checkpoint holds (non-persistent buffers, constants of the program) is carried along. Without
it everything is carried, and written beside the pipeline when that is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

import shardwright.pipeline as pl
from shardwright.building.slots import LocalSlice
from shardwright.errors import WeightError
from shardwright.ir import IRGraph, IRValue
from shardwright.ir.structure import leaves
from shardwright.pipeline import (
    ParamValue,
    StateOrigin,
    Weights,
    find_weights,
    open_paramfile,
)
from shardwright.pipeline.paramfiles import Paramfile
from shardwright.planning.step import PreparedStep

CARRIED = "weights.safetensors"
"""The path under which carried tensors stand until the pipeline is saved."""

Rename = Callable[[str], str] | Mapping[str, str] | None


class WeightSource:
    """Finds each stored value's contents: `locate` gives the reference that the file holds."""

    def __init__(self, graph: IRGraph, weights: str | Path | None, rename: Rename) -> None:
        self.carried = Weights()
        self._whole = {value.names[0]: value for value in graph.stored()}
        self._tensors = graph.tensors
        self._rename = rename
        self._files = {} if weights is None else find_weights(Path(weights))
        self._origin = weights
        self._open: dict[Path, Paramfile] = {}
        self._used: set[str] = set()

    def locate(self, value: IRValue, name_in_graph: str) -> ParamValue:
        """The reference to a value's contents. Raises WeightError where there are none."""
        placements = value.placements or tuple((0, size) for size in value.shape)
        key = self._key(value)
        if key is None:
            return self._carry(value, name_in_graph, placements)
        path = self._files[key]
        self._compare(value, key, path)
        self._used.add(key)
        return ParamValue(
            path=str(path.resolve()),
            format="safetensors",
            name=key,
            name_in_graph=name_in_graph,
            placements=placements,
            shape=self._whole_of(value).shape,
        )

    def origin(self, value: IRValue) -> StateOrigin | None:
        """Which part of which whole a state is that begins with zeros, where it has a name."""
        if not value.names:
            return None
        placements = value.placements or tuple((0, size) for size in value.shape)
        return StateOrigin(value.names[0], placements, self._whole_of(value).shape)

    @property
    def unused(self) -> list[str]:
        """Names in the checkpoint that the graph does not read."""
        return sorted(self._files.keys() - self._used)

    def _whole_of(self, value: IRValue) -> IRValue:
        """The stored value that ``value`` is, or is a part of."""
        return self._whole.get(value.names[0], value)

    def _key(self, value: IRValue) -> str | None:
        """The first of a value's names that the checkpoint has."""
        for name in value.names:
            if (key := self._renamed(name)) in self._files:
                return key
        return None

    def _renamed(self, name: str) -> str:
        if self._rename is None:
            return name
        if isinstance(self._rename, Mapping):
            return self._rename.get(name, name)
        return self._rename(name)

    def _compare(self, value: IRValue, key: str, path: Path) -> None:
        """Raise WeightError where the file holds another tensor than the model."""
        if path not in self._open:
            self._open[path] = open_paramfile(path, "safetensors")
        file = self._open[path]
        whole = self._whole_of(value)
        found = (tuple(file.shape(key)), file.dtype(key))
        if found != (whole.shape, whole.dtype):
            raise WeightError(
                f"{path}: {key!r} is {found[1]}{list(found[0])}, but the model's "
                f"{value.names[0]!r} is {whole.dtype}{list(whole.shape)}; give the checkpoint of "
                "this model, or load the model in the checkpoint's dtype before capture"
            )
        held = self._tensors.get(whole.id)
        if held is not None and not held.is_meta and key not in self._used:
            stored = file.read(key, tuple((0, size) for size in whole.shape))
            if not _same_bytes(stored, held):
                raise WeightError(
                    f"{path}: {key!r} has other contents than the model's {value.names[0]!r}; "
                    "save the model and give that file, or leave weights= out"
                )

    def _carry(
        self, value: IRValue, name_in_graph: str, placements: tuple[tuple[int, int], ...]
    ) -> ParamValue:
        """Keep the whole tensor in memory, once for all its parts."""
        whole = self._whole_of(value)
        tensor = self._tensors.get(whole.id)
        if tensor is None or tensor.is_meta:
            raise WeightError(self._missing(value))
        self.carried.put(CARRIED, value.names[0], tensor)
        return self._beside(value, name_in_graph, placements)

    def _beside(
        self, value: IRValue, name_in_graph: str, placements: tuple[tuple[int, int], ...]
    ) -> ParamValue:
        """The reference to what is carried along."""
        return ParamValue(
            path=CARRIED,
            format="safetensors",
            name=value.names[0],
            name_in_graph=name_in_graph,
            placements=placements,
            shape=self._whole_of(value).shape,
        )

    def _missing(self, value: IRValue) -> str:
        if self._origin is None:
            return (
                f"{value.role} {value.names[0]!r} has no contents (the model was built on the "
                'meta device); give the checkpoint: build(graph, plan, weights="model.'
                'safetensors")'
            )
        looked = ", ".join(repr(self._renamed(name)) for name in value.names)
        return (
            f"{self._origin}: no tensor {looked} for the model's {value.role}; if the checkpoint "
            "uses other names, pass rename= (a dict or a function from the model's names to the "
            "file's)"
        )


class NoContents(WeightSource):
    """For a file that nobody runs: what stored values hold is not looked at, nor carried."""

    def __init__(self, graph: IRGraph) -> None:
        super().__init__(graph, None, None)

    def _carry(
        self, value: IRValue, name_in_graph: str, placements: tuple[tuple[int, int], ...]
    ) -> ParamValue:
        return self._beside(value, name_in_graph, placements)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    flat = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


# --- original inputs and outputs ------------------------------------------------------------------
#
# A graph has the shapes of one microbatch, the file those of the whole batch. Slices are microbatch
# 0's, which lies at the beginning of the batch, so that they are the slots' slices as they stand;
# an input of the whole batch, which is read once a step, is a slice of the same original.


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
    def of_step(cls, step: PreparedStep, microbatches: int) -> Originals:
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

    def slice_of_input(self, value_id: int, part: LocalSlice) -> pl.MetadataTensorSlice:
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


def slice_of(value: IRValue, origin: str, part: LocalSlice) -> pl.MetadataTensorSlice:
    """What a tensor is of an original input or output."""
    return pl.MetadataTensorSlice(
        placements=part.ranges,
        origin=origin,
        dtype=value.dtype,  # type: ignore[arg-type]
        device=part.device,
    )
