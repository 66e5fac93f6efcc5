"""Which outputs of a pipeline have the rows of its batch, if every operator keeps rows apart.

Input: a pipeline and the dimension of each input that has the rows; output: which dimension of each
output has them, so that row i of it is made from row i of the inputs alone. That is followed
task by task, through the graphs by dimension annotations and through communication by what each
kind does, not believed of the file. Equal tasks (the layers of a stack) are looked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from shardwright.communication import COMMUNICATION, CommunicationRow
from shardwright.errors import InputError
from shardwright.ir import IRGraph
from shardwright.ops.independence import Annotations, Rows, follow_rows
from shardwright.pipeline import MetadataTensor, Pipeline, SuperTask
from shardwright.pipeline.connections import Connections
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import BatchRows, MetadataTensors


def batches_of(pipeline: Pipeline) -> tuple[BatchRows, ...]:
    """The inputs of one first size, for each size whose rows a pipeline keeps apart."""
    inputs = pipeline.metadata.tensors.inputs
    sizes = dict.fromkeys(whole.shape[0] for whole in inputs.values() if whole.shape)
    found = []
    for size in sizes:
        batched = tuple(name for name, whole in inputs.items() if whole.shape[:1] == (size,))
        try:
            dims = row_dims(pipeline, dict.fromkeys(batched, 0), size)
            found.append(BatchRows(batched, dims))
        except InputError:
            continue
    return tuple(found)


def row_dims(pipeline: Pipeline, inputs: Mapping[str, int], size: int) -> dict[str, int]:
    """Along which dimension each output has the ``size`` rows that inputs have along these.

    An output without rows is not there; one may have several elements a row, next to each other.
    Raises InputError where something mixes the rows, or does not tell.
    """
    if pipeline.origin is not None:
        return _row_dims_of_graph(pipeline.origin.graph, pipeline.metadata.tensors, inputs, size)
    return _RowFollowing(pipeline, size).run(inputs)


@dataclass(slots=True)
class _RowFollowing:
    """Goes through the tasks of a pipeline, each device's in order."""

    pipeline: Pipeline
    size: int
    rows: dict[str, Rows | None] = field(default_factory=dict)
    """By tensor, once it is made; constants have none."""
    done: set[str] = field(default_factory=set)
    """Groups whose communication is done."""
    graphs: TaskGraphs = field(init=False)
    connections: Connections = field(init=False)
    known: dict[Hashable, list[Rows | None]] = field(default_factory=dict)
    """The rows of a task's outputs, by its graph and the rows of its inputs."""
    annotations: dict[Hashable, Annotations] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graphs = TaskGraphs(self.pipeline)
        self.connections = self.pipeline.connections

    def run(self, inputs: Mapping[str, int]) -> dict[str, int]:
        """The dimension of each output's rows."""
        pieces = self.pipeline.metadata.tensor_slices
        for name, piece in pieces.inputs.items():
            dim = inputs.get(piece.origin)
            self.rows[name] = None if dim is None else Rows(dim, *piece.placements[dim])
        queues = [deque(names) for names in self.connections.order.values()]
        while any(queues):
            before = sum(map(len, queues))
            for queue in queues:
                while queue and self._do(queue[0], {other[0] for other in queues if other}):
                    queue.popleft()
            if sum(map(len, queues)) == before:
                raise InputError("its tasks wait for one another")
        replaces = self.pipeline.replaces
        if changed := [old for new, old in replaces.items() if self.rows[new] is not None]:
            raise InputError(f"the buffer {changed[0]!r} is made from all rows")
        return self._outputs()

    def _outputs(self) -> dict[str, int]:
        found: dict[str, Rows | None] = {}
        metadata = self.pipeline.metadata
        for name, piece in metadata.tensor_slices.outputs.items():
            rows, whole = self.rows[name], metadata.tensors.outputs[piece.origin].shape
            placed = None
            if rows is not None and whole[rows.dim] % self.size == 0:
                unit = whole[rows.dim] // self.size
                placed = piece.placements[rows.dim] == (rows.start * unit, rows.stop * unit)
            dim = None if rows is None else Rows(rows.dim, 0, self.size)
            if placed is False or found.setdefault(piece.origin, dim) != dim:
                raise InputError(f"the output {piece.origin!r} mixes the rows of the batch")
        return {name: rows.dim for name, rows in found.items() if rows is not None}

    # --- tasks --------------------------------------------------------------------------------

    def _do(self, name: str, heads: set[str]) -> bool:
        """Do the next task of a device; False where it waits for those of others.

        ``heads`` are the next of each device.
        """
        task = self.pipeline.supertasks[name]
        if task.group is None:
            self._compute(name, task)
        elif task.group not in self.done:
            members = self.connections.groups[task.group]
            if task.kind != "send" and not heads.issuperset(members):
                return False
            self._communicate(members)
            self.done.add(task.group)
        return True

    def _compute(self, name: str, task: SuperTask) -> None:
        if task.kind == "dfg":
            raise InputError(
                "the file is lowered, and does not say that its rows are independent "
                "(metadata.rows)"
            )
        given = [self.rows.get(tensor) for tensor in task.inputs]
        key = self.graphs.key(name), tuple(given)
        if key not in self.known:
            graph = self.graphs.of(name)
            if id(graph) not in self.annotations:
                self.annotations[id(graph)] = Annotations(graph)
            self.known[key] = follow_rows(graph, given, self.annotations[id(graph)], graph.outputs)
        self.rows.update(zip(task.outputs, self.known[key], strict=True))

    def _communicate(self, names: Sequence[str]) -> None:
        tasks = [self.pipeline.supertasks[name] for name in names]
        sources = [tensor for task in tasks for tensor in task.inputs]
        outputs = [tensor for task in tasks for tensor in task.outputs]
        shapes = [self.pipeline.tensors[tensor].shape for tensor in (*sources, *outputs)]
        try:
            made = _through_communication(
                COMMUNICATION[tasks[0].kind],
                [self.rows.get(tensor) for tensor in sources],
                shapes[: len(sources)],
                shapes[len(sources) :],
                tasks[0].metadata or {},
            )
        except InputError:
            raise InputError(f"{tasks[0].kind} of {sources[0]!r} mixes the rows") from None
        self.rows.update(zip(outputs, made, strict=True))


