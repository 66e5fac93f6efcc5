"""One training step of every model in stages, held against eager: `python -m zoo --training`.

Comes in: a model of the zoo, a mesh, a number of microbatches. Goes out: how far the loss, every
gradient, every parameter after the update and every buffer are from eager's, each as a share of the
largest number of its tensor. The gradients are AdamW's first moments, which after one step are a
tenth of them.

A gradient whose true value is zero, as that of a key's bias, is nothing but rounding: where its
largest number is below what the largest of all gradients rounds to, it has to be so in both. What
AdamW makes of it is as large as anything, so parameters are held against the largest of all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import shardwright as sw
from shardwright.ir.graph import forward_nodes
from zoo.models import BY_NAME, LAYERS
from zoo.training import LEARNING_RATE, Trained, joined, trained

ROUNDING = {True: 1e-12, False: 1e-5}
"""How far a step may be from eager's, by whether the model computes in float64 throughout."""
MESH = {"pipeline": 2}


@dataclass(frozen=True)
class Errors:
    """Distances from eager by name, and whether the forward computes in float64 throughout."""

    double: bool
    loss: float
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    buffers: Mapping[str, float]

    @property
    def largest(self) -> float:
        """The largest distance of all."""
        groups = (self.gradients, self.parameters, self.buffers)
        return max(self.loss, *(error for group in groups for error in group.values()))

    @property
    def passed(self) -> bool:
        """Whether all of it is rounding."""
        return self.largest <= ROUNDING[self.double]


def captured(name: str, microbatches: int, *, layers: int = LAYERS) -> tuple[Trained, sw.IRGraph]:
    """A model in the widest dtype it knows, and its step on the first of some microbatches."""
    single = BY_NAME[name].single_only
    entry = trained(name, torch.float32 if single else torch.float64, layers=layers)
    graph = sw.compile_ir(entry.step, **entry.microbatches(microbatches)[0])
    return entry, graph


def compare(
    entry: Trained, graph: sw.IRGraph, microbatches: int, mesh: Mapping[str, int] = MESH
) -> Errors:
    """A step on a mesh, in one process, and the same in eager, which changes ``entry``."""
    pipeline = sw.build(graph, sw.plan(graph, mesh=mesh, microbatches=microbatches))
    batches = entry.microbatches(microbatches)
    modules = BY_NAME[entry.name].modules
    with sw.TrainingRunner(pipeline, in_process=True, modules=modules) as session:
        loss = session.step(**joined(batches), lr=LEARNING_RATE)
        state = session.state()
    expected = entry.accumulated(batches)
    moments = {
        name: entry.optimizer.state[parameter]["exp_avg"]
        for name, parameter in entry.model.named_parameters()
        if parameter.grad is not None
    }
    parameters = {name: parameter.detach() for name, parameter in entry.model.named_parameters()}
    buffers = {name: buffer for name, buffer in entry.model.named_buffers() if name in state}
    return Errors(
        all(graph.values[v].dtype != "f32" for n in forward_nodes(graph) for v in n.outputs),
        distance(loss, expected),
        {
            name: gradient_distance(state[f"optimizer.{name}.exp_avg"], moment, largest(moments))
            for name, moment in moments.items()
        },
        {
            name: float((state[name] - parameter).abs().max()) / largest(parameters)
            for name, parameter in parameters.items()
        },
        {name: distance(state[name], buffer) for name, buffer in buffers.items()},
    )


def largest(tensors: Mapping[str, Tensor]) -> float:
    """The largest number in some tensors, without its sign."""
    return max(float(tensor.abs().max()) for tensor in tensors.values())


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest number that is expected."""
    difference = float((found.double() - expected.double()).abs().max())
    return difference / float(expected.abs().max()) if difference else 0.0


def gradient_distance(found: Tensor, expected: Tensor, largest: float) -> float:
    """As `distance`, where the gradient is more than the rounding of the largest of all."""
    rounding = torch.finfo(expected.dtype).eps * largest
    if max(float(found.abs().max()), float(expected.abs().max())) <= rounding:
        return 0.0
    return distance(found, expected)


@dataclass(frozen=True)
class Row:
    """What happened to one model's step of training; a field a column."""

    model: str
    nodes: str
    capture: str
    computes_in: str
    loss: str
    gradients: str
    parameters: str
    two_microbatches: str
    result: str

    @property
    def passed(self) -> bool:
        """Whether the step is eager's, whole and in two microbatches."""
        return self.result == "equal"


def run(name: str) -> Row:
    """One model through a step, whole and in two microbatches."""
    start = time.perf_counter()
    entry, graph = captured(name, 1)
    seconds = time.perf_counter() - start
    one, two = compare(entry, graph, 1), compare(*captured(name, 2), 2)
    return Row(
        model=name,
        nodes=str(len(graph.nodes)),
        capture=f"{seconds:.1f} s",
        computes_in="float64" if one.double else "float32",
        loss=f"{one.loss:.0e}",
        gradients=f"{max(one.gradients.values()):.0e}",
        parameters=f"{max(one.parameters.values()):.0e}",
        two_microbatches=f"{two.largest:.0e}",
        result="equal" if one.passed and two.passed else "differs",
    )
