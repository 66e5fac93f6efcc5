"""Lowered graphs: flat calls on values, each with all that a kernel is told.

A `LoweredGraph` is what `lower_graph` makes of an `IRGraph` and what a ``dfg`` supertask holds. It
says what is called, on what; where values lie in memory is the `ExecPlan`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.ir.values import Role
from shardwright.kernels.kinds import kind_of
from shardwright.kernels.lowered_text import format_call, format_lowered

ABSENT = -1
"""Stands for an optional operand that is not there."""


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One value: a slot of the executor's table.

    ``strides`` are in elements, None where the value is contiguous; ``names`` those of a
    checkpoint.
    """

    vid: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    strides: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """One call: a kind, its packed attributes, and the values it reads and makes.

    where
        The node it came from, for messages and traces.
    constraints, hints
        For the planner, in the words of `constraints`.
    saved
        Values that lie in their homes when a run has ended, whether or not anyone reads them.
    """

    kind_id: int
    attr_schema: int
    attr_blob: bytes
    in_vids: tuple[int, ...]
    out_vids: tuple[int, ...]
    where: str = field(default="", compare=False)
    constraints: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    saved: tuple[int, ...] = ()

    def must(self, constraint: str) -> bool:
        """Whether it is under a constraint, its own or its kind's."""
        return constraint in self.constraints or constraint in kind_of(self.kind_id).constrains

    def __str__(self) -> str:
        return format_call(self)


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """Calls in order.

    inputs, outputs
        Value ids; a value may stand twice among the outputs, and may be an input or stored.
    updates
        Stored value to the value whose contents it holds after a run.
    """

    name: str
    values: Mapping[int, ValueSpec]
    ops: tuple[LoweredOp, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    updates: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return format_lowered(self)
