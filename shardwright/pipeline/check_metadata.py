"""Rules of metadata: what the pipeline's inputs and outputs are of the original's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence

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
from shardwright.pipeline.check_tensors import check_extents, check_inside, format_ranges
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.rules import broken
from shardwright.pipeline.schema import (
    BatchRows,
    Document,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    Microbatches,
    Placements,
    Training,
)

Originals = Mapping[str, MetadataTensor]


def check_slices(index: Connections) -> None:
    """Slices are the pipeline's inputs and outputs, each a true part of its origin."""
    document = index.document
    slices, originals = document.metadata.tensor_slices, document.metadata.tensors
    (source,), (sink,) = index.ends["input"], index.ends["output"]
    for side, task, named, found, wholes in (
        ("inputs", source, document.supertasks[source].outputs, slices.inputs, originals.inputs),
        ("outputs", sink, document.supertasks[sink].inputs, slices.outputs, originals.outputs),
    ):
        _check_listed(side, task, named, found)
        for tensor, piece in found.items():
            _check_slice(document, tensor, piece, wholes, side)
            _check_device(index, tensor, piece.device)


def _check_listed(
    side: str, task: str, named: Sequence[str], found: Mapping[str, MetadataTensorSlice]
) -> None:
    where = f"metadata.tensor_slices.{side}"
    for tensor in named:
        if tensor not in found:
            raise broken(
                "slices", f"the pipeline's tensor is not in {where}", task=task, tensor=tensor
            )
    for tensor in found.keys() - set(named):
        raise broken(
            "slices",
            f"{where} lists a tensor that supertask {task!r} does not name",
            tensor=tensor,
        )


def _check_slice(
    document: Document, tensor: str, piece: MetadataTensorSlice, wholes: Originals, side: str
) -> None:
    info, whole = document.tensors[tensor], wholes.get(piece.origin)
    if whole is None:
        raise broken(
            "origin",
            f"the origin {piece.origin!r} is not in metadata.tensors.{side}, which has "
            f"{', '.join(map(repr, wholes)) or 'none'}",
            tensor=tensor,
        )
    if piece.dtype != info.dtype or (piece.dtype in COMPLEX) != (whole.dtype in COMPLEX):
        raise broken(
            "slice-dtype",
            f"the slice is {piece.dtype}, the tensor {info.dtype}, the origin {piece.origin!r} "
            f"{whole.dtype}; slice and tensor must be one, and the origin be cast to it",
            tensor=tensor,
        )
    check_extents(piece.placements, info, tensor)
    check_inside(piece.placements, whole.shape, piece.origin, tensor)


def _check_device(index: Connections, tensor: str, device: str) -> None:
    if device not in index.document.devices:
        raise unknown_device(index.document, device, tensor=tensor)
    if index.devices[tensor] != device:
        raise broken(
            "slice-device",
            f"the slice says device {device!r}, the tensor is on {index.devices[tensor]!r}",
            tensor=tensor,
        )


def check_originals(index: Connections) -> None:
    """The original's inputs and outputs are numbered, and its outputs whole."""
    document = index.document
    originals = document.metadata.tensors
    for side, wholes in (("inputs", originals.inputs), ("outputs", originals.outputs)):
        by_idx: dict[int, str] = {}
        for name, whole in wholes.items():
            if whole.idx >= len(wholes) or whole.idx in by_idx:
                raise broken(
                    "idx",
                    f"idx is {whole.idx} in metadata.tensors.{side}; the {len(wholes)} {side} are "
                    f"numbered 0 to {len(wholes) - 1}, each once",
                    tensor=name,
                )
            by_idx[whole.idx] = name
    _check_covered(document)
    for rows in document.metadata.rows:
        _check_rows(rows, document.metadata.tensors)


def _check_rows(rows: BatchRows, originals: MetadataTensors) -> None:
    """The rows of a batch are dimensions of inputs and outputs, each row as long as the others."""
    sides = (
        ("inputs", rows.inputs, originals.inputs),
        ("outputs", rows.outputs, originals.outputs),
    )
    for side, names, known in sides:
        if unknown := [name for name in names if name not in known]:
            raise broken(
                "rows", f"metadata.rows names what is not among the {side}", tensor=unknown[0]
            )
    sizes = {originals.inputs[name].shape[:1] for name in rows.inputs}
    if len(sizes) != 1 or sizes in ({()}, {(0,)}):
        raise broken(
            "rows",
            "the inputs of metadata.rows must be equally long along dimension 0, found "
            f"{', '.join(str(list(originals.inputs[n].shape)) for n in rows.inputs) or 'none'}",
        )
    ((size,),) = sizes
    for name, dim in rows.outputs.items():
        shape = originals.outputs[name].shape
        if dim >= len(shape) or shape[dim] % size:
            raise broken(
                "rows",
                f"metadata.rows says that dimension {dim} of {list(shape)} has the {size} rows",
                tensor=name,
            )


def _check_covered(document: Document) -> None:
    """Outputs can be put together from their slices; those of one microbatch cover its part."""
    training = document.training or Training()
    microbatches = training.microbatches or Microbatches(1)
    boxes: dict[str, list[Placements]] = {}
    for piece in document.metadata.tensor_slices.outputs.values():
        boxes.setdefault(piece.origin, []).append(piece.placements)
    for name, whole in document.metadata.tensors.outputs.items():
        if name not in boxes:
            raise broken(
                "outputs-covered", "no pipeline output is a slice of this output", tensor=name
            )
        shape = [*whole.shape]
        if (dim := microbatches.dim.get(name)) is not None and dim < len(shape):
            shape[dim] //= microbatches.n
        if (hole := uncovered(shape, boxes[name])) is not None:
            raise broken(
                "outputs-covered",
                f"no pipeline output holds the part {format_ranges(hole)} of this output",
                tensor=name,
            )


def uncovered(shape: Sequence[int], boxes: Sequence[Placements]) -> Placements | None:
    """A part of a tensor of ``shape`` that is in none of ``boxes``, or None."""
    rest: list[Placements] = [] if 0 in shape else [tuple((0, size) for size in shape)]
    for box in dict.fromkeys(boxes):
        rest = [piece for part in rest for piece in _outside(part, box)]
    return rest[0] if rest else None


def _outside(part: Placements, box: Placements) -> Iterator[Placements]:
    """``part`` without ``box``, as boxes that hold something and do not overlap."""
    core = list(part)
    for dim, ((start, end), (low, high)) in enumerate(zip(part, box, strict=True)):
        low, high = max(start, low), min(end, high)
        if low >= high:
            yield tuple(core)
            return
        for piece in ((start, low), (high, end)):
            if piece[0] < piece[1]:
                yield (*core[:dim], piece, *core[dim + 1 :])
        core[dim] = (low, high)


# --- metadata.structure ---------------------------------------------------------------------------


def check_structure(index: Connections) -> None:
    """The structure folds exactly the original's inputs and outputs."""
    metadata = index.document.metadata
    structure, originals = metadata.structure, metadata.tensors
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
