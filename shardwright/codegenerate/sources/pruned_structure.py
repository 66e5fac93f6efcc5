"""Structures of arguments and results of which some tensors are left out.

Where a tensor stood that is not kept stands None; a parameter of which nothing is kept is one that
was not given. The leaves that are kept are counted anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from shardwright.ir.structure import Arguments, Fixed, FixedFloat, Leaf, Parameter, Tree, leaves


def pruned_result(tree: Tree, kept: Iterable[int], first: int = 0) -> Tree:
    """The tree with the leaves of these numbers, which count from ``first`` on."""
    return _pruned(tree, {old: new for new, old in enumerate(kept, first)})


def pruned_arguments(arguments: Arguments, kept: Iterable[int]) -> Arguments:
    """The arguments with the tensors of these numbers."""
    numbers = {old: new for new, old in enumerate(kept)}
    return Arguments(tuple(_pruned_parameter(p, numbers) for p in arguments.parameters))


def _pruned_parameter(parameter: Parameter, numbers: Mapping[int, int]) -> Parameter:
    if parameter.value is None:
        return parameter
    before = [leaf.index for leaf in leaves(parameter.value)]
    if before and numbers.keys().isdisjoint(before):
        return Parameter(parameter.name, parameter.kind)
    value = _pruned(parameter.value, numbers)
    return Parameter(parameter.name, parameter.kind, value)


def _pruned(tree: Tree, numbers: Mapping[int, int]) -> Tree:
    if isinstance(tree, Leaf):
        return Leaf(tree.name, numbers[tree.index]) if tree.index in numbers else Fixed(None)
    if isinstance(tree, Fixed | FixedFloat):
        return tree
    items = tuple(_pruned(item, numbers) for item in tree.items)
    return msgspec.structs.replace(tree, items=items)
