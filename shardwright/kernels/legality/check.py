"""Whether a lowered graph's calls make what its values are said to be.

Comes in: a `LoweredGraph` whose calls have as many operands as their kinds, made before they are
read. What holds after `check_calls`: attributes are ones that the kind knows, operands fit one
another, each output has the shape and dtype that its call makes, its elements lie apart, and views
lie inside what they view. So a kernel neither reads nor writes outside of its operands' memory.

Equal calls, by kind, attributes and operands, are checked once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardwright.errors import ExecError, GraphError
from shardwright.kernels.kinds import BY_ID, Kind
from shardwright.kernels.legality import contractions, elementwise, generic, layers, optimizers
from shardwright.kernels.legality.call import Call, Made, Operand, Table
from shardwright.kernels.lowered import ABSENT, LoweredGraph, LoweredOp
from shardwright.kernels.spots import VIEW, Spot, find_spots, is_inside, overlaps

RULES: Table = {
    **generic.TABLE,
    **elementwise.TABLE,
    **contractions.TABLE,
    **layers.TABLE,
    **optimizers.TABLE,
}
"""By the kind's name; views have none, as where they lie is all that can be wrong with them."""

Operands = tuple[Operand | None, ...]


def check_calls(graph: LoweredGraph) -> None:
    """Raise ExecError at the first call that is not what it says."""
    spots = find_spots(graph.values, graph.ops)
    operands: dict[int, Operand | None] = {
        vid: Operand(spot.shape, graph.values[vid].dtype, spot.strides)
        for vid, spot in spots.items()
    }
    operands[ABSENT] = None
    for op in graph.ops:
        if op.kind_id == VIEW.id:
            _check_view(graph, op, spots)
            continue
        inputs = tuple(operands[vid] for vid in op.in_vids)
        outputs = tuple(operands[vid] for vid in op.out_vids)
        try:
            _check_call(op.kind_id, op.attr_schema, op.attr_blob, inputs, outputs)
        except (ExecError, GraphError) as error:
            raise ExecError(f"{op.where}, {BY_ID[op.kind_id].name}: {error}") from None


@lru_cache(maxsize=8192)
def _check_call(
    kind_id: int, schema: int, blob: bytes, inputs: Operands, outputs: Operands
) -> None:
    """Raise ExecError where such a call is wrong."""
    kind = BY_ID[kind_id]
    call = Call(kind, kind.unpack(schema, blob), inputs, outputs)
    for k, (said, makes) in enumerate(zip(outputs, RULES[kind.name](call), strict=True)):
        if said is None:
            continue
        if said[:2] not in makes:
            wanted = " or ".join(map(str, makes)) or "no such output"
            raise ExecError(
                f"{_name(kind, k)} is {said}, but the call makes {wanted}; lower the pipeline "
                "again, or write what the call makes"
            )
        if overlaps(said.shape, said.strides):
            raise ExecError(
                f"{_name(kind, k)} is {said} with strides {list(said.strides)}, so that elements "
                "lie on one another; expected strides that keep them apart"
            )


def _name(kind: Kind, place: int) -> str:
    """An output in a message."""
    names = kind.names(1)
    name = names[place].rstrip("?") if place < len(names) else ""
    return f"output {place}" if kind.lists or not name or name.endswith("…") else name


def _check_view(graph: LoweredGraph, op: LoweredOp, spots: Mapping[int, Spot]) -> None:
    """A view lies inside what it views, and is the value that it says."""
    source, made = graph.values[op.in_vids[0]], graph.values[op.out_vids[0]]
    spot = spots[made.vid]
    root = graph.values[spot.root]
    if (spot.shape, source.dtype) != (made.shape, made.dtype) or not is_inside(spot, root):
        raise ExecError(
            f"{op.where}: a view of shape {list(spot.shape)} and strides {list(spot.strides)} "
            f"from element {spot.offset}, of {source.dtype}, as {Made(made.shape, made.dtype)}, "
            f"does not lie in value {spot.root}, {root.dtype}{list(root.shape)}; a view has the "
            "shape and dtype that its value says, and lies inside what it views"
        )
