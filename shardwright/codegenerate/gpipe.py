"""One call of a pipeline: forward and backward of every stage on every microbatch (GPipe).

Comes in: stages, and the model's inputs of each microbatch. Goes out: the tensors that are wanted,
and, where gradients will be, a `Recording` of what the backward begins with. What always holds:

    each stage's part of a microbatch is an autograd graph of its own, from leaves to outputs; what
    passes from stage to stage has none, so that its backward can run in the stage's own thread
    gradients are summed in an order that does not depend on time: those of a tensor from the last
    stage that takes it on, those of a parameter microbatch by microbatch, then from the last stage
    a tensor is let go of when nothing will read it, the activations of a microbatch after its
    backward

Yanping Huang and others, GPipe, arXiv 1811.06965.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwright.codegenerate.stage_devices import Copies
from shardwright.codegenerate.stage_random import OwnDraws
from shardwright.codegenerate.stages import PipelineStage, StandIns, buffers_left
from shardwright.codegenerate.sweeps import Sweep
from shardwright.errors import InputError


@dataclass(slots=True)
class Segment:
    """A stage's part of a microbatch, as autograd has it: leaves, and what was made of them."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """How one call goes.

    devices
        Where each stage computes; None where its inputs are.
    wanted
        What the caller gets of each microbatch, each name once.
    recording
        Whether there will be a backward.
    recompute
        Whether activations are computed again in it. Those of the last microbatch are not: its
        backward is the first, and nothing would be gained.
    drawing, seed
        The stages whose random numbers follow from a seed, because others run at the same time.
    """

    stages: Sequence[PipelineStage]
    devices: Sequence[torch.device | None]
    microbatches: int
    wanted: tuple[str, ...]
    recording: bool
    copies: Copies
    recompute: bool = False
    drawing: frozenset[int] = frozenset()
    seed: int = 0


@dataclass(slots=True)
class Recording:
    """What a forward leaves for its backward."""

    call: Call
    stand_ins: Sequence[StandIns]
    segments: dict[tuple[int, int], Segment] = field(default_factory=dict)
    """By stage and microbatch."""


class Forward(Sweep):
    """Runs every stage on every microbatch, the first one first.

    values
        Of each microbatch the tensors by name that are still to be read; after the sweep, those
        that are wanted.
    drew
        Those of ``call.drawing`` that did draw random numbers.
    """

    what = "forward"

    def __init__(self, call: Call, inputs: Sequence[Mapping[str, Tensor]]) -> None:
        self.stages = range(len(call.stages))
        self.microbatches = range(call.microbatches)
        self.before = [stage.before for stage in call.stages]
        pairs = zip(call.stages, call.devices, strict=True)
        stand_ins = [StandIns(stage, device, recording=call.recording) for stage, device in pairs]
        self.recording = Recording(call, stand_ins)
        self.values: list[dict[str, Tensor]] = [dict(given) for given in inputs]
        self.drew: set[int] = set()
        self._call = call
        uses = Counter(name for stage in call.stages for name in stage.inputs)
        uses.update(call.wanted)
        self._uses = [uses.copy() for _ in self.microbatches]
        self._counting = threading.Lock()

    def step(self, stage: int, microbatch: int) -> None:
        """Run a stage on a microbatch."""
        inputs = self._take(stage, microbatch)
        outputs = self._compute(stage, microbatch, inputs)
        if self._call.recording:
            self.recording.segments[stage, microbatch] = Segment(inputs, outputs)
        for name, made in outputs.items():
            if self._uses[microbatch][name]:
                self.values[microbatch][name] = made

    def _take(self, stage: int, microbatch: int) -> dict[str, Tensor]:
        """A stage's inputs on its device, as leaves."""
        values, device = self.values[microbatch], self._call.devices[stage]
        taken = {}
        for name in self._call.stages[stage].inputs:
            value = values[name]
            leaf = self._call.copies.moved(value.detach(), device)
            if self._call.recording and value.requires_grad:
                leaf.requires_grad_()
            taken[name] = leaf
        with self._counting:
            for name in self._call.stages[stage].inputs:
                self._uses[microbatch][name] -= 1
                if not self._uses[microbatch][name]:
                    del values[name]
        return taken

    def _compute(
        self, stage: int, microbatch: int, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        described = self._call.stages[stage]
        arguments = list(inputs.values())
        run = _Computation(self, stage, microbatch)
        if self._call.recompute and microbatch != self._call.microbatches - 1:
            preserve = stage not in self._call.drawing
            made = checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=preserve)
        else:
            made = run(*arguments)
        return dict(zip(described.outputs, _as_tensors(made, described), strict=True))

    @contextmanager
    def drawing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Let a stage draw what the seed says for it, in the block."""
        if stage not in self._call.drawing:
            yield
            return
        with OwnDraws(self._call.seed, stage, microbatch) as draws:
            yield
        if draws.drew:
            self.drew.add(stage)


class _Computation:
    """A stage's forward of a microbatch; run again, it leaves buffers alone."""

    def __init__(self, forward: Forward, stage: int, microbatch: int) -> None:
        call = forward.recording.call
        self._module = call.stages[stage].module
        self._stand_ins = forward.recording.stand_ins[stage]
        self._draw = forward.drawing
        self._place = stage, microbatch
        self._again = False

    def __call__(self, *inputs: Tensor) -> Any:
        left = buffers_left(self._module) if self._again else nullcontext()
        self._again = True
        with self._stand_ins.in_place(), left, self._draw(*self._place):
            return self._module(*inputs)


