"""The recorded backward of a call as costs read it: what it saves, and its B and W halves.

The backward is the one that building writes (`vjp`), with the additions of parameters' gradients to
what was accumulated before. B gives the gradients of what other nodes made, W those of stored
values (`split_backward`). Recorded once for all calls of the same kind in a process; gradients are
taken to have the strides of what they are gradients of.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from shardwright.autodiff.differentiate import add_into
from shardwright.autodiff.needed import can_have_gradient
from shardwright.autodiff.vjp import Read, Vjp, VjpCall, Vjps, ancestors
from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.inference import settings
from shardwright.ir.operators import is_built_in, is_marker


@dataclass(frozen=True, slots=True, eq=False)
class BackwardGraph:
    """The backward of a call.

    graph
        From what is read, and the accumulated gradients of stored values, to gradients.
    inputs
        By input of ``graph``: what is read there; of an accumulated gradient None.
    sizes
        By value of ``graph`` that is as large as one of the call: the number of that among the
        call's inputs, then outputs.
    gets
        The outputs of the call that have a gradient.
    gives
        By input of the call, the value of ``graph`` that B gives as its gradient.
    early, late
        The nodes of B and of W.
    saved
        Bytes that the forward keeps beside the call's inputs and outputs.
    """

    graph: IRGraph
    inputs: dict[int, Read | None]
    sizes: dict[int, int]
    gets: tuple[int, ...]
    gives: dict[int, int]
    early: tuple[IRNode, ...]
    late: tuple[IRNode, ...]
    saved: int

    def reads(self, *, late: bool = False) -> dict[Read, None]:
        """What the backward, or W alone, reads of the call and its gradients, each once."""
        nodes = self.late if late else (*self.early, *self.late)
        makers = {v: node for node in self.early for v in node.outputs}
        read: dict[Read, None] = {}
        for value_id in dict.fromkeys(v for node in nodes for v in node.inputs):
            while (maker := makers.get(value_id)) is not None and len(maker.inputs) == 1:
                value_id = maker.inputs[0]  # a view that both halves read
            if (what := self.inputs.get(value_id)) is not None:
                read[what] = None
        return read


_MOST_KEPT = 4096
_kept: dict[Hashable, BackwardGraph | None] = {}
"""By settings of torch, call and what is stored; of users' operators without a derivative none."""


def backward_of(
    graph: IRGraph, node: IRNode, needing: Collection[int], stored: Collection[int]
) -> BackwardGraph | None:
    """The backward of a node that gives the gradients of ``needing``, those of ``stored`` in W.

    None where there is none to give, or where the operator has no derivative: building refuses a
    step that needs one.
    """
    wants = tuple(
        i for i, v in enumerate(node.inputs) if v in needing and can_have_gradient(graph, v)
    )
    real = [i for i, v in enumerate(node.outputs) if can_have_gradient(graph, v)]
    if is_marker(node.op) or not wants or not real:
        return None
    read = [i for i in real if graph.values[node.outputs[i]].users]
    read = read or [i for i in real if node.outputs[i] in graph.outputs]
    call = VjpCall.of(graph, node, wants, {i: graph.values[node.outputs[i]] for i in read or real})
    late = tuple(i for i in wants if node.inputs[i] in stored)
    key = settings(), call._replace(attrs=repr(call.attrs)), late  # type: ignore[arg-type]
    if key in _kept:
        return _kept[key]
    try:
        found = _divided(Vjps().of(call), call, late, len(node.inputs))
    except GraphError:
        found = None
    if found is not None or is_built_in(node.op):
        if len(_kept) == _MOST_KEPT:
            _kept.clear()
        _kept[key] = found
    return found


