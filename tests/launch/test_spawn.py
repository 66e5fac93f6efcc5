"""Workers that are forked from a process that has imported what they need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwright.errors import LaunchError
from shardwright.launch import spawn
from shardwright.runtime import Runner
from tests.clean_process import ROOT, run_program
from tests.launch.test_local import wait_until
from tests.runtime.own_workers import children, fork_servers, workers
from tests.runtime.sketch import chain, chain_result

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not spawn.can_fork(), reason="this system's workers are not forked"),
]

X = torch.ones(3, 4)


@pytest.fixture
def own_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers that only this test has."""
    monkeypatch.setattr(spawn, "_servers", {})
    yield
    spawn._end_servers()


def test_runners_share_a_server() -> None:
    found = []
    for _ in range(2):
        with Runner(chain(2)) as runner:
            (server,) = (pid for pid in fork_servers() if children(pid))
            found.append((server, *children(server)))
            assert list(workers()) == [0, 1]
            assert torch.equal(runner(X), chain_result(X, 2))
    (first, *ones), (second, *others) = found
    assert first == second
    assert not {*ones} & {*others}
    assert children(first) == []


def test_two_runners_at_once() -> None:
    with Runner(chain(2)) as one, Runner(chain(3)) as other:
        assert torch.equal(one(X), chain_result(X, 2))
        one.close()
        assert torch.equal(other(X), chain_result(X, 3))


def test_a_server_is_one_thread() -> None:
    with Runner(chain(1)):
        (server,) = (pid for pid in fork_servers() if children(pid))
        assert len(os.listdir(f"/proc/{server}/task")) == 1


FIRST_CALL = """
import sys, torch
import shardwright.launch.fork_server
from shardwright.torch_internals import preload_compiler
from tests.runtime import operators

preload_compiler()
before = {*sys.modules}
torch.ops.runtime_tests.nap(torch.zeros(1))
print(sorted({*sys.modules} - before))
"""


def test_a_server_has_imported_what_torch_needs_for_custom_operators() -> None:
    command = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_another_server_where_libraries_would_read_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Runner(chain(1)):
        before = len(spawn._servers)
    for threads in (2, 3):
        counting = chain(1, op="runtime_tests.threads.default")
        with Runner(counting, threads=threads, modules=["tests.runtime.operators"]) as runner:
            assert (runner(X) == threads).all()
            assert len(spawn._servers) == before
    monkeypatch.setenv("SOMETHING", "else")
    with Runner(chain(1)):
        assert len(spawn._servers) == before
    monkeypatch.setenv("TORCH_SOMETHING", "else")
    with Runner(chain(1)):
        assert len(spawn._servers) == before + 1


def test_workers_without_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "can_fork", lambda: False)
    with Runner(chain(2)) as runner:
        assert torch.equal(runner(X), chain_result(X, 2))
        assert workers() == {}


# --- servers that end ------------------------------------------------------------------------


@pytest.mark.usefixtures("own_servers")
def test_workers_go_on_without_their_server() -> None:
    with Runner(chain(2)) as runner:
        (server,) = (pid for pid in fork_servers() if children(pid))
        pids = list(workers().values())
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: server not in fork_servers() or _is_zombie(server))
        assert torch.equal(runner(X), chain_result(X, 2))
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with Runner(chain(2)) as runner:
        assert torch.equal(runner(X), chain_result(X, 2))


@pytest.mark.usefixtures("own_servers")
def test_a_server_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match=r"forked from ended with exit code 1; what it printed"):
        Runner(chain(2))


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _is_gone(pid: int) -> bool:
    try:
        return _is_zombie(pid)
    except (FileNotFoundError, ProcessLookupError):
        return True


# --- what a worker is ------------------------------------------------------------------------


def test_a_worker_begins_with_what_the_driver_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Runner(chain(1)):
        before = len(spawn._servers)
        capfd.readouterr()
    monkeypatch.setenv("FACTS", str(tmp_path))
    monkeypatch.syspath_prepend("/first")
    monkeypatch.chdir(tmp_path)
    with Runner(chain(2), modules=["tests.runtime.facts"]):
        assert len(spawn._servers) == before
        pids = list(workers().values())
    first, second = (json.loads((tmp_path / f"{pid}.json").read_text()) for pid in pids)
    for found in (first, second):
        assert found["folder"] == str(tmp_path)
        assert found["path"] == "/first"
        assert found["leads its group"]
    assert not {*first["draws"]} & {*second["draws"]}
    assert first["descriptors"] == second["descriptors"]
    assert set(capfd.readouterr().out.split("\n")) >= {f"facts of {pid}" for pid in pids}


DRIVER = """
import os, signal, time
from tests.runtime.own_workers import fork_servers, workers
from tests.runtime.sketch import chain
from shardwright.runtime import Runner

runner = Runner(chain(2))
print(*fork_servers(), *workers().values(), flush=True)
if {forks} and not os.fork():
    os.close(1)
    os.close(2)
    time.sleep(60)  # As a process of a DataLoader, it has a copy of every descriptor.
    os._exit(0)
if {killed}:
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
runner.close()
"""


def test_nothing_outlives_a_driver() -> None:
    for killed in (False, True):
        driver = run_program(DRIVER.format(killed=killed, forks=False))
        assert driver.stderr == ""
        pids = [int(pid) for pid in driver.stdout.split()[:3]]
        assert len(pids) == 3
        wait_until(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_processes_end_at_once_with_a_killed_driver() -> None:
    """Also where a process that it has forked goes on, with a copy of every connection."""
    program = DRIVER.format(killed=True, forks=True)
    driver = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        killed_at = float(driver.stdout.readline())
        wait_until(lambda: all(_is_gone(pid) for pid in pids))
        assert time.monotonic() - killed_at < 2


COUNTING = """
import os, signal, sys
from pathlib import Path
from tests.runtime.own_workers import workers
from tests.runtime.sketch import chain
from shardwright.runtime import Runner

def count(path):
    with Runner(chain(2)):
        with open(path, "a") as file:
            file.write(str(len(workers())))

def odd(path):
    os.environb[b"NO_TEXT"] = b"\\xff\\xfe"
    os.close(1)
    os.close(2)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    count(path)
    count(path)

def fork(path):
    count(path)
    if not (pid := os.fork()):
        count(path)
        os._exit(0)
    os.waitpid(pid, 0)
    count(path)

pids = []
for drive in (odd, fork):
    if not (pid := os.fork()):
        drive(Path(sys.argv[1], drive.__name__))
        sys.exit()
    pids.append(pid)
sys.exit(max(os.waitpid(pid, 0)[1] for pid in pids) != 0)
"""


@pytest.mark.timeout(300)
def test_odd_drivers(tmp_path: Path) -> None:
    """One with a variable that is no text, closed outputs and ignored children, and a fork."""
    done = run_program(COUNTING, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "odd": "22",
        "fork": "222",
    }


def test_a_fork_in_the_middle_of_a_launch() -> None:
    with spawn._lock:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if not spawn._lock.locked() and not spawn._servers else 1)
    assert os.waitpid(pid, 0)[1] == 0
