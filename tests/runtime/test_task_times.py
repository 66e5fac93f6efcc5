"""What the supertasks of a pipeline take, measured as a slot runs them."""

import pytest
import torch
from torch.nn import functional

from shardwright.building import build
from shardwright.compiler import lower
from shardwright.costs import TaskTimes
from shardwright.errors import ProfileError
from shardwright.pipeline import Pipeline
from shardwright.planner import plan
from shardwright.runtime.task_times import profile_tasks, small_step
from shardwright.tracing import compile_ir
from tests.graphs import language_model
from tests.runtime.programs import gpt, tokens
from tests.runtime.sketch import chain


def computing(pipeline: Pipeline) -> set[str]:
    return {name for name, task in pipeline.supertasks.items() if task.kind == "FX"}


def held(pipeline: Pipeline) -> list[torch.Tensor]:
    infos = pipeline.tensors.values()
    return [pipeline.weights.read(info.value, info) for info in infos if info.value is not None]


@pytest.fixture(scope="module")
def training() -> Pipeline:
    program = gpt()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        program.optimizer.zero_grad()
        loss = functional.cross_entropy(program.model(x).flatten(0, 1), y.flatten())
        loss.backward()
        program.optimizer.step()
        return loss

    graph = compile_ir(step, *tokens(1)[0])
    return build(graph, plan(graph, mesh={"pipeline": 2}, microbatches=2))


@pytest.fixture(scope="module")
def times(training: Pipeline) -> TaskTimes:
    return profile_tasks(training, n_iter=2, in_process=True)


def test_every_compute_supertask_has_a_time(training: Pipeline, times: TaskTimes) -> None:
    assert set(times.tasks) == computing(training)
    assert all(times.seconds(task) > 0 for task in times.tasks)
    times.check_belong(training)


def test_lowered_supertasks_have_times(training: Pipeline) -> None:
    lowered = lower(training)
    found = profile_tasks(lowered, n_iter=1, in_process=True)
    assert set(found.tasks) == computing(training)
    assert all(found.seconds(task) > 0 for task in found.tasks)
    assert max(map(found.temporary_bytes, found.tasks)) > 0  # the arena
    found.check_belong(lowered)
    with pytest.raises(ProfileError, match="do something else"):
        found.check_belong(training)


def test_supertasks_that_share_a_program_are_measured_once() -> None:
    graph = language_model(layers=4)
    pipeline = build(graph, plan(graph, 1))
    found = profile_tasks(pipeline, n_iter=1, in_process=True)
    seconds: dict[str, set[float]] = {}
    for task in found.tasks:
        seconds.setdefault(pipeline.data_of(task), set()).add(found.seconds(task))
    assert len(found.tasks) > len(seconds)
    assert all(len(numbers) == 1 for numbers in seconds.values())


def test_temporary_bytes_are_what_neither_goes_in_nor_comes_out() -> None:
    found = profile_tasks(chain(1, width=8), n_iter=1, in_process=True)
    (task,) = found.tasks
    assert found.temporary_bytes(task) == 3 * 8 * 4  # of the linear layer, before relu


def test_updates_in_place_need_next_to_no_memory(training: Pipeline, times: TaskTimes) -> None:
    updates = [task for task in times.tasks if training.supertasks[task].phase == "update"]
    assert updates
    summed = 20 * 16 * 4  # the gradient of the tied weight, from both its uses
    assert max(map(times.temporary_bytes, updates)) in range(summed, summed + 100)


def test_the_contents_of_the_pipeline_stay_as_they_are() -> None:
    pipeline = chain()
    before = [tensor.clone() for tensor in held(pipeline)]
    profile_tasks(pipeline, n_iter=1, in_process=True)
    assert all(torch.equal(a, b) for a, b in zip(held(pipeline), before, strict=True))


def test_a_trained_models_own_tensors_stay_as_they_are() -> None:
    program = gpt()
    graph = compile_ir(program.step, *tokens(1)[0])
    pipeline = build(graph, plan(graph, mesh={"pipeline": 2}))
    before = [parameter.detach().clone() for parameter in program.model.parameters()]
    profile_tasks(pipeline, n_iter=1, in_process=True)
    assert all(map(torch.equal, program.model.parameters(), before))


def test_the_callers_generator_stays_as_it_is(training: Pipeline) -> None:
    before = torch.get_rng_state()
    profile_tasks(training, n_iter=1, in_process=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be() -> None:
    with pytest.raises(ProfileError, match=r"n_iter is a number from 1 up, found 0"):
        profile_tasks(chain(), n_iter=0)
    with pytest.raises(ProfileError, match=r"no time was measured for the supertask 'x'"):
        TaskTimes({}).seconds("x")


@pytest.mark.processes
def test_slots_in_processes_of_their_own_measure_at_the_same_time(training: Pipeline) -> None:
    found = profile_tasks(training, n_iter=1)
    assert set(found.tasks) == computing(training)


def test_a_round_is_a_small_step(training: Pipeline) -> None:
    numbers = {task: i for i, task in enumerate(computing(training))}
    phases = {i: training.supertasks[task].phase for task, i in numbers.items()}
    order = small_step(training, numbers)
    assert set(order) == set(phases)
    for number, phase in phases.items():
        assert order.count(number) == (1 if phase in ("prepare", "update") else 2)  # microbatches
    assert phases[order[-1]] == "update"
