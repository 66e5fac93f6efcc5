"""The rules of the format that types cannot say, as tables.

`RULES` names each rule that `check` proves and says it in one line; a PipelineError carries the
name. `FAMILIES` says which fields stand on a supertask. Nothing here reads a pipeline; what a kind
of communication has is in `shardwright.communication`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from shardwright.communication import CommunicationKind
from shardwright.devices import DeviceKind
from shardwright.errors import PipelineError
from shardwright.ir.tensor_meta import COMPLEX, INTEGERS
from shardwright.pipeline.schema import ComputeKind, Phase

RULES: dict[str, str] = {
    # the file
    "file": "the file can be read",
    "json": "the file is one whole JSON object in UTF-8",
    "unique-keys": "no JSON object has a key twice",
    "type": "every field has the type and the name that the format gives it",
    "version": "the format version is one that this shardwright reads",
    "plain": "a file that is written in the plain format needs no optional key",
    "bundle": "the pipelines of a bundle are one model's, for the sizes that its index names",
    # supertasks and devices
    "names": "names of devices, tensors, supertasks, groups and blobs are not empty",
    "device-unique": "idx is unique among the devices of a host and kind; so are a device's pes",
    "device-known": "a device that is named is a key of devices",
    "device-used": "each device runs at least one supertask",
    "fields": "a supertask has the fields of its kind and no others",
    "task-metadata": "a communication's metadata has exactly the keys of its kind",
    "task-tensors": "a supertask has as many inputs and outputs as its kind says",
    "one-input-task": "there is exactly one input supertask",
    "one-output-task": "there is exactly one output supertask",
    # tensors
    "tensor-known": "a tensor that a supertask names is a key of tensors",
    "tensor-used": "each tensor is an input or output of some supertask",
    "one-producer": "a tensor is produced once",
    "one-kind": "a tensor is a constant, a pipeline input, or produced, and only one of them",
    "pipeline-output": "a pipeline output is a produced tensor, and stands once",
    "tensor-size": "a tensor takes less than 2**63 bytes",
    "strides": "there is a stride a dimension, and where memory is allocated none overlap",
    "one-device": "a tensor is used on the device where it is; communication moves it",
    "placements": "placements have a range a dimension, inside the original, as long as the shape",
    "weight-file": "a parameter file has a path and one format",
    "constant-parts": "distinct parts of a stored tensor make it up, each element in as many",
    "state-origin": "only a tensor with init has an origin, and the origin has a name",
    "name-in-graph": "name_in_graph is the placeholder of the constant in a graph that takes it",
    # metadata
    "slices": "tensor_slices lists exactly the pipeline's inputs and outputs",
    "origin": "the origin of a slice is an input or output of the original model",
    "slice-dtype": "a slice has its tensor's dtype, to which the Generator casts its origin",
    "slice-device": "a slice's device is where its tensor is",
    "idx": "the idx of the original's inputs count from 0, as do those of its outputs",
    "outputs-covered": "the slices of each output of the original cover all of it",
    "structure": "the leaves of structure are the original's inputs and outputs, by name and idx",
    "rows": "the rows of a batch are a dimension of its inputs and outputs, each row as long",
    "replaces": "a constant is replaced once, by a produced tensor of its shape, dtype and device",
    "lands": "in a step, what a graph makes is read, given out, or replaces a constant",
    # training
    "phases": "in a training step every supertask has a phase, elsewhere none has",
    "stages": "what runs once a microbatch has a stage of its device's rank, nothing else has one",
    "schedule": "the schedule's numbers go together, and each device is of one pipeline rank",
    "phase-order": "a supertask reads what its own phase or those before it made",
    "once-a-step": "of what microbatches made, only sums over them are read once a step",
    "microbatches": "microbatches are equal parts of inputs and outputs; slices are microbatch 0's",
    # groups and order
    "group-members": "a group has two or more supertasks, numbered from 0, each on its own device",
    "group-kind": "the supertasks of a group are of one kind, or one send and one recv",
    "group-metadata": "the supertasks of a group have the same metadata, phase and stage; only "
    "messages go on to another stage, or to a later phase of the microbatch",
    "group-dtype": "the tensors of a group have one dtype, and its reduce_op can reduce it",
    "group-shape": "the shapes in a group follow from its kind",
    "file-order": "a device's supertasks stand in the file after those whose tensors they use",
    "no-cycle": "no supertask waits for itself through tensors and groups",
    "no-deadlock": "with blocking communication, each device in file order, all supertasks run",
    "schedule-order": "the schedule does a stage's work after that whose tensors it reads",
    "schedule-deadlock": "every slot comes to the end of a step; sends do not wait",
    # computation
    "blobs": "each data_blob is a key of blobs, and each blob is used",
    "graph": "the data of a compute supertask is the text of a graph that can be built",
    "operators": "a graph calls only operators that a file may call (docs/security.md lists them)",
    "graph-calls": "each call has every argument of its operator's schema, and makes what it says",
    "graph-tensors": "a graph takes and gives the tensors that its supertask names",
    "device-kind": "an operator of one kind of device is called on that kind",
    "requires": "operators that torch does not bring are listed in requires, and only they",
}


def broken(
    rule: str,
    message: str,
    *,
    task: str | None = None,
    node: str | None = None,
    tensor: str | None = None,
) -> PipelineError:
    """The error for a rule of `RULES`."""
    assert rule in RULES, rule
    return PipelineError(message, rule=rule, task=task, node=node, tensor=tensor)


Finding = str | PipelineError | None
"""What is wrong, of what is checked; the whole error where the place is another; None if valid."""


@dataclass(frozen=True, slots=True)
class KindFields:
    """Which fields stand on the supertasks of some kinds; all others must be absent.

    ``one_of`` are fields of which exactly one stands.
    """

    kinds: tuple[str, ...]
    required: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


FAMILIES: dict[str, KindFields] = {
    "compute": KindFields(
        get_args(ComputeKind), ("device",), ("data", "data_blob"), ("phase", "stage")
    ),
    "communication": KindFields(
        get_args(CommunicationKind),
        ("device", "group", "device_idx", "metadata"),
        optional=("phase", "stage"),
    ),
    "input": KindFields(("input",)),
    "output": KindFields(("output",)),
}
FAMILY_OF: dict[str, str] = {kind: name for name, row in FAMILIES.items() for kind in row.kinds}
"""Kind of a supertask to the name of its family."""
COMPUTE_KINDS = FAMILIES["compute"].kinds
"""The kinds of supertasks that compute: ``FX`` has operators, ``dfg`` lowered calls."""

MICROBATCH_PHASES: tuple[Phase, ...] = ("forward", "backward", "backward_weight")
"""The phases that run once a microbatch."""
READS: dict[Phase, tuple[Phase, ...]] = {
    "prepare": ("prepare",),
    "forward": ("prepare", "forward"),
    "backward": ("prepare", "forward", "backward"),
    "backward_weight": ("prepare", "forward", "backward", "backward_weight"),
    "update": ("prepare", "update"),
}
"""The phases whose products each phase reads; sums over the microbatches are read besides."""

_KERNELS: dict[DeviceKind, tuple[str, ...]] = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
    "cuda": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "cudnn_batch_norm",
    ),
}
ONE_KIND: dict[str, DeviceKind] = {
    f"aten.{name}{end}.default": kind
    for kind, names in _KERNELS.items()
    for name in names
    for end in ("", "_backward")
}
"""Operators that one kind of device has, as they appear where a step is differentiated for it."""

REDUCE_OPS = ("sum", "avg", "max", "min")
UNDEFINED: dict[str, frozenset[str]] = {
    "avg": INTEGERS | {"bool"},
    "max": COMPLEX,
    "min": COMPLEX,
}
"""The dtypes of which a reduce_op is not defined."""
