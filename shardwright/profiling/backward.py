"""The backward of a unit that is run alone.

Comes in: a unit's program, its tensors, and which of them want gradients. Goes out: the seconds and
bytes of its backward. Gradients come from torch.autograd, which takes some microseconds to start;
in a whole backward that is paid once, so it is left out here.

What always holds: only the tensors that are given get to want gradients, and no ``.grad`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardwright.profiling.clock import median_seconds, sample_seconds
from shardwright.profiling.memory import peak_bytes

Function = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Backward:
    """Seconds of the gradients of what nodes made and of what is stored, and bytes.

    ``kept`` are the most bytes of a forward that keeps what the backward needs; ``memory`` those of
    the backward beyond what such a forward leaves; ``again`` those of both together.
    """

    made: float = 0.0
    stored: float = 0.0
    kept: int = 0
    memory: int = 0
    again: int = 0


def measure_backward(
    function: Function,
    tensors: Sequence[Tensor],
    made: Sequence[Tensor],
    stored: Sequence[Tensor],
    *,
    samples: int,
    device: torch.device,
) -> Backward:
    """Measure the gradients of ``made`` and ``stored``, which are among ``tensors``.

    Each is 0 where there is nothing to give one of. Where there are both, their sum is the time of
    the backward that gives both at once.
    """
    with torch.enable_grad():
        for tensor in (*made, *stored):
            tensor.requires_grad_()
        results: list[Tensor] = []
        kept = peak_bytes(lambda: results.extend(function(tensors)), device).most
        outputs = [result for result in results if result.requires_grad]
        if not outputs:
            return Backward(kept=kept)
        run = _Gradients(outputs, [torch.ones_like(output) for output in outputs])
        everything = [*made, *stored]
        memory = peak_bytes(lambda: run.of(everything), device).most
        both = run.seconds(everything, samples, device)
        share = _share(run, made, stored, samples, device)
        again = peak_bytes(lambda: _again(function, tensors, everything, run.seeds), device).most
        return Backward(share * both, (1 - share) * both, kept, memory, again)


def _share(
    run: _Gradients,
    made: Sequence[Tensor],
    stored: Sequence[Tensor],
    samples: int,
    device: torch.device,
) -> float:
    """The part of a backward that its gradients of ``made`` take."""
    if not made or not stored:
        return 1.0 if made else 0.0
    first, second = (run.seconds(part, samples, device) for part in (made, stored))
    return first / (first + second) if first + second > 0 else 0.5


def _again(
    function: Function,
    tensors: Sequence[Tensor],
    inputs: Sequence[Tensor],
    seeds: Sequence[Tensor],
) -> object:
    """A forward and its backward, of which nothing is kept but the gradients."""
    outputs = [result for result in function(tensors) if result.requires_grad]
    return torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The backward of a forward that was run once."""

    outputs: Sequence[Tensor]
    seeds: Sequence[Tensor]

    def of(self, inputs: Sequence[Tensor]) -> object:
        """Run it for some inputs."""
        return torch.autograd.grad(
            self.outputs, inputs, self.seeds, retain_graph=True, allow_unused=True
        )

    def seconds(self, inputs: Sequence[Tensor], samples: int, device: torch.device) -> float:
        """What it takes, without the start of autograd."""
        whole = median_seconds(lambda: self.of(inputs), samples, device)
        return max(0.0, whole - start_seconds(device))


@lru_cache(maxsize=16)
def start_seconds(device: torch.device) -> float:
    """What a backward that computes nothing takes, at its quickest."""
    with torch.enable_grad():
        x = torch.ones(1, device=device, requires_grad=True)
        nothing = _Gradients([x.view_as(x)], [torch.ones(1, device=device)])
        return min(sample_seconds(lambda: nothing.of([x]), 20, device))
