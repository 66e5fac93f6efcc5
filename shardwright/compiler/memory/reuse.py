"""In-place reuse: results in memory of what is read no more; and copy insertion.

``targets`` are external memory (a stored value, a donated input) by the value that is to be there
after a run. Nobody reads a base's memory after another base was written there, but the call itself
that writes, where its kind reads an element before it writes it.

Copies are inserted around calls that are constrained to other strides than their operands have; of
results in memory that is written over, from before; and at the end, to targets that nothing is made
in directly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace

from shardwright.ir.tensor_meta import contiguous_strides, strides_or_none
from shardwright.kernels.lowered import (
    BY_NAME,
    VIEW,
    BaseView,
    LoweredGraph,
    LoweredOp,
    ValueSpec,
    kind_of,
)
from shardwright.kernels.row import ABSENT
from shardwright.kernels.strides import same_order

COPY = BY_NAME["copy"]

Bases = Mapping[int, BaseView]


@dataclass(frozen=True, slots=True)
class _Operands:
    """One call: where each base is read, as (place, vid), and what may share, by output."""

    elementwise: bool
    readers: Mapping[int, Sequence[tuple[int, int]]]
    pairs: Mapping[int, Sequence[tuple[int, int]]]


class MemoryReuse:
    """What shares memory in one order of calls.

    owner
        For every base the one that its memory is called by; itself where it shares none.
    alias
        Output to the input whose memory it took, by value id: what the plan prints.
    claimed
        Targets that their new contents are written to directly.
    first, last
        Base to the call that makes it; to the last one that reads or makes it, past the end for
        what is needed when all calls have run.
    """

    def __init__(
        self,
        values: Mapping[int, ValueSpec],
        ops: Sequence[LoweredOp],
        bases: Bases,
        kept: Collection[int],
        targets: Mapping[int, int],
    ) -> None:
        self._values, self._ops, self._bases = values, ops, bases
        self._calls: dict[int, _Operands] = {}
        self.owner = {view.base: view.base for view in bases.values()}
        self.alias: dict[int, int] = {}
        self.claimed: set[int] = set()
        self.first = {vid: index for index, op in self._no_views() for vid in op.makes}
        self.last = {
            bases[vid].base: index
            for index, op in self._no_views()
            for vid in (*op.reads, *op.makes)
        }
        self.last |= {bases[vid].base: len(ops) for vid in kept}
        for target, result in targets.items():
            self._claim(target, result)
        self._ends = {base: self.last.get(base, -1) for base in self.owner}
        for index, op in self._no_views():
            kind = kind_of(op.kind_id)
            if kind.elementwise or kind.pairs or kind.lists:
                self._reuse(index)

    def _no_views(self) -> Iterator[tuple[int, LoweredOp]]:
        return ((k, op) for k, op in enumerate(self._ops) if op.kind_id != VIEW.id)

    def _operands(self, index: int) -> _Operands:
        """A call's operands as they are asked for."""
        if index not in self._calls:
            op = self._ops[index]
            kind = kind_of(op.kind_id)
            readers: dict[int, list[tuple[int, int]]] = {}
            for place, vid in enumerate(op.in_vids):
                if vid != ABSENT:
                    readers.setdefault(self._bases[vid].base, []).append((place, vid))
            pairs: dict[int, list[tuple[int, int]]] = {}
            shared = kind.aliases(len(op.in_vids), len(op.out_vids))
            for o, k in () if op.must("no_alias") else shared:
                if ABSENT not in (op.out_vids[o], op.in_vids[k]):
                    pairs.setdefault(op.out_vids[o], []).append((op.in_vids[k], k))
            self._calls[index] = _Operands(kind.elementwise, readers, pairs)
        return self._calls[index]

    # --- results that replace external memory -------------------------------------------------

    def _claim(self, target: int, result: int) -> None:
        """Let the result be made in the target's memory, if nothing reads that later."""
        view = self._bases[result]
        base, made = self._values[view.base], self.first.get(view.base)
        if (
            made is None
            or self.owner[view.base] != view.base
            or target in self.claimed
            or not view.is_whole(base)
            or not view.is_alike(self._bases[target])
            or self._values[target].dtype != base.dtype
            or self.last.get(target, -1) > made
            or not self._may_write(made, view.base, target)
        ):
            return
        self.owner[view.base] = self.alias[view.base] = target
        self.claimed.add(target)

    def _may_write(self, index: int, base: int, target: int) -> bool:
        """Whether the call that makes ``base`` may write over a target that it reads, or not."""
        operands = self._operands(index)
        return target not in operands.readers or any(
            self._bases[vid].base == target and self._is_safe(operands, base, vid, place, {target})
            for vid, place in operands.pairs.get(base, ())
        )

    # --- outputs in memory that is read no more -----------------------------------------------

    def _reuse(self, index: int) -> None:
        taken: set[int] = set()
        for out, pairs in self._operands(index).pairs.items():
            for vid, place in pairs:
                owner = self.owner[self._bases[vid].base]
                free = self.owner[out] == out and owner not in taken
                if free and self._ends.get(owner) == index and self._donate(index, out, vid, place):
                    taken.add(owner)

    def _donate(self, index: int, out: int, vid: int, place: int) -> bool:
        """Let ``out`` have the memory of input number ``place``, where that is safe."""
        base = self._bases[vid].base
        owner, operands = self.owner[base], self._operands(index)
        if owner not in self.first or not self._bases[vid].is_whole(self._values[base]):
            return False
        members = [other for other in operands.readers if self.owner[other] == owner]
        if not self._is_safe(operands, out, vid, place, members):
            return False
        self.owner[out], self.alias[out] = owner, vid
        self._ends[owner] = max(index, self.last.get(out, index))
        return True

    def _is_safe(
        self, operands: _Operands, out: int, vid: int, place: int, members: Collection[int]
    ) -> bool:
        """Whether ``out`` may be in input number ``place``, when other inputs are there too.

        ``members`` are the bases in that memory. An input there may be read elementwise, if it has
        exactly the output's place.
        """
        view, made = self._bases[vid], self._bases[out]
        if not view.is_alike(made) or self._values[vid].dtype != self._values[out].dtype:
            return False
        others = [
            self._bases[other]
            for base in members
            for k, other in operands.readers[base]
            if k != place
        ]
        return not others or (
            operands.elementwise
            and all(other.offset == view.offset and other.is_alike(view) for other in others)
        )


