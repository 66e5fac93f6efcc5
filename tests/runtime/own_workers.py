"""The processes that a driver started, as the system knows them."""

from __future__ import annotations

import os
from pathlib import Path


def workers(driver: int | None = None) -> dict[int, int]:
    """The process ids of a driver's live workers by rank; of this process if none is given."""
    ranks = {}
    for server in fork_servers(driver):
        for pid in children(server):
            if name := _read(Path(f"/proc/{pid}/comm")).split():
                assert name[:2] == ["sw", "rank"], name
                ranks[int(name[2])] = pid
    return dict(sorted(ranks.items()))


def fork_servers(driver: int | None = None) -> list[int]:
    """The process ids of a driver's fork servers."""
    return [
        pid
        for pid in children(driver or os.getpid())
        if "shardwright.launch.fork_server" in _read(Path(f"/proc/{pid}/cmdline"))
    ]


def children(pid: int) -> list[int]:
    """The processes that a process has started and not buried."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, _read(task / "children").split())
    return found


def _read(path: Path) -> str:
    """What the system says; nothing of a thread or process that has ended in the meantime."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
