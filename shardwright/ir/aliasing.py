"""Alias analysis, and donation: running nodes in place where a caller gives memory away.

A value has roots: the values whose memory it may be a view of, itself where its node makes new
memory. Two values without a common root share no memory. Operators say in their schemas what they
return a view of; those that torch composes of others may return an argument as it is (`dropout` in
evaluation), and a few share memory without saying so.

    acc_new = aten.addmm.default(acc, dy, x)    becomes    acc.addmm_(dy, x); acc_new = acc

Of a graph, and for each donated argument the result that takes its place (an accumulator and its
sum, a parameter and its update), a `Donation` says which nodes run as their in-place siblings, and
which results have to be copied into their arguments at the end. Afterwards the argument's memory
holds the result, and every result has the values that it has without donation. A node runs in place
only where nothing needs the old contents later: neither its value, nor one that may share its
memory, nor a result of the graph; and where shape, dtype and strides stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwright.ir.operators import is_marker, join_call, resolve, signature
from shardwright.ir.values import IRNode
from shardwright.torch_internals import (
    OpOverload,
    is_composite,
    operator_of,
    overload_of,
    schema_of,
)

if TYPE_CHECKING:
    from shardwright.ir.graph import IRGraph

Roots = dict[int, frozenset[int]]
"""Value id to the ids of its roots."""

_UNDECLARED = {"aten._unsafe_view.default", "aten.lift.default"}
"""Operators that return memory of their arguments although their schemas do not say so."""


def memory_roots(graph: IRGraph) -> Roots:
    """The roots of every value."""
    roots: Roots = {}
    for value in graph.values.values():
        if value.producer is None:
            roots[value.id] = frozenset((value.id,))
    for node in graph.nodes:
        shared = not is_marker(node.op) and may_return_an_argument(node.op)
        below = frozenset[int]().union(*(roots[value_id] for value_id in node.inputs))
        for value_id in node.outputs:
            roots[value_id] = below if shared and below else frozenset((value_id,))
    return roots


@cache
def may_return_an_argument(op: str) -> bool:
    """Whether what the operator returns may be in the memory of what it is given."""
    overload = resolve(op)
    return (
        op in _UNDECLARED
        or any(item.alias_info is not None for item in schema_of(overload).returns)
        or is_composite(overload)
    )


# --- donation -------------------------------------------------------------------------------------

_COMMUTATIVE = {"aten.add.Tensor"}
"""Operators of two tensors that may as well write to the second, where ``alpha`` is 1."""

_SCALED = {
    f"aten.{name}.default": {"beta": 0} for name in ("addmm", "baddbmm", "addbmm", "addmv", "addr")
}
"""Operators that add to ``beta`` times what they write to: what to change where that is zeros."""

_READ_ONLY = {"grads": "grad_scale"}
"""Arguments that in-place optimizers declare as written, but write only where another is given."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """How a node runs in place.

    overload, inputs, attrs
        What is called: inputs and attributes as an `IRNode` has them.
    written
        Each output, and the input that it is written to.
    untouched
        Outputs that nobody may read, and the input that each would be written to but is not.
    cloned
        Inputs that are not to be written to: the call gets clones of them.
    """

    overload: OpOverload
    inputs: tuple[int, ...]
    attrs: dict[str, Any]
    written: dict[int, int]
    untouched: dict[int, int]
    cloned: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Donation:
    """What becomes of a graph's donated arguments; all are value ids.

    nodes
        Nodes that run in place, by node id.
    copies
        Argument to the result that is copied into it when all nodes have run.
    clones
        Results that need memory of their own before anything is copied.
    zeroed
        Arguments that must be set to zero before the first node.
    """

    nodes: dict[int, InPlace] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    clones: frozenset[int] = frozenset()
    zeroed: frozenset[int] = frozenset()


NOTHING = Donation()
"""No argument is given away."""


def donate(graph: IRGraph, donated: Mapping[int, int], zeros: frozenset[int]) -> Donation:
    """How to run ``graph`` if argument ``a`` may be overwritten by result ``donated[a]``.

    ``zeros`` are donated arguments whose contents count as zeros, whatever they are.
    """
    lives = _Lives(graph)
    chains: dict[int, _Chain] = {}
    forms: dict[int, InPlace] = {}
    for argument, result in donated.items():
        chain = _chain(lives, argument, result)
        if chain is not None and not _contradicts(chain, forms):
            chains[argument] = chain
            forms |= {node_id: link.form for node_id, link in chain.items()}
    while refused := [a for a, chain in chains.items() if not _holds(lives, chain, chains)]:
        for argument in refused:
            del chains[argument]
    unchained = {argument: result for argument, result in donated.items() if argument not in chains}
    zeroed = {a for a in zeros if not _take_for_zeros(lives, a, chains.get(a, {}))}
    return Donation(
        _nodes(lives, chains), unchained, _clones(graph, lives, unchained), frozenset(zeroed)
    )


def _contradicts(chain: _Chain, forms: Mapping[int, InPlace]) -> bool:
    """Whether a node of the chain runs in another way in chains before it, which all agree."""
    return any(forms.get(node_id, link.form) != link.form for node_id, link in chain.items())


def _holds(lives: _Lives, chain: _Chain, chains: Collection[int]) -> bool:
    """Whether each node may write what it is in the chain for, and clone what it may not write."""
    return all(
        lives.may_write(node_id, link.form, link.output, chains)
        and lives.may_clone(node_id, link.form)
        and not lives.are_read(link.form.untouched)
        for node_id, link in chain.items()
    )


def _nodes(lives: _Lives, chains: Mapping[int, _Chain]) -> dict[int, InPlace]:
    """The nodes of all chains, with clones of what they may not write to.

    Each is asked once: an optimizer's step is one node in as many chains as it has tensors.
    """
    links = {node_id: link for chain in chains.values() for node_id, link in chain.items()}
    return {
        node_id: replace(
            link.form,
            cloned=frozenset(
                place
                for output, place in link.form.written.items()
                if not lives.may_write(node_id, link.form, output, chains)
            ),
        )
        for node_id, link in links.items()
    }


# --- in-place siblings ----------------------------------------------------------------------------


@cache
def in_place_sibling(op: str) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload that writes what ``op`` returns, and the arguments it writes to, in order.

    ``aten.add.Tensor`` has ``aten.add_.Tensor``, which writes to ``self``; None where torch has no
    sibling with the same parameters.
    """
    overload = resolve(op)
    packet = getattr(getattr(torch.ops, overload.namespace), f"{operator_of(overload)}_", None)
    sibling = getattr(packet, overload_of(overload), None)
    if not isinstance(sibling, OpOverload):
        return None
    ours, theirs = schema_of(overload).arguments, schema_of(sibling).arguments
    written = [a for a in theirs if a.alias_info is not None and a.alias_info.is_write]
    same = [(a.name, str(a.type)) for a in ours] == [(a.name, str(a.type)) for a in theirs]
    returns = [str(item.type) for item in schema_of(overload).returns]
    if not same or returns != [str(a.type) for a in written]:
        return None
    return sibling, tuple(argument.name for argument in written)