# --- copies of what would be written over --------------------------------------------------------


def keep_results(
    graph: LoweredGraph, targets: Mapping[int, int], bases: Bases
) -> tuple[LoweredGraph, dict[int, int]]:
    """The graph and its targets, with copies of results that are in a target's old contents.

    Each is copied as soon as it is there; where there is none, the graph is given as it is.
    """
    wanted = dict.fromkeys([*graph.kept, *targets.values()])
    kept = [vid for vid in wanted if bases[vid].base in targets]
    if not kept:
        return graph, dict(targets)
    values, fresh = dict(graph.values), max(graph.values) + 1
    copies: dict[int, int] = {}
    for k, vid in enumerate(kept):
        copies[vid] = fresh + k
        strides = None if bases[vid].extent < math.prod(bases[vid].shape) else values[vid].strides
        values[fresh + k] = _copy_of(values[vid], fresh + k, "kept", strides)
    made = {vid for op in graph.ops for vid in op.out_vids}
    ops = [copy_call(vid, copies[vid], values) for vid in kept if vid not in made]
    for op in graph.ops:
        saved = tuple(copies.get(vid, vid) for vid in op.saved)
        ops.append(op if saved == op.saved else replace(op, saved=saved))
        ops += [copy_call(vid, copies[vid], values) for vid in op.out_vids if vid in copies]
    changed = replace(
        graph,
        values=values,
        ops=tuple(ops),
        outputs=tuple(copies.get(vid, vid) for vid in graph.outputs),
        updates={old: copies.get(new, new) for old, new in graph.updates.items()},
    )
    return changed, {target: copies.get(vid, vid) for target, vid in targets.items()}


