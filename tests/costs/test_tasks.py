"""Times of supertasks: a file of them, and which pipeline they belong to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shardwright.compiler import lower
from shardwright.costs.tasks import TaskTime, TaskTimes, fingerprint_tasks
from shardwright.errors import ProfileError
from shardwright.pipeline import Pipeline
from tests.runtime.linear_step import linear_step
from tests.runtime.sketch import chain


def of(pipeline: Pipeline) -> TaskTimes:
    """A second for each compute supertask."""
    tasks = (name for name, task in pipeline.supertasks.items() if task.kind in ("FX", "dfg"))
    return TaskTimes(dict.fromkeys(tasks, TaskTime(1.0, 8)), fingerprint_tasks(pipeline))


def test_times_are_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    times = of(linear_step())
    times.save(path)
    assert TaskTimes.load(path) == times
    assert path.read_text().startswith('{\n "version": 1,\n "task_times": {\n  "tasks": {')
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


BROKEN = (
    b"",
    b"{}",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"version": 2, "task_times": {"tasks": {}}}',
    b'{"version": 1, "task_times": {"tasks": {}}, "profile": {}}',
    b'{"version": 1, "task_times": {"tasks": {"a": {"seconds": -1, "temporary_bytes": 0}}}}',
    b'{"version": 1, "task_times": {"tasks": {"a": {"seconds": NaN, "temporary_bytes": 0}}}}',
)


@pytest.mark.parametrize("content", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_holds_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"times\.json is no file of .*simulate --measure"):
        TaskTimes.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"can be read from .*none\.json: No such"):
        TaskTimes.load(tmp_path / "none.json")


def test_they_belong_to_the_file_too(tmp_path: Path) -> None:
    pipeline = linear_step()
    times = of(pipeline)
    pipeline.save(tmp_path / "step.json")
    times.check_belong(Pipeline.load(tmp_path / "step.json"))


def test_the_schedule_and_how_many_microbatches_there_are_do_not_count() -> None:
    one, other = linear_step("gpipe"), linear_step("1f1b")
    assert other.training is not None
    assert other.training.microbatches is not None
    other.training.microbatches.n *= 2
    of(one).check_belong(other)


def test_times_by_hand_belong_to_any() -> None:
    TaskTimes({}).check_belong(linear_step())


def test_another_pipeline_is_told_by_its_supertasks() -> None:
    with pytest.raises(ProfileError, match=r"F0\.0.* only here and d0\.0, d1\.0 only there; meas"):
        of(chain(2)).check_belong(linear_step())


def test_supertasks_of_the_same_names_are_told_by_what_they_do() -> None:
    with pytest.raises(ProfileError, match=r"the same names, but do something else; measure"):
        of(chain(2, width=8)).check_belong(chain(2, width=16))
    with pytest.raises(ProfileError, match="the same names, but do something else"):
        of(chain(2)).check_belong(lower(chain(2)))


def test_another_slot_is_another_machine() -> None:
    pipeline = chain(2)
    task = msgspec.structs.replace(pipeline.supertasks["d0.0"], device="d1")
    moved = msgspec.structs.replace(pipeline, supertasks={**pipeline.supertasks, "d0.0": task})
    assert fingerprint_tasks(moved) != fingerprint_tasks(pipeline)
