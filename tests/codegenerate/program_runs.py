"""Programs run stage by stage, each stage's graph by itself, fed through its ports by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.codegenerate.stages import Stage, StageProgram
from shardwright.ir import IRGraph, compile_graph
from shardwright.ir.structure import flatten_call, rebuild


class ProgramRun:
    """A program with the contents of each stage's stored values.

    ``graph`` knows the structure of arguments and results; without one these are flat.
    """

    def __init__(self, program: StageProgram, graph: IRGraph | None = None) -> None:
        self.program = program
        self.graph = graph
        self.stored = [self._stored(stage) for stage in stages(program)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; buffers that change are replaced."""
        if self.graph is None:
            found = self.flat([*args, *kwargs.values()])
            return found[0] if len(found) == 1 else tuple(found)
        given = flatten_call(self.graph.in_structure, args, kwargs)
        return rebuild(self.graph.out_structure, self.flat(given))

    def flat(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Flat outputs from flat inputs."""
        held = dict(zip(self.program.inputs, given, strict=True))
        for stage, stored in zip(stages(self.program), self.stored, strict=True):
            held |= self._run(stage, stored, held)
        return [held[name] for name in self.program.outputs]

    def buffers(self) -> dict[str, Tensor]:
        """The contents of what changes, by stored name."""
        return {
            stage.graph.values[old].names[0]: stored[old]
            for stage, stored in zip(stages(self.program), self.stored, strict=True)
            for old in stage.graph.updates
        }

    def _stored(self, stage: Stage) -> dict[int, Tensor]:
        graph = stage.graph
        return {value.id: graph.tensors[value.id] for value in graph.stored()}

    def _run(
        self, stage: Stage, stored: dict[int, Tensor], held: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        program = compile_graph(stage.graph)
        values = dict(zip(stage.graph.inputs, (held[p.name] for p in stage.inputs), strict=True))
        made = program([(values | stored)[value_id] for value_id in program.arguments])
        count = len(stage.outputs)
        for old, new in zip(stage.graph.updates, made[count:], strict=True):
            stored[old] = stored[old].detach().clone().copy_(new)
        return {port.name: t for port, t in zip(stage.outputs, made[:count], strict=True)}


def stages(program: StageProgram) -> Iterator[Stage]:
    """The stages of a program in which each partition is one stage."""
    for partition in program.partitions:
        (stage,) = partition
        yield stage


def check_program(program: StageProgram) -> None:
    """What always holds of a program."""
    made: dict[str, int] = dict.fromkeys(program.inputs, -1)
    assert len(set(program.inputs)) == len(program.inputs)
    for number, stage in enumerate(stages(program)):
        assert stage.name == f"Stage{number}"
        for ports, ends in (
            (stage.inputs, stage.graph.inputs),
            (stage.outputs, stage.graph.outputs),
        ):
            names = [port.name for port in ports]
            assert names == sorted(set(names))
            assert [port.value for port in ports] == ends
        assert all(port.name in made for port in stage.inputs), "topological"
        assert not any(port.name in made for port in stage.outputs), "made once"
        made |= dict.fromkeys((port.name for port in stage.outputs), number)
        read = {v for node in stage.graph.nodes for v in node.inputs}
        ends = {*stage.graph.outputs, *stage.graph.updates, *stage.graph.updates.values()}
        assert all(value.id in read | ends for value in stage.graph.stored()), "nothing unread"
        assert set(stage.graph.inputs) <= read | ends
    assert set(program.outputs) <= made.keys()
    read_somewhere = {port.name for stage in stages(program) for port in stage.inputs}
    left = {port.name for stage in stages(program) for port in stage.outputs}
    assert left <= read_somewhere | {*program.outputs}, "nothing leaves for nobody"
    _check_updates(program)


def _check_updates(program: StageProgram) -> None:
    changed = [
        stage.graph.values[old].names for stage in stages(program) for old in stage.graph.updates
    ]
    for names in changed:
        holders = [s for s in stages(program) for v in s.graph.stored() if v.names == names]
        assert len(holders) == 1, "what changes stands in one stage"


def same(found: Any, wanted: Any) -> bool:
    """Whether two results hold the same tensors, to the last bit."""
    if isinstance(wanted, Tensor):
        return isinstance(found, Tensor) and torch.equal(found, wanted)
    if isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)
