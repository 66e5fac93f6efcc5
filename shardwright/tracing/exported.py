"""From an exported program to a finished graph.

Comes in: the calls of a `FlatModel`, and the tensors it holds. Goes out: an IRGraph
under the names and the structure of the captured call. What always holds: nodes that nothing
needs are dropped, and every stored value that the program changed is among the updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardwright.ir.builder import Builder
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Arguments, leaves
from shardwright.ir.values import IRValue
from shardwright.tracing.boundary import Boundary, StoredTensor
from shardwright.tracing.dead_code import remove_dead_code
from shardwright.tracing.emitter import GraphEmitter
from shardwright.tracing.export import TracedProgram
from shardwright.tracing.flat import PREFIX, FlatModel
from shardwright.tracing.origins import Scopes
from shardwright.tracing.translate import Translator


class ExportedGraph:
    """One exported program on its way to a graph.

    ``contents`` are the tensors it holds, by their paths behind the prefix; ``roots`` are the
    paths that stand before those of the program's modules, ``constants`` names for other tensors
    that it uses, by id. ``updates_parameters`` says that it may write to its parameters.
    """

    def __init__(
        self,
        name: str,
        flat: FlatModel,
        program: TracedProgram,
        contents: Mapping[str, StoredTensor],
        roots: tuple[str, ...] = (PREFIX,),
        constants: Mapping[int, str] | None = None,
        *,
        updates_parameters: bool = False,
    ) -> None:
        self.flat = flat
        self.program = program
        self.emitter = GraphEmitter(Builder(name))
        self.builder = self.emitter.builder
        self.translator = Translator(
            self.emitter, Scopes(flat, roots), updates_parameters=updates_parameters
        )
        self.memory = self.translator.memory
        self.boundary = Boundary(self.emitter, self.memory, program, contents, constants or {})

    def finish(self, stacklevel: int) -> IRGraph:
        """The graph; warnings are of the line ``stacklevel`` frames up, 1 being the caller's.

        Raises CaptureError.
        """
        roots = self.boundary.roots(leaf.name for leaf in leaves(self.flat.arguments))
        places = self.translator.walk(self.program.graph, roots, self.boundary.constant)
        self.emitter.records = torch.is_grad_enabled()
        values = [self.emitter.seen(self.memory.read(place)) for place in places]
        result = self.flat.outcome.result
        assert result is not None
        count = sum(1 for _ in leaves(result))
        outputs, rest = values[:count], values[count:]
        updates = self.updates(outputs, rest)
        self.boundary.check_inputs(stacklevel + 1)
        needed = [value.id for value in outputs] + [*updates, *updates.values()]
        remove_dead_code(self.builder.graph, needed)
        self.translator.backwards.check()
        return self.builder.finish(
            outputs, in_structure=self.arguments(), out_structure=result, updates=updates
        )

    def updates(self, outputs: Sequence[IRValue], rest: Sequence[IRValue]) -> dict[int, int]:
        """What replaces stored values; ``rest`` is what the program returns behind its result."""
        assigned = self.flat.outcome.assigned
        return self.boundary.updates() | self.boundary.assigned(assigned, rest[: len(assigned)])

    def arguments(self) -> Arguments:
        """The structure of the graph's inputs."""
        return self.flat.arguments