def _divided(vjp: Vjp, call: VjpCall, late: Collection[int], count: int) -> BackwardGraph:
    source = vjp.backward
    builder = Builder("backward")
    mapping = {
        v: builder.copy_value(source, source.values[v], role="input").id for v in source.inputs
    }
    inputs: dict[int, Read | None] = {
        mapping[v]: read for v, read in zip(source.inputs, vjp.reads, strict=True)
    }
    for node in source.nodes:
        builder.copy_node(source, node, mapping)
    values = builder.graph.values
    sizes = {
        v: _number(read, call, count)
        for v, read in inputs.items()
        if read is not None and read.what != "saved"
    }
    gives: dict[int, int] = {}
    made: list[int] = []
    early: set[int] = set()
    for number, given in zip(call.wants, vjp.gives, strict=True):
        if given is None:
            continue
        gradient = values[mapping[source.outputs[given]]]
        sizes.setdefault(gradient.id, number)
        if number in late:
            before = builder.input("accumulated", gradient.shape, gradient.dtype)
            gradient = add_into(builder, before, gradient)
            inputs[before.id] = None
            sizes[before.id] = sizes[gradient.id] = number
        else:
            early.add(gradient.id)
            gives[number] = gradient.id
        made.append(gradient.id)
    graph = builder.graph
    graph.outputs[:] = dict.fromkeys(made)
    needed = ancestors(graph, made)
    nodes = [node for node in graph.nodes if node.id in needed]
    first, later = split_backward(graph, nodes, early)
    count = sum(read.what == "saved" for read in vjp.reads)
    kept = [] if vjp.forward is None else vjp.forward.outputs[len(vjp.forward.outputs) - count :]
    saved = 0 if vjp.forward is None else sum(vjp.forward.values[v].nbytes for v in kept)
    return BackwardGraph(graph, inputs, sizes, call.gets, gives, tuple(first), tuple(later), saved)


def _number(read: Read, call: VjpCall, count: int) -> int:
    """The number of what is read among a call's ``count`` inputs, then outputs."""
    if read.what == "input":
        return read.number
    return count + (call.gets[read.number] if read.what == "gradient" else read.number)


# --- B and W (Qi et al., Zero Bubble Pipeline Parallelism, 2023) --------------------------------
#
# An operator with an output mask may lead to both. It is run twice, with masks that share nothing,
# where that costs no more than running it once: a convolution's gradients are computed one by one
# anyway. Those of a norm come out of one pass over the same tensors: a norm stays whole, and early.

_SEPARABLE = {"aten.convolution_backward.default": "output_mask"}
"""Operators that compute each of their results by itself, and the name of their mask."""


def split_backward(
    graph: IRGraph, nodes: Sequence[IRNode], early: Collection[int]
) -> tuple[list[IRNode], list[IRNode]]:
    """The nodes that the values ``early`` depend on, and all others, each in order.

    Early nodes read nothing of late ones, and together they make what the nodes made, under the
    same ids: ``early`` leaves towards earlier stages, the rest is mostly the gradients of weights.
    A node that is run twice stands in both: the early part under its own id, the late one under a
    fresh id of ``graph``, which is left as it is otherwise.
    """
    needed = set(early)
    first: list[IRNode] = []
    later: list[IRNode] = []
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            later.append(node)
            continue
        mask = _SEPARABLE.get(node.op)
        if mask is not None and not needed.issuperset(node.outputs):
            later.append(_part(node, mask, set(node.outputs) - needed, graph.fresh_id()))
            node = _part(node, mask, needed, node.id)
        first.append(node)
        needed.update(node.inputs)
    return first[::-1], later[::-1]


def _part(node: IRNode, mask: str, kept: Collection[int], node_id: int) -> IRNode:
    """The node with the results ``kept`` alone."""
    flags = [value_id in kept for value_id in node.results]
    return replace(
        node,
        id=node_id,
        inputs=list(node.inputs),
        outputs=[value_id for value_id in node.outputs if value_id in kept],
        attrs=node.attrs | {mask: flags},
        absent=tuple(i for i, flag in enumerate(flags) if not flag),
    )