def copy_back(
    graph: LoweredGraph,
    targets: Mapping[int, int],
    reuse: MemoryReuse,
    bases: MutableMapping[int, BaseView],
) -> LoweredGraph:
    """The graph with copies at its end into the targets that nothing is made in directly.

    What is copied there has the target's memory in ``reuse``, and is a base of its own.
    """
    values, fresh = dict(graph.values), max(graph.values, default=0) + 1
    ops, updates, outputs = list(graph.ops), dict(graph.updates), list(graph.outputs)
    for target, result in targets.items():
        if target in reuse.claimed:
            continue
        values[fresh] = _copy_of(values[target], fresh, "new", values[target].strides)
        ops.append(copy_call(result, fresh, values))
        reuse.owner[fresh] = target
        bases[fresh] = bases[target]._replace(base=fresh)
        if target in updates:
            updates[target] = fresh
        else:
            outputs = [fresh if vid == result else vid for vid in outputs]
        fresh += 1
    return replace(graph, values=values, ops=tuple(ops), updates=updates, outputs=tuple(outputs))


def copy_call(source: int, target: int, values: Mapping[int, ValueSpec]) -> LoweredOp:
    """A call that copies one value to another."""
    return LoweredOp(COPY.id, 0, b"", (source,), (target,), f"copy of %{values[source].name}")


def _copy_of(spec: ValueSpec, vid: int, suffix: str, strides: tuple[int, ...] | None) -> ValueSpec:
    name = f"{spec.name}.{suffix}"
    return replace(spec, vid=vid, name=name, role="tmp", names=(), strides=strides)


# --- copies of what has other strides than a call demands ----------------------------------------


def legalize_layouts(graph: LoweredGraph, bases: Bases) -> LoweredGraph:
    """The graph, with copies where calls are constrained to other strides than operands have.

    Inputs are copied before the call, outputs are made beside and copied after.
    """
    values = dict(graph.values)
    ops: list[LoweredOp] = []
    for op in graph.ops:
        wanted = dict(_wanted(op, bases)) if op.must("alike") or op.must("contiguous") else {}
        ops += _with_copies(op, wanted, values) if wanted else [op]
    if len(ops) == len(graph.ops):
        return graph
    return replace(graph, values=values, ops=tuple(ops))


def _with_copies(
    op: LoweredOp, wanted: Mapping[int, tuple[int, ...]], values: dict[int, ValueSpec]
) -> list[LoweredOp]:
    """The call on copies with the wanted strides; ``values`` grows by these."""
    fresh = max(values) + 1
    copies = {vid: fresh + k for k, vid in enumerate(wanted)}
    for vid, copy in copies.items():
        strides = strides_or_none(values[vid].shape, wanted[vid])
        values[copy] = _copy_of(values[vid], copy, "laid", strides)
    ins, outs = (tuple(copies.get(v, v) for v in vids) for vids in (op.in_vids, op.out_vids))
    made = set(op.out_vids)
    return [
        *(copy_call(vid, copies[vid], values) for vid in wanted if vid not in made),
        replace(op, in_vids=ins, out_vids=outs),
        *(copy_call(copies[vid], vid, values) for vid in wanted if vid in made),
    ]


def _wanted(op: LoweredOp, bases: Bases) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The operands with other strides than they must have, and those that they must have."""
    contiguous = op.must("contiguous")
    for row in _rows(op):
        views = {vid: bases[vid] for vid in row if vid != ABSENT}
        first = next(iter(views.values()), None)
        for vid, view in views.items():
            assert first is not None
            if not contiguous and view.shape != first.shape:
                continue
            dense = math.prod(first.shape) == first.extent
            strides = first.strides if dense and not contiguous else contiguous_strides(view.shape)
            if 0 not in view.shape and not same_order(view.shape, view.strides, strides):
                yield vid, strides


def _rows(op: LoweredOp) -> list[Sequence[int]]:
    """The operands that belong together: a parameter's, or all of the call."""
    kind = kind_of(op.kind_id)
    if not kind.lists:
        return [(*op.in_vids, *op.out_vids)]
    count = len(op.in_vids) // kind.lists
    listed = op.in_vids[: count * kind.lists]
    rows: list[Sequence[int]] = [(*listed[k::count], *op.out_vids[k::count]) for k in range(count)]
    return [*rows, op.in_vids[count * kind.lists :]]
