"""How the gradient of one operator call is computed, taken from torch itself.

Comes in: a node's call, which of its inputs want gradients and which of its outputs have one. Goes
out: a `Vjp` (vector-Jacobian product): graphs of the operators that torch runs for it below
autograd (``mm``, ``native_layer_norm_backward``, …), divided into what the node does and what its
backward does. They are recorded once for all calls of the same kind, from fake tensors; of
operators that every process has, once a process, since that is most of what a build takes.

What the backward reads of the forward is as little as torch's own reads:

    the node's inputs and outputs     are there anyway
    views of what is there, copies    are done again in the backward, as are constants
    anything else that is read        is saved: `Vjp.forward` replaces the node, and gives it too

Where nothing has to be saved `Vjp.forward` is None: the node stays as it is (``linear``, ``gelu``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from shardwright.autodiff.divide import divide
from shardwright.autodiff.record import Kind, record
from shardwright.autodiff.scattered import Scattered
from shardwright.autodiff.simplify import simplify
from shardwright.errors import GraphError
from shardwright.ir import WITH_BACKWARD, Builder, IRGraph, IRNode, IRValue
from shardwright.ir.operators import is_built_in, join_call, resolve
from shardwright.torch_internals import FakeTensorMode


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


class Call(NamedTuple):
    """A call to differentiate, with all that its backward depends on.

    ``wants`` are the inputs that want a gradient and ``gets`` the outputs that have one, both by
    number and in order; ``gradients`` are the kinds of the latter's gradients, whose strides may be
    others than the outputs'.
    """

    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[Kind, ...]
    wants: tuple[int, ...]
    gets: tuple[int, ...]
    gradients: tuple[Kind, ...]

    @classmethod
    def of(
        cls,
        graph: IRGraph,
        node: IRNode,
        wants: Sequence[int],
        gradients: Mapping[int, IRValue],
    ) -> Call:
        """The call of a node; ``gradients`` are those of its outputs, by number of the output."""
        inputs = tuple(Kind.of(graph.values[value_id]) for value_id in node.inputs)
        gets = tuple(sorted(gradients))
        kinds = tuple(Kind.of(gradients[i]) for i in gets)
        return cls(node.op, node.attrs, inputs, tuple(wants), gets, kinds)


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

    def of(self, call: Call) -> Vjp:
        """The backward of a call.

        Raises GraphError where the operator has no derivative, or one that cannot be in a graph.
        """
        key = call._replace(attrs=repr(call.attrs))  # type: ignore[arg-type]
        if key not in self._known:
            self._known[key] = self._kept(call, key) if is_built_in(call.op) else self._record(call)
        return self._known[key]

    def _kept(self, call: Call, key: Call) -> Vjp:
        """The backward of a call from what this process keeps, or for it."""
        whole = (self._device, settings(), key)
        found = _kept.get(whole)
        if found is None:
            found = _kept[whole] = self._record(call)
            while len(_kept) > _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)
        return found

    def _record(self, call: Call) -> Vjp:
        count = len(call.inputs)

        device = "meta" if call.op in _BY_CELLS else self._device

        def pull(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
            return _pull(call, tensors[:count], tensors[count:], device)

        kinds = (*call.inputs, *call.gradients)
        try:
            recorded = record(pull, kinds, self._mode, device)
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


def _handing_on(call: Call) -> IRGraph:
    """The forward of a call whose outputs are its first inputs."""
    builder = Builder("forward")
    inputs = [builder.input("x", *kind[:2], strides=kind.strides) for kind in call.inputs]
    return builder.finish(inputs[: len(call.attrs["made"])])


def _let_views_copy(graph: IRGraph) -> None:
    """Write views so that they copy where what a kernel makes lies otherwise than was thought."""
    for node in graph.nodes:
        if node.op == "aten.view.default":
            node.op, node.attrs = "aten.reshape.default", {"shape": node.attrs["size"]}


def settings() -> tuple[object, ...]:
    """What, beside a call, torch chooses kernels by: above all those of attention."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _is_here(device_kind: str) -> bool:
    """Whether this process can make tensors on devices of a kind."""
    module = getattr(torch, device_kind, None)
    return bool(module is not None and module.is_available())


def _pull(
    call: Call, inputs: list[torch.Tensor], gradients: list[torch.Tensor], device: str
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


def _apply(call: Call, inputs: list[torch.Tensor], device: str) -> list[torch.Tensor]:
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
