"""One variant of one workload in a process of its own, that runs as often as it is told.

`python -m benchmarks.executor.worker NAME VARIANT THREADS FILE DEVICE` makes the variant, writes
what its first steps gave to FILE and a line of JSON, then reads a number of steps a line, and
answers with the seconds that they took, the device's work included. `Worker` is the other side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.executor.variants import variants_of
from benchmarks.executor.workloads import WORKLOADS, Task

CHECKED_STEPS = 4
"""Training steps whose losses are compared with eager's."""


class Worker:
    """A variant's process; a context manager that ends it."""

    def __init__(
        self, name: str, variant: str, threads: int, folder: Path, device: str = "cpu"
    ) -> None:
        self.path = folder / f"{name}-{variant}-{threads}.pt".replace(" ", "_")
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, name, variant, str(threads), str(self.path), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )

    def answer(self) -> dict[str, float]:
        """The next line; RuntimeError where the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with {self.process.wait()}; see above")
        found: dict[str, float] = json.loads(line)
        return found

    def run(self, steps: int) -> float:
        """The seconds of a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self.answer()["seconds"] / steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def tensors_of(results: Any) -> list[torch.Tensor]:
    """What a forward gave, flat; detached copies on the CPU."""
    parts = results if isinstance(results, tuple | list) else [results]
    return [part.detach().to("cpu", copy=True) for part in parts if isinstance(part, torch.Tensor)]


def placed(task: Task, device: str) -> Task:
    """The task with its model, which its loss has too, and its batch on a device."""
    return task._replace(
        model=task.model.to(device), batch=tuple(part.to(device) for part in task.batch)
    )


def main(name: str, variant: str, threads: str, path: str, device: str) -> None:
    """Serve until the other side closes."""
    torch.set_num_threads(int(threads))
    answers, sys.stdout = sys.stdout, sys.stderr
    workload, wait = WORKLOADS[name], torch.cuda.synchronize if device == "cuda" else int
    start = time.perf_counter()
    step = variants_of(workload, device)[variant](workload, placed(workload.make(), device))
    first = [tensors_of(step())]
    seconds = time.perf_counter() - start
    if workload.optimizer is not None:
        first += [tensors_of(step()) for _ in range(CHECKED_STEPS - 1)]
    torch.save(first, path)
    print(json.dumps({"seconds": seconds}), file=answers, flush=True)
    for line in sys.stdin:
        count = int(line)
        wait()
        start = time.perf_counter()
        for _ in range(count):
            step()
        wait()
        took = time.perf_counter() - start
        print(json.dumps({"seconds": took}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
