"""Rules of metadata.structure: it folds the original's inputs and outputs, and can be rebuilt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from shardwright.ir.structure import (
    Arguments,
    DictTree,
    Fixed,
    FixedFloat,
    Leaf,
    ObjectTree,
    Parameter,
    Tree,
    TupleTree,
    leaves,
)
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import Document, MetadataTensor


def check_structure(document: Document, _: Connections) -> None:
    """The structure folds exactly the original's inputs and outputs."""
    structure, originals = document.metadata.structure, document.metadata.tensors
    if structure is None:
        return
    _check_leaves("inputs", structure.inputs, originals.inputs)
    _check_leaves("outputs", structure.outputs, originals.outputs)
    _check_signature(structure.inputs)
    for parameter in structure.inputs.parameters:
        if parameter.value is not None:
            _check_tree(parameter.value, f"structure.inputs, parameter {parameter.name!r}")
    _check_tree(structure.outputs, "structure.outputs")


def _check_leaves(
    side: str, structure: Arguments | Tree, wholes: Mapping[str, MetadataTensor]
) -> None:
    found: dict[str, int] = {}
    for leaf in leaves(structure):
        if leaf.name in found:
            raise broken("structure", f"structure.{side} has this leaf twice", tensor=leaf.name)
        if leaf.name not in wholes:
            raise broken(
                "structure",
                f"structure.{side} has a leaf that is not in metadata.tensors.{side}",
                tensor=leaf.name,
            )
        if leaf.index != wholes[leaf.name].idx:
            raise broken(
                "structure",
                f"the leaf in structure.{side} has index {leaf.index}, metadata.tensors.{side} "
                f"says idx {wholes[leaf.name].idx}",
                tensor=leaf.name,
            )
        found[leaf.name] = leaf.index
    for name in wholes:
        if name not in found:
            raise broken("structure", f"structure.{side} has no leaf for this tensor", tensor=name)


_KINDS = {
    kind.name: kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}


def _check_signature(arguments: Arguments) -> None:
    """The parameters are those of a Python function, and hold what their kinds collect."""
    try:
        inspect.Signature([inspect.Parameter(p.name, _KINDS[p.kind]) for p in arguments.parameters])
    except (KeyError, ValueError, IndexError) as error:
        raise broken(
            "structure", f"structure.inputs is no signature of a function: {error}"
        ) from None
    for parameter in arguments.parameters:
        if not _holds(parameter):
            raise broken(
                "structure",
                f"structure.inputs, parameter {parameter.name!r}: a {parameter.kind} parameter "
                "holds a tuple or a dict with names for keys",
            )


def _holds(parameter: Parameter) -> bool:
    """Whether the value is what a parameter of this kind collects."""
    value = parameter.value
    if value is None or parameter.kind not in ("VAR_POSITIONAL", "VAR_KEYWORD"):
        return True
    if parameter.kind == "VAR_POSITIONAL":
        return isinstance(value, TupleTree)
    return isinstance(value, DictTree) and all(isinstance(key, str) for key in value.keys)


def _check_tree(tree: Tree, where: str) -> None:
    """Containers have a key an item, and classes are named as they can be found."""
    if isinstance(tree, Leaf | Fixed | FixedFloat):
        return
    if isinstance(tree, DictTree | ObjectTree):
        keys = tree.keys if isinstance(tree, DictTree) else tree.fields
        distinct = len(set(keys))
        if not len(tree.items) == len(keys) == distinct:
            raise broken(
                "structure",
                f"{where}: {len(tree.items)} items for {len(keys)} keys ({distinct} distinct)",
            )
    if isinstance(tree, ObjectTree) and not all(tree.cls.partition(":")):
        raise broken("structure", f"{where}: {tree.cls!r} is no class, expected module:qualname")
    for item in tree.items:
        _check_tree(item, where)
