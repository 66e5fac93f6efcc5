"""Who may connect to workers: nobody but those that their driver has started."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from shardwright.errors import WorkerError
from shardwright.launch import torchrun
from shardwright.launch.protocol import Completed, from_bytes, to_bytes
from shardwright.launch.torchrun import TorchrunRank
from shardwright.launch.worker import Reply
from shardwright.runtime import Runner
from tests.runtime.own_workers import fork_servers, workers
from tests.runtime.sketch import chain, chain_result

X = torch.ones(3, 4)


def internet_sockets(pid: int) -> list[str]:
    """What a process has open that has an address and a port, or that listens for one."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        if Path(f"/proc/net/{table}").exists()
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    inodes = {f"socket:[{row[9]}]" for row in rows}
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:
            continue  # the descriptor by which this reads the folder
    return [name for name in found if name in inodes]


NOSY = """
import os, sys
os.setgid(65534); os.setuid(65534)
for pid in sys.argv[1:]:
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR)
            print("opened", pid, name)
    except PermissionError:
        print("refused")
"""


@pytest.mark.processes
def test_workers_and_driver_have_no_port() -> None:
    before = internet_sockets(os.getpid())
    with Runner(chain(3)) as runner:
        assert torch.equal(runner(X), chain_result(X, 3))
        assert internet_sockets(os.getpid()) == before
        for pid in (*workers().values(), *fork_servers()):
            assert internet_sockets(pid) == []
    assert internet_sockets(os.getpid()) == before


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_reaches_neither_the_store_nor_memory() -> None:
    with Runner(chain(2)) as runner:
        runner(X)
        pids = [*map(str, workers().values()), *map(str, fork_servers()), str(os.getpid())]
        done = subprocess.run(
            [sys.executable, "-c", NOSY, *pids], capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == ["refused"] * len(pids), done.stderr
        assert torch.equal(runner(X), chain_result(X, 2))


# --- under torchrun ---------------------------------------------------------------------------


class Evil:
    ran = False

    def __reduce__(self) -> tuple:
        return setattr, (Evil, "ran", True)


def test_a_message_is_read_as_it_was_written() -> None:
    tensors = {"x": torch.randn(3, 5).t(), "empty": torch.empty(0, 2), "n": torch.tensor(3)}
    message, found = from_bytes(to_bytes(Completed(4, {"rows": [1, 2]}), tensors))
    assert message == Completed(4, {"rows": [1, 2]})
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].stride() == tensor.stride()


@pytest.mark.parametrize("cut", [0, 3, 9, 30, -1])
def test_half_a_message_is_an_error(cut: int) -> None:
    whole = to_bytes(Completed(4, "text"), {"x": torch.ones(8)})
    with pytest.raises((EOFError, msgspec.MsgspecError)):
        from_bytes(whole[:cut])


def test_what_another_rank_sends_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(TorchrunRank):
        def __init__(self) -> None:
            self._store = self._gathering = object()
            self._slots = ["d0", "d1"]

    def gathered(content: bytes, group: object) -> list[bytes]:
        return [content, pickle.dumps(Evil())]

    monkeypatch.setattr(torchrun, "gather_bytes", gathered)
    with pytest.raises(WorkerError, match="answers what no rank does"):
        Two().gather({"d0": Reply(1)})
    assert not Evil.ran
    pickle.loads(pickle.dumps(Evil()))
    assert Evil.ran, "it would have run"


def test_nothing_here_sends_objects() -> None:
    """The functions of torch.distributed for objects pickle them, and unpickle what comes."""
    package = Path(torchrun.__file__).parents[1]
    calls = re.compile(r"dist\.\w*_object\w*\(")
    assert [path for path in package.rglob("*.py") if calls.search(path.read_text())] == []
