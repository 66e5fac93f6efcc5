"""Worker processes: what they compute, and what happens when something goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwright.engine.board import Line, State
from shardwright.engine.program import Entry
from shardwright.errors import (
    InputError,
    LaunchError,
    RunError,
    VerifyError,
    WeightError,
    WorkerError,
)
from shardwright.launch import spawn
from shardwright.launch.local import LocalProcesses, position_of, stall_error
from shardwright.pipeline import Pipeline
from shardwright.runtime import Runner, run, verify
from tests.clean_process import run_program
from tests.engine.test_slot_engine import counting
from tests.runtime import operators, own_workers
from tests.runtime.sketch import (
    chain,
    chain_result,
    every_collective,
    every_collective_result,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

X = torch.ones(3, 4)
SLEEPER = [operators.__name__]


@pytest.fixture(scope="module", autouse=True)
def descriptors_that_are_kept() -> None:
    """The first worker leaves a process a fork server."""
    Runner(chain(1)).close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No worker and no descriptor outlives a test."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert own_workers.workers() == {}
    wait_until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= descriptors)


def workers(runner: Runner) -> list[int]:
    assert isinstance(runner._backend, LocalProcesses)
    return [worker.process.pid for worker in runner._backend._workers]


def sleepy(slots: int = 2) -> Pipeline:
    """A chain whose slots sleep as long as the first number they see says."""
    return chain(slots, op="runtime_tests.nap.default")


def seconds(count: float) -> torch.Tensor:
    """An input of `sleepy` by which slot 0 naps for ``count`` seconds."""
    weight = chain(1).weights.read(*_constant("w0"))
    row = torch.linalg.solve(weight.double(), torch.tensor([count, 0, 0, 0]).double())
    return row.float().repeat(3, 1)


def _constant(name: str):
    info = chain(1).tensors[name]
    return info.value, info


def test_results_streams_and_events(tmp_path: Path) -> None:
    chain(3).save(tmp_path / "chain.pipeline.json")
    stream = [torch.randn(3, 4) for _ in range(8)]
    with Runner(tmp_path / "chain.pipeline.json", trace=True) as runner:
        with pytest.raises(InputError, match="the inputs are: x"):
            runner(y=X)
        for x, found in zip(stream, runner.map(stream), strict=True):
            assert torch.equal(found, chain_result(x, 3))
        events = runner.timeline.events
    kinds = {(e.slot, e.task, e.kind) for e in events if e.kind != "wait"}
    assert kinds == {
        ("d0", "d0.0", "compute"),
        ("d0", "send.y0@d1", "send"),
        ("d1", "recv.y0@d1", "recv"),
        ("d1", "d1.0", "compute"),
        ("d1", "send.y1@d2", "send"),
        ("d2", "recv.y1@d2", "recv"),
        ("d2", "d2.0", "compute"),
    }
    assert all(
        sum((e.task, e.call) == (task, call) for e in events if e.kind != "wait") == 1
        for _, task, _ in kinds
        for call in range(len(stream))
    )
    now = time.monotonic()
    assert all(now - 60 < event.start <= event.end <= now for event in events)


@pytest.mark.parametrize(("slots", "dtype"), [(2, "bf16"), (4, "f32")])
def test_every_collective(slots: int, dtype: str) -> None:
    size = 2 * slots + 1
    x = (torch.arange(size * size) % 7).reshape(size, size)
    x = x.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    found = run(every_collective(slots, dtype), x)
    assert all(map(torch.equal, found.values(), every_collective_result(x, slots)))


def test_verify_in_processes() -> None:
    with pytest.raises(VerifyError, match="differs by 1"):
        verify(chain(2), lambda x: chain_result(x, 2) + 1, (X,), in_process=False)


def test_state_is_kept_between_calls() -> None:
    with Runner(counting()) as runner:
        assert [y.item() for y in runner.map([torch.zeros(1)] * 4)] == [0, 1, 2, 3]


def test_one_slot_without_communication_and_a_forgotten_runner() -> None:
    runner = Runner(chain(1))
    assert torch.equal(runner(X), chain_result(X, 1))
    del runner


def test_idle_workers_use_no_processor() -> None:
    with Runner(chain(2)) as runner:
        runner(X)
        before = [ticks(pid) for pid in workers(runner)]
        time.sleep(1)
        assert [ticks(pid) for pid in workers(runner)] == pytest.approx(before, abs=5)


def ticks(pid: int) -> int:
    """Hundredths of a second of processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_an_exception_on_a_worker() -> None:
    bad = torch.full((3, 4), float("nan"))
    with Runner(chain(2, op="runtime_tests.refuse_nan.default"), modules=SLEEPER) as runner:
        with pytest.raises(WorkerError, match="ArithmeticError: there is a NaN") as caught:
            runner(bad)
        assert (caught.value.rank, caught.value.task) == (0, "d0.0")
        assert "in refuse_nan\n    raise ArithmeticError" in str(caught.value)
        assert own_workers.workers() == {}
        with pytest.raises(WorkerError, match="ArithmeticError: there is a NaN") as again:
            runner(X)
        assert (again.value.rank, again.value.task) == (0, "d0.0")
        assert not again.value.lost, "new workers would raise it too"


