"""What the steps of slots take."""

from __future__ import annotations

import pytest

from shardwright.clusters.device import CPU_CORE
from shardwright.costs.cost import Analytic, Costs
from shardwright.costs.tasks import TaskTime, TaskTimes
from shardwright.engine.program import slot_program
from shardwright.engine.replacement import MemoryUse
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.simulation.memory import TaskWork
from tests.runtime.linear_step import WIDTH, linear_step

PIPELINE = linear_step()
MATRIX = 8 * WIDTH * WIDTH


def work(costs: Costs | TaskTimes) -> TaskWork:
    return TaskWork(PIPELINE, costs, CPU_CORE, TaskGraphs(PIPELINE))


def test_node_by_node_where_nothing_was_measured() -> None:
    costs = Analytic(CPU_CORE)
    found = work(costs)
    graph = TaskGraphs(PIPELINE).of("U0.0")
    expected = sum(costs.node(graph, node).forward for node in graph.nodes)
    assert found.seconds("U0.0") == pytest.approx(expected)
    assert found.seconds("U0.0") > found.seconds("F0.0") / 10


def test_as_measured() -> None:
    found = work(TaskTimes({"F0.0": TaskTime(1.5, 10_000)}))
    assert found.seconds("F0.0") == 1.5
    kept = found.footprint("F0.0", MemoryUse(), first=False)
    assert kept.most == 10_000 + kept.left


def test_an_accumulator_takes_no_memory_of_its_own() -> None:
    found = work(Analytic(CPU_CORE))
    memory = slot_program(PIPELINE, "d0").memory["W0.0"]
    assert found.footprint("W0.0", memory, first=False).left == 0
    assert found.footprint("W0.0", memory, first=True).left == 0
    assert found.footprint("W0.0", MemoryUse(), first=False).left == MATRIX


def test_what_stands_in_no_file_moves_its_bytes() -> None:
    found = work(Analytic(CPU_CORE))
    assert found.moving("zero", 1000) == pytest.approx(1000 / CPU_CORE.bandwidth)
    assert found.moving("stack", 1000) == 2 * found.moving("zero", 1000)
