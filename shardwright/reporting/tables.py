"""The one look of all tables: a plain rule under the headings, numbers to the right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from shardwright.engine.timeline import Timeline
from shardwright.ir.tensor_meta import format_bytes, seconds_text
from shardwright.pipeline.connections import connect
from shardwright.pipeline.rules import FAMILY_OF
from shardwright.pipeline.schema import Document, SuperTask
from shardwright.simulation.slot import SlotSimulation, StepSimulation


def new_table(title: str, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """An empty table whose columns of text stand left of its columns of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for heading in texts:
        table.add_column(heading, overflow="fold")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


# --- runs -----------------------------------------------------------------------------------------


def slot_table(timeline: Timeline) -> Table:
    """One row a device slot: seconds it computed, communicated and waited, and bytes it sent.

    The share is of the time from the first event of all slots to the last. Communication goes on
    beside computing, so the columns need not add up to it.
    """
    headings = ("calls", "computes", "share", "communicates", "waits", "sends")
    table = new_table("Who did what for how long", ("slot",), headings)
    start = min((event.start for event in timeline.events), default=0.0)
    span = max((event.end for event in timeline.events), default=start) - start
    for row in timeline.summary():
        table.add_row(
            escape(row.slot),
            str(row.calls),
            seconds_text(row.compute),
            f"{row.compute / span if span else 0:.0%}",
            seconds_text(row.communication),
            seconds_text(row.waiting),
            format_bytes(row.sent),
        )
    return table


def task_table(timeline: Timeline, rows: int = 12) -> Table:
    """The supertasks that took longest in all calls together, slowest first."""
    durations: dict[tuple[str, str, str], list[float]] = {}
    for event in timeline.events:
        if event.kind != "wait":
            key = (event.slot, event.task, event.kind)
            durations.setdefault(key, []).append(event.end - event.start)
    slowest = sorted(durations.items(), key=lambda item: -sum(item[1]))
    shown = "Supertasks" if len(slowest) <= rows else f"The {rows} longest of {len(slowest)} tasks"
    table = new_table(shown, ("slot", "supertask", "kind"), ("calls", "together", "a call"))
    for (slot, task, kind), seconds in slowest[:rows]:
        total = sum(seconds)
        each = seconds_text(total / len(seconds))
        table.add_row(
            escape(slot), escape(task), kind, str(len(seconds)), seconds_text(total), each
        )
    return table


# --- totals ---------------------------------------------------------------------------------------


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
    communication = [task for task in tasks if FAMILY_OF[task.kind] == "communication"]
    constants = constants_of(document, tasks)
    return SlotTotals(
        slot=slot,
        supertasks=len(tasks),
        operators=sum(
            operator_count(document, name)
            for name, task in document.supertasks.items()
            if task.device == slot
        ),
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


class _NodeCountText(msgspec.Struct):
    """The part of a text that tells how many operators an FX graph has, or calls a lowered one."""

    nodes: list[msgspec.Raw] = []
    calls: list[msgspec.Raw] = []


def operator_count(document: Document, task: str) -> int:
    """How many operators a compute supertask's graph calls; if it is lowered, how many kernels."""
    if FAMILY_OF[document.supertasks[task].kind] != "compute":
        return 0
    found = msgspec.json.decode(document.data_of(task), type=_NodeCountText)
    return len(found.nodes) + len(found.calls)


# --- simulated runs -------------------------------------------------------------------------------


SHOWN_WAITS = 2
"""How many of the things that a slot waits for are named."""
ITEMS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "messages")


def simulation_table(simulation: StepSimulation) -> Table:
    """One row a slot: seconds of computing, moving bytes and waiting, and what for."""
    table = new_table(
        "Who would do what for how long",
        ("slot", "waits for"),
        ("computes", "moves bytes", "waits", "idle"),
    )
    for slot, idle in zip(simulation.slots, simulation.idle, strict=True):
        table.add_row(
            escape(slot.slot),
            escape(_waits(slot)),
            *map(seconds_text, (slot.computing, slot.moving, slot.waiting)),
            f"{100 * idle:.0f}%",
        )
    return table


def simulated_memory_table(simulation: StepSimulation) -> Table:
    """One row a slot: MB of each item at the moment when it held most."""
    table = new_table("What slots hold when that is most, in MB", ("slot",), (*ITEMS, "all"))
    for slot in simulation.slots:
        numbers = [getattr(slot.memory, item) for item in ITEMS]
        row = [f"{number / 1e6:.2f}" for number in (*numbers, slot.memory.total)]
        table.add_row(escape(slot.slot), *row)
    return table


def _waits(slot: SlotSimulation) -> str:
    found = [
        f"{wait.kind}{' with ' + ' '.join(wait.peers) if wait.peers else ''} "
        f"{seconds_text(wait.seconds)}"
        for wait in slot.waits[:SHOWN_WAITS]
    ]
    return ", ".join(found)
