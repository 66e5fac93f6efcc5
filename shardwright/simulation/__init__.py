"""A pipeline file simulated task by task, as its workers walk it."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.simulation.simulate import simulate
    from shardwright.simulation.slot import StepSimulation

__all__ = [
    "StepSimulation",
    "simulate",
]

import_lazily(__name__)
