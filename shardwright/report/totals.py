"""Counts and bytes of a pipeline file, by device slot and by communication group.

In comes a checked document; sizes are counted from shapes and dtypes, no weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import msgspec

from shardwright.ir.dtypes import itemsize
from shardwright.pipeline.schema import (
    CommunicationKind,
    ComputeKind,
    Document,
    SuperTask,
    TensorInfo,
)

COMPUTE_KINDS = frozenset(get_args(ComputeKind))
COMMUNICATION_KINDS = frozenset(get_args(CommunicationKind))


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """What one device slot does in one run of the pipeline.

    ``stored_bytes`` are the constants it loads, ``made_bytes`` the tensors its compute tasks
    produce, ``sent_bytes`` and ``received_bytes`` what its communication tasks read and make.
    """

    slot: str
    supertasks: int
    operators: int
    constants: int
    stored_bytes: int
    made_bytes: int
    sent_bytes: int
    received_bytes: int


def slot_totals(document: Document, slot: str) -> SlotTotals:
    """Counts and bytes of one device slot."""
    tasks = [task for task in document.supertasks.values() if task.device == slot]
    compute = [task for task in tasks if task.kind in COMPUTE_KINDS]
    communication = [task for task in tasks if task.kind in COMMUNICATION_KINDS]
    constants = constants_of(document, tasks)
    return SlotTotals(
        slot=slot,
        supertasks=len(tasks),
        operators=sum(operator_count(document, task) for task in compute),
        constants=len(constants),
        stored_bytes=total_bytes(document, constants),
        made_bytes=total_bytes(document, (name for task in compute for name in task.outputs)),
        sent_bytes=total_bytes(document, (name for task in communication for name in task.inputs)),
        received_bytes=total_bytes(
            document, (name for task in communication for name in task.outputs)
        ),
    )


def constants_of(document: Document, tasks: Iterable[SuperTask]) -> list[str]:
    """The constants that some tasks read, each once, in order of their first use."""
    read = dict.fromkeys(name for task in tasks for name in task.inputs)
    return [name for name in read if document.tensors[name].value is not None]


def communication_groups(document: Document) -> dict[str, list[SuperTask]]:
    """Communication supertasks by group, members in order of their index."""
    groups: dict[str, list[SuperTask]] = {}
    for task in document.supertasks.values():
        if task.kind in COMMUNICATION_KINDS:
            groups.setdefault(str(task.group), []).append(task)
    for tasks in groups.values():
        tasks.sort(key=lambda task: task.device_idx or 0)
    return groups


def tensor_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor's elements."""
    return math.prod(info.shape) * itemsize(info.dtype)


def total_bytes(document: Document, names: Iterable[str]) -> int:
    """Bytes of several tensors together."""
    return sum(tensor_bytes(document.tensors[name]) for name in names)


class _NodeList(msgspec.Struct):
    """The part of FX text that tells how many operators it has."""

    nodes: list[msgspec.Raw]


def operator_count(document: Document, task: SuperTask) -> int:
    """How many operators a compute supertask's graph calls; 0 where the text is not FX."""
    if task.kind != "FX":
        return 0
    text = task.data if task.data_blob is None else (document.blobs or {})[task.data_blob]
    return len(msgspec.json.decode(text or '{"nodes": []}', type=_NodeList).nodes)
