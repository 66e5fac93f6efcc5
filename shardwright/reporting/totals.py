"""Counts and bytes of a pipeline file, by device slot and by communication group.

In comes a checked document; sizes are counted from shapes and dtypes, no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from shardwright.pipeline.check_compute import data_of
from shardwright.pipeline.connections import connect
from shardwright.pipeline.rules import FAMILY_OF
from shardwright.pipeline.schema import Document, SuperTask


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """What one device slot does in one run of the pipeline.

    ``stored_bytes`` are the constants it loads, ``sent_bytes`` and ``received_bytes`` what its
    communication tasks read and make.
    """

    slot: str
    supertasks: int
    operators: int
    constants: int
    stored_bytes: int
    sent_bytes: int
    received_bytes: int


def slot_totals(document: Document, slot: str) -> SlotTotals:
    """Counts and bytes of one device slot."""
    tasks = [task for task in document.supertasks.values() if task.device == slot]
    compute = [task for task in tasks if FAMILY_OF[task.kind] == "compute"]
    communication = [task for task in tasks if FAMILY_OF[task.kind] == "communication"]
    constants = constants_of(document, tasks)
    return SlotTotals(
        slot=slot,
        supertasks=len(tasks),
        operators=sum(operator_count(document, task) for task in compute),
        constants=len(constants),
        stored_bytes=total_bytes(document, constants),
        sent_bytes=total_bytes(document, (name for task in communication for name in task.inputs)),
        received_bytes=total_bytes(
            document, (name for task in communication for name in task.outputs)
        ),
    )


def constants_of(document: Document, tasks: Iterable[SuperTask]) -> list[str]:
    """The constants that some tasks read, each once, in order of their first use."""
    read = dict.fromkeys(name for task in tasks for name in task.inputs)
    return [name for name in read if document.tensors[name].is_constant]


def communication_groups(document: Document) -> dict[str, list[SuperTask]]:
    """Communication supertasks by group, members in order of their index."""
    return {
        group: [document.supertasks[name] for name in names]
        for group, names in connect(document).groups.items()
    }


def total_bytes(document: Document, names: Iterable[str]) -> int:
    """Bytes of several tensors together."""
    return sum(document.tensors[name].nbytes for name in names)


class _NodeList(msgspec.Struct):
    """The part of a text that tells how many operators an FX graph has, or calls a lowered one."""

    nodes: list[msgspec.Raw] = []
    calls: list[msgspec.Raw] = []


def operator_count(document: Document, task: SuperTask) -> int:
    """How many operators a compute supertask's graph calls; if it is lowered, how many kernels."""
    if FAMILY_OF[task.kind] != "compute":
        return 0
    found = msgspec.json.decode(data_of(document, task), type=_NodeList)
    return len(found.nodes) + len(found.calls)
