"""The storages that the nodes of a placed graph make and read on one device, and when.

Input: a placed graph, and the recorded backward of each node. Output: `PlacedCosts`. It goes
through the nodes forward and backward as building does: what is fetched is a storage of its own, a
slice and a view lie in what they show, a gradient that is passed on lies where it lay, and terms of
a gradient that lie alike are added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwright.autodiff.backward import BackwardGraph
from shardwright.clusters import DeviceModel
from shardwright.costs.cost import Costs, NodeCost
from shardwright.costs.placed import (
    ADD,
    AGAIN,
    BACKWARD,
    EACH_OF_ITS_OWN,
    FORWARD,
    WEIGHT,
    Bools,
    Floats,
    Forward,
    Integers,
    Moved,
    Passed,
    PlacedCosts,
    Reduction,
    Stored,
    inner_bytes,
    same_gradient,
)
from shardwright.costs.roofline import ADD_PASSES
from shardwright.ir import IRNode
from shardwright.ir.tensor_meta import itemsize
from shardwright.sharding.layout import Partial, Placements, largest_shape
from shardwright.sharding.place import Move, PlacedGraph
from shardwright.sharding.strategy import LargestPart, Strategy


def place_costs(
    source: Forward,
    placed: Sequence[PlacedGraph],
    which: Sequence[int],
    costs: Costs,
    device: DeviceModel,
    reasons: Sequence[str] = (),
) -> PlacedCosts:
    """The costs of a forward; ``which`` of the placed graphs each node is as it is in."""
    return _Listing(source, placed, which, costs, device).run(reasons)


@dataclass(slots=True)
class _Listing:
    """Goes through the nodes forward and backward; `run` does."""

    source: Forward
    placed: Sequence[PlacedGraph]
    which: Sequence[int]
    costs: Costs
    device: DeviceModel
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    moved: list[tuple[float, ...]] = field(default_factory=list)
    """Rows of `Moved`."""
    stored: list[tuple[int, int, float, float, float]] = field(default_factory=list)
    inputs: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    """Bytes of an input of the graph at a node, and whether its backward reads it."""
    at: dict[tuple[int, int, Placements], int] = field(default_factory=dict)
    """The storage of a value in a layout of a placed graph."""
    numbers: dict[tuple[int, int, Placements], int] = field(default_factory=dict)
    beside: dict[int, int] = field(default_factory=dict)
    """The storage of what a node saves beside its outputs."""
    terms: dict[int, dict[Placements, int]] = field(default_factory=dict)
    """The storages of what gradients of a value are made of."""
    givers: dict[tuple[int, Placements], list[int]] = field(default_factory=dict)
    """The nodes that give to a value's gradient in a layout."""
    prices: dict[tuple[int, LargestPart], NodeCost] = field(default_factory=dict)
    seconds: Floats = field(init=False)

    def run(self, reasons: Sequence[str]) -> PlacedCosts:
        source, nodes = self.source, self.source.view.nodes
        self.seconds = np.array([self._price(i) for i in range(len(nodes))]).reshape(-1, 3)
        forward, backward = self._moves("forward"), self._moves("backward")
        for i, node in enumerate(nodes):
            if i not in source.prepare:
                self._forward(i, node, forward.get(i, ()))
        if source.training:
            for i in reversed(range(len(nodes))):
                if i not in source.prepare:
                    self._backward(i, nodes[i], backward.get(i, ()))
        else:
            self.seconds[:, 1:] = 0.0
        storage, node, work = _columns(self.rows, 3)
        maker = np.array(self.makers, dtype=np.int64)
        again, redone = self._again(storage, node, work, maker)
        rows = np.flatnonzero(again[node] & (work == FORWARD))
        return PlacedCosts(
            source=source,
            splits=[self._strategy(i).splits for i in range(len(nodes))],
            seconds=self.seconds,
            moved=self._moved(),
            storage=np.concatenate([storage, storage[rows]]),
            node=np.concatenate([node, node[rows]]),
            work=np.concatenate([work, np.full(len(rows), AGAIN)]),
            size=np.array(self.sizes),
            maker=maker,
            again=again,
            redone=redone,
            passed=self._passed(),
            stored=self._stored(),
            inputs=np.array(
                [(*key, *found) for key, found in self.inputs.items()], dtype=np.float64
            ).reshape(-1, 4),
            reductions=self._communications("once"),
            renewals=self._communications("updates"),
            reasons=reasons,
        )

    def _strategy(self, position: int) -> Strategy:
        return self.placed[self.which[position]].strategies[position]

    def _of_own_mesh(self, phase: str) -> Iterator[Move]:
        """Moves of a phase, of each node those on its own mesh."""
        for number, placed in enumerate(self.placed):
            for move in placed.moves:
                if move.phase == phase and self.which[move.position] == number:
                    yield move

    def _moves(self, phase: str) -> dict[int, list[Move]]:
        found: dict[int, list[Move]] = {}
        for move in self._of_own_mesh(phase):
            found.setdefault(move.position, []).append(move)
        return found

    def _communications(self, phase: str) -> list[Reduction]:
        return [
            Reduction(move.position, move.step.seconds, self._nbytes(move))
            for move in self._of_own_mesh(phase)
            if move.step.kind != "slice"
        ]

    def _price(self, position: int) -> NodeCost:
        key = self.source.outline.kinds[position], self._strategy(position).part
        if key not in self.prices:
            node = self.source.view.nodes[position]
            self.prices[key] = self.costs.node(self.source.whole, node, key[1])
        return self.prices[key]

    # --- storages -----------------------------------------------------------------------------

    def _new(self, position: int, nbytes: float, *works: int) -> int:
        """A storage that a node makes, and what touches it there."""
        self.sizes.append(nbytes)
        self.makers.append(position)
        number = len(self.sizes) - 1
        self.rows += [(number, position, work) for work in works]
        return number

    def _size(self, value_id: int, layout: Placements, position: int) -> int:
        value = self.source.view.values[value_id]
        sizes = self.placed[self.which[position]].mesh.sizes
        return _local_bytes(layout, sizes, value.shape, itemsize(value.dtype))

    def _nbytes(self, move: Move) -> int:
        """What a device holds after a move."""
        return self._size(move.value, move.step.after.placements, move.position)

    def _held(self, value_id: int, layout: Placements, position: int) -> int | None:
        """The storage of a value in a layout; what another mesh made comes in one of its own."""
        value = self.source.view.values[value_id]
        if value.producer is None:
            self._load(value_id, layout, position)
            return None
        maker = self.source.outline.makers[value_id]
        base = self.source.view.values[self.source.bases.get(value_id, value_id)]
        if base.producer is None and not base.is_stored:
            self._note_input(position, base.id)
        if maker in self.source.prepare or base.producer is None:
            return None
        key = value_id, self.which[position], layout
        if key not in self.at:
            self.at[key] = self._new(maker, self._size(value_id, layout, position))
        return self.at[key]

    def _load(self, value_id: int, layout: Placements, position: int) -> None:
        value, source = self.source.view.values[value_id], self.source
        nbytes = self._size(value_id, layout, position)
        key = value_id, self.which[position], layout
        number = self.numbers.setdefault(key, len(self.numbers))
        if not value.is_stored:
            self.inputs.setdefault((number, position), [nbytes, 0])
            return
        state = source.states.get(value_id, 0) * nbytes / max(value.nbytes, 1)
        gradient = float(nbytes if value_id in source.trained else 0)
        self.stored.append((number, position, nbytes, gradient, state))

    def _move(self, move: Move, source: int | None, work: int, givers: Sequence[int]) -> int | None:
        """The storage of what a move brings: a slice lies where the whole does."""
        if source is None:
            return None
        self.rows.append((source, move.position, work))
        if move.step.kind == "slice":
            return source
        made = self._new(move.position, self._nbytes(move), work)
        takes = move.step.seconds, self.sizes[source], made
        for giver in givers:
            sums = isinstance(move.step.source, Partial)
            self.moved.append((made, move.position, work, giver, sums, *takes))
        return made

    def _moved(self) -> Moved:
        columns = np.array(self.moved, dtype=np.float64).reshape(-1, 8).T
        number, node, work, giver, sums, *_, made = columns.astype(np.int64)
        return Moved(number, node, work, giver, sums > 0, columns[5], columns[6], made)

    # --- forward ------------------------------------------------------------------------------

    def _forward(self, i: int, node: IRNode, moves: Sequence[Move]) -> None:
        chosen = self._strategy(i)
        for move in moves:
            held = self._held(move.value, move.step.before.placements, i)
            givers = [self.source.outline.makers.get(move.value, i)]
            found = self._move(move, held, FORWARD, givers)
            if found is not None:
                self.at[move.value, self.which[i], move.step.after.placements] = found
        for value_id, read in zip(node.inputs, chosen.reads, strict=True):
            if read is not None and (storage := self._held(value_id, read, i)) is not None:
                self.rows.append((storage, i, FORWARD))
        for number, value_id in enumerate(node.outputs):
            made = chosen.makes[number]
            storage = self._seen(i, node, number)
            if storage is None and value_id not in self.source.bases:
                storage = self._new(i, self._size(value_id, made, i), FORWARD)
            if storage is not None:
                self.at[value_id, self.which[i], made] = storage
        backward = self.source.backward(i)
        if backward is not None and backward.saved:
            self.beside[i] = self._new(i, backward.saved / chosen.part.work, FORWARD, BACKWARD)

    def _seen(self, i: int, node: IRNode, number: int) -> int | None:
        """The storage of the input that an output is a view of."""
        if node.outputs[number] not in self.source.bases:
            return None
        index = number if node.op in EACH_OF_ITS_OWN else 0
        read = self._strategy(i).reads[index]
        return None if read is None else self._held(node.inputs[index], read, i)

    # --- backward -----------------------------------------------------------------------------

    def _backward(self, i: int, node: IRNode, moves: Sequence[Move]) -> None:
        found = self.source.backward(i)
        if found is None:
            return
        chosen = self._strategy(i)
        given = {
            number: total
            for number, value_id in enumerate(node.outputs)
            if (total := self._total(i, value_id, number, moves)) is not None
        }
        for work, late in ((BACKWARD, False), (WEIGHT, True)):
            for storage in self._read(i, node, found, given, late=late):
                self.rows.append((storage, i, work))
        sizes = tuple(
            self._size(v, layout, i) if layout is not None else 0
            for v, layout in zip(
                (*node.inputs, *node.outputs), (*chosen.reads, *chosen.makes), strict=True
            )
        )
        inner = inner_bytes(found, sizes, chosen.part.work)
        for work, nbytes in zip((BACKWARD, WEIGHT), inner, strict=True):
            if nbytes:
                self._new(i, nbytes, work)
        seen: set[tuple[int, Placements]] = set()
        for number, value in found.gives.items():
            value_id, layout = node.inputs[number], chosen.returns[number]
            read = chosen.reads[number]
            if layout is None or read is None or (value_id, read) in seen:
                continue
            seen.add((value_id, read))
            same = same_gradient(found, value)
            storage = given.get(found.gets[same], -1) if same is not None else -1
            if storage < 0:
                storage = self._new(i, self._size(value_id, layout, i), BACKWARD)
            self._add(i, value_id, layout, storage)

    def _total(self, i: int, value_id: int, number: int, moves: Sequence[Move]) -> int | None:
        """The storage of the gradient of an output, brought to where the output was made."""
        terms = self.terms.get(value_id)
        if terms is None:
            if value_id not in self.source.outline.losses:
                return None
            made = self._strategy(i).makes[number]
            return self._new(i, self._size(value_id, made, i), BACKWARD)
        at, ends = dict(terms), dict.fromkeys(terms.values())
        for move in moves:
            before, after = move.step.before.placements, move.step.after.placements
            if move.value == value_id and before in at:
                ends.pop(at[before], None)
                givers = self.givers[value_id, before]
                found = self._move(move, at[before], BACKWARD, givers)
                assert found is not None
                at[after] = found
                self.givers.setdefault((value_id, after), []).extend(givers)
                ends[found] = None
        first, *others = ends
        if not others:
            return first
        self.rows += [(storage, i, BACKWARD) for storage in ends]
        return self._new(i, self.sizes[first], BACKWARD)

    def _add(self, i: int, value_id: int, layout: Placements, storage: int) -> None:
        """Add to a gradient what lies alike."""
        self.givers.setdefault((value_id, layout), []).append(i)
        terms = self.terms.setdefault(value_id, {})
        if layout not in terms:
            terms[layout] = storage
            return
        self.rows += [(terms[layout], i, ADD), (storage, i, ADD)]
        size = self.sizes[storage]
        terms[layout] = self._new(i, size, ADD)
        self.seconds[i, 1] += ADD_PASSES * size / self.device.bandwidth + self.device.overhead

    def _read(
        self,
        i: int,
        node: IRNode,
        found: BackwardGraph,
        given: Mapping[int, int],
        *,
        late: bool,
    ) -> Iterator[int]:
        """The storages that a backward reads, or its weight gradients."""
        chosen = self._strategy(i)
        if not late:
            yield from given.values()
        for what, number in found.reads(late=late):
            storage: int | None = None
            if what == "gradient":
                storage = given.get(found.gets[number])
            elif what == "saved":
                storage = self.beside.get(i)
            elif what == "output":
                key = node.outputs[number], self.which[i], chosen.makes[number]
                storage = self.at.get(key)
            elif (read := chosen.reads[number]) is not None:
                storage = self.at.get((node.inputs[number], self.which[i], read))
                base = self.source.bases.get(node.inputs[number], node.inputs[number])
                value = self.source.view.values[base]
                if value.producer is None and not value.is_stored:
                    self._note_input(i, base)[1] = 1
            if storage is not None:
                yield storage

    def _note_input(self, i: int, value_id: int) -> list[float]:
        """A node reads an input of the graph, or a view of it, that was loaded before."""
        number = next(n for (v, _, _), n in self.numbers.items() if v == value_id)
        nbytes = next(found[0] for (n, _), found in self.inputs.items() if n == number)
        return self.inputs.setdefault((number, i), [nbytes, 0])

    # --- what is done again -------------------------------------------------------------------

    def _again(
        self, storage: Integers, node: Integers, work: Integers, maker: Integers
    ) -> tuple[Bools, Bools]:
        """The nodes that are done again where only what crosses blocks is kept, and storages.

        A node is where a backward of its block reads what it makes, or what is made again of it.
        What leaves its block, and what communication brings, is kept.
        """
        source = self.source
        again, redone = np.zeros(len(source.view.nodes), dtype=bool), np.zeros(len(maker), bool)
        if not source.training:
            return again, redone
        block = source.block
        kept = np.zeros(len(maker), dtype=bool)
        forward = work == FORWARD
        leaves = block[node] != block[maker[storage]]
        kept[storage[forward & leaves]] = True
        moved = self._moved()
        kept[moved.storage[moved.work == FORWARD]] = True
        fixed = [
            i
            for i, one in enumerate(source.view.nodes)
            if not source.replaced.isdisjoint(one.inputs)
        ]
        kept[np.isin(maker, fixed)] = True
        needed = np.zeros(len(maker), dtype=bool)
        needed[storage[work >= BACKWARD]] = True
        made: dict[int, list[int]] = {}
        reads: dict[int, list[int]] = {}
        is_gradient = np.ones(len(maker), dtype=bool)
        is_gradient[storage[forward]] = False
        for number, i in zip(storage[forward].tolist(), node[forward].tolist(), strict=True):
            (made if maker[number] == i else reads).setdefault(i, []).append(number)
        for i in reversed(range(len(again))):
            mine = [number for number in made.get(i, ()) if not kept[number]]
            if any(needed[number] for number in mine):
                again[i] = True
                redone[mine] = True
                needed[reads.get(i, [])] = True
        return again, redone & ~is_gradient

    # --- between stages -----------------------------------------------------------------------

    def _passed(self) -> Passed:
        outline, view = self.source.outline, self.source.view
        rows = []
        for i, node in enumerate(view.nodes):
            if i in self.source.prepare:
                continue
            for number, value_id in enumerate(node.outputs):
                size = self._size(value_id, self._strategy(i).makes[number], i)
                answers = self.source.training and value_id in outline.required
                readers = dict.fromkeys(at for at, _ in outline.readers.get(value_id, ()))
                rows += [(value_id, i, reader, size, answers) for reader in readers]
        value, maker, reader, sizes, answered = _columns(rows, 5)
        return Passed(value, maker, reader, sizes.astype(np.float64), answered.astype(bool))

    def _stored(self) -> Stored:
        found = np.array(self.stored, dtype=np.float64).reshape(-1, 5)
        number, node = found[:, 0].astype(np.int64), found[:, 1].astype(np.int64)
        return Stored(number, node, found[:, 2], found[:, 3], found[:, 4])


def _columns(rows: Sequence[tuple[int, ...]], count: int) -> NDArray[np.int64]:
    return np.array(rows, dtype=np.int64).reshape(-1, count).T


@lru_cache(maxsize=1 << 14)
def _local_bytes(
    layout: Placements, sizes: tuple[int, ...], shape: tuple[int, ...], element: int
) -> int:
    return math.prod(largest_shape(layout, sizes, shape)) * element
