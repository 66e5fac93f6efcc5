"""A graph's node as emitters see it: arguments by name, operands by place.

An emitter sees shapes, dtypes, strides, attributes and which results anyone reads, never ids; so
nodes that are alike in these share what was emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shardwright.ir import IRGraph, IRNode, resolve
from shardwright.ir.operators import join_call, signature
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.ir.values import SLOT, Emitted
from shardwright.kernels.row import ABSENT, KernelRow
from shardwright.torch_internals import OpOverload


class OperandPlace(int):
    """A tensor among a call's arguments: an operand by place."""


class NodeCall:
    """One node; ``arguments`` are its operator's by name, with `OperandPlace` for tensors."""

    def __init__(
        self,
        kinds: Mapping[str, KernelRow],
        graph: IRGraph,
        node: IRNode,
        live: Collection[int] | None = None,
    ) -> None:
        self.op = node.op
        self.overload: OpOverload = resolve(node.op)
        self.attrs = node.attrs
        self.absent = node.absent
        self.operands = [graph.values[k].meta for k in (*node.inputs, *node.outputs)]
        self.n_inputs = len(node.inputs)
        self._kinds = kinds
        self._live = [live is None or value_id in live for value_id in node.outputs]
        self._temps: list[TensorMeta] = []
        places = [OperandPlace(k) for k in range(self.n_inputs)]
        self.args, self.kwargs = join_call(self.overload, places, node.attrs, SLOT)
        names = [p.name for p in signature(self.overload).parameters if not p.keyword_only]
        self.arguments: dict[str, Any] = dict(zip(names, self.args, strict=True)) | self.kwargs

    def given(self, names: str) -> list[Any]:
        """The arguments of these names, which spaces divide."""
        return [self.arguments[name] for name in names.split()]

    @property
    def made(self) -> tuple[OperandPlace, ...]:
        """The places of the node's outputs."""
        end = len(self.operands) - len(self._temps)
        return tuple(OperandPlace(k) for k in range(self.n_inputs, end))

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

    def of(self, place: int) -> TensorMeta:
        """What is known of an operand."""
        return self.operands[place]

    def temp(self, shape: Sequence[int], dtype: str) -> OperandPlace:
        """A contiguous tensor between this node's calls; the next `emit` is to make it."""
        self._temps.append(TensorMeta(tuple(shape), dtype))
        self.operands.append(self._temps[-1])
        return OperandPlace(len(self.operands) - 1)

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
        row = self._kinds[kind]
        schema, blob = row.pack({**row.defaults, **attrs})
        made = tuple(self.results if outputs is None else outputs)
        first = len(self.operands) - len(self._temps)
        temps = tuple(self._temps[place - first] for place in made if place >= first)
        places = tuple(ABSENT if place is None else int(place) for place in inputs)
        return Emitted(row.id, schema, blob, places, tuple(map(int, made)), temps)


Emission = Sequence[Emitted] | Emitted | None
"""What an emitter gives: calls, or None where it leaves the node to others.

An emitter need not look at what its kind's own rule does (`KernelRow.makes`): calls that are not
legal are taken for None.
"""

Emitter = Callable[[NodeCall], Emission]


def emits(kind: str, inputs: str, attrs: str = "", **fixed: Any) -> Emitter:
    """An emitter of one call, on arguments by name; ``-`` is an operand that is absent."""

    def emit(call: NodeCall) -> Emission:
        places = [None if name == "-" else call.arguments[name] for name in inputs.split()]
        given = {name: call.arguments[name] for name in attrs.split()}
        return call.emit(kind, places, None, **given, **fixed)

    return emit


def is_tensor(*arguments: Any) -> bool:
    """Whether all of these arguments are tensors."""
    return all(isinstance(argument, OperandPlace) for argument in arguments)


def is_number(argument: Any) -> bool:
    """Whether an argument is a real number."""
    return isinstance(argument, (bool, int, float))
