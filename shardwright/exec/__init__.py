"""Execution plans: a graph as a flat list of kernel calls on memory that is planned ahead."""

from typing import TYPE_CHECKING

from shardwright.lazy import import_lazily

if TYPE_CHECKING:
    from shardwright.exec.compile import compile
    from shardwright.exec.lower_pipeline import lower
    from shardwright.exec.lowering import lower_graph
    from shardwright.exec.program import CompiledProgram
    from shardwright.exec.replay import Replaying
    from shardwright.exec.specified import CudaExecutor, compile_cuda, optimize_ir

__all__ = [
    "CompiledProgram",
    "CudaExecutor",
    "Replaying",
    "compile",
    "compile_cuda",
    "lower",
    "lower_graph",
    "optimize_ir",
]

import_lazily(__name__)
