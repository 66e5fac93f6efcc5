"""Operator calls as Python text: what a person would write that does exactly the same."""

from shardwright.codegenerate.spelling.call import Mode
from shardwright.codegenerate.spelling.imports import imports, module_of
from shardwright.codegenerate.spelling.spell import is_typed, spell

__all__ = ["Mode", "imports", "is_typed", "module_of", "spell"]
