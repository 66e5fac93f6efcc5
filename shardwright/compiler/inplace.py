"""Which values share memory: results in place of what they replace, and of what is read no more.

Comes in: calls, spots, and targets: external memory (a stored value, a donated input) by the value
that is to lie there after a run. Goes out: a `Sharing`, roots in memory of others. What always
holds: nobody reads a root's memory after another root was written there, but the call itself that
writes, where its kind reads an element before it writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.kernels.kinds import Kind, kind_of
from shardwright.kernels.lowered import ABSENT, LoweredOp, ValueSpec
from shardwright.kernels.spots import VIEW, Spot, alike, is_whole


@dataclass(slots=True)
class Sharing:
    """Roots by the root whose memory they have.

    owner
        For every root the one that its memory is called by; itself where it shares none.
    alias
        Output to the input whose memory it took, by value id: what the plan prints.
    claimed
        Targets that their new contents are written to directly.
    """

    owner: dict[int, int]
    alias: dict[int, int] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Operands:
    """One call: where each root is read, as (place, vid), and what may share, by output."""

    elementwise: bool
    readers: Mapping[int, Sequence[tuple[int, int]]]
    pairs: Mapping[int, Sequence[tuple[int, int]]]


class Sharer:
    """Decides for one list of calls."""

    def __init__(
        self,
        values: Mapping[int, ValueSpec],
        ops: Sequence[LoweredOp],
        spots: Mapping[int, Spot],
        kept: Collection[int],
    ) -> None:
        """``kept`` are values that are needed when all calls have run."""
        self._values = values
        self._ops = ops
        self._spots = spots
        self._kept = {spots[vid].root for vid in kept}
        self._made: dict[int, int] = {}
        self._calls: dict[int, _Operands] = {}
        self.last: dict[int, int] = {}
        """Root to the last call that reads or makes it; past the end for what is kept."""
        self._find_lives()

    def _find_lives(self) -> None:
        for index, op in enumerate(self._ops):
            if op.kind_id == VIEW.id:
                continue
            self._made.update((vid, index) for vid in op.out_vids if vid != ABSENT)
            for vid in (*op.in_vids, *op.out_vids):
                if vid != ABSENT:
                    self.last[self._spots[vid].root] = index
        self.last.update((root, len(self._ops)) for root in self._kept)

    @property
    def first(self) -> Mapping[int, int]:
        """Root to the call that makes it."""
        return self._made

    def share(self, targets: Mapping[int, int]) -> Sharing:
        """What shares memory, where target ``t`` is to hold ``targets[t]`` after a run."""
        sharing = Sharing({spot.root: spot.root for spot in self._spots.values()})
        for target, result in targets.items():
            self._claim(target, result, sharing)
        ends = {root: self.last.get(root, -1) for root in sharing.owner}
        for index, op in enumerate(self._ops):
            if op.kind_id != VIEW.id:
                self._reuse(index, op, sharing, ends)
        return sharing

    # --- results that replace external memory -------------------------------------------------

    def _claim(self, target: int, result: int, sharing: Sharing) -> None:
        """Let the result be made in the target's memory, if nothing reads that later."""
        spot = self._spots[result]
        root, home = self._values[spot.root], self._spots[target]
        made = self._made.get(spot.root)
        if (
            made is None
            or sharing.owner[spot.root] != spot.root
            or target in sharing.claimed
            or not is_whole(spot, root)
            or not alike(spot, home)
            or self._values[target].dtype != root.dtype
            or self.last.get(target, -1) > made
            or not self._may_write(made, spot.root, target)
        ):
            return
        sharing.owner[spot.root] = target
        sharing.alias[spot.root] = target
        sharing.claimed.add(target)

    def _may_write(self, index: int, root: int, target: int) -> bool:
        """Whether the call that makes ``root`` may write over a target that it reads, or not."""
        operands = self._operands(index)
        if target not in operands.readers:
            return True
        return any(
            self._spots[vid].root == target and self._is_safe(operands, root, vid, place, {target})
            for vid, place in operands.pairs.get(root, ())
        )

    def _operands(self, index: int) -> _Operands:
        """A call's operands as they are asked for."""
        if index not in self._calls:
            op = self._ops[index]
            readers: dict[int, list[tuple[int, int]]] = {}
            for place, vid in enumerate(op.in_vids):
                if vid != ABSENT:
                    readers.setdefault(self._spots[vid].root, []).append((place, vid))
            pairs: dict[int, list[tuple[int, int]]] = {}
            for out, vid, place in _pairs(op):
                pairs.setdefault(out, []).append((vid, place))
            elementwise = kind_of(op.kind_id).aliasing == "elementwise"
            self._calls[index] = _Operands(elementwise, readers, pairs)
        return self._calls[index]

    # --- outputs in memory that is read no more -----------------------------------------------

    def _reuse(self, index: int, op: LoweredOp, sharing: Sharing, ends: dict[int, int]) -> None:
        if kind_of(op.kind_id).aliasing == "none":
            return
        taken: set[int] = set()
        operands = self._operands(index)
        for out, pairs in operands.pairs.items():
            for vid, place in pairs:
                owner = sharing.owner[self._spots[vid].root]
                if sharing.owner[out] == out and owner not in taken and ends.get(owner) == index:
                    self._take(index, out, vid, place, sharing, ends, taken)

    def _take(
        self,
        index: int,
        out: int,
        vid: int,
        place: int,
        sharing: Sharing,
        ends: dict[int, int],
        taken: set[int],
    ) -> None:
        """Let ``out`` have the memory of input number ``place``, where that is safe."""
        root = self._spots[vid].root
        owner, operands = sharing.owner[root], self._operands(index)
        if owner not in self._made or not is_whole(self._spots[vid], self._values[root]):
            return
        members = [r for r in operands.readers if sharing.owner[r] == owner]
        if self._is_safe(operands, out, vid, place, members):
            sharing.owner[out], sharing.alias[out] = owner, vid
            ends[owner] = max(index, self.last.get(out, index))
            taken.add(owner)

    def _is_safe(
        self, operands: _Operands, out: int, vid: int, place: int, members: Collection[int]
    ) -> bool:
        """Whether ``out`` may lie in input number ``place``, when other inputs lie there too.

        ``members`` are the roots in that memory. An input there may be read elementwise, if it
        lies exactly as the output does.
        """
        spot, made = self._spots[vid], self._spots[out]
        if not alike(spot, made) or self._values[vid].dtype != self._values[out].dtype:
            return False
        others = [
            self._spots[other]
            for root in members
            for k, other in operands.readers[root]
            if k != place
        ]
        return not others or (
            operands.elementwise
            and all(there.offset == spot.offset and alike(there, spot) for there in others)
        )


def _pairs(op: LoweredOp) -> Iterator[tuple[int, int, int]]:
    """Outputs and inputs that may share memory by their kind: (out vid, in vid, input's place)."""
    if op.must("no_alias"):
        return
    kind = kind_of(op.kind_id)
    for o, k in _places(kind, len(op.in_vids), len(op.out_vids)):
        if k < len(op.in_vids) and ABSENT not in (op.out_vids[o], op.in_vids[k]):
            yield op.out_vids[o], op.in_vids[k], k


def _places(kind: Kind, n_in: int, n_out: int) -> Iterator[tuple[int, int]]:
    if kind.aliasing == "elementwise":
        yield from ((o, k) for o in range(n_out) for k in range(n_in))
    elif kind.lists:
        count = n_in // kind.lists
        for position, listed in enumerate(kind.written):
            for i in range(min(count, n_out - position * count)):
                yield position * count + i, listed * count + i
    else:
        yield from kind.pairs
