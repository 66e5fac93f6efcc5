"""Constant folding: what is the same in every run is computed now.

Comes in: a graph. Goes out: the same, in which what depends on no input, and on no stored value
that may change, is a stored constant of its own. In inference parameters and buffers do not change
either. What always holds: views are never folded, a transposed weight costs nothing as it is; what
is folded takes no more memory than the stored values it is made of, or little; random numbers and
memory as it is found are left alone.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from shardwright.compiler.passes.rewriter import Rewriter
from shardwright.compiler.passes.subexpressions import is_repeatable
from shardwright.ir import IRGraph, IRNode
from shardwright.ir.aliasing import may_return_an_argument
from shardwright.ir.operators import flatten_results, join_call, resolve
from shardwright.ir.overloads import callable_of
from shardwright.ir.tensor_meta import dtype_name, strides_or_none
from shardwright.torch_internals import without_autocast

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
