"""Execution plans: a graph as a flat list of kernel calls on memory that is planned ahead."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.exec.compile import compile
    from shardwright.exec.lower_pipeline import lower
    from shardwright.exec.program import CompiledProgram
    from shardwright.exec.replay import Replaying

__all__ = ["CompiledProgram", "Replaying", "compile", "lower"]

import_lazily(__name__)
