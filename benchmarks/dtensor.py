"""PyTorch's own tensor parallelism, for comparison: DTensor over gloo, a process a rank.

`DTensorGPT` starts the processes, which stay and wait for calls. Each builds the same model,
splits it by `torch.distributed.tensor.parallel` as its documentation does (columns, then rows;
embedding by vocabulary), and keeps the arguments of the call: nothing but the word to begin goes
to it, and nothing comes back until `output` asks for it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.models import GPT, gpt


class DTensorGPT:
    """A `gpt` of these sizes, without fused or tied weights, over ``ranks`` processes."""

    def __init__(self, ranks: int, **sizes: int) -> None:
        self._folder = TemporaryDirectory()
        spawn = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            here, there = spawn.Pipe()
            arguments = (rank, ranks, Path(self._folder.name) / "store", there, sizes)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self._all(None)

    def __enter__(self) -> DTensorGPT:
        return self

    def __exit__(self, *exception: object) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=20)
        self._folder.cleanup()

    def run(self, calls: int) -> None:
        """Call the model some times, one after another."""
        self._all(calls)

    def output(self) -> torch.Tensor:
        """The result of one call."""
        return torch.cat([torch.from_numpy(part) for part in self._all(0)], dim=-1)

    def _all(self, message: int | None) -> list[object]:
        for end in self._ends:
            end.send(message)
        return [end.recv() for end in self._ends]


def _serve(rank: int, ranks: int, store: Path, end: Connection, sizes: dict[str, int]) -> None:
    """One rank: call the model as often as is asked for, until nobody asks any more."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model, args = gpt(**sizes, fused=False, tied=False)
    model = split(model, ranks)
    try:
        with torch.no_grad():
            while True:
                calls = end.recv()
                if calls == 0:
                    end.send(model(*args).numpy())
                    continue
                for _ in range(calls or 0):
                    model(*args)
                end.send(None)
    except EOFError:
        dist.destroy_process_group()


def split(model: GPT, ranks: int, *, gathered: bool = False) -> nn.Module:
    """The model with each rank's part of its weights; its scores whole where ``gathered``."""
    mesh = init_device_mesh("cpu", (ranks,))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()) if gathered else ColwiseParallel(),
    }
    for i in range(len(model.blocks)):
        for name in ("attention.query", "attention.key", "attention.value", "mlp.0"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "mlp.2"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)
