"""Readable Python for each partition of a program: files that import torch and nothing else."""

from shardwright.codegenerate.codegen import codegen

__all__ = ["codegen"]
