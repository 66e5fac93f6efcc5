"""A simulated run as tables: what each slot does and waits for, and what it holds."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from shardwright.ir.quantities import seconds_text
from shardwright.reporting.tables import new_table
from shardwright.simulation.simulated import SlotSimulation, StepSimulation

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
