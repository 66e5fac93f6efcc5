"""The pipeline format: the types of one file, field for field.

These Structs are the file: `msgspec.json` reads and writes them, and the JSON Schema is made from
them. What the types cannot say (which fields a kind of supertask has, that tensor sets agree, that
groups are complete) is said in `rules` and `check`.

Fields below the line "optional keys" of a type are extensions: a file without them is exactly the
format of the specification, and they are left out where they say nothing.

The types hold for what was read from a file. A Struct that is made in Python is taken as it is;
`check` puts the types to the test, as it does every other rule.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shardwright.communication import CommunicationKind
from shardwright.devices import DeviceKind
from shardwright.ir.structure import Arguments, Tree
from shardwright.ir.tensor_meta import itemsize

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""uint64 in the specification; bounded by what a signed tensor size can be."""

DType = Literal[
    "f64",
    "f32",
    "f16",
    "bf16",
    "f8",
    "bool",
    "i64",
    "i32",
    "i16",
    "i8",
    "u8",
    "c64",
    "c128",
    "u16",
    "u32",
    "u64",
]
"""``f8`` is torch.float8_e4m3fn. What comes after ``i8`` extends the specification."""

ParamfileFormat = Literal["safetensors", "torch.save", "torch.export"]

ComputeKind = Literal["dfg", "FX"]
SuperTaskKind = Literal[ComputeKind, CommunicationKind, "input", "output"]

Phase = Literal["prepare", "forward", "backward", "backward_weight", "update"]
"""When a task of a training pipeline runs: ``prepare`` and ``update`` once a step, before and after
everything else, the others once a microbatch."""

Placements = tuple[tuple[Natural, Natural], ...]
"""Half-open range taken of each dimension of a tensor, one a dimension."""


