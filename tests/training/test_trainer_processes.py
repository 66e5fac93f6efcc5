"""`train` on worker processes and under torchrun: the same losses, and what happens to faults."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwright.errors import WorkerError
from shardwright.launch import local, spawn
from shardwright.training import state_dict, train
from tests.clean_process import ranks
from tests.runtime.own_workers import workers
from tests.runtime.programs import perceptron, rows, some_short

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
OPTIONS = {"mesh": {"pipeline": 2}, "microbatches": 2}
STEPS = 8
SLOW = 2048
"""A width with which a worker is surely still at a step when the next batch is read."""
PAUSE = 2
"""Seconds in which workers surely come to where they have to wait."""


class Disturbed:
    """Data that does something to rank 1 when one batch is asked for, once."""

    def __init__(self, act: Callable[[int], None], at: int) -> None:
        self.act: Callable[[int], None] | None = act
        self.at = at
        self.since = 0.0

    def __call__(self, epoch: int):
        for number, batch in enumerate(rows(STEPS)):
            if number == self.at and self.act is not None:
                act, self.act = self.act, None
                self.since = time.monotonic()
                act(workers()[1])
            yield batch


def test_a_step_lasts_until_it_ends_not_until_it_is_asked_for() -> None:
    def data(epoch: int):
        first, *others, last = rows(4)
        yield from (first, *others)
        time.sleep(PAUSE)
        yield last

    result = train(perceptron().step, data, epochs=1, quiet=True, **OPTIONS)
    # The third step begins when the last batch has been read: until then the second has ended.
    second, third = result.seconds[1:3]
    assert second < PAUSE / 2 < third


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def kill_while_idle(pid: int) -> None:
    """While the workers have nothing to do: the data takes its time."""
    time.sleep(PAUSE)
    kill(pid)
    time.sleep(PAUSE)


def kill_in_its_stage(pid: int) -> None:
    """With rank 0 stopped before, between two steps, so that by then rank 1 waits for it."""
    time.sleep(PAUSE)
    os.kill(workers()[0], signal.SIGSTOP)
    threading.Timer(PAUSE, kill, [pid]).start()


def in_process(data) -> list[float]:
    return train(
        perceptron(0.3).step, data, epochs=1, in_process=True, quiet=True, **OPTIONS
    ).losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return in_process(rows(STEPS))


@pytest.fixture(scope="module")
def expected_short() -> list[float]:
    return in_process(some_short(rows(STEPS)))


def test_processes_compute_the_same(expected_short: list[float], tmp_path: Path) -> None:
    program = perceptron(0.3)
    log = tmp_path / "log.jsonl"
    result = train(
        program.step,
        some_short(rows(STEPS)),
        epochs=1,
        evaluate=program.evaluate,
        eval_data=rows(2, seed=1),
        log=log,
        checkpoint=tmp_path / "kept",
        quiet=True,
        **OPTIONS,
    )
    assert result.losses == expected_short
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["loss"] for line in lines] == expected_short
    assert set(lines[0]["memory"]) == {"d0", "d1"}
    assert lines[-1]["evaluation"].keys() == {"loss", "accuracy"}
    assert workers() == {}
    saved = state_dict(tmp_path / "kept")
    for name, tensor in program.model.state_dict().items():
        assert (saved[name] == tensor).all()


def test_a_killed_worker_is_named() -> None:
    data = Disturbed(kill_in_its_stage, at=4)
    with pytest.raises(WorkerError, match=r"rank 1.*killed by SIGKILL") as caught:
        train(perceptron().step, data, epochs=1, quiet=True, **OPTIONS)
    assert time.monotonic() - data.since < 2 * PAUSE + 5
    error = caught.value
    assert (error.rank, error.stage) == (1, 1)
    assert error.task is not None
    assert error.microbatch is not None
    assert workers() == {}


@pytest.mark.parametrize("act", [kill, kill_while_idle])
def test_a_killed_worker_is_replaced(
    act: Callable[[int], None], expected: list[float], tmp_path: Path
) -> None:
    data = Disturbed(act, at=5)
    result = train(
        perceptron(0.3).step,
        data,
        epochs=1,
        quiet=True,
        checkpoint=tmp_path / "kept",
        checkpoint_every=2,
        log=tmp_path / "log.jsonl",
        restarts=1,
        **OPTIONS,
    )
    assert data.act is None
    assert result.losses == expected
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == expected


def test_a_worker_that_is_lost_before_any_checkpoint(expected: list[float], tmp_path: Path) -> None:
    result = train(
        perceptron(0.3).step,
        Disturbed(kill, at=3),
        epochs=1,
        quiet=True,
        checkpoint=tmp_path,
        restarts=1,
        **OPTIONS,
    )
    assert result.losses == expected


def test_a_mistake_of_the_program_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def counted(*arguments: int) -> list[spawn.WorkerHandle]:
        starts.append(arguments)
        return spawn.start_workers(*arguments)

    monkeypatch.setattr(local, "start_workers", counted)
    weight = torch.nn.Parameter(torch.eye(4))
    optimizer = torch.optim.SGD([weight], 0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.linalg.cholesky(x @ weight).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = [torch.eye(4), -torch.eye(4)]
    with pytest.raises(WorkerError, match="cholesky") as caught:
        train(step, data, epochs=1, devices=1, checkpoint=tmp_path, restarts=3, quiet=True)
    assert not caught.value.lost
    assert len(starts) == 1


def test_a_stopped_worker_is_noticed() -> None:
    data = Disturbed(lambda pid: os.kill(pid, signal.SIGSTOP), at=4)
    with pytest.raises(
        WorkerError, match="nothing has moved for 2 s, its process is stopped"
    ) as caught:
        train(perceptron(hidden=SLOW).step, data, epochs=1, quiet=True, timeout=2, **OPTIONS)
    assert time.monotonic() - data.since < 10
    assert caught.value.rank == 1
    assert caught.value.task is not None, "in whichever phase that is"
    assert workers() == {}


SCRIPT = """
import os, signal, sys
from pathlib import Path
from shardwright.training import train
from tests.runtime.programs import perceptron, rows, some_short

