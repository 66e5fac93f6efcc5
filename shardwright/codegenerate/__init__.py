"""Readable Python for each partition of a program: files that import torch and nothing else."""

from shardwright.codegenerate.codegen import codegen
from shardwright.codegenerate.synchronous import SynchronousPipeline

__all__ = [
    "SynchronousPipeline",
    "codegen",
]