def test_a_worker_is_killed_in_the_middle_of_a_call() -> None:
    with Runner(sleepy(), modules=SLEEPER) as runner:
        future = runner.submit(seconds(30))
        wait_until(lambda: at(runner, 0) == "d0.0")
        os.kill(workers(runner)[0], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
            future.result()
        assert time.monotonic() - start < 5
        assert (caught.value.rank, caught.value.task) == (0, "d0.0")
        assert own_workers.workers() == {}


def test_the_last_worker_is_killed_while_it_waits() -> None:
    with Runner(sleepy(), modules=SLEEPER) as runner:
        future = runner.submit(seconds(30))
        wait_until(lambda: at(runner, 1) == "recv.y0@d1")
        os.kill(workers(runner)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="killed by SIGKILL") as caught:
            future.result()
        assert (caught.value.rank, caught.value.task) == (1, "recv.y0@d1")
        assert caught.value.tensor == "y0@d1"


def test_a_worker_dies_between_calls() -> None:
    with Runner(chain(2)) as runner:
        runner(X)
        os.kill(workers(runner)[1], signal.SIGTERM)
        wait_until(lambda: runner._backend._ended.is_set())
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"rank 1.*: the worker is gone: .*SIGTERM") as e:
                runner(X)
            assert (e.value.rank, e.value.task, e.value.lost) == (1, None, True)
        with pytest.raises(WorkerError, match=r"rank 1.*SIGTERM"):
            list(runner.map([X] * 100))


def test_a_worker_stands_still() -> None:
    with Runner(sleepy(), modules=SLEEPER, timeout=1.5) as runner:
        future = runner.submit(seconds(0.5))
        wait_until(lambda: at(runner, 0) == "d0.0")
        os.kill(workers(runner)[0], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"nothing has moved for 1\.5 s") as caught:
            future.result()
        assert 1 < time.monotonic() - start < 10
        assert (caught.value.rank, caught.value.task) == (0, "d0.0")
        assert own_workers.workers() == {}


def test_a_worker_stands_still_while_it_waits() -> None:
    with Runner(sleepy(), modules=SLEEPER, timeout=4) as runner:
        future = runner.submit(seconds(0.8))
        wait_until(lambda: at(runner, 1) == "recv.y0@d1")
        os.kill(workers(runner)[1], signal.SIGSTOP)
        with pytest.raises(WorkerError, match="nothing has moved") as caught:
            future.result()
        assert caught.value.rank == 1


def test_a_worker_that_stands_still_does_not_hold_up_the_driver() -> None:
    """Inputs larger than a socket's buffer: the driver is in the middle of sending."""
    with Runner(chain(1, width=1000), timeout=1.5, in_flight=1000) as runner:
        os.kill(workers(runner)[0], signal.SIGSTOP)
        with pytest.raises(RunError, match="nothing has moved"):
            list(runner.map([torch.zeros(3, 1000)] * 1000))


def test_long_work_is_no_failure_while_something_moves() -> None:
    with Runner(sleepy(3), modules=SLEEPER, timeout=4) as runner:
        results = list(runner.map([seconds(0.9)] * 5))
        assert len(results) == 5


def test_weights_that_vanish() -> None:
    """A worker that cannot read what the driver could is one clear error."""
    pipeline = chain(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pipeline.weights), "check", lambda *_: None)
        patch.setattr(type(pipeline.weights), "held", lambda *_: None)
        with pytest.raises(WeightError, match=r"rank \d \(device slot 'd\d'\): constant 'w\d'"):
            Runner(pipeline)


