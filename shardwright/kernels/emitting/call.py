"""A node as emitters see it: arguments by name, operands by place.

Comes in: a graph and a node. Goes out, by `NodeCall.emit`: `Emitted` calls. What always holds: an
emitter sees shapes, dtypes, strides, attributes and which results anyone reads, never ids; so nodes
that are alike in these share what was emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from shardwright.ir import IRGraph, IRNode, resolve
from shardwright.ir.operators import join_call, signature
from shardwright.ir.tensor_meta import TensorMeta, contiguous_strides, torch_dtype
from shardwright.ir.values import SLOT, Emitted
from shardwright.kernels.kinds import BY_NAME
from shardwright.kernels.lowered import ABSENT
from shardwright.torch_internals import OpOverload


class Place(int):
    """A tensor among a call's arguments: an operand by place."""


class Operand(NamedTuple):
    """What an emitter knows of a tensor; strides in elements."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        """Whether it holds real floating-point numbers."""
        return torch_dtype(self.dtype).is_floating_point


class NodeCall:
    """One node; ``arguments`` are its operator's by name, with `Place` for tensors."""

    def __init__(self, graph: IRGraph, node: IRNode, live: Collection[int] | None = None) -> None:
        self.op = node.op
        self.overload: OpOverload = resolve(node.op)
        self.attrs = node.attrs
        self.absent = node.absent
        ids = (*node.inputs, *node.outputs)
        self.operands = [_operand(graph, value_id) for value_id in ids]
        self.n_inputs = len(node.inputs)
        self._live = [live is None or value_id in live for value_id in node.outputs]
        self._temps: list[TensorMeta] = []
        self.args, self.kwargs = join_call(
            self.overload, [Place(k) for k in range(self.n_inputs)], node.attrs, SLOT
        )
        names = [p.name for p in signature(self.overload).parameters if not p.keyword_only]
        self.arguments: dict[str, Any] = dict(zip(names, self.args, strict=True)) | self.kwargs

    @property
    def made(self) -> tuple[Place, ...]:
        """The places of the node's outputs."""
        return tuple(Place(k) for k in range(self.n_inputs, len(self.operands) - len(self._temps)))

    @property
    def results(self) -> list[int]:
        """The outputs as the operator returns them, `ABSENT` where it returns no tensor."""
        left = iter(self.made)
        count = len(self.made) + len(self.absent)
        return [ABSENT if k in self.absent else next(left) for k in range(count)]

    @property
    def wanted(self) -> list[int]:
        """As `results`, `ABSENT` also where nobody reads the output."""
        return [
            place if place != ABSENT and self._live[place - self.n_inputs] else ABSENT
            for place in self.results
        ]

    def of(self, place: int) -> Operand:
        """What is known of an operand."""
        return self.operands[place]

    def temp(self, shape: Sequence[int], dtype: str) -> Place:
        """A contiguous tensor between this node's calls; the next `emit` is to make it."""
        self._temps.append(TensorMeta(tuple(shape), dtype))
        self.operands.append(Operand(tuple(shape), dtype, contiguous_strides(shape)))
        return Place(len(self.operands) - 1)

    def emit(
        self,
        kind: str,
        inputs: Sequence[int | None],
        outputs: Sequence[int] | None = None,
        **attrs: Any,
    ) -> Emitted:
        """A call of a kind; attributes that are left out have their defaults.

        ``outputs`` are the node's results by default; None among the inputs is absent.
        """
        row = BY_NAME[kind]
        schema, blob = row.pack({**row.defaults, **attrs})
        made = tuple(self.results if outputs is None else outputs)
        first = len(self.operands) - len(self._temps)
        temps = tuple(self._temps[place - first] for place in made if place >= first)
        places = tuple(ABSENT if place is None else int(place) for place in inputs)
        return Emitted(row.id, schema, blob, places, tuple(map(int, made)), temps)


Emission = Sequence[Emitted] | None
"""What an emitter gives: the calls, or None where it leaves the node to others."""

Emitter = Callable[[NodeCall], Emission]
Table = Mapping[str, Emitter]
"""Emitters by the operator's full name."""


def _operand(graph: IRGraph, value_id: int) -> Operand:
    value = graph.values[value_id]
    return Operand(value.shape, value.dtype, value.strides or contiguous_strides(value.shape))


def is_tensor(*arguments: Any) -> bool:
    """Whether all of these arguments are tensors."""
    return all(isinstance(argument, Place) for argument in arguments)


def is_number(argument: Any) -> bool:
    """Whether an argument is a real number."""
    return isinstance(argument, (bool, int, float))
