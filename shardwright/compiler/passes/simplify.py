"""What is computed twice, the same in every run, copied twice, or not needed.

    merge_common_subexpressions   equal calls on the same values, but the first
    fold_constants                what depends on no input and on nothing stored that may change
    order_concatenations          clone(permute(cat(a, b, c))) is cat(permute(a), ..)
    remove_dead_code              nodes on whose results neither an output nor an update depends

Calls that draw random numbers stay, used or not, so that others draw what they drew; they, and what
gives memory as it finds it, are never taken for equal or for constant. A backward that does its
forward again to save memory is a graph of its own, so that nothing done again on purpose is taken
out here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache

import torch

from shardwright.compiler.passes.rewriter import Rewriter, dead_nodes, same_layout
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.aliasing import may_return_an_argument
from shardwright.ir.inference import Inference
from shardwright.ir.operators import flatten_results, is_marker, join_call, resolve
from shardwright.ir.overloads import callable_of
from shardwright.ir.tensor_meta import TensorMeta, dtype_name, strides_or_none
from shardwright.ir.values import Input, IRValue
from shardwright.torch_internals import without_autocast

# --- dead code ------------------------------------------------------------------------------------


def remove_dead_code(graph: IRGraph) -> IRGraph:
    """The graph without nodes that nothing needs; the same where there are none."""
    dead = {node.id for node in dead_nodes(graph)}
    if not dead:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if node.id not in dead:
            rewriter.keep(node)
    return rewriter.finish()


# --- common subexpressions ------------------------------------------------------------------------


_UNINITIALIZED = ("aten.empty", "aten.new_empty")
MOST_INPUTS = 16
"""Calls on more tensors, as optimizers', are not compared."""


def merge_common_subexpressions(graph: IRGraph) -> IRGraph:
    """The graph with each call done once; the same where none is done twice."""
    same = _repeated(graph)
    if not same:
        return graph
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if same.keys().isdisjoint(node.outputs):
            rewriter.keep(node)
        else:
            for value_id in node.outputs:
                rewriter.replace(value_id, same[value_id])
    return rewriter.finish()


def _repeated(graph: IRGraph) -> dict[int, int]:
    """What calls that were done before make, by the first that makes it."""
    same: dict[int, int] = {}
    seen: dict[object, list[IRNode]] = {}
    for node in graph.nodes:
        if len(node.inputs) > MOST_INPUTS or not is_repeatable(node.op):
            continue
        inputs = (same.get(value_id, value_id) for value_id in node.inputs)
        alike = seen.setdefault((node.op, *inputs), [])
        first = next((other for other in alike if _equal(graph, node, other)), None)
        if first is None:
            alike.append(node)
        else:
            same.update(zip(node.outputs, first.outputs, strict=True))
    return same


@cache
def is_repeatable(op: str) -> bool:
    """Whether equal calls give equal results."""
    if is_marker(op) or op.startswith(_UNINITIALIZED):
        return False
    return torch.Tag.nondeterministic_seeded not in resolve(op).tags


def _equal(graph: IRGraph, a: IRNode, b: IRNode) -> bool:
    """Whether two calls of one operator on the same values are the same call."""
    values = graph.values
    return (
        repr(a.attrs) == repr(b.attrs)
        and a.absent == b.absent
        and all(
            same_layout(values[one], values[other])
            for one, other in zip(a.outputs, b.outputs, strict=True)
        )
    )


# --- concatenations -------------------------------------------------------------------------------
#
#     clone(permute(cat(a, b, c)))   becomes   cat(permute(a), permute(b), permute(c))
#
# One copy where there were two: the gradients of queries, keys and values that attention's backward
# leaves stacked go straight to the layout that the gradient of their projection is read in.


_CAT = "aten.cat.default"
_PERMUTE = "aten.permute.default"
_CLONE = "aten.clone.default"


def order_concatenations(graph: IRGraph, known: Inference | None = None) -> IRGraph:
    """The graph with concatenations in the order in which they are read."""
    nodes = graph.node_by_id()
    found = {
        node.id: path
        for node in graph.nodes
        if node.op == _CLONE and (path := _path(graph, nodes, node)) is not None
    }
    if not found:
        return graph
    rewriter = Rewriter(graph, known)
    for node in graph.nodes:
        path = found.get(node.id)
        if path is None or not _write(rewriter, node, *path):
            rewriter.keep(node)
    return rewriter.finish(prune=True)


def _path(
    graph: IRGraph, nodes: Mapping[int, IRNode], clone: IRNode
) -> tuple[IRNode, IRNode] | None:
    """The permutation and the concatenation before a contiguous copy, where only it reads them."""
    if clone.attrs["memory_format"] is not torch.contiguous_format:
        return None
    permute = _made_for(graph, nodes, clone.inputs[0], _PERMUTE)
    if permute is None:
        return None
    cat = _made_for(graph, nodes, permute.inputs[0], _CAT)
    return None if cat is None else (permute, cat)


def _made_for(graph: IRGraph, nodes: Mapping[int, IRNode], value_id: int, op: str) -> IRNode | None:
    """The node that makes a value, where it is ``op`` and one other alone reads the value."""
    value = graph.values[value_id]
    kept = value.role == "output" or value_id in graph.updates.values()
    if value.producer is None or kept or len(value.users) != 1:
        return None
    return nodes[value.producer] if nodes[value.producer].op == op else None