def _as_tensors(made: Any, stage: PipelineStage) -> list[Tensor]:
    """What a stage returned, a tensor an output. Raises InputError."""
    found = [made] if isinstance(made, Tensor) else list(made or ())
    if len(found) != len(stage.outputs) or not all(isinstance(part, Tensor) for part in found):
        raise InputError(
            f"the stage returned {', '.join(type(part).__name__ for part in found) or 'nothing'}; "
            f"expected a tensor for each of its outputs: {', '.join(stage.outputs)}"
        )
    return found


class Backward(Sweep):
    """Differentiates every stage for every microbatch, the last one first.

    ``gradients`` are those of the wanted tensors of each microbatch; those of the model's inputs
    come to stand beside them. ``keep`` says that there will be another backward.
    """

    what = "backward"

    def __init__(
        self,
        recording: Recording,
        gradients: Sequence[Mapping[str, Tensor | None]],
        *,
        keep: bool = False,
    ) -> None:
        call = recording.call
        self._recording, self._keep, self._copies = recording, keep, call.copies
        self.stages = range(len(call.stages))[::-1]
        self.microbatches = range(call.microbatches)[::-1]
        self.before = _users(call.stages)
        self._arrived: list[dict[str, dict[int, Tensor]]] = [
            {name: {len(call.stages): given} for name, given in some.items() if given is not None}
            for some in gradients
        ]
        self._sums: list[list[Tensor | None]] = [
            [None] * len(stand_ins.leaves) for stand_ins in recording.stand_ins
        ]
        self._owned: list[set[int]] = [set() for _ in call.stages]

    def step(self, stage: int, microbatch: int) -> None:
        """Differentiate a stage for a microbatch."""
        segments = self._recording.segments
        take = segments.__getitem__ if self._keep else segments.pop
        segment = take((stage, microbatch))
        made = {name: self.gradient(microbatch, name) for name in segment.outputs}
        pairs = [
            (output, self._copies.moved(gradient, output.device))
            for name, output in segment.outputs.items()
            if output.requires_grad and (gradient := made[name]) is not None
        ]
        wanted = {name: leaf for name, leaf in segment.inputs.items() if leaf.requires_grad}
        leaves = self._recording.stand_ins[stage].leaves
        if not pairs or not (wanted or leaves):
            return
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(
            outputs,
            [*wanted.values(), *leaves],
            gradients,
            allow_unused=True,
            retain_graph=self._keep,
        )
        for name, gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                self._arrived[microbatch].setdefault(name, {})[stage] = gradient
        for number, gradient in enumerate(found[len(wanted) :]):
            if gradient is not None:
                self._add(stage, number, gradient)

    def gradient(self, microbatch: int, name: str) -> Tensor | None:
        """The sum of what has arrived for a tensor, which is forgotten here."""
        arrived = self._arrived[microbatch].pop(name, {})
        total = None
        for user in sorted(arrived, reverse=True):
            total = _sum(total, arrived[user], self._copies)
        return total

    def of_parameters(self) -> dict[int, Tensor]:
        """The gradients of parameters by their ids, from all stages that have them."""
        totals: dict[int, Tensor] = {}
        for stand_ins, sums in reversed(
            list(zip(self._recording.stand_ins, self._sums, strict=True))
        ):
            for parameter, gradient in zip(stand_ins.parameters, sums, strict=True):
                if gradient is not None:
                    here = self._copies.moved(gradient, parameter.device)
                    totals[id(parameter)] = _sum(totals.get(id(parameter)), here, self._copies)
        return totals

    def _add(self, stage: int, number: int, gradient: Tensor) -> None:
        """Add a microbatch's gradient of a parameter; in place only to a sum that is ours."""
        total = self._sums[stage][number]
        if total is not None and number in self._owned[stage] and not gradient.is_sparse:
            total.add_(gradient)
            return
        if total is not None:
            self._owned[stage].add(number)
        self._sums[stage][number] = _sum(total, gradient, self._copies)


def _users(stages: Sequence[PipelineStage]) -> list[list[int]]:
    """For each stage those that take something from it."""
    found: list[list[int]] = [[] for _ in stages]
    for stage in stages:
        for source in stage.before:
            found[source].append(stage.index)
    return found


def _sum(first: Tensor | None, second: Tensor, copies: Copies) -> Tensor:
    if first is None:
        return second
    second = copies.moved(second, first.device)
    if first.is_sparse and not second.is_sparse:
        first, second = second, first  # a sparse tensor takes no dense one
    return first + second
