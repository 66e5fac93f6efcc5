"""PyTorch's own tensor parallelism, for comparison: DTensor over gloo, a process a rank.

`DTensorGPT` starts the processes (`ranks`). Each builds the same model, splits it by
`torch.distributed.tensor.parallel` as its documentation does (columns, then rows; embedding by
vocabulary), and keeps the arguments of the call: nothing but the word to begin goes to it, and
nothing comes back until `output` asks for it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.models import GPT, gpt
from benchmarks.ranks import Answerer, Ranks


class DTensorGPT:
    """A `gpt` of these sizes, without fused or tied weights, over ``ranks`` processes."""

    def __init__(self, ranks: int, **sizes: int) -> None:
        self._ranks = Ranks(ranks, _model, sizes)
        self.run(0)

    def __enter__(self) -> DTensorGPT:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ranks.close()

    def run(self, calls: int) -> None:
        """Call the model some times, one after another."""
        self._ranks.ask(calls)

    def output(self) -> torch.Tensor:
        """The result of one call."""
        return torch.cat([torch.from_numpy(part) for part in self._ranks.ask(None)], dim=-1)


def _model(rank: int, ranks: int, sizes: dict[str, int]) -> Answerer:
    """One rank's model: calls it as often as is asked for, or gives its output for None."""
    model, args = gpt(**sizes, fused=False, tied=False)
    model = split(model, ranks)

    @torch.no_grad()
    def answer(calls: int | None) -> object:
        if calls is None:
            return model(*args).numpy()
        for _ in range(calls):
            model(*args)
        return None

    return answer


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
