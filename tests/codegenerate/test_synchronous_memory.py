"""What a call of `SynchronousPipeline` keeps for its backward, and for how long."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.codegenerate.synchronous import SynchronousPipeline
from tests.codegenerate.staged import Meeting, Stage, configured, met, nothing, perceptron


class Saved:
    """A tensor that the backward needs, while it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def counting(layer: nn.Module, live: weakref.WeakSet[Saved]) -> Any:
    def pack(tensor: Tensor) -> Saved:
        kept = Saved(tensor)
        live.add(kept)
        return kept

    def compute(stage: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            return layer(x)

    return Stage({"layer": layer}, compute)


def test_what_a_microbatch_saved_is_freed_after_its_backward() -> None:
    live: weakref.WeakSet[Saved] = weakref.WeakSet()
    counts: list[int] = []

    def count(stage: nn.Module, x: Tensor) -> Tensor:
        return Meeting.apply(x, lambda: None, lambda: counts.append(len(live)))

    configuration = configured(
        [
            (["x"], ["y"], Stage({}, count)),
            (["y"], ["output"], counting(nn.Linear(3, 3), live)),
        ]
    )
    x = torch.randn(4, 3, requires_grad=True)
    for microbatches in (4, 1):
        with SynchronousPipeline(configuration, microbatches) as pipeline:
            output = pipeline(x)
            saved = len(live) // microbatches
            assert saved > 0
            output.sum().backward()
        assert len(live) == 0
        for done, found in enumerate(counts):
            assert found <= saved * (microbatches - 1 - done)
        counts.clear()
        assert output is not None


def test_nothing_is_saved_without_gradients_nor_after_a_call_is_dropped() -> None:
    live: weakref.WeakSet[Saved] = weakref.WeakSet()
    configuration = configured([(["x"], ["output"], counting(nn.Linear(3, 3), live))])
    with SynchronousPipeline(configuration, 2) as pipeline:
        with torch.no_grad():
            pipeline(torch.ones(4, 3))
        assert len(live) == 0
        output = pipeline(torch.ones(4, 3, requires_grad=True))
        assert len(live) > 0
        del output
        assert len(live) == 0


def test_recomputation_runs_all_but_the_last_microbatch_again() -> None:
    model = perceptron()
    seen: list[tuple[int, int]] = []
    configuration = met(model, lambda *place: seen.append(place), nothing)
    x = torch.randn(3, 6, dtype=torch.float64)
    with SynchronousPipeline(configuration, 3, checkpoint=True) as pipeline:
        output = pipeline(x, torch.arange(3))
        assert [row for stage, row in seen if stage == 1] == [0, 1, 2]
        output.sum().backward()
    for stage in (0, 1):
        assert [row for number, row in seen if number == stage] == [0, 1, 2, 1, 0]