class Device(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A device slot: ``idx`` is the device's number among those of its kind on its host.

    ``host`` names the machine where there are several, ``pes`` the fused processing elements.
    """

    kind: DeviceKind
    idx: Natural
    # optional keys
    host: str | None = None
    pes: tuple[Natural, ...] | None = None


class ParamValue(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Where a constant tensor's contents lie.

    ``path`` is relative to the pipeline file. ``name`` is the tensor's name in that file,
    ``name_in_graph`` the placeholder it fills in its first user's graph, ``placements`` the part
    of the stored tensor that this tensor is, ``shape`` the stored tensor's whole shape: with it
    a file that holds another tensor under the name is told from the right one.
    """

    path: str
    format: ParamfileFormat
    name: str
    name_in_graph: str
    placements: Placements
    # optional keys
    shape: tuple[Natural, ...] | None = None


class StateOrigin(Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of which named whole a state is: what `ParamValue` says of stored contents.

    ``name`` is the whole's name in the program (``optimizer.lm_head.weight.exp_avg``), ``shape``
    its whole shape, ``placements`` the part of it that this tensor is.
    """

    name: str
    placements: Placements
    shape: tuple[Natural, ...]


class TensorInfo(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A tensor of the pipeline; ``value`` is there for constants and only for them.

    ``strides``, in elements, stand where the tensor is not contiguous. A tensor with ``init`` is a
    constant without stored contents: state that begins with zeros. ``origin`` says what it is
    called, where it is part of a state that outlives the run and has a name.
    """

    shape: tuple[Natural, ...]
    dtype: DType
    value: ParamValue | None = None
    # optional keys
    strides: tuple[Natural, ...] | None = None
    init: Literal["zeros"] | None = None
    origin: StateOrigin | None = None

    @property
    def is_constant(self) -> bool:
        """Whether the tensor exists before a run: stored, or beginning with zeros."""
        return self.value is not None or self.init is not None

    @property
    def nbytes(self) -> int:
        """How many bytes the elements take."""
        return math.prod(self.shape) * itemsize(self.dtype)


class SuperTask(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One step of one device slot. Which fields stand, by kind, is a table in `rules`.

    ``fx`` is read as ``FX``. ``data_blob`` stands in the place of ``data``: a key of ``blobs``.
    ``phase`` and ``stage`` say when a task of a training pipeline runs; ``stage`` is the number of
    the virtual stage, for the phases that run once a microbatch.
    """

    kind: SuperTaskKind | Literal["fx"]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    device: str | None = None
    data: str | None = None
    group: str | None = None
    device_idx: Natural | None = None
    metadata: dict[str, Natural | str] | None = None
    # optional keys
    data_blob: str | None = None
    phase: Phase | None = None
    stage: Natural | None = None

    def __post_init__(self) -> None:
        if self.kind == "fx":
            self.kind = "FX"


class MetadataTensor(Struct, forbid_unknown_fields=True):
    """A whole input or output of the original model; ``idx`` is its place among them."""

    shape: tuple[Natural, ...]
    dtype: DType
    idx: Natural


class MetadataTensors(Struct, forbid_unknown_fields=True):
    """The original model's inputs and outputs by name."""

    inputs: dict[str, MetadataTensor]
    outputs: dict[str, MetadataTensor]


class MetadataTensorSlice(Struct, forbid_unknown_fields=True):
    """A pipeline input or output: which part of which original tensor, and on which slot."""

    placements: Placements
    origin: str
    dtype: DType
    device: str


class MetadataTensorSlices(Struct, forbid_unknown_fields=True):
    """The pipeline's inputs and outputs by tensor name."""

    inputs: dict[str, MetadataTensorSlice]
    outputs: dict[str, MetadataTensorSlice]


class Structure(Struct, forbid_unknown_fields=True):
    """How the flat inputs and outputs fold back into the original call and result."""

    inputs: Arguments
    outputs: Tree


class BatchRows(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Inputs whose dimension 0 is the batch, and which dimension of outputs has its rows.

    Each row of an output is made from the same row of these inputs alone, and is the same in a call
    of fewer rows, down to ``least``. Outputs that are not named have no rows.
    """

    inputs: tuple[str, ...]
    outputs: dict[str, Natural]
    # optional keys
    least: Natural = 1


class Metadata(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What the Generator needs to cut whole inputs and to join outputs; runners do not read it.

    ``rows`` is found out about the model when it is captured: tasks do not tell it.
    """

    tensors: MetadataTensors
    tensor_slices: MetadataTensorSlices
    # optional keys
    structure: Structure | None = None
    rows: tuple[BatchRows, ...] = ()


class Microbatches(Struct, forbid_unknown_fields=True):
    """How a step's batch is cut: in ``n`` equal microbatches.

    ``dim`` names the original inputs that are cut, and the original outputs that are put together,
    each with its dimension. Metadata give their whole shapes; their slices are microbatch 0's, and
    those of microbatch i lie i/n of the whole further on. Slices of inputs that only tasks of the
    phases ``prepare`` and ``update`` read are of the whole batch.
    """

    n: Annotated[int, Meta(ge=1)]
    dim: dict[str, Natural] = {}


class ScheduleInfo(Struct, forbid_unknown_fields=True):
    """In which order slots work through stages and microbatches; see `shardwright.schedules`.

    ``placement`` has the pipeline rank of each virtual stage, ``slots`` the device slots of each
    pipeline rank, ``chunks`` is how many stages a rank has.
    """

    kind: str
    ranks: Annotated[int, Meta(ge=1)]
    chunks: Annotated[int, Meta(ge=1)]
    placement: tuple[Natural, ...]
    slots: tuple[tuple[str, ...], ...]


class Training(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """How often tasks run, and which tensor replaces which.

    ``replaces`` maps a produced tensor to the constant whose contents it becomes: once a step
    where a task of the phase ``update`` makes it, else after each microbatch. A pipeline of one
    forward has it too, where the program changes its buffers. A constant with ``init`` that is
    replaced once a microbatch is an accumulator: each step begins with zeros in it. ``notes`` say
    in words what a reader should know of the step, such as which operators mix the batch.
    """

    replaces: dict[str, str] = {}
    microbatches: Microbatches | None = None
    schedule: ScheduleInfo | None = None
    notes: tuple[str, ...] = ()


class Document(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A pipeline file's contents: the specification's ``Pipeline``.

    ``blobs`` hold the graphs that several supertasks share, ``requires`` the full names of the
    operators that the graphs call and torch does not bring.
    """

    name: str
    devices: dict[str, Device]
    tensors: dict[str, TensorInfo]
    supertasks: dict[str, SuperTask]
    metadata: Metadata
    # optional keys
    version: Natural | None = None
    blobs: dict[str, str] | None = None
    training: Training | None = None
    requires: tuple[str, ...] | None = None

    @property
    def replaces(self) -> dict[str, str]:
        """``training.replaces``, empty where there is no training."""
        return self.training.replaces if self.training is not None else {}

    def data_of(self, task: str) -> str:
        """The graph of a compute supertask as text: its own or the blob that it shares."""
        spec = self.supertasks[task]
        if spec.data is not None:
            return spec.data
        assert self.blobs is not None
        assert spec.data_blob is not None
        return self.blobs[spec.data_blob]


FORMAT_VERSION = 1
"""The revision of the format that is written; a file without ``version`` is read as this one."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a pipeline file."""
    described = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return described | msgspec.json.schema(Document)


def json_schema_text() -> str:
    """The JSON Schema as the text that ``schema.json`` beside this module holds."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"