folder = Path(sys.argv[1])

def data(epoch):
    for number, batch in enumerate(some_short(rows(8))):
        marker = folder / "killed"
        if number == 5 and os.environ["RANK"] == "1" and not marker.exists() and len(sys.argv) > 2:
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch

program = perceptron(0.3)
result = train(
    program.step, data, epochs=1, mesh={"pipeline": 2}, microbatches=2, evaluate=program.evaluate,
    eval_data=rows(1), checkpoint=folder / "kept", checkpoint_every=2, resume=True,
    log=folder / "log.jsonl", quiet=True,
)
(folder / f"losses-{os.environ['RANK']}").write_text(str(len(result.losses)))
"""


def torchrun(folder: Path) -> subprocess.CompletedProcess[str]:
    """Two ranks of which one is killed, and both are started again."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--max-restarts", "2", str(script), str(folder), "fault"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("fault", [False, True], ids=["undisturbed", "a rank is killed"])
def test_under_torchrun(fault: bool, tmp_path: Path, expected_short: list[float]) -> None:
    done = torchrun(tmp_path) if fault else ranks(SCRIPT, tmp_path, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists() == fault
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == expected_short
    assert "evaluation" in lines[-1]
    assert (tmp_path / "losses-1").read_text() == "0", "the losses are the first rank's"
    single = perceptron(0.3)
    train(single.step, some_short(rows(STEPS)), epochs=1, in_process=True, quiet=True, **OPTIONS)
    saved = state_dict(tmp_path / "kept")
    assert all((saved[k] == tensor).all() for k, tensor in single.model.state_dict().items())
