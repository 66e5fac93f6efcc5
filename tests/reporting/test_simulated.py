"""Simulated runs as tables."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.costs.predict import SlotMemory
from shardwright.reporting import simulated_memory_table, simulation_table
from shardwright.simulation.slot import SlotSimulation, StepSimulation, Wait

Draw = Callable[..., str]

MEMORY = SlotMemory(
    parameters=1_000_000, gradients=0, optimizer=0, activations=5_000, temporaries=0, messages=0
)
WAITS = (Wait("recv", ("d1",), 0.5), Wait("end", (), 0.25), Wait("order", (), 0.01))
FOUND = StepSimulation(2.0, 2, (SlotSimulation("d0", 0, 1.2, 0.04, 0.76, WAITS, MEMORY),))
SLOTS = """
Who would do what for how long
slot  waits for                        computes  moves bytes   waits  idle
──────────────────────────────────────────────────────────────────────────
d0    recv with d1 500 ms, end 250 ms     1.2 s        40 ms  760 ms   38%
"""
HELD = """
What slots hold when that is most, in MB
slot  parameters  gradients  optimizer  activations  temporaries  messages   all
────────────────────────────────────────────────────────────────────────────────
d0          1.00       0.00       0.00         0.01         0.00      0.00  1.00
"""


def test_what_slots_do(drawn: Draw) -> None:
    assert drawn(simulation_table(FOUND)) == SLOTS.strip("\n")


def test_what_slots_hold(drawn: Draw) -> None:
    assert drawn(simulated_memory_table(FOUND), width=100) == HELD.strip("\n")
