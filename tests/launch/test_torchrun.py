from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from shardwright.comm.transport import operations
from shardwright.errors import LaunchError
from shardwright.launch.torchrun import outputs_on_first_slot, relays, relays_of
from shardwright.pipeline import check
from shardwright.runtime import Runner, run
from tests.clean_process import ranks
from tests.runtime.linear_step import WIDTH, linear_step
from tests.runtime.sketch import (
    chain,
    chain_result,
    every_collective,
    every_collective_result,
)

X = torch.ones(3, 4)


def test_outputs_come_to_the_first_slot() -> None:
    pipeline = chain(3)
    moved = outputs_on_first_slot(pipeline)
    check(moved)
    assert list(moved.metadata.tensor_slices.outputs) == ["y2@d0"]
    assert moved.tasks_of("d2")[-1] == "send.y2"
    assert moved.tasks_of("d0")[-1] == "recv.y2"
    assert torch.equal(run(moved, X, in_process=True), chain_result(X, 3))
    assert list(pipeline.metadata.tensor_slices.outputs) == ["y2"]


def test_outputs_that_are_there_stay() -> None:
    pipeline = every_collective(2)
    moved = outputs_on_first_slot(pipeline)
    x = torch.ones(5, 5)
    assert list(moved.metadata.tensor_slices.outputs) == ["y@d0", "z"]
    found = run(moved, x, in_process=True)
    assert all(map(torch.equal, found.values(), every_collective_result(x, 2)))


# --- outputs of steps -----------------------------------------------------------------------------


def test_each_output_that_is_elsewhere_is_sent_behind_the_files_own() -> None:
    pipeline = linear_step("gpipe", microbatches=2, data=2)
    found = relays(pipeline)
    assert list(found) == ["loss", "h2.0", "h2.1"]
    tags = [operation.tag for operation in found.values()]
    count = len(operations(pipeline))
    assert tags == [count, count + 1, count + 2]
    assert [operation.ranks for operation in found.values()] == [(2, 0), (2, 0), (3, 0)]
    spec = found["h2.1"].given(0)
    assert (spec.shape, found["h2.1"].gotten(1)) == ((2, 2, WIDTH), spec)
    assert found["loss"].given(0).shape == ()


def test_the_parts_of_ranks() -> None:
    found = relays(linear_step("gpipe", microbatches=2, data=2))
    assert [(r.tensor, r.gives) for r in relays_of(3, found)] == [("h2.1", True)]
    assert [(r.tensor, r.gives) for r in relays_of(0, found)] == [
        ("loss", False), ("h2.0", False), ("h2.1", False),
    ]  # fmt: skip
    assert relays_of(1, found) == {}


def test_outputs_of_steps_that_are_there_stay() -> None:
    assert relays(linear_step(ranks=1)) == {}
    assert relays(chain(2)) == {}


# --- ranks ----------------------------------------------------------------------------------------


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_another_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rank_environment(0, 3, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="3 ranks were started for the 2 device slots"):
        Runner(chain(2))
    assert torch.equal(run(chain(2), X, in_process=True), chain_result(X)), "in_process is local"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in rank_environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        threads = torch.get_num_threads()
        with pytest.raises(LaunchError, match=rf"127\.0\.0\.1:{port}.*[Cc]hoose another"):
            Runner(chain(2), threads=threads + 1)
        assert torch.get_num_threads() == threads


SCRIPT = """
import sys, torch
from shardwright.errors import InputError
from shardwright.runtime import Runner, run
from tests.runtime.sketch import chain, chain_result, every_collective, every_collective_result
from tests.engine.test_slot_engine import counting

x = torch.ones(5, 5)
found = run(every_collective(2), x)
with Runner(chain(2), trace=True) as runner:
    try:
        runner(y=x)
    except InputError:
        pass
    y = runner(torch.ones(3, 4))
    stream = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    ys = list(runner.map(stream))
    tasks = {event.task for event in runner.timeline.events}
with Runner(counting()) as runner:
    counts = list(runner.map([torch.zeros(1)] * 3))
if runner._backend._rank == 0:
    assert all(map(torch.equal, found.values(), every_collective_result(x, 2)))
    assert torch.equal(y, chain_result(torch.ones(3, 4)))
    assert all(torch.equal(y, chain_result(x)) for x, y in zip(stream, ys, strict=True))
    assert {"d0.0", "send.y0@d1", "recv.y1"} <= tasks, tasks
    assert counts == [0, 1, 2]
else:
    assert (found, y, ys, counts) == (None, None, [None] * 5, [None] * 3)
assert not torch.distributed.is_initialized()
sys.stdout.write("as it should be\\n")
"""

OWN_GROUP = """
import sys, torch, torch.distributed as dist
from shardwright.runtime import Runner
from tests.runtime.sketch import chain, chain_result
dist.init_process_group("gloo")
with Runner(chain(2)) as runner:
    y = runner(torch.ones(3, 4))
assert dist.get_rank() or torch.equal(y, chain_result(torch.ones(3, 4)))
dist.barrier()
dist.destroy_process_group()
sys.stdout.write("as it should be\\n")
"""


@pytest.mark.processes
def test_two_ranks_alone_then_within_a_programs_group(tmp_path: Path) -> None:
    done = ranks(SCRIPT + OWN_GROUP, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("as it should be") == 4


GONE = """
import os, sys, time, torch
from shardwright.runtime import Runner
from tests.runtime.sketch import chain
from shardwright.errors import WorkerError

def run(act, timeout):
    try:
        with Runner(chain(2), timeout=timeout) as runner:
            runner(torch.ones(3, 4))
            if int(os.environ["RANK"]) == 1:
                act()
            runner(torch.ones(3, 4))
            runner(torch.ones(3, 4))
    except WorkerError as error:
        said = f"rank {os.environ['RANK']} says: {error} {error.__notes__}"
        sys.stdout.write(said + "\\n")

run(lambda: time.sleep(6), 1)
run(lambda: os._exit(0), 60)
"""


@pytest.mark.processes
def test_a_rank_hangs_then_ends(tmp_path: Path) -> None:
    done = ranks(GONE, tmp_path)
    said = [line for line in done.stdout.splitlines() if "rank 0 says:" in line]
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert len(said) == 2, done.stdout
    for line, message in zip(said, ("nothing came for 1 s", "rank 1 is gone"), strict=True):
        assert message in line
        assert "recv.y1" in line
