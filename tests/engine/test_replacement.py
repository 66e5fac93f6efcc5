"""Which constants are overwritten by programs, and which are copied to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwright.compiler.tasks import compile_tasks
from shardwright.engine.program import is_training, slot_program
from shardwright.engine.replacement import MemoryUse, Replacements, find_replacements
from shardwright.pipeline import Microbatches, Pipeline, TensorInfo, Training, check
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.pipeline.connections import connect
from shardwright.runtime.training_runner import TrainingRunner
from shardwright.schedules import make_schedule
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import Sketch, chain, identity

SHAPE = (2, 2)
ACCUMULATORS = {"acc", "other"}
CPU = torch.device("cpu")
Write = Callable[..., Any]


def changes(pipeline: Pipeline, slot: str) -> Replacements:
    return find_replacements(connect(pipeline), slot, is_step=is_training(pipeline))


def memory_of(pipeline: Pipeline) -> Mapping[str, MemoryUse]:
    return slot_program(pipeline, "d0").memory


def add(b: Any, x: Any, y: Any) -> Any:
    return b.call("aten.add.Tensor", x, y)


def product(b: Any, x: Any, y: Any) -> Any:
    return b.call("aten.mul.Tensor", x, y)


def one_slot(
    tasks: Sequence[tuple[str, str, Sequence[str], Sequence[str], Write]],
    replaces: dict[str, str],
    output: str,
    microbatches: int = 2,
) -> Pipeline:
    """Tasks (phase, name, inputs, outputs, graph) on x, with ``w`` ones, and zeros to add to."""
    sketch = Sketch(1)
    sketch.input("x", SHAPE, part=("x", ((0, 2), (0, 2))))
    sketch.constant("w", torch.ones(SHAPE))
    for name in ACCUMULATORS:
        sketch.tensors[name] = TensorInfo(SHAPE, "f32", init="zeros")
    for _, name, inputs, outputs, write in tasks:
        sketch.fx(name, "d0", inputs, outputs, write)
    used = {tensor for _, _, inputs, *_ in tasks for tensor in inputs}
    for name in ACCUMULATORS - used:
        del sketch.tensors[name]
    pipeline = sketch.finish([output])
    schedule = make_schedule("gpipe", ranks=1, microbatches=microbatches)
    dims = Microbatches(microbatches, {"x": 0})
    pipeline.training = Training(replaces, dims, schedule_info(schedule, [["d0"]]))
    pipeline.metadata.tensors.inputs["x"].shape = (2 * microbatches, 2)
    for phase, name, *_ in tasks:
        task = pipeline.supertasks[name]
        task.phase, task.stage = phase, None if phase == "update" else 0  # type: ignore[assignment]
    check(pipeline)
    return pipeline


def result(pipeline: Pipeline, steps: int = 2) -> torch.Tensor:
    x = torch.arange(8.0).reshape(4, 2)
    with TrainingRunner(pipeline, in_process=True) as session:
        for _ in range(steps):
            found = session.step(x)
    return found


def test_a_pipeline_without_training_replaces_nothing_in_steps() -> None:
    assert changes(chain(1), "d0") == Replacements()


def test_what_a_step_overwrites() -> None:
    found = changes(linear_step(data=2), "d0")
    assert found.in_place == {
        "W0.0": {"g_new0.0": "g0.0"},
        "U0.0": {"w_new0.0": "w0.0", "m_new0.0": "m0.0"},
    }
    assert found.written == {"g0.0": "g_new0.0", "w0.0": "w_new0.0", "m0.0": "m_new0.0"}
    assert (found.copied, found.assigned, found.zeroed) == ({}, {"g0.0"}, ())


def test_what_is_received_is_copied() -> None:
    pipeline = linear_step()
    assert pipeline.training is not None
    pipeline.training.replaces = {"h1.0@d1": "sum.0"}
    assert changes(pipeline, "d1").copied == {("forward", 1): {"h1.0@d1": "sum.0"}}


def test_an_accumulator_that_two_read_is_set_to_zero_before_a_step() -> None:
    """The other reader comes first, and reads what is there before each microbatch."""
    tasks = [
        ("forward", "F.0", ["acc"], ["seen"], lambda b, acc: b.call("aten.mul.Tensor", acc, 2.0)),
        ("forward", "F.1", ["acc", "x"], ["sum"], add),
        ("forward", "F.2", ["other", "seen"], ["rest"], add),
        ("update", "U", ["sum"], ["y"], identity),
    ]
    pipeline = one_slot(tasks, {"sum": "acc", "rest": "other"}, "y")
    found = changes(pipeline, "d0")
    assert (found.assigned, found.zeroed) == ({"other"}, ("acc",))
    assert result(pipeline).tolist() == [[4, 6], [8, 10]]


def test_old_contents_that_are_read_later_in_the_turn_stay_until_its_end() -> None:
    tasks = [
        ("forward", "F.0", ["acc", "x"], ["sum"], add),
        ("forward", "F.1", ["acc", "other"], ["rest"], product),
        ("update", "U", ["sum"], ["y"], identity),
    ]
    pipeline = one_slot(tasks, {"sum": "acc", "rest": "other"}, "y")
    found = changes(pipeline, "d0")
    assert found.in_place == {"F.1": {"rest": "other"}}
    assert found.copied == {("forward", 0): {"sum": "acc"}}
    assert result(pipeline).tolist() == [[4, 6], [8, 10]]


def test_an_accumulator_goes_through_two_supertasks() -> None:
    tasks = [
        ("backward", "B.0", ["acc", "x"], ["partly"], add),
        ("backward", "B.1", ["partly", "x"], ["sum"], add),
        ("update", "U", ["sum"], ["y"], identity),
    ]
    pipeline = one_slot(tasks, {"sum": "acc"}, "y")
    found = changes(pipeline, "d0")
    assert found.in_place == {"B.0": {"partly": "acc"}, "B.1": {"sum": "partly"}}
    assert found.copied == {("backward", 0): {"sum": "acc"}}, "in case it is not there"
    assert found.assigned == {"acc"}
    compiled = compile_tasks(pipeline, memory_of(pipeline), CPU)
    acc, x = torch.full(SHAPE, 7.0), torch.ones(SHAPE)
    assert compiled["B.0"].first is not None
    (partly,) = compiled["B.0"].first([acc, x])
    (total,) = compiled["B.1"].program([partly, x])
    assert total.data_ptr() == acc.data_ptr()
    assert acc.tolist() == [[2, 2], [2, 2]]
    assert result(pipeline).tolist() == [[8, 12], [16, 20]]


def test_accumulators_alike_that_go_through_the_same_supertasks_have_a_place_each() -> None:
    """Which of the tensors between is made of which follows from no shape."""

    def both(b: Any, one: Any, other: Any, x: Any) -> Any:
        return [add(b, one, x), add(b, other, product(b, x, x))]

    tasks = [
        ("backward", "B.0", ["acc", "other", "x"], ["part", "rest"], both),
        ("backward", "B.1", ["rest", "part", "x"], ["second", "first"], both),
        (
            "update",
            "U",
            ["first", "second"],
            ["y"],
            lambda b, a, c: b.call("aten.sub.Tensor", a, c),
        ),
    ]
    pipeline = one_slot(tasks, {"first": "acc", "second": "other"}, "y")
    x = torch.arange(8.0).reshape(2, 2, 2)
    expected = ((x + x * x) - (x * x + x)).sum(0)
    found = changes(pipeline, "d0")
    assert found.in_place == {}
    assert set(found.zeroed) == {"acc", "other"}
    for steps in (1, 2, 3):
        assert result(pipeline, steps).tolist() == expected.tolist()


def test_a_view_that_outlives_what_it_shows_is_copied() -> None:
    """``seen`` is a view of w, which the next supertask overwrites before the last one reads."""
    tasks = [
        ("forward", "F.0", ["acc", "x"], ["sum"], add),
        ("update", "U.0", ["w"], ["seen"], lambda b, w: b.call("aten.t.default", w)),
        ("update", "U.1", ["w", "sum"], ["w_new"], add),
        ("update", "U.2", ["seen"], ["y"], identity),
    ]
    pipeline = one_slot(tasks, {"sum": "acc", "w_new": "w"}, "y")
    memory = memory_of(pipeline)
    compiled = compile_tasks(pipeline, memory, CPU)
    w = torch.ones(SHAPE)
    assert compiled["U.0"].program([w])[0].data_ptr() != w.data_ptr()
    assert memory["U.0"].fresh == {"seen"}
    assert memory["U.1"].writes == ("w",)
    assert result(pipeline, 1).tolist() == [[1, 1], [1, 1]]
    assert result(pipeline, 2).tolist() == [[5, 9], [7, 11]]


def test_new_contents_that_lie_in_the_old() -> None:
    """A state that becomes its own transpose, which another supertask reads before."""
    swapped = [
        ("forward", "F.0", ["x", "third"], ["kept"], add),
        ("update", "U.0", ["w"], ["w_new"], lambda b, w: b.call("aten.t.default", w)),
        ("update", "U.1", ["w", "lr"], ["y"], add),
    ]
    sketch = Sketch(1)
    sketch.input("x", SHAPE)
    sketch.input("lr", SHAPE)
    sketch.constant("w", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    sketch.tensors["third"] = TensorInfo(SHAPE, "f32", init="zeros")
    for _, name, inputs, outputs, write in swapped:
        sketch.fx(name, "d0", inputs, outputs, write)
    pipeline = sketch.finish(["y"])
    schedule = make_schedule("gpipe", ranks=1, microbatches=1)
    pipeline.training = Training(
        {"w_new": "w", "kept": "third"}, Microbatches(1, {}), schedule_info(schedule, [["d0"]])
    )
    for phase, name, *_ in swapped:
        task = pipeline.supertasks[name]
        task.phase, task.stage = phase, 0 if phase == "forward" else None  # type: ignore[assignment]
    zeros = torch.zeros(SHAPE)
    with TrainingRunner(pipeline, in_process=True) as session:
        found = [session.step(zeros, zeros).tolist() for _ in range(3)]
    assert found == [[[1, 2], [3, 4]], [[1, 3], [2, 4]], [[1, 2], [3, 4]]]
