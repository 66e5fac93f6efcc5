"""check: a pipeline is valid, or one PipelineError says where and why it is not.

It reads only the document: no weights, no devices. Operators run on tensors without contents, those
of each distinct graph once (`graphs.prove`). `CHECKS` is in order: later rules may rely on earlier
ones. Time is linear in the size of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from shardwright.communication import COMMUNICATION
from shardwright.errors import PipelineError
from shardwright.pipeline import check_graphs as graphs
from shardwright.pipeline import check_groups as groups
from shardwright.pipeline import check_metadata as metadata
from shardwright.pipeline import check_schedule as schedule
from shardwright.pipeline import check_structure as structure
from shardwright.pipeline import check_tensors as tensors
from shardwright.pipeline.connections import Connections, connect
from shardwright.pipeline.rules import Finding, broken
from shardwright.pipeline.schema import Document
from shardwright.pipeline.serialize import reread

_Place = tuple[dict[str, str], tuple[Any, ...]]
"""What an error says of a place, and what a check is called with there."""
_Each = Callable[[Connections], Iterator[_Place]]


def _document(index: Connections) -> Iterator[_Place]:
    yield {}, (index,)


def _task(index: Connections) -> Iterator[_Place]:
    for name, task in index.document.supertasks.items():
        yield {"task": name}, (index, name, task)


def _communication(index: Connections) -> Iterator[_Place]:
    return (place for place in _task(index) if place[1][2].kind in COMMUNICATION)


def _step_task(index: Connections) -> Iterator[_Place]:
    """The supertasks of devices, where they are of a training step."""
    training = index.document.training
    if training is not None and training.schedule is not None:
        yield from (place for place in _task(index) if place[1][2].device is not None)


def _tensor(index: Connections) -> Iterator[_Place]:
    for name, info in index.document.tensors.items():
        yield {"tensor": name}, (index, name, info)


def _part(index: Connections) -> Iterator[_Place]:
    """The tensors that are parts of wholes which are stored or have names."""
    for place in _tensor(index):
        _, _, info = place[1]
        if info.value is not None or info.origin is not None:
            yield place


def _slice(index: Connections) -> Iterator[_Place]:
    for side in ("inputs", "outputs"):
        for name, piece in getattr(index.document.metadata.tensor_slices, side).items():
            yield {"tensor": name}, (index, side, name, piece)


def _group(index: Connections) -> Iterator[_Place]:
    for name, tasks in index.groups.items():
        members = tuple(index.document.supertasks[task] for task in tasks)
        yield (
            {},
            (
                index,
                groups.CommunicationGroup(name, index.document, tuple(tasks), members),
            ),
        )


CHECKS: tuple[tuple[str, _Each, Callable[..., Finding]], ...] = (
    ("version", _document, structure.check_version),
    ("names", _document, structure.check_names),
    ("fields", _task, structure.check_fields),
    ("task-metadata", _communication, structure.check_metadata),
    ("device-known", _task, structure.check_devices_known),
    ("task-tensors", _task, structure.check_counts),
    ("device-unique", _document, structure.check_devices_unique),
    ("device-used", _document, structure.check_devices_used),
    ("one-input-task", _document, partial(structure.check_ends, kind="input")),
    ("one-output-task", _document, partial(structure.check_ends, kind="output")),
    ("tensor-known", _task, tensors.check_known),
    ("tensor-used", _tensor, tensors.check_used),
    ("one-producer", _tensor, tensors.check_producers),
    ("one-kind", _tensor, tensors.check_kind),
    ("pipeline-output", _document, tensors.check_outputs),
    ("tensor-size", _tensor, tensors.check_size),
    ("strides", _tensor, tensors.check_strides),
    ("weight-file", _document, tensors.check_weight_files),
    ("state-origin", _part, tensors.check_origin),
    ("placements", _part, tensors.check_placements),
    ("constant-parts", _document, tensors.check_parts),
    ("tensor-known", _document, tensors.check_replaced_known),
    ("replaces", _document, tensors.check_replaces),
    ("phases", _document, schedule.check_step),
    ("phases", _task, schedule.check_phase),
    ("stages", _task, schedule.check_stage),
    ("schedule", _document, schedule.check_numbers),
    ("stages", _step_task, schedule.check_rank),
    ("phase-order", _step_task, schedule.check_phase_order),
    ("once-a-step", _step_task, schedule.check_sums),
    ("slices", _document, metadata.check_listed),
    ("origin", _slice, metadata.check_origin),
    ("slice-dtype", _slice, metadata.check_dtype),
    ("placements", _slice, metadata.check_placements),
    ("device-known", _slice, metadata.check_device_known),
    ("slice-device", _slice, metadata.check_device),
    ("microbatches", _document, schedule.check_dims),
    ("microbatches", _slice, schedule.check_slice),
    ("replaces", _document, schedule.check_lasting),
    ("idx", _document, metadata.check_idx),
    ("outputs-covered", _document, metadata.check_covered),
    ("rows", _document, metadata.check_rows),
    ("structure", _document, metadata.check_structure),
    ("one-device", _task, tensors.check_locality),
    ("group-kind", _group, groups.check_kinds),
    ("group-members", _group, groups.check_members),
    ("group-metadata", _group, groups.check_metadata),
    ("group-dtype", _group, groups.check_dtypes),
    ("group-shape", _group, groups.check_shapes),
    ("lands", _document, tensors.check_made),
    ("lands", _document, tensors.check_all_replaced),
    ("file-order", _document, structure.check_order),
    ("no-deadlock", _document, structure.check_deadlock),
    ("blobs", _document, graphs.check_blobs),
    ("graph", _document, graphs.check_graphs),
    ("schedule", _document, schedule.check_schedule),
)
"""Each rule, what it is about, and its check, which is called with every one of those."""


def check(pipeline: Document) -> None:
    """Raise PipelineError at the first rule of the format that ``pipeline`` breaks.

    The error's ``rule`` is a key of `rules.RULES`. ``task`` and ``tensor`` say where, if the rule
    is about one.
    """
    check_rules(reread(pipeline))


def check_rules(document: Document) -> None:
    """`check` for a document whose types are known to be right, as one just read."""
    index = connect(document)
    places: dict[_Each, list[_Place]] = {}
    for rule, each, find in CHECKS:
        if each not in places:
            places[each] = [*each(index)]
        for place, arguments in places[each]:
            if (found := find(*arguments)) is not None:
                raise found if isinstance(found, PipelineError) else broken(rule, found, **place)
