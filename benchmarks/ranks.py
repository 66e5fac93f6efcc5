"""Processes for comparisons with PyTorch itself: one a rank, over gloo, that stay and answer.

What always holds: each makes its answerer once, from the same arguments, and nothing but questions
and answers travels; the processes end with the block that started them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

Answerer = Callable[[Any], Any]


class Ranks:
    """Processes of so many threads; ``make`` gives what answers, from rank, ranks, arguments."""

    def __init__(
        self, ranks: int, make: Callable[..., Answerer], *arguments: object, threads: int = 1
    ) -> None:
        self._folder = TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            here, there = spawn.Pipe()
            store = Path(self._folder.name) / "store"
            given = (rank, ranks, threads, store, there, make, arguments)
            process = spawn.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)

    def ask(self, question: object) -> list[Any]:
        """The answers of all ranks."""
        for end in self._ends:
            end.send(question)
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        """Let the processes end."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=20)
        self._folder.cleanup()


def _serve(
    rank: int,
    ranks: int,
    threads: int,
    store: Path,
    end: Connection,
    make: Callable[..., Answerer],
    arguments: tuple[object, ...],
) -> None:
    """One rank: answer until nobody asks any more."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    answer = make(rank, ranks, *arguments)
    try:
        while True:
            end.send(answer(end.recv()))
    except EOFError:
        dist.destroy_process_group()
