"""What a pipeline file holds, as tables and a tree for a terminal.

In comes a checked document; out go rich renderables. Supertasks that run the same graph one after
another are drawn as one line with a count, so that a deep model stays readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from shardwright.pipeline.rules import FAMILY_OF
from shardwright.pipeline.schema import Device, Document, Placements, SuperTask
from shardwright.pipeline.text import format_bytes
from shardwright.report.quantities import count_text, tensor_text
from shardwright.report.tables import new_table
from shardwright.report.totals import (
    communication_groups,
    constants_of,
    operator_count,
    slot_totals,
    total_bytes,
)

NAMES_SHOWN = 4
"""How many tensor names a line of the tree gives before it counts the rest."""

_ARROWS = {"send": "→", "recv": "←"}
_Tasks = Sequence[tuple[str, SuperTask]]


def overview(document: Document) -> RenderableType:
    """One line about the whole, the device slots, the communication, and the tree."""
    parts: list[RenderableType] = [headline(document), "", device_table(document)]
    if communication_groups(document):
        parts += ["", communication_table(document)]
    return Group(*parts, "", supertask_tree(document))


def headline(document: Document) -> Text:
    """Name, counts and the bytes of all constants in one line."""
    constants = constants_of(document, document.supertasks.values())
    counts = (
        count_text(len(document.devices), "device slot"),
        count_text(len(document.supertasks), "supertask"),
        count_text(len(document.tensors), "tensor"),
        f"{count_text(len(constants), 'constant')} of {_bytes_of(document, constants)}",
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
    """One row a communication group: kind, members in order, and what goes over."""
    table = new_table("Communication", ("group", "kind", "slots", "tensor", "type"), ("bytes",))
    for group, tasks in communication_groups(document).items():
        sent = [name for task in tasks for name in task.inputs]
        slots = [str(task.device) for task in tasks]
        pair = tasks[0].kind == "send"
        table.add_row(
            escape(group),
            "send/recv" if pair else tasks[0].kind,
            escape((" → " if pair else ", ").join(slots)),
            escape(sent[0]),
            escape(_type_of(document, sent[0])),
            _bytes_of(document, sent),
        )
    return table


def supertask_tree(document: Document) -> Tree:
    """The pipeline's inputs, each slot with its supertasks in file order, and the outputs."""
    tree = Tree(Text(document.name, style="bold"))
    _add_slices(tree.add("inputs"), document, "inputs")
    groups = communication_groups(document)
    for slot, device in document.devices.items():
        branch = tree.add(Text.assemble((slot, "bold"), f"  {device_text(device)}"))
        for line in _task_lines(document, groups, slot):
            branch.add(line)
    _add_slices(tree.add("outputs"), document, "outputs")
    return tree


def device_text(device: Device) -> str:
    """``cpu:0``, with the host in front where the file names one."""
    place = f"{device.kind}:{device.idx}"
    return f"{device.host}/{place}" if device.host else place


def slice_text(origin: str, placements: Placements, shape: Sequence[int]) -> str:
    """A part of a tensor: ``all of x``, or ``x[0:2, 0:8]``."""
    if all(part == (0, size) for part, size in zip(placements, shape, strict=True)):
        return f"all of {origin}"
    return f"{origin}[{', '.join(f'{start}:{stop}' for start, stop in placements)}]"


def _add_slices(branch: Tree, document: Document, side: str) -> None:
    for name, part in getattr(document.metadata.tensor_slices, side).items():
        whole = getattr(document.metadata.tensors, side)[part.origin].shape
        branch.add(
            Text(
                f"{name} {_type_of(document, name)} on {part.device}, "
                f"{slice_text(part.origin, part.placements, whole)}"
            )
        )


def _task_lines(
    document: Document, groups: dict[str, list[SuperTask]], slot: str
) -> Iterator[Text]:
    tasks = [(name, task) for name, task in document.supertasks.items() if task.device == slot]
    for _, repeated in groupby(tasks, key=lambda item: item[1].data_blob or item[0]):
        run = list(repeated)
        if FAMILY_OF[run[0][1].kind] == "communication":
            yield _communication_line(document, groups, *run[0])
        else:
            yield _compute_line(document, run)


def _communication_line(
    document: Document, groups: dict[str, list[SuperTask]], name: str, task: SuperTask
) -> Text:
    members = groups[str(task.group)]
    others = ", ".join(str(member.device) for member in members if member.device != task.device)
    arrow = _ARROWS.get(task.kind, "↔")
    tensor = (*task.inputs, *task.outputs)[0]
    return Text.assemble(
        (name, "magenta"),
        f"  {task.kind} {arrow} {others}: {tensor} {_type_of(document, tensor)}",
    )


def _compute_line(document: Document, run: _Tasks) -> Text:
    """One compute supertask, or several in a row that run the same graph."""
    (first, task), (last, last_task) = run[0], run[-1]
    repeated = len(run) > 1
    operators = count_text(operator_count(document, task), "operator")
    constants = constants_of(document, (task for _, task in run))
    variables = [name for name in task.inputs if not document.tensors[name].is_constant]
    return Text.assemble(
        (f"{first} … {last}" if repeated else first, "cyan"),
        f"  {task.kind} ",
        f"{len(run)} × {operators}, " if repeated else f"{operators}, ",
        f"{count_text(len(constants), 'constant')} of {_bytes_of(document, constants)}: ",
        (f"{_names_text(variables)} → {_names_text(last_task.outputs)}", "dim"),
    )


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    rest = len(names) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _type_of(document: Document, name: str) -> str:
    info = document.tensors[name]
    return tensor_text(info.dtype, info.shape)


def _bytes_of(document: Document, names: Sequence[str]) -> str:
    return format_bytes(total_bytes(document, names))
