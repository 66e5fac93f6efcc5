"""Vector-Jacobian products of operator calls, taken from torch itself.

A `Vjp` has graphs of the operators that torch runs for the gradients of a call below autograd
(``mm``, ``native_layer_norm_backward``, …), divided into what the node does and what its backward
does. They are recorded once for all calls of the same kind, from fake tensors; of operators that
every process has, once a process, since that is most of what a build takes.

What the backward reads of the forward is as little as torch's own reads:

    the node's inputs and outputs     are there anyway
    views of what is there, copies    are done again in the backward, as are constants
    anything else that is read        is saved: `Vjp.forward` replaces the node, and gives it too

Where nothing has to be saved `Vjp.forward` is None: the node stays as it is (``linear``, ``gelu``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from shardwright.autodiff.record import record, simplify
from shardwright.errors import GraphError
from shardwright.ir import WITH_BACKWARD, Builder, IRGraph, IRNode, IRValue
from shardwright.ir.inference import settings
from shardwright.ir.operators import is_built_in, join_call, resolve
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.torch_internals import FakeTensorMode, operator_of, schema_of


class Read(NamedTuple):
    """A tensor that a backward reads: which of the node's ``what``, counted from 0."""

    what: Literal["input", "output", "saved", "gradient"]
    number: int


@dataclass(frozen=True, slots=True)
class Vjp:
    """The backward of a call.

    forward
        From the node's inputs to its outputs and what is saved; None where the node stays.
    backward
        From what ``reads`` says to gradients.
    reads
        What stands at each input of ``backward``; gradients are numbered as `Call.gets`.
    gives
        For each of `Call.wants`, which output of ``backward`` is its gradient; None where the
        outputs do not depend on it.
    """

    forward: IRGraph | None
    backward: IRGraph
    reads: tuple[Read, ...]
    gives: tuple[int | None, ...]


class VjpCall(NamedTuple):
    """A call to differentiate, with all that its backward depends on.

    ``wants`` are the inputs that want a gradient and ``gets`` the outputs that have one, both by
    number and in order; ``gradients`` are the kinds of the latter's gradients, whose strides may be
    others than the outputs'.
    """

    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorMeta, ...]
    wants: tuple[int, ...]
    gets: tuple[int, ...]
    gradients: tuple[TensorMeta, ...]

    @classmethod
    def of(
        cls,
        graph: IRGraph,
        node: IRNode,
        wants: Sequence[int],
        gradients: Mapping[int, IRValue],
    ) -> VjpCall:
        """The call of a node; ``gradients`` are those of its outputs, by number of the output."""
        inputs = tuple(graph.values[value_id].meta for value_id in node.inputs)
        gets = tuple(sorted(gradients))
        metas = tuple(gradients[i].meta for i in gets)
        return cls(node.op, node.attrs, inputs, tuple(wants), gets, metas)


_BY_CELLS = frozenset({"aten.lstm.input", "aten.lstm.data"})
"""Operators whose kernels for the whole leave what their backward reads in bytes of their own: cell
by cell, as torch does where it has no such kernel, and as on its ``meta`` device."""

_MOST_KEPT = 4096
_kept: dict[object, Vjp] = {}
"""What was recorded last in this process, by device, settings of torch and call, the oldest first.

Users' own operators are left out: they can be registered anew with another backward.
"""