def _in_place(node: IRNode, *, swapped: bool) -> InPlace | None:
    """The node run in place, where torch can; with its two inputs ``swapped``, if they are."""
    found = None if is_marker(node.op) else in_place_sibling(node.op)
    if found is None or node.absent:
        return None
    sibling, names = found
    inputs = tuple(reversed(node.inputs) if swapped else node.inputs)
    args, kwargs = join_call(sibling, [_Place(i) for i in inputs], node.attrs)
    bound = dict(zip((p.name for p in signature(sibling).parameters), args, strict=False)) | kwargs
    targets = [
        (place, _is_touched(name, bound)) for name in names for place in _places(bound[name])
    ]
    if len(targets) != len(node.outputs):
        return None
    pairs = list(zip(node.outputs, targets, strict=True))
    return InPlace(
        sibling,
        inputs,
        node.attrs,
        {output: place for output, (place, touched) in pairs if touched},
        {output: place for output, (place, touched) in pairs if not touched},
    )


def _is_second(node: IRNode, argument: int) -> bool:
    """Whether ``argument`` is the second of two summands, which may as well be the first."""
    return (
        node.op in _COMMUTATIVE
        and node.attrs.get("alpha", 1) == 1
        and len(node.inputs) == 2
        and node.inputs[1] == argument
    )


def _is_touched(name: str, bound: Mapping[str, Any]) -> bool:
    return name not in _READ_ONLY or bound[_READ_ONLY[name]] is not None


class _Place(int):
    """A value id among the arguments of a call."""


def _places(argument: Any) -> list[int]:
    items = argument if isinstance(argument, list) else [argument]
    return [int(item) for item in items if isinstance(item, _Place)]


# --- from a result back to its argument -----------------------------------------------------------


class _DonationPair(NamedTuple):
    """A node of a chain, and which of its outputs is on the way."""

    form: InPlace
    output: int


_Chain = dict[int, _DonationPair]
"""Nodes that all run in place, by node id; the last one first."""


