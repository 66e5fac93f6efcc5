"""Training on two processes against one: `python -m benchmarks.pipeline`.

A GPT of 8 layers, hidden size 512, vocabulary 8192, 16 sequences, AdamW: one process of one thread
against two by pipeline, data and tensor parallelism, by this package and by PyTorch's own
(`peers`), and against one process of two threads, in turn. Small microbatches make slow matrix
products, large ones long waits, so each schedule is measured with several counts.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

import torch

import shardwright as sw
from benchmarks.measure import alternate, console, print_machine, print_timings
from benchmarks.models import loss_of, training_gpt
from benchmarks.peers import Trainers

ONE = "eager, one thread"
STEPS = 2
"""Steps a round, of which a mean is taken."""
OURS: dict[str, dict[str, Any]] = {
    "pipeline": {
        "1f1b 8": {"mesh": {"pipeline": 2}, "schedule": "1f1b", "microbatches": 8},
        "zb-h1 4": {"mesh": {"pipeline": 2}, "schedule": "zb-h1", "microbatches": 4},
        "zb-h1 8": {"mesh": {"pipeline": 2}, "schedule": "zb-h1", "microbatches": 8},
        "zb-v 4": {"mesh": {"pipeline": 2}, "schedule": "zb-v", "microbatches": 4},
        "zb-v 8": {"mesh": {"pipeline": 2}, "schedule": "zb-v", "microbatches": 8},
    },
    "data": {
        "data": {"mesh": {"data": 2}},
        "data, zero 1": {"mesh": {"data": 2}, "zero": 1},
    },
    "tensor": {
        "tensor": {"mesh": {"tensor": 2}},
        "tensor 2": {"mesh": {"tensor": 2}, "microbatches": 2},
    },
}
"""What is measured of this package, by what is split: a number is that of the microbatches."""
PEERS = {
    "pipeline": ("GPipe 8", "1F1B 8", "ZBV 4", "ZBV 8"),
    "data": ("DDP",),
    "tensor": ("DTensor",),
}
"""What is measured of PyTorch."""


class Training(Protocol):
    """Something that trains the benchmark's GPT."""

    def run(self, steps: int) -> list[float]:
        """Train some steps; gives the losses."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class Split:
    """The GPT trained by this package on two workers of one thread."""

    def __init__(self, length: int, options: dict[str, Any]) -> None:
        model, self._ids, self._labels = training_gpt(length=length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(ids), labels)
            loss.backward()
            optimizer.step()
            return loss

        rows = len(self._ids) // options.get("microbatches", 1)
        graph = sw.compile_ir(step, self._ids[:rows], self._labels[:rows])
        pipeline = sw.build(graph, sw.plan(graph, **options))
        self._session = sw.TrainingRunner(pipeline, threads=1)
        self._rate = torch.tensor(1e-3, dtype=torch.float64)

    def run(self, steps: int) -> list[float]:
        calls = [self._session.submit(self._ids, self._labels, lr=self._rate) for _ in range(steps)]
        return [call.result().item() for call in calls]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.close()


def measure(length: int, kind: str, rounds: int) -> None:
    """Print seconds a round of steps, by variant; all variants stay in memory meanwhile."""
    with ExitStack() as stack:
        running: dict[str, Training] = {
            ONE: Trainers("eager", 1, 1, length=length),
            "eager, two threads": Trainers("eager", 1, 2, length=length),
        }
        for name, options in OURS[kind].items():
            running[f"shardwright {name}"] = Split(length, options)
        for name in PEERS[kind]:
            running[f"torch {name}"] = Trainers(name, 2, 1, length=length)
        for training in running.values():
            stack.enter_context(training)
        losses = {name: training.run(2)[-1] for name, training in running.items()}
        for name, loss in losses.items():
            if name != "torch DDP":  # Its loss is that of half of the batch.
                assert abs(loss - losses[ONE]) < 1e-4 * losses[ONE], (name, loss, losses[ONE])
        timings = alternate(
            {
                name: lambda training=training: training.run(STEPS)
                for name, training in running.items()
            },
            rounds=rounds,
        )
    print_timings(f"{STEPS} steps, 16 sequences of {length}", timings, ONE)
    for name in timings.seconds:
        if name != ONE:
            console.print(f"speed of {name} over one thread: {1 / timings.ratio(name, ONE):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--split", choices=list(OURS), nargs="+", default=list(OURS))
    options = parser.parse_args()
    print_machine()
    for length in options.length:
        for kind in options.split:
            measure(length, kind, options.rounds)


if __name__ == "__main__":
    main()
