"""The processes that a driver started, as the system knows them."""

from __future__ import annotations

import os
from pathlib import Path


def workers(driver: int | None = None) -> dict[int, int]:
    """The process ids of a driver's live workers by rank; of this process if none is given."""
    ranks = {}
    for server in fork_servers(driver):
        for pid in children(server):
            name = Path(f"/proc/{pid}/comm").read_text().split()
            assert name[:2] == ["sw", "rank"], name
            ranks[int(name[2])] = pid
    return dict(sorted(ranks.items()))


def fork_servers(driver: int | None = None) -> list[int]:
    """The process ids of a driver's fork servers."""
    return [
        pid
        for pid in children(driver or os.getpid())
        if b"shardwright.runtime.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def children(pid: int) -> list[int]:
    """The processes that a process has started and not buried."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found