def _chain(lives: _Lives, argument: int, result: int) -> _Chain | None:
    """The nodes on the way from a result back to its argument, if each writes to one input."""
    chain: _Chain = {}
    while result != argument:
        node = lives.producer(result)
        form = lives.in_place(node, argument) if node is not None else None
        if node is None or form is None or result not in form.written:
            return None
        chain[node.id] = _DonationPair(form, result)
        result = form.written[result]
    return chain


class _Lives:
    """When values are read for the last time, and which may share memory."""

    def __init__(self, graph: IRGraph) -> None:
        self._graph = graph
        self._roots = memory_roots(graph)
        self._index = {node.id: k for k, node in enumerate(graph.nodes)}
        self._last: dict[int, int] = {}
        for k, node in enumerate(graph.nodes):
            self._last.update(dict.fromkeys(node.inputs, k))
        for value_id in (*graph.outputs, *graph.updates.values()):
            self._last[value_id] = len(graph.nodes)
        self._members: dict[int, set[int]] = {}
        self._forms: dict[tuple[int, bool], InPlace | None] = {}
        self._clonable: dict[int, bool] = {}
        for value_id, roots in self._roots.items():
            for root in roots:
                self._members.setdefault(root, set()).add(value_id)

    def producer(self, value_id: int) -> IRNode | None:
        """The node that makes a value."""
        producer = self._graph.values[value_id].producer
        return None if producer is None else self._graph.nodes[self._index[producer]]

    def in_place(self, node: IRNode, argument: int) -> InPlace | None:
        """The node run in place; a sum writes to ``argument`` if that is in it."""
        key = node.id, _is_second(node, argument)
        if key not in self._forms:
            self._forms[key] = _in_place(node, swapped=key[1])
        return self._forms[key]

    def readers(self, value_id: int) -> list[IRNode]:
        """The nodes that read a value."""
        users = dict.fromkeys(self._graph.values[value_id].users)
        return [self._graph.nodes[self._index[user]] for user in users]

    def sharing(self, value_id: int) -> set[int]:
        """The values that may share memory with this one, itself included."""
        return set[int]().union(*(self._members[root] for root in self._roots[value_id]))

    def are_read(self, value_ids: Collection[int]) -> bool:
        """Whether any of the values is read or returned."""
        return any(value_id in self._last for value_id in value_ids)

    def may_write(self, node_id: int, form: InPlace, output: int, donated: Collection[int]) -> bool:
        """Whether a node may write one of its outputs to the memory of the input for it."""
        place = form.written[output]
        old, new = self._graph.values[place], self._graph.values[output]
        sharing = self.sharing(place)
        return (
            old.meta == new.meta
            and all(self._last.get(other, -1) <= self._index[node_id] for other in sharing)
            and sum(value_id in sharing for value_id in form.inputs) == 1
            and all(
                root in donated or self._graph.values[root].producer is not None
                for root in self._roots[place]
            )
        )

    def may_clone(self, node_id: int, form: InPlace) -> bool:
        """Whether clones of what a node writes to would be as its outputs are.

        Each node is asked once: an optimizer's step is one in as many chains as it has tensors.
        """
        if node_id not in self._clonable:
            values, uses = self._graph.values, Counter(form.inputs)
            pairs = [(values[place], values[output]) for output, place in form.written.items()]
            self._clonable[node_id] = all(
                (old.shape, old.dtype) == (new.shape, new.dtype)
                and new.strides in (None, old.strides)
                and uses[old.id] == 1
                for old, new in pairs
            )
        return self._clonable[node_id]


# --- zeros, copies --------------------------------------------------------------------------------


def _take_for_zeros(lives: _Lives, argument: int, chain: _Chain) -> bool:
    """Change the first node of the chain so that it takes the argument for zeros, if it can."""
    if not chain or len(lives.readers(argument)) > 1:
        return False
    first, (form, output) = next(reversed(chain.items()))
    op = lives.readers(argument)[0].op
    if op in _SCALED:
        changed = replace(form, attrs=form.attrs | _SCALED[op])
    elif op in _COMMUTATIVE and form.attrs.get("alpha", 1) == 1:
        copy = torch.ops.aten.copy_.default
        changed = replace(form, overload=copy, attrs={"non_blocking": False})
    else:
        return False
    chain[first] = _DonationPair(changed, output)
    return True


def _clones(graph: IRGraph, lives: _Lives, copies: Mapping[int, int]) -> frozenset[int]:
    """Results in memory that a copy overwrites before they are copied or returned."""
    overwritten = set[int]().union(*(lives.sharing(argument) for argument in copies))
    return frozenset(overwritten.intersection((*graph.outputs, *graph.updates.values())))
