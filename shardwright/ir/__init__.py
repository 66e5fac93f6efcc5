"""The intermediate representation: a functional, flat graph of operator calls."""

from shardwright.ir.builder import Builder
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.execute import Program, compile_graph
from shardwright.ir.graph import IRGraph, format_graph
from shardwright.ir.operators import resolve
from shardwright.ir.validate import validate
from shardwright.ir.values import SLOT, Input, IRNode, IRValue, Scope, Source
from shardwright.ir.with_backward import WITH_BACKWARD

__all__ = [
    "DROPOUT",
    "SLOT",
    "WITH_BACKWARD",
    "Builder",
    "IRGraph",
    "IRNode",
    "IRValue",
    "Input",
    "Program",
    "Scope",
    "Source",
    "compile_graph",
    "format_graph",
    "resolve",
    "validate",
]
