"""GPipe: every stage on every microbatch, forward and backward, as one function of autograd.

Each stage's part of a microbatch is an autograd graph of its own, from leaves to outputs; what
passes between stages has none, so that its backward can run in the stage's own thread. To autograd
the whole call is one node, whose inputs are the model's inputs and parameters: hooks,
`torch.autograd.grad` and a larger model around it work as ever. Gradients are summed in an order
that does not depend on time: a tensor's from the last stage that takes it on, a parameter's
microbatch by microbatch, then from the last stage on. A tensor is freed when nothing will read it,
the activations of a microbatch after its backward.

Yanping Huang and others, GPipe, arXiv 1811.06965.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwright.codegenerate.stage_threads import (
    StageThreads,
    ThreadState,
    Traversal,
    run_in_order,
)
from shardwright.codegenerate.wiring import PipelineStage, StandIns
from shardwright.errors import InputError, RunError
from shardwright.torch_internals import OpOverload, TorchDispatchMode, keeps_graph, schema_of

TensorsByName = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class GPipeCall:
    """How one call goes.

    devices
        Where each stage computes; None where its inputs are.
    wanted
        What the caller gets of each microbatch, each name once.
    recompute
        Whether activations are computed again in the backward. Those of the last microbatch are
        not: its backward is the first.
    drawing, seed
        The stages whose random numbers follow from a seed, because others run at the same time.
    """

    stages: Sequence[PipelineStage]
    devices: Sequence[torch.device | None]
    microbatches: int
    wanted: tuple[str, ...]
    recording: bool
    copies: DeviceCopies
    recompute: bool = False
    drawing: frozenset[int] = frozenset()
    seed: int = 0


def call_stages(
    call: GPipeCall, parts: Sequence[Mapping[str, Tensor]], threads: StageThreads | None
) -> tuple[list[TensorsByName], frozenset[int]]:
    """What the stages make of each microbatch, and which of them drew random numbers.

    Without ``threads`` the calling thread runs all stages. Raises WorkerError.
    """
    forward = PipelineForward(call, parts)
    run = run_in_order if threads is None else threads.run
    if not call.recording:
        run(forward.traversal(), ThreadState.current())
        made = [{name: values[name] for name in call.wanted} for values in forward.values]
        return made, frozenset(forward.drew)
    read = {name for stage in call.stages for name in stage.inputs}
    sources = [
        (number, name)
        for number, part in enumerate(parts)
        for name, tensor in part.items()
        if name in read and tensor.requires_grad
    ]
    parameters = {id(p): p for stand_ins in forward.stand_ins for p in stand_ins.parameters}
    tensors = [parts[number][name] for number, name in sources]
    apply: Callable[..., Sequence[Tensor]] = _GPipe.apply
    found = iter(apply(forward, run, sources, *tensors, *parameters.values()))
    return [{name: next(found) for name in call.wanted} for _ in parts], frozenset(forward.drew)


class _GPipe(torch.autograd.Function):
    """All stages on all microbatches; ``sources`` are the differentiated inputs' places."""

    @staticmethod
    def forward(
        ctx: Any,
        forward: PipelineForward,
        run: Callable[[Traversal, ThreadState], None],
        sources: Sequence[tuple[int, str]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The wanted tensors, microbatch by microbatch."""
        run(forward.traversal(), ThreadState.current(grad=True))
        made = [values[name] for values in forward.values for name in forward.call.wanted]
        outputs = tuple(tensor.detach() for tensor in made)
        pairs = zip(outputs, made, strict=True)
        ctx.mark_non_differentiable(*(out for out, tensor in pairs if not tensor.requires_grad))
        ctx.set_materialize_grads(False)
        forward.values = []
        ctx.recording, ctx.run, ctx.sources = forward, run, sources
        ctx.tensors = [(id(tensor), tensor.device) for tensor in tensors]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the model's inputs and of the parameters."""
        recording, keep = _recording_of(ctx), keeps_graph()
        call, found = recording.call, iter(gradients)
        arrived = [{name: next(found) for name in call.wanted} for _ in range(call.microbatches)]
        if not keep:
            ctx.recording = None
        backward = PipelineBackward(recording, arrived, keep=keep)
        ctx.run(backward.traversal(), ThreadState.current(grad=False))
        of_inputs = [
            None
            if (gradient := backward.gradient(number, name)) is None
            else call.copies.moved(gradient, device)
            for (number, name), (_, device) in zip(ctx.sources, ctx.tensors, strict=False)
        ]
        of_parameters = backward.of_parameters()
        rest = [of_parameters.get(number) for number, _ in ctx.tensors[len(ctx.sources) :]]
        return None, None, None, *of_inputs, *rest


def _recording_of(ctx: Any) -> PipelineForward:
    """What the forward left. Raises RunError where this backward cannot be."""
    if torch.is_grad_enabled():
        raise RunError(
            "the backward of a pipeline cannot be differentiated again; leave create_graph=True "
            "out, or use the model itself for second derivatives"
        )
    recording: PipelineForward | None = ctx.recording
    if recording is None:
        raise RunError(
            "the backward of this call has run, and what it needed is freed; give "
            "retain_graph=True to the first backward, or call the pipeline again"
        )
    return recording


# --- forward and backward of one stage and microbatch --------------------------------------------


class PipelineForward:
    """Runs stages on microbatches, and records what their backwards begin with.

    values
        Of each microbatch the tensors by name that are still to be read; in the end those wanted.
    segments
        The leaves and outputs of each stage and microbatch that will be differentiated.
    drew
        Those of ``call.drawing`` that did draw random numbers.
    """

    def __init__(self, call: GPipeCall, inputs: Sequence[Mapping[str, Tensor]]) -> None:
        self.call = call
        pairs = zip(call.stages, call.devices, strict=True)
        self.stand_ins = [StandIns(s, device, recording=call.recording) for s, device in pairs]
        self.values: list[TensorsByName] = [dict(given) for given in inputs]
        self.segments: dict[tuple[int, int], tuple[TensorsByName, TensorsByName]] = {}
        self.drew: set[int] = set()
        uses = Counter(name for stage in call.stages for name in stage.inputs)
        uses.update(call.wanted)
        self._uses = [uses.copy() for _ in inputs]
        self._counting = threading.Lock()

    def traversal(self) -> Traversal:
        """Every stage on every microbatch, the first one first."""
        before = [stage.before for stage in self.call.stages]
        stages, microbatches = range(len(self.call.stages)), range(self.call.microbatches)
        return Traversal("forward", stages, microbatches, before, self._step)

    def _step(self, stage: int, microbatch: int) -> None:
        inputs = self._take(stage, microbatch)
        outputs = self._compute(stage, microbatch, inputs)
        if self.call.recording:
            self.segments[stage, microbatch] = inputs, outputs
        for name, made in outputs.items():
            if self._uses[microbatch][name]:
                self.values[microbatch][name] = made

    def _take(self, stage: int, microbatch: int) -> TensorsByName:
        """A stage's inputs on its device, as leaves."""
        values, names = self.values[microbatch], self.call.stages[stage].inputs
        taken = {}
        for name in names:
            leaf = self.call.copies.moved(values[name].detach(), self.call.devices[stage])
            if self.call.recording and values[name].requires_grad:
                leaf.requires_grad_()
            taken[name] = leaf
        with self._counting:
            for name in names:
                self._uses[microbatch][name] -= 1
                if not self._uses[microbatch][name]:
                    del values[name]
        return taken

    def _compute(self, stage: int, microbatch: int, inputs: TensorsByName) -> TensorsByName:
        runs = 0

        def compute(*arguments: Tensor) -> Any:
            nonlocal runs
            runs += 1
            with self._drawing(stage, microbatch):
                return self.stand_ins[stage].call(arguments, keep_buffers=runs > 1)

        arguments = inputs.values()
        if self.call.recompute and microbatch != self.call.microbatches - 1:
            preserve = stage not in self.call.drawing
            made = checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=preserve)
        else:
            made = compute(*arguments)
        names = self.call.stages[stage].outputs
        return dict(zip(names, _as_tensors(made, names), strict=True))

    @contextmanager
    def _drawing(self, stage: int, microbatch: int) -> Iterator[None]:
        """Let a stage draw what the seed says for it, in the block."""
        if stage not in self.call.drawing:
            yield
            return
        with OwnDraws(self.call.seed, stage, microbatch) as draws:
            yield
        if draws.drew:
            self.drew.add(stage)


def _as_tensors(made: Any, names: Sequence[str]) -> list[Tensor]:
    """What a stage returned, a tensor an output. Raises InputError."""
    found = [made] if isinstance(made, Tensor) else list(made or ())
    if len(found) != len(names) or not all(isinstance(part, Tensor) for part in found):
        raise InputError(
            f"the stage returned {', '.join(type(part).__name__ for part in found) or 'nothing'}; "
            f"expected a tensor for each of its outputs: {', '.join(names)}"
        )
    return found


class PipelineBackward:
    """Differentiates stages for microbatches, from the gradients of the wanted tensors.

    ``keep`` says that there will be another backward.
    """

    def __init__(
        self,
        recording: PipelineForward,
        gradients: Sequence[Mapping[str, Tensor | None]],
        *,
        keep: bool = False,
    ) -> None:
        self._recording, self._keep = recording, keep
        self._copies, self._stages = recording.call.copies, recording.call.stages
        self._arrived: list[dict[str, dict[int, Tensor]]] = [
            {name: {len(self._stages): given} for name, given in some.items() if given is not None}
            for some in gradients
        ]
        self._sums: list[list[Tensor | None]] = [
            [None] * len(stand_ins.leaves) for stand_ins in recording.stand_ins
        ]
        self._owned: list[set[int]] = [set() for _ in self._stages]

    def traversal(self) -> Traversal:
        """Every stage for every microbatch, the last one first."""
        users: list[list[int]] = [[] for _ in self._stages]
        for stage in self._stages:
            for source in stage.before:
                users[source].append(stage.index)
        stages, microbatches = range(len(self._stages)), range(len(self._arrived))
        return Traversal("backward", stages[::-1], microbatches[::-1], users, self._step)

    def _step(self, stage: int, microbatch: int) -> None:
        segments = self._recording.segments
        take = segments.__getitem__ if self._keep else segments.pop
        inputs, outputs = take((stage, microbatch))
        made = {name: self.gradient(microbatch, name) for name in outputs}
        pairs = [
            (output, self._copies.moved(gradient, output.device))
            for name, output in outputs.items()
            if output.requires_grad and (gradient := made[name]) is not None
        ]
        wanted = {name: leaf for name, leaf in inputs.items() if leaf.requires_grad}
        leaves = self._recording.stand_ins[stage].leaves
        if not pairs or not (wanted or leaves):
            return
        found = torch.autograd.grad(
            [output for output, _ in pairs],
            [*wanted.values(), *leaves],
            [gradient for _, gradient in pairs],
            allow_unused=True,
            retain_graph=self._keep,
        )
        for name, gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                self._arrived[microbatch].setdefault(name, {})[stage] = gradient
        for number, gradient in enumerate(found[len(wanted) :]):
            if gradient is not None:
                self._accumulate(stage, number, gradient)

    def gradient(self, microbatch: int, name: str) -> Tensor | None:
        """The sum of what has arrived for a tensor, which is forgotten here."""
        arrived = self._arrived[microbatch].pop(name, {})
        total = None
        for user in sorted(arrived, reverse=True):
            total = self._sum(total, arrived[user])
        return total

    def of_parameters(self) -> dict[int, Tensor]:
        """The gradients of parameters by their ids, from all stages that have them."""
        totals: dict[int, Tensor] = {}
        pairs = list(zip(self._recording.stand_ins, self._sums, strict=True))
        for stand_ins, sums in reversed(pairs):
            for parameter, gradient in zip(stand_ins.parameters, sums, strict=True):
                if gradient is not None:
                    here = self._copies.moved(gradient, parameter.device)
                    totals[id(parameter)] = self._sum(totals.get(id(parameter)), here)
        return totals

    def _accumulate(self, stage: int, number: int, gradient: Tensor) -> None:
        """Add a microbatch's gradient of a parameter; in place only to a sum that is ours."""
        total = self._sums[stage][number]
        if total is not None and number in self._owned[stage] and not gradient.is_sparse:
            total.add_(gradient)
            return
        if total is not None:
            self._owned[stage].add(number)
        self._sums[stage][number] = self._sum(total, gradient)

    def _sum(self, first: Tensor | None, second: Tensor) -> Tensor:
        if first is None:
            return second
        second = self._copies.moved(second, first.device)
        if first.is_sparse and not second.is_sparse:
            first, second = second, first  # a dense tensor takes a sparse one, not the reverse
        return first + second


# --- random numbers and devices -------------------------------------------------------------------

_SEEDED = torch.Tag.nondeterministic_seeded
_default_generator = threading.Lock()
"""Held while operators that take no generator draw from the process's."""


class OwnDraws(TorchDispatchMode):
    """Lets the CPU's operators draw from a generator of the block's own, seeded by ``numbers``.

    The CPU has one generator for the whole process: threads that draw from it would get what is
    left, by chance. ``drew`` is whether any operator has drawn.
    """

    def __init__(self, *numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        seed = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
        self._generator = torch.Generator().manual_seed(int(seed))
        self.drew = False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; one that draws, with this generator."""
        given = dict(kwargs or {})
        if _SEEDED not in func.tags:
            return func(*args, **given)
        self.drew = True
        names = [argument.name for argument in schema_of(func).arguments]
        if "generator" not in names:
            return self._with_default(lambda: func(*args, **given))
        if names.index("generator") >= len(args) and given.get("generator") is None:
            given["generator"] = self._generator
        return func(*args, **given)

    def _with_default(self, draw: Callable[[], Any]) -> Any:
        """Let the process's generator have this one's state for a draw."""
        with _default_generator:
            before = torch.get_rng_state()
            torch.set_rng_state(self._generator.get_state())
            try:
                return draw()
            finally:
                self._generator.set_state(torch.get_rng_state())
                torch.set_rng_state(before)


class DeviceCopies:
    """Copies of tensors between devices; between GPUs on streams of their own.

    Such a copy waits for what its source has been asked for so far, and its target's next work
    waits for it: a stage continues with its next microbatch while its last one travels (the copy
    streams of torchgpipe, arXiv 2004.09910).
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def moved(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """The tensor on a device; itself where it is there, or where there is none to go to."""
        if device is None or tensor.device == device:
            return tensor
        if not tensor.is_cuda or device.type != "cuda":
            # Towards the CPU the copy must have ended before anybody there reads it.
            return tensor.to(device, non_blocking=device.type == "cuda")
        out, into = self._stream(tensor.device, "out"), self._stream(device, "in")
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(out), torch.cuda.stream(into):
            moved = tensor.to(device, non_blocking=True)
        here = torch.cuda.current_stream(device)
        here.wait_stream(into)
        tensor.record_stream(out)
        moved.record_stream(here)
        return moved

    def _stream(self, device: torch.device, direction: str) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]
