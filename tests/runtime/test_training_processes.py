"""Sessions on worker processes and under torchrun: the same steps, and what happens to faults."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.errors import RunError, WorkerError
from shardwright.launch.local import LocalProcesses
from shardwright.runtime.training_runner import TrainingRunner
from tests.clean_process import ranks
from tests.launch.test_local import wait_until
from tests.runtime import operators, own_workers
from tests.runtime.linear_step import ROWS, WIDTH, LinearModel, batches, linear_step, weight
from tests.runtime.test_training_runner import LR, assert_close, assert_trains, evaluation, model_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

NAP = {"op": "runtime_tests.nap.default"}
MODULES = [operators.__name__]


@pytest.mark.parametrize(
    ("kind", "microbatches", "data"), [("1f1b", 2, 1), ("zb-v", 4, 1), ("gpipe", 2, 2)]
)
def test_steps(kind: str, microbatches: int, data: int) -> None:
    assert_trains(linear_step(kind, microbatches=microbatches, data=data))


def test_what_is_asked_is_done_in_order() -> None:
    """Steps under way, evaluations, reading and writing the state, one after another."""
    pipeline, evaluated = linear_step(), evaluation()
    model = model_of(pipeline)
    with TrainingRunner(pipeline, trace=True) as session:
        start = session.state()
        for x, target in batches(3):
            future = session.submit(x, target, lr=LR)
            loss = model.step(x, target, LR)["loss"]
            assert_close(session.evaluate(evaluated, x[:4]), 2 * model.outputs(x[:4]))
            assert_close(session.state(), model.state())
            assert_close(future.result()["loss"], loss)
        session.load_state(start)
        assert_close(session.state(), start)
        again = LinearModel(2)
        x, target = batches(1)[0]
        assert_close(session.step(x, target, lr=LR), again.step(x, target, LR))
        events = session.timeline.events
    forwards = [(e.call, e.stage, e.microbatch) for e in events if e.task == "F1.0"]
    assert len(forwards) == 4 * 2
    assert {(stage, microbatch) for _, stage, microbatch in forwards} == {(1, 0), (1, 1)}
    updates = [e for e in events if e.task == "U1.0"]
    assert [(e.stage, e.microbatch) for e in updates] == [(None, None)] * 4
    assert "d1.1" in {e.task for e in events}, "the evaluation's"


def test_a_request_that_fails_leaves_the_workers_as_they_are() -> None:
    with TrainingRunner(linear_step()) as session:
        with pytest.raises(RunError, match=r"rank \d .*functions of shardwright\.\* only"):
            session.call_workers("os:getcwd")
        with pytest.raises(WorkerError, match="AttributeError"):
            session.call_workers("shardwright.runtime.memory:nothing")
        x, target = batches(1)[0]
        assert_close(session.step(x, target, lr=LR), LinearModel(2).step(x, target, LR))


# --- faults ----------------------------------------------------------------------------------


def sleeping_batch(seconds: float) -> tuple[Tensor, Tensor]:
    """A batch whose second microbatch keeps the last of two stages for as long."""
    x = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    wanted = torch.zeros(1, WIDTH, dtype=torch.float64)
    wanted[0, 0] = seconds
    x[ROWS // 2] = (wanted @ torch.linalg.inv(weight(0) @ weight(1)))[0]
    return x, torch.zeros_like(x)


def at(session: TrainingRunner, rank: int) -> tuple[str, int | None] | None:
    """The supertask and microbatch that a worker says it is at."""
    backend = session._backend
    assert isinstance(backend, LocalProcesses)
    entry = backend._position(rank, backend._board.read(rank)).entry
    return (entry.task, entry.microbatch) if entry is not None else None


def pids(session: TrainingRunner) -> list[int]:
    backend = session._backend
    assert isinstance(backend, LocalProcesses)
    return [worker.process.pid for worker in backend._workers]


def test_a_worker_is_killed() -> None:
    with TrainingRunner(linear_step(**NAP), modules=MODULES) as session:
        future = session.submit(*sleeping_batch(60), lr=LR)
        wait_until(lambda: at(session, 1) == ("F1.0", 1))
        os.kill(pids(session)[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
            future.result()
        assert time.monotonic() - start < 5
        assert own_workers.workers() == {}
        with pytest.raises(WorkerError, match="killed by SIGKILL"):
            session.step(*sleeping_batch(0), lr=LR)
    error = caught.value
    assert (error.rank, error.stage, error.task, error.microbatch) == (1, 1, "F1.0", 1)
    assert str(error).startswith(
        "rank 1, stage 1, supertask F1.0, microbatch 1: the worker is gone"
    )


def test_a_worker_stands_still() -> None:
    with TrainingRunner(linear_step(**NAP), modules=MODULES, timeout=3) as session:
        future = session.submit(*sleeping_batch(60), lr=LR)
        wait_until(lambda: at(session, 1) == ("F1.0", 1))
        os.kill(pids(session)[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match="nothing has moved for 3 s") as caught:
            future.result()
    error = caught.value
    assert (error.rank, error.stage, error.task, error.microbatch) == (1, 1, "F1.0", 1)


def test_an_exception_on_a_worker() -> None:
    pipeline = linear_step(op="runtime_tests.refuse_nan.default")
    x, target = batches(1)[0]
    x[ROWS // 2 :] = torch.nan
    with (
        TrainingRunner(pipeline, modules=MODULES) as session,
        pytest.raises(WorkerError, match="ArithmeticError: there is a NaN") as caught,
    ):
        session.step(x, target, lr=LR)
    assert (caught.value.stage, caught.value.microbatch) == (1, 1)


# --- torchrun --------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch
from pathlib import Path
from shardwright.runtime.training_runner import TrainingRunner
from tests.runtime.linear_step import LinearModel, batches, linear_step
from tests.runtime.test_training_runner import LR, assert_close, evaluation, model_of

rank = int(os.environ["RANK"])

def train(name, pipeline):
    model = model_of(pipeline)
    with TrainingRunner(pipeline) as session:
        own = session.own_part()
        for x, target in batches(3):
            given = []
            for key, tensor in (("x", x), ("target", target)):
                rows = [tensor[start:end] for start, end in own[key].ranges]
                given.append(torch.cat(rows) if rows else tensor[:0])
            found = session.step(*given, lr=LR)
            expected = model.step(x, target, LR)
            assert_close(found, expected) if rank == 0 else None
            assert rank == 0 or found is None
        assert_close(session.state(), model.state())
        session.load_state(model.state())
        if len(pipeline.devices) == 2 and "F1.0" in pipeline.tasks_of("d1"):
            y = session.evaluate(evaluation(), x[:4])
            assert_close(y, 2 * model.outputs(x[:4])) if rank == 0 else None
        assert list(session.call_workers("shardwright.runtime.memory:peak_memory")) == ["d0", "d1"]
    sys.stdout.write(f"{name}: rows {rank} {own['x'].ranges} {own['target'].ranges}\\n")

def threads_of_gloo():
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").glob("*")]
    return [name for name in names if "gloo" in name]

train("stages", linear_step())
assert not threads_of_gloo()
train("data", linear_step(ranks=1, data=2))
assert not threads_of_gloo()
"""


