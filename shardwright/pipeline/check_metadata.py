"""Rules of metadata: what the pipeline's inputs and outputs are of the original's."""

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
from shardwright.ir.tensor_meta import COMPLEX
from shardwright.pipeline.check_structure import unknown_device
from shardwright.pipeline.check_tensors import count_cells, format_ranges, misplaced
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import Finding, broken
from shardwright.pipeline.schema import (
    MetadataTensor,
    MetadataTensorSlice,
    Microbatches,
    Placements,
    Training,
)


def check_listed(index: Connections) -> Finding:
    """Slices are the pipeline's inputs and outputs."""
    tasks, slices = index.document.supertasks, index.document.metadata.tensor_slices
    (source,), (sink,) = index.ends["input"], index.ends["output"]
    for side, task, named, found in (
        ("inputs", source, tasks[source].outputs, slices.inputs),
        ("outputs", sink, tasks[sink].inputs, slices.outputs),
    ):
        where = f"metadata.tensor_slices.{side}"
        for tensor in named:
            if tensor not in found:
                message = f"the pipeline's tensor is not in {where}"
                return broken("slices", message, task=task, tensor=tensor)
        for tensor in found.keys() - set(named):
            message = f"{where} lists a tensor that supertask {task!r} does not name"
            return broken("slices", message, tensor=tensor)
    return None


def check_origin(index: Connections, side: str, name: str, piece: MetadataTensorSlice) -> Finding:
    """A slice is of an input or output of the original."""
    wholes = getattr(index.document.metadata.tensors, side)
    if piece.origin in wholes:
        return None
    return (
        f"the origin {piece.origin!r} is not in metadata.tensors.{side}, which has "
        f"{', '.join(map(repr, wholes)) or 'none'}"
    )


def check_dtype(index: Connections, side: str, name: str, piece: MetadataTensorSlice) -> Finding:
    """A slice has its tensor's dtype, and its origin can be cast to it."""
    dtype = index.document.tensors[name].dtype
    whole = getattr(index.document.metadata.tensors, side)[piece.origin].dtype
    if piece.dtype == dtype and (piece.dtype in COMPLEX) == (whole in COMPLEX):
        return None
    return (
        f"the slice is {piece.dtype}, the tensor {dtype}, the origin {piece.origin!r} {whole}; "
        "slice and tensor must be one, and the origin be cast to it"
    )


def check_placements(
    index: Connections, side: str, name: str, piece: MetadataTensorSlice
) -> Finding:
    """A slice is a part of its origin, as large as the tensor."""
    whole = getattr(index.document.metadata.tensors, side)[piece.origin]
    return misplaced(piece.placements, index.document.tensors[name], whole.shape, piece.origin)


def check_device_known(
    index: Connections, side: str, name: str, piece: MetadataTensorSlice
) -> Finding:
    """A slice's device is there."""
    is_known = piece.device in index.document.devices
    return None if is_known else unknown_device(index.document, piece.device)


def check_device(index: Connections, side: str, name: str, piece: MetadataTensorSlice) -> Finding:
    """A slice's device is where its tensor is."""
    if piece.device == (device := index.devices[name]):
        return None
    return f"the slice says device {piece.device!r}, the tensor is on {device!r}"


def check_idx(index: Connections) -> Finding:
    """The original's inputs and outputs are numbered."""
    originals = index.document.metadata.tensors
    for side, wholes in (("inputs", originals.inputs), ("outputs", originals.outputs)):
        seen: set[int] = set()
        for name, whole in wholes.items():
            if whole.idx >= len(wholes) or whole.idx in seen:
                message = (
                    f"idx is {whole.idx} in metadata.tensors.{side}; the {len(wholes)} {side} are "
                    f"numbered 0 to {len(wholes) - 1}, each once"
                )
                return broken("idx", message, tensor=name)
            seen.add(whole.idx)
    return None


def check_covered(index: Connections) -> Finding:
    """Outputs can be put together from their slices; those of one microbatch cover its part."""
    metadata = index.document.metadata
    microbatches = (index.document.training or Training()).microbatches or Microbatches(1)
    boxes: dict[str, list[Placements]] = {}
    for piece in metadata.tensor_slices.outputs.values():
        boxes.setdefault(piece.origin, []).append(piece.placements)
    for name, whole in metadata.tensors.outputs.items():
        if name not in boxes:
            message = "no pipeline output is a slice of this output"
            return broken("outputs-covered", message, tensor=name)
        shape = [*whole.shape]
        if (dim := microbatches.dim.get(name)) is not None and dim < len(shape):
            shape[dim] //= microbatches.n
        counts = count_cells([*dict.fromkeys(boxes[name])], shape)
        if counts is None or 0 in counts.values():
            holes = (format_ranges(cell) for cell, count in (counts or {}).items() if not count)
            found = f"part {next(holes)}" if counts else "whole, but too many small parts,"
            message = f"no pipeline output holds the {found} of this output"
            return broken("outputs-covered", message, tensor=name)
    return None


