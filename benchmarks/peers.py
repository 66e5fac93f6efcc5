"""How PyTorch itself trains over several processes, for comparison: a process a rank, over gloo.

`Trainers` starts the processes (`ranks`). Each builds the same model and optimizer, makes
them parallel as PyTorch's documentation does (`TRAINERS`), and keeps the batch: nothing but the
word to begin goes to it, and its losses come back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks.dtensor import split
from benchmarks.models import GPT, loss_of, training_gpt
from benchmarks.ranks import Answerer, Ranks

Step = Callable[[], float | None]
"""Trains one step; the loss, on the rank that has it."""


class Trainers:
    """Processes that train a `training_gpt` of these sizes as ``trainer`` says."""

    def __init__(self, trainer: str, ranks: int, threads: int = 1, **sizes: int) -> None:
        self._ranks = Ranks(ranks, _trainer, trainer, sizes, threads=threads)
        self.run(0)

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ranks.close()

    def run(self, steps: int) -> list[float]:
        """Train some steps; gives the losses."""
        found = self._ranks.ask(steps)
        return next((losses for losses in found if None not in losses), [])


def _trainer(rank: int, ranks: int, trainer: str, sizes: dict[str, int]) -> Answerer:
    """One rank: trains as many steps as is asked for."""
    kind, _, microbatches = trainer.partition(" ")
    step = TRAINERS[kind](rank, ranks, int(microbatches or 1), sizes)
    return lambda steps: [step() for _ in range(steps)]


def _loop(model: nn.Module, ids: Tensor, labels: Tensor) -> Step:
    """An ordinary training loop over one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def eager(rank: int, ranks: int, microbatches: int, sizes: dict[str, int]) -> Step:
    """One process."""
    return _loop(*training_gpt(**sizes))


def data_parallel(rank: int, ranks: int, microbatches: int, sizes: dict[str, int]) -> Step:
    """DistributedDataParallel, each rank with its part of the batch."""
    model, ids, labels = training_gpt(**sizes)
    return _loop(DistributedDataParallel(model), ids.chunk(ranks)[rank], labels.chunk(ranks)[rank])


def tensor_parallel(rank: int, ranks: int, microbatches: int, sizes: dict[str, int]) -> Step:
    """DTensor, layers split by columns and then rows."""
    model, ids, labels = training_gpt(**sizes)
    return _loop(split(model, ranks, gathered=True), ids, labels)


class Stage(nn.Module):
    """Some blocks of a GPT; the first stage embeds, the last makes scores."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        share = len(model.blocks) // count
        self.blocks = model.blocks[index * share : (index + 1) * share]
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.embed, self.position = model.embed, model.position
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def _pipelined(
    schedule: type[ScheduleGPipe | Schedule1F1B | ScheduleZBVZeroBubble], chunks: int
) -> Callable[[int, int, int, dict[str, int]], Step]:
    """torch.distributed.pipelining with stages of equally many blocks."""

    def make(rank: int, ranks: int, microbatches: int, sizes: dict[str, int]) -> Step:
        model, ids, labels = training_gpt(**sizes)
        count = ranks * chunks
        own = [rank] if chunks == 1 else [rank, count - 1 - rank]
        stages = [
            PipelineStage(Stage(model, index, count), index, count, torch.device("cpu"))
            for index in own
        ]
        running = schedule(
            stages[0] if chunks == 1 else stages, n_microbatches=microbatches, loss_fn=loss_of
        )
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        first, last = 0 in own, count - 1 in own

        def step() -> float | None:
            optimizer.zero_grad()
            losses: list[Tensor] = []
            given = {"target": labels, "losses": losses} if last else {}
            running.step(*([ids] if first else []), **given)
            optimizer.step()
            return torch.stack(losses).mean().item() if last else None

        return step

    return make


TRAINERS: dict[str, Callable[[int, int, int, dict[str, int]], Step]] = {
    "eager": eager,
    "DDP": data_parallel,
    "DTensor": tensor_parallel,
    "GPipe": _pipelined(ScheduleGPipe, 1),
    "1F1B": _pipelined(Schedule1F1B, 1),
    "ZBV": _pipelined(ScheduleZBVZeroBubble, 2),
}
"""Ways to train, by name; a number of microbatches may stand behind the name."""
