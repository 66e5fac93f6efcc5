"""Files of training steps run task by task in one process, each slot in its schedule's order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.comm.rounds import combine
from shardwright.comm.transport import memberships
from shardwright.comm.wire import conform
from shardwright.ir import compile_graph
from shardwright.ir.tensor_meta import torch_dtype
from shardwright.pipeline import Pipeline
from shardwright.pipeline.check_schedule import phases_of, schedule_of
from shardwright.pipeline.fxtext import decode
from shardwright.pipeline.rules import MICROBATCH_PHASES


class Visit(NamedTuple):
    """A task in a microbatch, the last of its action or not."""

    task: str
    microbatch: int | None
    last: bool


class StepRun:
    """The contents of constants, by tensor, from step to step."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.training = pipeline.training
        self.schedule = schedule_of(pipeline.training)
        self.connections = pipeline.connections
        self.members = memberships(pipeline)
        self.constants = {
            name: torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
            if info.value is None
            else pipeline.weights.read(info.value, info).clone()
            for name, info in pipeline.tensors.items()
            if info.is_constant
        }
        self.programs = {}

    def step(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole outputs by name, from whole inputs by name."""
        self.held = {}
        self._clear_sums()
        self._give(inputs)
        visits = {device: list(self._visits(device)) for device in self.pipeline.devices}
        while any(visits.values()):
            moved = [self._go(queue) for queue in visits.values()]
            assert any(moved) or self._meet(visits), "the slots wait for one another"
        return self._outputs()

    def _clear_sums(self) -> None:
        for new, old in self.training.replaces.items():
            if self.pipeline.tensors[old].init and self._phase(new) in MICROBATCH_PHASES:
                self.constants[old] = torch.zeros_like(self.constants[old])

    def _phase(self, tensor: str) -> str:
        return self.pipeline.supertasks[self.connections.producers[tensor][0]].phase

    def _give(self, inputs: Mapping[str, Tensor]) -> None:
        count, dims = self.training.microbatches.n, self.training.microbatches.dim
        for name, piece in self.pipeline.metadata.tensor_slices.inputs.items():
            users = [self.pipeline.supertasks[user] for user in self.connections.users[name]]
            again = any(user.phase in MICROBATCH_PHASES for user in users)
            whole, dim = inputs[piece.origin], dims.get(piece.origin)
            ranges = tuple(slice(*taken) for taken in piece.placements)
            if not again or dim is None:
                self.held[name, None] = whole[ranges]
                continue
            for microbatch, part in enumerate(whole.chunk(count, dim)):
                self.held[name, microbatch] = part[ranges]

    def _visits(self, device: str) -> Iterator[Visit]:
        slots = self.training.schedule.slots
        rank = next(i for i, devices in enumerate(slots) if device in devices)
        yield from self._action(device, ("prepare",), None, None)
        for action in self.schedule.actions[rank]:
            phases = phases_of(self.schedule, action.kind)
            yield from self._action(device, phases, action.stage, action.microbatch)
        yield from self._action(device, ("update",), None, None)

    def _action(self, device, phases, stage, microbatch) -> Iterator[Visit]:
        tasks = [
            name
            for phase in phases
            for name in self.connections.order[device]
            if (task := self.pipeline.supertasks[name]).phase == phase and task.stage == stage
        ]
        for name in tasks:
            yield Visit(name, microbatch, name == tasks[-1])

    def _go(self, queue: list[Visit]) -> bool:
        """Do what needs nobody else."""
        before = len(queue)
        while queue:
            task = self.pipeline.supertasks[queue[0].task]
            key = (task.group, queue[0].microbatch)
            if task.kind == "FX":
                self._compute(queue[0])
            elif task.kind == "send":
                self.held[key] = self._read(task.inputs[0], queue[0].microbatch)
            elif task.kind == "recv" and key in self.held:
                spec = self.members[queue[0].task].operation.gotten(1)
                made = conform(self.held.pop(key), spec)
                self.held[task.outputs[0], queue[0].microbatch] = made
            else:
                break
            self._done(queue)
        return len(queue) < before

    def _meet(self, visits: Mapping[str, list[Visit]]) -> bool:
        """A collective at which all its members stand."""
        fronts = {queue[0].task: queue for queue in visits.values() if queue}
        for task, queue in fronts.items():
            operation = self.members[task].operation if task in self.members else None
            if operation is None or operation.kind == "send":
                continue
            if not set(operation.tasks) <= fronts.keys():
                continue
            tasks = [self.pipeline.supertasks[name] for name in operation.tasks]
            microbatch = queue[0].microbatch
            given = [self._read(t.inputs[0], microbatch) if t.inputs else None for t in tasks]
            for member, made in enumerate(combine(operation, given)):
                if tasks[member].outputs:
                    spec = operation.gotten(member)
                    self.held[tasks[member].outputs[0], microbatch] = conform(made, spec)
                self._done(fronts[operation.tasks[member]])
            return True
        return False

    def _compute(self, visit: Visit) -> None:
        task = self.pipeline.supertasks[visit.task]
        if visit.task not in self.programs:
            infos = [self.pipeline.tensors[tensor] for tensor in task.inputs]
            graph = decode(self.pipeline.data_of(visit.task), infos)
            self.programs[visit.task] = compile_graph(graph)
        read = [self._read(tensor, visit.microbatch) for tensor in task.inputs]
        for tensor, made in zip(task.outputs, self.programs[visit.task](read), strict=True):
            self.held[tensor, visit.microbatch] = made

    def _read(self, tensor: str, microbatch: int | None) -> Tensor:
        if tensor in self.constants:
            return self.constants[tensor]
        last = self.training.microbatches.n - 1
        keys = ((tensor, microbatch), (tensor, None), (tensor, last))
        return next(self.held[key] for key in keys if key in self.held)

    def _done(self, queue: list[Visit]) -> None:
        """Replacements take place when a stage's work on a microbatch is done."""
        visit = queue.pop(0)
        device = self.pipeline.supertasks[visit.task].device
        made = {**{(new, visit.microbatch): old for new, old in self.training.replaces.items()}}
        for (new, microbatch), old in made.items():
            if visit.last and (new, microbatch) in self.held:
                maker = self.pipeline.supertasks[self.connections.producers[new][0]]
                done = self.pipeline.supertasks[visit.task]
                kinds = {maker.phase, done.phase} <= {"backward", "backward_weight"}
                same = maker.phase == done.phase or kinds
                if maker.device == device and same and maker.stage == done.stage:
                    self.constants[old] = self.held[new, microbatch].clone()

    def _outputs(self) -> dict[str, Tensor]:
        found = {}
        for name, piece in self.pipeline.metadata.tensor_slices.outputs.items():
            whole = self.pipeline.metadata.tensors.outputs[piece.origin]
            dim = self.training.microbatches.dim.get(piece.origin)
            if piece.origin not in found:
                found[piece.origin] = torch.zeros(whole.shape, dtype=torch_dtype(whole.dtype))
            parts = [found[piece.origin]]
            if dim is not None:
                parts = found[piece.origin].chunk(self.training.microbatches.n, dim)
            for microbatch, part in enumerate(parts):
                ranges = tuple(slice(*taken) for taken in piece.placements)
                part[ranges] = self._read(name, microbatch if dim is not None else None)
        return found