def check_rows(index: Connections) -> Finding:
    """The rows of a batch are dimensions of inputs and outputs, each row as long as the others."""
    originals = index.document.metadata.tensors
    for rows in index.document.metadata.rows:
        for side, names in (("inputs", rows.inputs), ("outputs", (*rows.outputs,))):
            known = getattr(originals, side)
            if unknown := [name for name in names if name not in known]:
                message = f"metadata.rows names what is not among the {side}"
                return broken("rows", message, tensor=unknown[0])
        shapes = [originals.inputs[name].shape for name in rows.inputs]
        sizes = {shape[:1] for shape in shapes}
        if len(sizes) != 1 or sizes in ({()}, {(0,)}):
            return (
                "the inputs of metadata.rows must be equally long along dimension 0, found "
                f"{', '.join(str(list(shape)) for shape in shapes) or 'none'}"
            )
        ((size,),) = sizes
        for name, dim in rows.outputs.items():
            shape = originals.outputs[name].shape
            if dim >= len(shape) or shape[dim] % size:
                message = f"metadata.rows says that dimension {dim} of {list(shape)} has the {size}"
                return broken("rows", f"{message} rows", tensor=name)
    return None


# --- metadata.structure ---------------------------------------------------------------------------


def check_structure(index: Connections) -> Finding:
    """The structure folds exactly the original's inputs and outputs."""
    structure, originals = index.document.metadata.structure, index.document.metadata.tensors
    if structure is None:
        return None
    found = (
        _bad_leaf("inputs", structure.inputs, originals.inputs)
        or _bad_leaf("outputs", structure.outputs, originals.outputs)
        or _bad_signature(structure.inputs)
    )
    for parameter in structure.inputs.parameters:
        if parameter.value is not None:
            where = f"structure.inputs, parameter {parameter.name!r}"
            found = found or _bad_tree(parameter.value, where)
    return found or _bad_tree(structure.outputs, "structure.outputs")


def _bad_leaf(
    side: str, structure: Arguments | Tree, wholes: Mapping[str, MetadataTensor]
) -> Finding:
    """A leaf that is no tensor of the original, or a tensor without one."""
    found: set[str] = set()
    for leaf in leaves(structure):
        message = None
        if leaf.name in found:
            message = f"structure.{side} has this leaf twice"
        elif leaf.name not in wholes:
            message = f"structure.{side} has a leaf that is not in metadata.tensors.{side}"
        elif leaf.index != wholes[leaf.name].idx:
            message = (
                f"the leaf in structure.{side} has index {leaf.index}, metadata.tensors.{side} "
                f"says idx {wholes[leaf.name].idx}"
            )
        if message is not None:
            return broken("structure", message, tensor=leaf.name)
        found.add(leaf.name)
    for name in wholes:
        if name not in found:
            message = f"structure.{side} has no leaf for this tensor"
            return broken("structure", message, tensor=name)
    return None


def _bad_signature(arguments: Arguments) -> str | None:
    """Parameters that are none of a Python function, or hold what their kinds do not collect."""
    try:
        kinds = [getattr(inspect.Parameter, p.kind) for p in arguments.parameters]
        inspect.Signature(
            [inspect.Parameter(p.name, k) for p, k in zip(arguments.parameters, kinds, strict=True)]
        )
    except (AttributeError, ValueError, IndexError) as error:
        return f"structure.inputs is no signature of a function: {error}"
    for parameter in arguments.parameters:
        if not _holds(parameter):
            return (
                f"structure.inputs, parameter {parameter.name!r}: a {parameter.kind} parameter "
                "holds a tuple or a dict with names for keys"
            )
    return None


def _holds(parameter: Parameter) -> bool:
    """Whether the value is what a parameter of this kind collects."""
    value = parameter.value
    if value is None or parameter.kind not in ("VAR_POSITIONAL", "VAR_KEYWORD"):
        return True
    if parameter.kind == "VAR_POSITIONAL":
        return isinstance(value, TupleTree)
    return isinstance(value, DictTree) and all(isinstance(key, str) for key in value.keys)


def _bad_tree(tree: Tree, where: str) -> str | None:
    """A container without a key an item, or a class that is not named as it can be found."""
    if isinstance(tree, Leaf | Fixed | FixedFloat):
        return None
    if isinstance(tree, DictTree | ObjectTree):
        keys = tree.keys if isinstance(tree, DictTree) else tree.fields
        distinct = len(set(keys))
        if not len(tree.items) == len(keys) == distinct:
            return f"{where}: {len(tree.items)} items for {len(keys)} keys ({distinct} distinct)"
    if isinstance(tree, ObjectTree) and not all(tree.cls.partition(":")):
        return f"{where}: {tree.cls!r} is no class, expected module:qualname"
    found = (_bad_tree(item, where) for item in tree.items)
    return next((each for each in found if each is not None), None)
