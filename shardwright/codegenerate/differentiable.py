"""A call of all stages as one function that autograd knows.

In come stages and the inputs of each microbatch; out come what they make, with gradients if these
are asked for. What always holds: to autograd the call is one node, whose inputs are the model's
inputs and parameters; its backward gives all their gradients and accumulates nothing by itself, so
that hooks, `torch.autograd.grad` and a larger model around it work as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.codegenerate.gpipe import Backward, Call, Forward, Recording
from shardwright.codegenerate.sweeps import StageThreads, ThreadState, sweep_in_order
from shardwright.errors import RunError
from shardwright.torch_internals import keeps_graph

Made = list[dict[str, Tensor]]
"""Tensors of each microbatch by name."""
Source = tuple[int, str]
"""An input of the model: its microbatch and name."""


def call_stages(
    call: Call, parts: Sequence[Mapping[str, Tensor]], threads: StageThreads, *, threaded: bool
) -> tuple[Made, frozenset[int]]:
    """What the stages make of each microbatch, and which of them drew random numbers.

    ``threaded`` is whether each stage runs in its thread. Raises WorkerError.
    """
    forward = Forward(call, parts)
    passage = _Passage(forward, threads, threaded)
    if call.recording:
        read = {name for stage in call.stages for name in stage.inputs}
        sources = [
            (number, name)
            for number, part in enumerate(parts)
            for name, tensor in part.items()
            if name in read and tensor.requires_grad
        ]
        parameters = {
            id(parameter): parameter
            for stand_ins in forward.recording.stand_ins
            for parameter in stand_ins.parameters
        }
        tensors = [parts[number][name] for number, name in sources]
        apply: Callable[..., Sequence[Tensor]] = _Stages.apply
        found = iter(apply(passage, sources, *tensors, *parameters.values()))
        made = [{name: next(found) for name in call.wanted} for _ in parts]
    else:
        passage.sweep(forward, ThreadState.here())
        made = [{name: values[name] for name in call.wanted} for values in forward.values]
    return made, frozenset(forward.drew)


class _Passage:
    """A forward that is to be run, and the way that it and its backward are run."""

    def __init__(self, forward: Forward, threads: StageThreads, threaded: bool) -> None:
        self.forward = forward
        self.sweep = threads.sweep if threaded else sweep_in_order


class _Stages(torch.autograd.Function):
    """All stages on all microbatches."""

    @staticmethod
    def forward(
        ctx: Any, passage: _Passage, sources: Sequence[Source], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """The wanted tensors, microbatch by microbatch."""
        forward = passage.forward
        passage.sweep(forward, ThreadState.here(grad=True))
        call = forward.recording.call
        made = [values[name] for values in forward.values for name in call.wanted]
        outputs = tuple(tensor.detach() for tensor in made)
        ctx.mark_non_differentiable(
            *(
                output
                for output, tensor in zip(outputs, made, strict=True)
                if not tensor.requires_grad
            )
        )
        ctx.set_materialize_grads(False)
        ctx.recording, ctx.sweep, ctx.sources = forward.recording, passage.sweep, sources
        ctx.tensors = [(id(tensor), tensor.device) for tensor in tensors]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the model's inputs and of the parameters."""
        recording, keep = _still_there(ctx.recording), keeps_graph()
        found = iter(gradients)
        arrived = [
            {name: next(found) for name in recording.call.wanted}
            for _ in range(recording.call.microbatches)
        ]
        if not keep:
            ctx.recording = None
        backward = Backward(recording, arrived, keep=keep)
        ctx.sweep(backward, ThreadState.here(grad=False))
        return None, None, *_results(backward, recording, ctx.sources, ctx.tensors)


def _results(
    backward: Backward,
    recording: Recording,
    sources: Sequence[Source],
    tensors: Sequence[tuple[int, torch.device]],
) -> list[Tensor | None]:
    """The gradients of inputs, then those of parameters, in order."""
    results: list[Tensor | None] = []
    for (number, name), (_, device) in zip(sources, tensors, strict=False):
        gradient = backward.gradient(number, name)
        moved = recording.call.copies.moved
        results.append(None if gradient is None else moved(gradient, device))
    of_parameters = backward.of_parameters()
    results += [of_parameters.get(number) for number, _ in tensors[len(sources) :]]
    return results


def _still_there(recording: Recording | None) -> Recording:
    """What the forward left. Raises RunError where this backward cannot be."""
    if torch.is_grad_enabled():
        raise RunError(
            "the backward of a pipeline cannot be differentiated again; leave create_graph=True "
            "out, or use the model itself for second derivatives"
        )
    if recording is None:
        raise RunError(
            "the backward of this call has run, and what it needed is freed; give "
            "retain_graph=True to the first backward, or call the pipeline again"
        )
    return recording
