"""Execution plans: a graph as a flat list of kernel calls on memory that is planned ahead."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.compiler.lowering import lower, lower_graph
    from shardwright.compiler.program import CompiledProgram, compile
    from shardwright.compiler.replay import Replaying

__all__ = [
    "CompiledProgram",
    "Replaying",
    "compile",
    "lower",
    "lower_graph",
]

import_lazily(__name__)