def test_ranks_that_read_their_own_rows(tmp_path: Path) -> None:
    done = ranks(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "rows" in line) == [
        "data: rows 0 ((0, 2), (4, 6)) ((0, 2), (4, 6))",
        "data: rows 1 ((2, 4), (6, 8)) ((2, 4), (6, 8))",
        "stages: rows 0 ((0, 8),) ()",
        "stages: rows 1 () ((0, 8),)",
    ]


GONE = """
import os, sys
from shardwright.errors import WorkerError
from shardwright.runtime.training_runner import TrainingRunner
from tests.runtime import operators
from tests.runtime.linear_step import linear_step
from tests.runtime.test_training_processes import LR, NAP, sleeping_batch

rank = int(os.environ["RANK"])
try:
    with TrainingRunner(linear_step(**NAP), modules=[operators.__name__], timeout=20) as session:
        if rank:
            import threading
            threading.Timer(4, os._exit, [0]).start()
        session.step(*sleeping_batch(15), lr=LR)
except WorkerError as error:
    sys.stdout.write(f"rank {rank} says: {error} {error.__notes__}\\n")
"""


def test_a_rank_that_ends(tmp_path: Path) -> None:
    done = ranks(GONE, tmp_path)
    said = [line for line in done.stdout.splitlines() if "rank 0 says:" in line]
    assert said, done.stderr
    assert "rank 1 is gone" in said[0]
    assert "on rank 0 in supertask 'recv.dh0.0@d0' of stage 0, microbatch" in said[0]