def _write(rewriter: Rewriter, clone: IRNode, permute: IRNode, cat: IRNode) -> bool:
    """Append the concatenation in its new order; not where it would lie in another way."""
    source = rewriter.source
    made = source.values[clone.outputs[0]]
    ndim = len(made.shape)
    dims = [dim % ndim for dim in permute.attrs["dims"]]
    dim = dims.index(cat.attrs["dim"] % ndim)
    parts = []
    for value_id in cat.inputs:
        call = {"dims": dims}
        name = source.values[value_id].name
        (part,) = rewriter.call(_PERMUTE, [rewriter.now(value_id)], call, permute, name)
        assert part is not None
        parts.append(part)
    attrs = {"tensors": [Input(i) for i in range(len(parts))], "dim": dim}
    (told,) = rewriter.inference.outputs(_CAT, [rewriter.of(i) for i in parts], attrs)
    assert told is not None
    found = IRValue(-1, "", TensorMeta(tuple(told.shape), dtype_name(told.dtype), told.stride()))
    if not same_layout(found, made):
        return False
    rewriter.emit(_CAT, parts, [made], attrs, clone)
    return True


# --- constants ------------------------------------------------------------------------------------


SMALL = 2**20
"""Bytes that a constant may always take."""
LARGEST = 2**26
"""Bytes that a constant made of nothing stored may take."""


def fold_constants(
    graph: IRGraph, *, inference: bool = False, device: str | torch.device = "cpu"
) -> IRGraph:
    """The graph with what is constant computed, on ``device``."""
    folder = _Folder(graph, inference, torch.device(device))
    with torch.no_grad(), without_autocast():
        return folder.folded()


class _Folder:
    """Computes what is constant in one graph, and writes what is left."""

    def __init__(self, graph: IRGraph, inference: bool, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._rewriter = Rewriter(graph)
        self._known: dict[int, torch.Tensor] = {
            value.id: graph.tensors[value.id]
            for value in graph.stored()
            if value.id in graph.tensors
            and not graph.tensors[value.id].is_meta
            and value.id not in graph.updates
            and (inference or value.role == "constant")
        }
        """Contents of what is constant: stored values, what is folded, and views of both."""
        self._sources: dict[int, frozenset[int]] = {v: frozenset((v,)) for v in self._known}
        """The stored values that each of them is made of."""
        self._views: dict[int, IRNode] = {}
        """Views of what is constant, which are written where something reads them."""
        self._folded: set[int] = set()

    def folded(self) -> IRGraph:
        """The graph that is left."""
        for node in self._graph.nodes:
            if not self._fold(node):
                self._want(node.inputs)
                self._rewriter.keep(node)
        self._want([*self._graph.outputs, *self._graph.updates.values()])
        return self._rewriter.finish(prune=True)

    def _fold(self, node: IRNode) -> bool:
        """Compute a node, if it is constant and worth it."""
        constant = all(value_id in self._known for value_id in node.inputs)
        if not constant or not is_repeatable(node.op) or node.absent:
            return False
        sources = frozenset[int]().union(*(self._sources[i] for i in node.inputs))
        may_be_view = may_return_an_argument(node.op)
        if not may_be_view and not self._is_small(node, sources):
            return False
        made = self._run(node)
        if made is None:
            return False
        if may_be_view and _shares_memory(made, [self._known[i] for i in node.inputs]):
            self._views |= dict.fromkeys(node.outputs, node)
        elif may_be_view and not self._is_small(node, sources):
            return False
        else:
            self._folded.update(node.outputs)
        self._known |= dict(zip(node.outputs, made, strict=True))
        self._sources |= dict.fromkeys(node.outputs, sources)
        return True

    def _is_small(self, node: IRNode, sources: Collection[int]) -> bool:
        values = self._graph.values
        size = sum(values[value_id].nbytes for value_id in node.outputs)
        held = sum(values[value_id].nbytes for value_id in sources)
        return size <= (max(held, SMALL) if sources else LARGEST)

    def _run(self, node: IRNode) -> list[torch.Tensor] | None:
        """What the node makes, None where it does not lie as the graph says."""
        overload = resolve(node.op)
        inputs = [self._known[value_id] for value_id in node.inputs]
        args, kwargs = join_call(overload, inputs, node.attrs, self._device)
        try:
            made = flatten_results(callable_of(overload)(*args, **kwargs))
        except RuntimeError:  # tensors of two devices, or too little memory: it runs in its place
            return None
        values = [self._graph.values[value_id] for value_id in node.outputs]
        told = [(value.shape, value.dtype, value.strides) for value in values]
        found = [
            (tuple(t.shape), dtype_name(t.dtype), strides_or_none(t.shape, t.stride()))
            for t in made
        ]
        return made if told == found else None

    def _want(self, value_ids: Collection[int]) -> None:
        """See to it that these values are there: as constants, or views of them."""
        for value_id in value_ids:
            if value_id in self._folded:
                self._folded.discard(value_id)
                name = self._graph.values[value_id].name
                constant = self._rewriter.constant(name, self._known[value_id])
                self._rewriter.replace(value_id, constant)
            elif (node := self._views.get(value_id)) is not None:
                for made in node.outputs:
                    del self._views[made]
                self._want(node.inputs)
                self._rewriter.keep(node)


def _shares_memory(made: Collection[torch.Tensor], inputs: Collection[torch.Tensor]) -> bool:
    homes = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return any(tensor.untyped_storage().data_ptr() in homes for tensor in made)