def _row_dims_of_graph(
    graph: IRGraph, originals: MetadataTensors, inputs: Mapping[str, int], size: int
) -> dict[str, int]:
    """As `row_dims`, from the graph that a pipeline was built from in this process."""
    given, made = _by_place(originals.inputs), _by_place(originals.outputs)
    rows = [Rows(inputs[name], 0, size) if name in inputs else None for name in given]
    ends = [*graph.outputs, *graph.updates.values()]
    found = follow_rows(graph, rows, Annotations(graph), ends)
    for old, changed in zip(graph.updates, found[len(made) :], strict=True):
        if changed is not None:
            raise InputError(f"the buffer {graph.values[old].name!r} is made from all rows")
    return {name: rows.dim for name, rows in zip(made, found, strict=False) if rows is not None}


def _by_place(originals: Mapping[str, MetadataTensor]) -> list[str]:
    return sorted(originals, key=lambda name: originals[name].idx)


# --- through communication ----------------------------------------------------------------------


def _through_communication(
    row: CommunicationRow,
    given: Sequence[Rows | None],
    shapes: Sequence[tuple[int, ...]],
    made: Sequence[tuple[int, ...]],
    metadata: Mapping[str, Any],
) -> list[Rows | None]:
    """The rows of each output of a communication, whose inputs have rows and shapes.

    Raises InputError where they are mixed.
    """
    pieces = [[rows] * len(made) for rows in given]
    if row.cut is not None:
        dim = metadata[row.cut]
        lengths = [shape[dim] for shape in made]
        pieces = [_parts(rows, lengths, dim) for rows in given]
    received = [list(rows) for rows in zip(*pieces, strict=True)]
    if row.join is None:
        return [_only(rows) for rows in received]
    dim = metadata[row.join]
    return [_joined(rows, [shape[dim] for shape in shapes], dim) for rows in received]


def _parts(rows: Rows | None, lengths: Sequence[int], dim: int) -> list[Rows | None]:
    """The rows of the pieces of a tensor that is cut along a dimension."""
    if rows is None or rows.dim != dim:
        return [rows] * len(lengths)
    unit, rest = divmod(sum(lengths), rows.stop - rows.start)
    if rest or any(length % unit or not length for length in lengths):
        raise InputError("pieces are no rows")
    ends = accumulate((length // unit for length in lengths), initial=rows.start)
    return [Rows(dim, start, stop) for start, stop in pairwise(ends)]


def _joined(parts: Sequence[Rows | None], lengths: Sequence[int], dim: int) -> Rows | None:
    """The rows of a tensor that is joined from pieces along a dimension."""
    present = [rows for rows in parts if rows is not None]
    if len(present) < len(parts) or (len({*parts}) == 1 and present[0].dim != dim):
        return _only(parts)
    sizes = {length / (r.stop - r.start) for r, length in zip(present, lengths, strict=True)}
    consecutive = all(one.stop == following.start for one, following in pairwise(present))
    if len(sizes) > 1 or not consecutive or any(rows.dim != dim for rows in present):
        raise InputError("pieces are not joined as rows")
    return Rows(dim, present[0].start, present[-1].stop)


def _only(rows: Sequence[Rows | None]) -> Rows | None:
    if len({*rows}) > 1:
        raise InputError("rows differ")
    return rows[0]
