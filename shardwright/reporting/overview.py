"""What a pipeline file holds, as tables and a tree for a terminal.

In comes a checked document; out go rich renderables. What repeats (equal layers, slots that work
alike) stands once with a count, so that a deep model on many slots stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shardwright.ir.quantities import count_text, format_bytes
from shardwright.pipeline.connections import connect
from shardwright.pipeline.schema import Document, SuperTask
from shardwright.pipeline.text import training_lines
from shardwright.reporting.quantities import device_text, slots_text, type_of
from shardwright.reporting.tables import new_table
from shardwright.reporting.totals import (
    communication_groups,
    constants_of,
    slot_totals,
    total_bytes,
)
from shardwright.reporting.tree import supertask_tree


def overview(document: Document) -> RenderableType:
    """One line about the whole, the device slots, the communication, and the tree."""
    lines = training_lines(document, connect(document))
    parts: list[RenderableType] = [headline(document), *(Text(line) for line in lines)]
    parts += ["", device_table(document)]
    if communication_groups(document):
        parts += ["", communication_table(document)]
    return Group(*parts, "", supertask_tree(document))


def headline(document: Document) -> Text:
    """Name, counts and the bytes of all constants in one line."""
    constants = constants_of(document, document.supertasks.values())
    stored = format_bytes(total_bytes(document, constants))
    counts = (
        count_text(len(document.devices), "device slot"),
        count_text(len(document.supertasks), "supertask"),
        count_text(len(document.tensors), "tensor"),
        f"{count_text(len(constants), 'constant')} of {stored}",
    )
    return Text.assemble((document.name, "bold"), "  ", ", ".join(counts))


def device_table(document: Document) -> Table:
    """One row a device slot: its device, its work, its weights, what it sends and receives."""
    counts = ("tasks", "operators", "constants")
    sizes = ("weights", "sends", "receives")
    table = new_table("Device slots", ("slot", "device"), (*counts, *sizes))
    for slot, device in document.devices.items():
        totals = slot_totals(document, slot)
        table.add_row(
            escape(slot),
            escape(device_text(device)),
            str(totals.supertasks),
            str(totals.operators),
            str(totals.constants),
            format_bytes(totals.stored_bytes),
            format_bytes(totals.sent_bytes),
            format_bytes(totals.received_bytes),
        )
    return table


def communication_table(document: Document) -> Table:
    """One row a communication: kind, members in order, and what goes over.

    Groups that differ only in which tensors go over (those of equal layers) share a row, which
    names the first of them and has the bytes of all.
    """
    headings = ("group", "kind", "slots", "tensor", "type")
    table = new_table("Communication", headings, ("times", "bytes"))
    alike: dict[tuple[str, ...], list[tuple[str, list[SuperTask]]]] = {}
    for group, tasks in communication_groups(document).items():
        row = (_kind_text(tasks), _members_text(document, tasks), _types_text(document, tasks))
        alike.setdefault(row, []).append((group, tasks))
    for (kind, slots, types), groups in alike.items():
        more = " …" if len(groups) > 1 else ""
        given = [name for _, tasks in groups for task in tasks for name in task.inputs]
        table.add_row(
            escape(groups[0][0] + more),
            kind,
            escape(slots),
            escape(given[0] + more),
            escape(types),
            str(len(groups)),
            format_bytes(total_bytes(document, given)),
        )
    return table


def _kind_text(tasks: Sequence[SuperTask]) -> str:
    """``send/recv``, ``all_reduce``, ``all_reduce max``."""
    operation = str((tasks[0].metadata or {}).get("reduce_op", "sum"))
    kind = "send/recv" if tasks[0].kind == "send" else tasks[0].kind
    return kind if operation == "sum" else f"{kind} {operation}"


def _members_text(document: Document, tasks: Sequence[SuperTask]) -> str:
    slots = [str(task.device) for task in tasks]
    if tasks[0].kind == "send":
        return " → ".join(slots)
    return slots_text(slots, list(document.devices))


def _types_text(document: Document, tasks: Sequence[SuperTask]) -> str:
    """What the first member gives, and what is made of it where that is of another type."""
    given = next(name for task in tasks for name in task.inputs)
    made = next(name for task in tasks for name in task.outputs)
    types = dict.fromkeys((type_of(document, given), type_of(document, made)))
    return " → ".join(types)
