"""Execution plans: a graph as a flat list of kernel calls on memory that is planned ahead."""

from shardwright.exec import operators as operators  # registers what graphs may hold
from shardwright.exec.compile import compile
from shardwright.exec.lower_pipeline import lower
from shardwright.exec.program import CompiledProgram
from shardwright.exec.replay import Replaying

__all__ = ["CompiledProgram", "Replaying", "compile", "lower"]
