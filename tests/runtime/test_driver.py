"""What drives slots, from several threads and in forks of its process."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shardwright.runtime import Runner
from shardwright.runtime.driver import Driver, Start
from tests.clean_process import run_program
from tests.runtime.sketch import chain, chain_result


def test_no_more_calls_are_under_way_than_in_flight_whoever_begins_them() -> None:
    lock, counts = threading.Lock(), [0, 0]

    def note(change: int) -> None:
        with lock:
            counts[0] += change
            counts[1] = max(counts)

    def work() -> None:
        note(1)
        time.sleep(0.002)
        note(-1)

    with ThreadPoolExecutor(16) as pool:
        backend = type("Nothing", (), {"close": lambda self, abort: None})()
        driver = Driver(chain(1), Start(in_process=True), backend, 2)
        with ThreadPoolExecutor(8) as callers:
            for _ in range(40):
                callers.submit(driver._begin, lambda: pool.submit(work))
        driver.close()
    assert counts == [0, 2]


def test_several_threads_call_a_runner_in_process() -> None:
    inputs = [torch.randn(3, 4) for _ in range(40)]
    with Runner(chain(3), in_process=True, in_flight=2) as runner, ThreadPoolExecutor(6) as pool:
        found = list(pool.map(runner, inputs))
    assert all(map(torch.equal, found, (chain_result(x, 3) for x in inputs)))


def test_a_runner_in_process_works_in_a_fork() -> None:
    with Runner(chain(2), in_process=True) as runner:
        pid = os.fork()
        if pid == 0:
            equal = torch.equal(runner(torch.ones(3, 4)), chain_result(torch.ones(3, 4)))
            os._exit(0 if equal else 1)
        assert os.waitpid(pid, 0)[1] == 0


FORKED = """
import os, sys, torch
from shardwright.errors import RunError
from shardwright.runtime import Runner
from tests.runtime.sketch import chain, chain_result

x = torch.ones(3, 4)
runner = Runner(chain(2))
for end in (sys.exit, os._exit):
    if not (pid := os.fork()):
        for ask in (lambda: runner(x), lambda: runner.call_workers("shardwright.runtime:none")):
            try:
                ask()
            except RunError as error:
                assert f"belongs to process {os.getppid()}" in str(error), error
                print("refused", flush=True)
        runner.close()  # must not end the workers of the other process
        end(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert torch.equal(runner(x), chain_result(x, 2))
if not (pid := os.fork()):
    sys.exit(0)  # with a runner that nobody has closed
assert os.waitpid(pid, 0)[1] == 0
assert torch.equal(runner(x), chain_result(x, 2))
runner.close()
print("whole")
"""


@pytest.mark.processes
def test_a_runner_says_that_it_is_in_a_fork_of_its_process() -> None:
    done = run_program(FORKED)
    assert done.stdout.split() == ["refused"] * 4 + ["whole"], done.stderr
