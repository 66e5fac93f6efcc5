"""Lowered pipelines in simulated time, by what their supertasks were measured to take."""

from __future__ import annotations

import msgspec
import pytest
import torch

from shardwright.clusters.device import CPU_CORE
from shardwright.compiler import lower
from shardwright.costs.cost import Analytic
from shardwright.costs.tasks import TaskTime, TaskTimes
from shardwright.errors import PlanError
from shardwright.pipeline import Pipeline
from shardwright.profiling.memory import peak_bytes
from shardwright.runtime import TrainingRunner
from shardwright.runtime.memory import COUNT_TENSORS, TENSORS
from shardwright.runtime.task_times import profile_tasks
from shardwright.simulation.simulate import simulate
from tests.runtime.linear_step import WIDTH, batches, linear_step
from tests.runtime.sketch import chain
from tests.simulation.test_simulate_pipeline import trained


def times(pipeline: Pipeline, temporary: int = 0, kept: int = 0) -> TaskTimes:
    """Half a second for each compute supertask."""
    tasks = (name for name, task in pipeline.supertasks.items() if task.kind in ("FX", "dfg"))
    return TaskTimes(dict.fromkeys(tasks, TaskTime(0.5, temporary, kept)))


@pytest.mark.parametrize("pipeline", [linear_step("1f1b", microbatches=4), chain(3)])
def test_the_same_times_make_the_same_step(pipeline: Pipeline) -> None:
    found = simulate(pipeline, times(pipeline), calls=2)
    lowered = simulate(lower(pipeline), times(pipeline), calls=2)
    assert lowered.seconds == pytest.approx(found.seconds, rel=1e-3)
    assert [event.task for event in lowered.events] == [event.task for event in found.events]


def test_state_is_what_it_was_and_programs_let_go_when_they_run_again() -> None:
    pipeline = linear_step("1f1b", microbatches=4)
    found = simulate(pipeline, times(pipeline)).slots
    lowered = simulate(lower(pipeline), times(pipeline)).slots
    for one, other in zip(found, lowered, strict=True):
        assert one.memory.parameters == other.memory.parameters
        assert one.memory.gradients == other.memory.gradients
        assert one.memory.optimizer == other.memory.optimizer
        assert one.memory.activations <= other.memory.activations


def test_one_arena_is_there_all_the_time_and_each_program_has_its_own_beside() -> None:
    step = lower(linear_step())
    none = simulate(step, times(step)).slots[0]
    some = simulate(step, times(step, temporary=1000, kept=30)).slots[0]
    programs = sum(step.supertasks[task].device == "d0" for task in times(step).tasks)
    assert programs > 1
    assert some.memory.total - none.memory.total == 1000 + 30 * programs


def test_as_much_memory_as_a_run_takes() -> None:
    pipeline = lower(linear_step("gpipe", ranks=1, microbatches=4))
    measured = profile_tasks(pipeline, n_iter=1, in_process=True)
    found = simulate(pipeline, measured).slots[0].memory
    x, target = batches(1)[0]
    with TrainingRunner(pipeline, in_process=True) as session:
        peak = peak_bytes(lambda: session.step(x, target, lr=0.1), torch.device("cpu"))
    given = x.nbytes + target.nbytes + 8
    arena = 8 * WIDTH * WIDTH  # which was there before, of at most a gradient in whole lines
    assert found.activations + found.temporaries == pytest.approx(peak.most + given, abs=2 * arena)


@pytest.mark.processes
def test_as_much_memory_as_each_process_takes() -> None:
    pipeline, x, y = trained("1f1b")
    lowered = lower(pipeline)
    measured = profile_tasks(lowered, n_iter=1, in_process=True).tasks
    # Which steps overlap, and so what is held at once, shall not hang on what a run took here.
    even = {name: msgspec.structs.replace(task, seconds=0.5) for name, task in measured.items()}
    found = simulate(lowered, TaskTimes(even), calls=2)
    with TrainingRunner(lowered) as session:
        session.step(x, y, lr=0.1)
        session.call_workers(COUNT_TENSORS)
        for call in [session.submit(x, y, lr=0.1) for _ in range(3)]:
            call.result()
        held = session.call_workers(TENSORS)
    given = 2 * x.nbytes  # of both steps, by another thread, which nobody counts
    for slot in found.slots:
        arena = slot.memory.temporaries  # was there before
        needed = slot.memory.total - slot.memory.messages - arena
        assert needed == pytest.approx(held[slot.slot] + given, rel=0.03)


def test_costs_of_nodes_say_nothing_of_a_lowered_pipeline() -> None:
    with pytest.raises(PlanError, match=r"'d0\.0' is lowered .*: no costs of nodes.*profile_tasks"):
        simulate(lower(chain(2)), Analytic(CPU_CORE))
