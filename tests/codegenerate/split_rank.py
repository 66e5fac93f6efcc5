"""One slot of a program that `split_stages` made, run node by node: outputs and gradients.

A job has ``model`` (a key of `split_models.MODELS`) and ``plan`` (keywords of `sw.plan`). Every
slot does its stage of each partition, one after another, and saves what leaves as outputs, and the
gradients of parameters by their keys in a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import shardwright as sw
from shardwright.codegenerate.splitting.collectives import COLLECTIVES, is_collective
from shardwright.codegenerate.splitting.stages import split_stages
from shardwright.codegenerate.stages import Stage, StageProgram
from shardwright.codegenerate.support import exchanges
from shardwright.codegenerate.support.exchanges import Slots
from shardwright.codegenerate.support.slices import Piece, piece_of
from shardwright.ir import IRGraph
from shardwright.ir.operators import flatten_results, join_call, resolve
from shardwright.planning.assemble import planned
from shardwright.planning.plan import Plan, assignments, cluster_of
from tests.codegenerate import split_models


def prepare(job: Mapping[str, Any]) -> Callable[[int], Any]:
    """What a rank does."""
    model, inputs = split_models.made(job["model"])
    graph = sw.capture(model, inputs)
    plan = sw.plan(graph, **job["plan"])
    program = split_program(graph, plan)
    mesh = plan.assignments[0].mesh

    def work(rank: int) -> dict[str, Any]:
        slots = Slots(dict(zip(mesh.axes, mesh.sizes, strict=True)))
        return run(program, inputs, slots, rank)

    return work


def split_program(graph: IRGraph, plan: Plan) -> StageProgram:
    """The program of a plan that splits nodes."""
    whole = planned(graph, plan)
    return split_stages(
        whole, list(assignments(plan, len(whole.nodes))), cluster_of(plan), stages=plan.stages
    )


def run(
    program: StageProgram, inputs: tuple[torch.Tensor, ...], slots: Slots, rank: int
) -> dict[str, Any]:
    """What leaves as outputs, and gradients."""
    given = dict(zip(program.inputs, inputs, strict=True))
    ports: dict[str, torch.Tensor] = {}
    parameters: dict[str, torch.Tensor] = {}
    for partition in program.partitions:
        stage = partition[rank]
        for port in stage.inputs:
            if port.name not in ports:
                piece = piece_of(port.name)
                ports[port.name] = piece.of(given[piece.name])
        ports |= run_stage(stage, ports, slots, parameters)
    outputs = {
        name: tensor
        for name, tensor in ports.items()
        if piece_of(name).name in program.outputs and piece_of(name).name not in given
    }
    shares = [
        split_models.weighted(tensor, piece_of(name).ranges) for name, tensor in outputs.items()
    ]
    torch.stack(shares).sum().backward()
    grads = {key: tensor.grad for key, tensor in parameters.items()}
    return {"outputs": {key: t.detach() for key, t in outputs.items()}, "gradients": grads}


def run_stage(
    stage: Stage,
    ports: dict[str, torch.Tensor],
    slots: Slots,
    parameters: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """What leaves one stage, by port; its parameters are added to those known."""
    graph = stage.graph
    held = {port.value: ports[port.name] for port in stage.inputs}
    for value in graph.stored():
        path = value.names[0]
        key = Piece(*stage.slices[path]).key if path in stage.slices else path
        if value.role == "param":
            if key not in parameters:
                parameters[key] = graph.tensors[value.id].detach().clone().requires_grad_()
            held[value.id] = parameters[key]
        else:
            held[value.id] = graph.tensors[value.id].clone()
    for node in graph.nodes:
        operands = [held[value_id] for value_id in node.inputs]
        if is_collective(node):
            rest = {name: node.attrs[name] for name in COLLECTIVES[node.op]}
            call = getattr(exchanges, node.op)
            results = [call(operands[0], slots[node.attrs["axis"]], **rest)]
        else:
            overload = resolve(node.op)
            args, kwargs = join_call(overload, operands, node.attrs, torch.device("cpu"))
            made = overload(*args, **kwargs)
            results = [made] if isinstance(made, torch.Tensor) else flatten_results(made)
        for value_id, result in zip(node.results, results, strict=True):
            if value_id is not None:
                shape = graph.values[value_id].shape
                assert tuple(result.shape) == shape, (node.op, result.shape, shape)
                held[value_id] = result
    return {port.name: held[port.value] for port in stage.outputs}
