"""How a node's tensors lie along one axis of its mesh, by what the axis does with the node.

Comes in: a call's annotation, and the `Split`, `Terms` or None of one mesh axis. Goes out: an
`NodeAxis`, which knows the placement in which each input is read and each output made, and in which
the gradient of an input comes out of the node's backward. `building` writes nodes by it, and
`planning` chooses splits by it: what is planned is what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ops.bound import BoundDimop, Carry, Flow
from shardwright.planning.plan import Split, Terms
from shardwright.sharding import Layout, Partial, Placement, Replicate, Shard


@dataclass(frozen=True, slots=True)
class NodeAxis:
    """How a node's tensors lie along one axis of its mesh."""

    split: Split | Terms | None
    flow: Flow | None
    reduction: str

    @classmethod
    def of(cls, bound: BoundDimop, split: Split | Terms | None) -> NodeAxis:
        """What a split of a call means for its tensors."""
        flow = bound.flow(split.identifier) if isinstance(split, Split) else None
        return cls(split, flow, bound.reduction)

    def adds(self, index: int) -> bool:
        """Whether an input is a term that is added to what the parts make: by the first only."""
        return self.flow is not None and self.flow.inputs[index].kind == "partial"

    def ignores(self, index: int) -> bool:
        """Whether only the dtype of an input is read."""
        return self.flow is not None and self.flow.inputs[index].kind == "any"

    def input(self, index: int) -> Placement:
        """How an input is read: a term to add comes whole."""
        if isinstance(self.split, Terms):
            return Partial() if index in self.split.inputs else Replicate()
        if self.flow is None or self.adds(index):
            return Replicate()
        return self._placement(self.flow.inputs[index])

    def output(self, index: int) -> Placement:
        """How an output is made."""
        if isinstance(self.split, Terms):
            return Partial()
        return Replicate() if self.flow is None else self._placement(self.flow.outputs[index])

    def gradient(self, index: int) -> Placement:
        """How the gradient of an input is made, from gradients that lie as `mirror` says.

        What each slot makes is all of it where all slots do the same, and where the input is a
        term: then the gradient of the sum is that of each term. Of an input that the split does not
        touch, each slot makes the part that goes through what it computes.
        """
        if self.split is None:
            return Replicate()
        if isinstance(self.split, Terms):
            return Replicate() if index in self.split.inputs else Partial()
        assert self.flow is not None
        carry = self.flow.inputs[index]
        return self._placement(carry) if carry.kind == "shard" else Partial()

    def repeats(self, index: int) -> bool:
        """Whether all slots make the same output although the node is split."""
        return self.flow is not None and self.flow.outputs[index].kind == "whole"

    def _placement(self, carry: Carry) -> Placement:
        if carry.kind in ("whole", "any"):
            return Replicate()
        if carry.kind == "partial":
            return Partial(self.reduction)
        assert carry.dim is not None
        assert isinstance(self.split, Split)
        return Shard(carry.dim, carry.unit * self.split.unit)


def wanted(axes: Sequence[NodeAxis], index: int) -> Layout | None:
    """The layout to fetch an input in, None where only the dtype is read."""
    if any(axis.ignores(index) for axis in axes):
        return None
    return Layout(tuple(axis.input(index) for axis in axes))
