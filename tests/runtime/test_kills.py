"""Training under random kills of workers, drivers and fork servers, busy or idle, or just starting.

A run is killed at random moments, a driver that was killed is started again with ``resume``, and
when all kills are done the losses and the state are those of a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shardwright.training import state_dict
from tests.clean_process import ROOT, run_program
from tests.launch.test_local import wait_until
from tests.runtime.own_workers import fork_servers, workers

DRIVER = """
import gc, os, random, sys, time
from pathlib import Path
from shardwright.training import train
from tests.runtime.programs import perceptron, rows

folder, steps, in_process = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
idle = random.Random(os.getpid())
counts = []

def data(epoch):
    gc.collect()
    until = time.monotonic() + 5  # Those of a worker that was killed are closed a little later.
    while (count := len(os.listdir("/proc/self/fd"))) > min(counts[1:], default=count) + 1:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    counts.append(count)
    with (folder / f"descriptors-{os.getpid()}").open("a") as file:
        file.write(f"{count}\\n")
    for number, batch in enumerate(rows(8) * (1 + steps // 8)):
        if not in_process and idle.random() < 0.3:
            time.sleep(idle.uniform(0, 0.3))  # The workers have nothing to do.
        yield batch

program = perceptron(0.3)
train(
    program.step, data, steps=steps, mesh={"pipeline": 2}, microbatches=2, quiet=True,
    checkpoint=folder / "kept", checkpoint_every=2, resume=True, restarts=0 if in_process else 999,
    log=folder / "log.jsonl", in_process=in_process,
)
"""
STEPS_A_KILL = 3
PATIENCE = 300
"""Seconds in which a run must get on by itself, on a machine that has much else to do."""


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), str(steps)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def logged(folder: Path) -> list[dict[str, float]]:
    log = folder / "log.jsonl"
    whole = log.read_text().rpartition("\n")[0] if log.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def victims(driver: int) -> dict[str, int]:
    """Whom one may kill now, by kind; a driver may not have come to start anybody yet."""
    found = {"driver": driver}
    with suppress(FileNotFoundError, AssertionError):  # One of them ends, or has no name yet.
        found |= {f"worker {rank}": pid for rank, pid in workers(driver).items()}
        for server in fork_servers(driver):
            found["fork server"] = server
    return found


def of_session(leader: int) -> list[int]:
    """All processes that a driver, the leader of a session, and those it started have left."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != leader and is_there(int(entry.name)):
            with suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


class Killed:
    """A run that is killed at random, and started again."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder = folder
        self.kills = kills
        self.steps = STEPS_A_KILL * kills + 6
        self.draw = random.Random(seed)
        self.killed: Counter[str] = Counter()

    def run(self) -> None:
        driver = start(self.folder, self.steps)
        try:
            while self.killed.total() < self.kills:
                self._wait(driver)
                driver = self._kill_one(driver)
            assert driver.wait(PATIENCE) == 0
            wait_until(lambda: not of_session(driver.pid))
        finally:
            driver.kill()
            driver.wait()

    def _wait(self, driver: subprocess.Popen[bytes]) -> None:
        """Let the run do a step or more, or begin to; then wait for no time in particular."""
        goal = len(logged(self.folder)) + self.draw.choice((0, 1, 2))
        goal = min(goal, self.steps - 3)
        deadline = time.monotonic() + PATIENCE
        while len(logged(self.folder)) < goal:
            assert driver.poll() is None, "a run ends when all its steps are done"
            assert time.monotonic() < deadline, "a run gets on"
            time.sleep(0.01)
        time.sleep(self.draw.uniform(0, 0.5))

    def _kill_one(self, driver: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        found = victims(driver.pid)
        others = [name for name in found if name.startswith("worker")]
        kinds = ["driver"] * 2 + ["fork server"] * ("fork server" in found) + others * 3
        name = self.draw.choice(kinds)
        try:
            os.kill(found[name], signal.SIGKILL)
        except ProcessLookupError:
            return driver  # It ended as one of a run that was killed just before.
        self.killed[name] += 1
        if name != "driver":
            return driver
        driver.wait()
        wait_until(lambda: not of_session(driver.pid))
        return start(self.folder, self.steps)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    shared = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= shared


def check_kills(tmp_path: Path, kills: int, seed: int) -> None:
    run = Killed(tmp_path / "killed", kills, seed)
    whole = tmp_path / "whole"
    for folder in (run.folder, whole):
        folder.mkdir()
    assert run_program(DRIVER, str(whole), str(run.steps), "in process").returncode == 0
    run.run()
    print(f"{kills} kills with seed {seed}: {dict(run.killed)}")
    found, expected = logged(run.folder), logged(whole)
    assert len(expected) == run.steps
    assert [(row["step"], row["loss"]) for row in found] == [
        (row["step"], row["loss"]) for row in expected
    ]
    states = [state_dict(folder / "kept") for folder in (run.folder, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert not list((run.folder / "kept").glob("*.tmp*"))
    for counts in run.folder.glob("descriptors-*"):
        _, *numbers = [int(line) for line in counts.read_text().split()]  # before any worker
        assert not numbers or max(numbers) <= numbers[0] + 1, "starts leave no descriptors"


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_again_and_again_computes_the_same(tmp_path: Path) -> None:
    check_kills(tmp_path, 6, 0)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_hundred_kills(tmp_path: Path, seed: int) -> None:
    check_kills(tmp_path, 20, seed)