def test_workers_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "_servers", {})
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(LaunchError, match="worker 0 of 2 cannot be started"):
        Runner(chain(2))


def test_workers_that_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "can_fork", lambda: False)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match=r"ended before it was ready: .*exit code 1"):
        Runner(chain(2))


def test_closing_from_another_thread_ends_calls() -> None:
    runner = Runner(sleepy(), modules=SLEEPER)
    future = runner.submit(seconds(30))
    threading.Timer(0.3, runner._close, kwargs={"abort": True}).start()
    with pytest.raises(RunError, match="closed during the call"):
        future.result()


INTERRUPTED = """
import os, signal, sys, threading, time
from tests.runtime import operators, own_workers
from tests.launch.test_local import SLEEPER, Runner, seconds, sleepy, workers

signal.signal(signal.SIGINT, signal.default_int_handler)  # A job in the background ignores it.
with Runner(sleepy(), modules=SLEEPER) as runner:
    print(*workers(runner), flush=True)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.{signal})).start()
    runner(seconds(30))
"""


def test_the_driver_is_interrupted_or_killed() -> None:
    """A script without a main guard; its workers end with it."""
    for sent in ("SIGINT", "SIGKILL"):
        driver = run_program(INTERRUPTED.format(signal=sent))
        assert ("KeyboardInterrupt" in driver.stderr) == (sent == "SIGINT")
        pids = [int(pid) for pid in driver.stdout.split()]
        assert len(pids) == 2
        wait_until(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def at(runner: Runner, rank: int) -> str | None:
    """The supertask that a worker says it is at."""
    assert isinstance(runner._backend, LocalProcesses)
    step = runner._backend._board.read(rank).step
    slot = list(runner.pipeline.devices)[rank]
    return runner.pipeline.tasks_of(slot)[step] if step >= 0 else None


def wait_until(condition, patience: float = 20.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


# --- where workers are ----------------------------------------------------------------------------


def line(state: State, step: int = -1, ago: float = 0.0) -> Line:
    return Line(1, 0 if step >= 0 else -1, step, state, time.monotonic() - ago)


def test_positions() -> None:
    pipeline = chain(3)
    assert position_of(pipeline, 1, line(State.IDLE)).entry is None
    owing = position_of(pipeline, 1, line(State.IDLE), owes=True)
    assert owing.entry == Entry("recv.y0@d1", "y0@d1")
    assert owing.doing == "while it had no call to run, before recv.y0@d1"
    waiting = position_of(pipeline, 1, line(State.WAITING, 0))
    assert waiting.entry == Entry("recv.y0@d1", "y0@d1")
    working = position_of(pipeline, 1, line(State.WORKING, 1, ago=2))
    assert working.entry == Entry("d1.0")
    assert "d1.0 of call 0, since 2." in working.doing


@pytest.mark.parametrize(
    ("lines", "waiting", "stopped", "blamed", "text"),
    [
        pytest.param(
            [line(State.WAITING, 0, 9), line(State.WORKING, 1, 5), line(State.IDLE)],
            [0, 1, 2], [], (1, "d1.0"), "nothing has moved for 4 s, while it ran d1.0",
            id="who computes",
        ),
        pytest.param(
            [line(State.IDLE), line(State.IDLE), line(State.WAITING, 0, 9)],
            [1, 2], [], (1, None), "rank 2 while it waited", id="else who has not begun",
        ),
        pytest.param(
            [line(State.IDLE), line(State.WAITING, 0, 3), line(State.WAITING, 0, 9)],
            [1, 2], [], (2, "recv.y1@d2"), "All ranks: rank 0 while it had",
            id="else who waits longest",
        ),
        pytest.param(
            [line(State.WAITING, 0, 9), line(State.WORKING, 1, 5), line(State.WAITING, 0, 3)],
            [0, 1, 2], [2], (2, "recv.y1@d2"), "4 s, its process is stopped, while it waited",
            id="before all who is stopped",
        ),
    ],
)  # fmt: skip
def test_who_is_to_blame_where_nothing_moves(lines, waiting, stopped, blamed, text) -> None:
    positions = [position_of(chain(3), rank, line) for rank, line in enumerate(lines)]
    error = stall_error(positions, lines, waiting, 4, stopped)
    assert (error.rank, error.task) == blamed
    assert text in str(error)