class Vjps:
    """Recorded backwards, each once, for devices of one kind (``cpu``, ``cuda``).

    Which kernels torch takes, for attention above all, is asked on a device of that kind. Where
    this machine has none it is asked on torch's ``meta`` device: then attention is written out as
    matrix products and a softmax, which every device has, and strides are not sure to be those of
    the kernels.
    """

    def __init__(self, device_kind: str = "cpu") -> None:
        self._device = device_kind if _is_here(device_kind) else "meta"
        self._mode = FakeTensorMode()
        self._known: dict[object, Vjp] = {}

    @property
    def recorded(self) -> int:
        """How many kinds of calls were recorded."""
        return len(self._known)

    def of(self, call: VjpCall) -> Vjp:
        """The backward of a call.

        Raises GraphError where the operator has no derivative, or one that cannot be in a graph.
        """
        key = call._replace(attrs=repr(call.attrs))  # type: ignore[arg-type]
        if key not in self._known:
            self._known[key] = self._kept(call, key) if is_built_in(call.op) else self._record(call)
        return self._known[key]

    def _kept(self, call: VjpCall, key: VjpCall) -> Vjp:
        """The backward of a call from what this process keeps, or for it."""
        whole = (self._device, settings(), key)
        found = _kept.get(whole)
        if found is None:
            found = _kept[whole] = self._record(call)
            while len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)
        return found

    def _record(self, call: VjpCall) -> Vjp:
        count = len(call.inputs)

        device = "meta" if call.op in _BY_CELLS else self._device

        def pull(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
            return _pull(call, tensors[:count], tensors[count:], device)

        metas = (*call.inputs, *call.gradients)
        try:
            recorded = record(pull, metas, self._mode, device)
        except Exception as error:
            raise GraphError(
                f"{call.op} cannot be differentiated: {error}; detach what it reads, or write it "
                "with operators that have a derivative"
            ) from error
        graph = recorded.builder.graph
        results = simplify(graph, recorded.results)
        _let_views_copy(graph)
        made = len(results) - len(call.wants)
        vjp = _vjp(graph, count, results[:made], results[made:])
        return replace(vjp, forward=_handing_on(call)) if call.op == WITH_BACKWARD else vjp


def _handing_on(call: VjpCall) -> IRGraph:
    """The forward of a call whose outputs are its first inputs."""
    builder = Builder("forward")
    inputs = [
        builder.input("x", meta.shape, meta.dtype, strides=meta.strides) for meta in call.inputs
    ]
    return builder.finish(inputs[: len(call.attrs["made"])])


def _let_views_copy(graph: IRGraph) -> None:
    """Write views so that they copy where what a kernel makes lies otherwise than was thought."""
    for node in graph.nodes:
        if node.op == "aten.view.default":
            node.op, node.attrs = "aten.reshape.default", {"shape": node.attrs["size"]}


def _is_here(device_kind: str) -> bool:
    """Whether this process can make tensors on devices of a kind."""
    module = getattr(torch, device_kind, None)
    return bool(module is not None and module.is_available())


def _pull(
    call: VjpCall, inputs: list[torch.Tensor], gradients: list[torch.Tensor], device: str
) -> list[torch.Tensor | None]:
    """The outputs of a call, then the gradients of what wants one."""
    with torch.enable_grad():
        for i in call.wants:
            inputs[i].requires_grad_()
        made = _apply(call, inputs, device)
        pairs = [
            (made[i], gradient)
            for i, gradient in zip(call.gets, gradients, strict=True)
            if made[i].requires_grad
        ]
    if not pairs:
        return [*made, *[None] * len(call.wants)]
    outputs, seeds = zip(*pairs, strict=True)
    wanted = [inputs[i] for i in call.wants]
    return [*made, *torch.autograd.grad(outputs, wanted, seeds, allow_unused=True)]


def _apply(call: VjpCall, inputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Run the call, or one that makes the same and that autograd knows; the tensors it makes."""
    if call.op == "aten.as_strided_scatter.default":
        where = (call.attrs[name] for name in ("size", "stride", "storage_offset"))
        return [Scattered.apply(*inputs, *where)]  # type: ignore[no-untyped-call]
    op, attrs, inputs = _SIBLINGS.get(call.op, _itself)(call.op, dict(call.attrs), inputs)
    args, kwargs = join_call(resolve(op), inputs, attrs, torch.device(device))
    made = resolve(op)(*args, **kwargs)
    listed = made if isinstance(made, (list, tuple)) else [made]
    return [item for item in listed if isinstance(item, torch.Tensor)]


_Sibling = tuple[str, dict[str, Any], list[torch.Tensor]]


def _itself(op: str, attrs: dict[str, Any], inputs: list[torch.Tensor]) -> _Sibling:
    return op, attrs, inputs


def _batch_norm(op: str, attrs: dict[str, Any], inputs: list[torch.Tensor]) -> _Sibling:
    """In training the running statistics, the last two inputs, have no part in the result."""
    attrs = attrs | {"running_mean": None, "running_var": None}
    return "aten.native_batch_norm.default", attrs, inputs[:-2]


_SIBLINGS = {"aten._native_batch_norm_legit_functional.default": _batch_norm}
"""Operators without a derivative, and calls that make the same; of several outputs the first."""


class Scattered(torch.autograd.Function):
    """``as_strided_scatter`` of a contiguous tensor, differentiated.

    torch gives the tensor that is written into the gradient of the elements that were overwritten,
    and none of those that stayed; it is the other way round.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        src: torch.Tensor,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
    ) -> torch.Tensor:
        """What is written into, then what is written and where."""
        if not x.is_contiguous():
            raise GraphError("it writes by strides into a tensor that is not contiguous")
        ctx.where = (size, stride, offset)
        return torch.as_strided_scatter(x, src, size, stride, offset)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """What was overwritten has no gradient; what was written has that of its place."""
        gradient = gradient.contiguous()
        written = torch.as_strided_copy(gradient, *ctx.where)
        stayed = torch.as_strided_scatter(gradient, torch.zeros_like(written), *ctx.where)
        return stayed, written, None, None, None


# --- forward and backward -----------------------------------------------------------------------


def _vjp(
    graph: IRGraph, count: int, outputs: Sequence[int | None], gradients: Sequence[int | None]
) -> Vjp:
    """Divide what was recorded; ``count`` of the graph's inputs are the node's."""
    made = [value_id for value_id in outputs if value_id is not None]
    found = list(dict.fromkeys(value_id for value_id in gradients if value_id is not None))
    named: dict[int, Read] = {}
    for i, value_id in enumerate(graph.inputs):
        named[value_id] = Read("input", i) if i < count else Read("gradient", i - count)
    for i, value_id in enumerate(made):
        named.setdefault(value_id, Read("output", i))
    parts = divide(graph, graph.inputs[:count], made, found, named)
    named |= {value_id: Read("saved", i) for i, value_id in enumerate(parts.saved)}
    return Vjp(
        parts.forward,
        parts.backward,
        tuple(named[value_id] for value_id in parts.reads),
        tuple(None if v is None else found.index(v) for v in gradients),
    )


class Parts(NamedTuple):
    """The two graphs; ``reads`` are the values that ``backward`` takes, ``saved`` those among them
    that ``forward`` gives beside the outputs. Values are those of the graph that was divided."""

    forward: IRGraph | None
    backward: IRGraph
    reads: list[int]
    saved: list[int]


def divide(
    graph: IRGraph,
    inputs: Sequence[int],
    outputs: Sequence[int],
    gradients: Sequence[int],
    known: Collection[int],
) -> Parts:
    """Divide ``graph`` between ``outputs`` and ``gradients``.

    The forward does what the outputs need, and nothing else; the backward does all the rest, and
    again what costs nothing: views, copies and constants of what it has.
    ``known`` are values that the backward has at no cost: inputs, outputs, outputs' gradients.
    """
    forward = ancestors(graph, outputs)
    saved: dict[int, None] = {}
    backward: set[int] = set()
    needed = [value_id for value_id in gradients if value_id not in known]
    producers = _producers(graph)
    while needed:
        value_id = needed.pop()
        node = producers[value_id]
        if node.id in forward and not _costs_nothing(node):
            saved[value_id] = None
        elif node.id not in backward:
            backward.add(node.id)
            needed += [read for read in node.inputs if read not in known]
    nodes = [node for node in graph.nodes if node.id in backward]
    made = {value_id for node in nodes for value_id in node.outputs}
    wanted = (*(v for node in nodes for v in node.inputs), *gradients)
    reads = list(dict.fromkeys(v for v in wanted if v not in made))
    kept = sorted(saved)
    return Parts(
        _part(graph, forward, inputs, [*outputs, *kept]) if kept else None,
        _part(graph, backward, reads, gradients),
        reads,
        kept,
    )


def ancestors(graph: IRGraph, value_ids: Iterable[int]) -> set[int]:
    """The ids of the nodes that some values depend on."""
    live, found = set(value_ids), set()
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.inputs)
            found.add(node.id)
    return found


def _producers(graph: IRGraph) -> dict[int, IRNode]:
    return {value_id: node for node in graph.nodes for value_id in node.outputs}


def _costs_nothing(node: IRNode) -> bool:
    """Whether a node only looks at its input anew, copies it, or makes a constant."""
    overload = resolve(node.op)
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return False
    views = any(item.alias_info is not None for item in schema_of(overload).returns)
    return views or operator_of(overload) in ("_unsafe_view", "clone") or not node.inputs


def _part(
    graph: IRGraph, chosen: Collection[int], inputs: Sequence[int], outputs: Sequence[int]
) -> IRGraph:
    """The chosen nodes as a graph of their own."""
    builder = Builder(graph.name)
    mapping = {v: builder.copy_value(graph, graph.values[v], role="input").id for v in inputs}
    for node in graph.nodes:
        if node.id in chosen:
            builder.copy_node(graph, node, mapping)
    return builder.finish([mapping[value_id] for value_id in outputs])
