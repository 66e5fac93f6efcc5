"""Decomposition: every operator becomes what kinds of kernels exist for.

    linear, mm, addmm           shardwright::gemm, transposes of its operands as flags
    baddbmm                     bmm, products and a sum
    with_backward               what it was given
    stack                       cat of unsqueezed
    sum of another dtype        a cast and a sum
    what torch composes         torch's own decomposition (`Composites`)

What has no rule stays as it is, and so does a call on which a rule's result would be in memory in
another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from shardwright.autodiff.record import record, simplify
from shardwright.compiler.passes.rewriter import (
    Rewriter,
    Tensor,
    bound,
    call_attributes,
    same_layout,
)
from shardwright.ir import WITH_BACKWARD, IRGraph, IRNode, IRValue
from shardwright.ir.inference import Inference
from shardwright.ir.operators import flatten_results, is_marker, join_call, resolve
from shardwright.ir.tensor_meta import TensorMeta, dtype_name
from shardwright.ir.values import Input
from shardwright.kernels.operators import GEMM
from shardwright.torch_internals import FakeTensorMode, is_composite

Results = list[int | None]
FLOATS = ("f32", "f64", "f16", "bf16")
NO_CAST = {
    "layout": None,
    "device": None,
    "pin_memory": None,
    "non_blocking": False,
    "memory_format": None,
}
"""What a cast (``aten._to_copy.default``) says besides its dtype."""


def decompose(
    graph: IRGraph,
    *,
    composites: Composites | None = None,
    known: Inference | None = None,
) -> IRGraph:
    """The graph in operators that have kernels.

    ``composites`` and ``known`` remember what was recorded and inferred for the next graph.
    """
    decomposer = Decomposer(Rewriter(graph, known), composites or Composites())
    for node in graph.nodes:
        decomposer.node(node)
    return decomposer.rewriter.finish(prune=True)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """A call to decompose: inputs are ids of the result, ``outputs`` the values it is to make."""

    op: str
    inputs: Sequence[int]
    attrs: Mapping[str, Any]
    outputs: Sequence[IRValue | None]
    like: IRNode

    @property
    def output(self) -> IRValue:
        """The first thing that it makes."""
        assert self.outputs[0] is not None
        return self.outputs[0]


class Decomposer:
    """Takes one graph apart."""

    def __init__(self, rewriter: Rewriter, composites: Composites) -> None:
        self.rewriter = rewriter
        self._composites = composites
        self._flipped: dict[int, int] = {}
        """Values of two dimensions to those that they are the transposes of."""

    def node(self, node: IRNode) -> None:
        """Take apart a node of the source."""
        rewriter = self.rewriter
        outputs = [None if i is None else rewriter.source.values[i] for i in node.results]
        inputs = [rewriter.now(value_id) for value_id in node.inputs]
        made = self.lower(OperatorCall(node.op, inputs, node.attrs, outputs, node), composed=True)
        pairs = [
            (old, new)
            for old, new in zip(outputs, made, strict=True)
            if old is not None and new is not None
        ]
        if all(same_layout(old, rewriter.of(new)) for old, new in pairs):
            for old, new in pairs:
                rewriter.replace(old.id, new)
        else:
            self._emit(node.op, inputs, outputs, node.attrs, node)

    def lower(self, call: OperatorCall, *, composed: bool) -> Results:
        """Append what does the call's work; gives what it makes, by place."""
        rule = RULES.get(call.op)
        if rule is not None and (made := rule(self, call)) is not None:
            return made
        if composed and (made := self._apart(call)) is not None:
            return made
        return self._emit(call.op, call.inputs, call.outputs, call.attrs, call.like)

    def then(
        self, op: str, inputs: Sequence[int], attrs: Mapping[str, Any], call: OperatorCall
    ) -> int:
        """Append a call of one result on the way to a call's result; gives its id."""
        value = self._inferred(op, inputs, attrs, call)
        self._emit(op, inputs, [value], attrs, call.like)
        return value.id

    def ends(
        self, op: str, inputs: Sequence[int], attrs: Mapping[str, Any], call: OperatorCall
    ) -> Results:
        """Append the call whose result stands for a call's one result, under its name if it can."""
        value = self._inferred(op, inputs, attrs, call)
        if same_layout(value, call.output):
            value = call.output
        return self._emit(op, inputs, [value], attrs, call.like)

    def _inferred(
        self, op: str, inputs: Sequence[int], attrs: Mapping[str, Any], call: OperatorCall
    ) -> IRValue:
        """A fresh value as the operator makes it."""
        rewriter = self.rewriter
        (found,) = rewriter.inference.outputs(op, [rewriter.of(i) for i in inputs], attrs)
        assert found is not None
        dtype = dtype_name(found.dtype)
        name = call.output.name
        return rewriter.made.new_value(name, found.shape, dtype, strides=found.stride())

    def last(
        self, op: str, inputs: Sequence[int], attrs: Mapping[str, Any], call: OperatorCall
    ) -> Results:
        """Append the call that makes a call's one result."""
        return self._emit(op, inputs, [call.output], attrs, call.like)

    def matrix(self, value_id: int) -> tuple[int, bool]:
        """The matrix that a value is, or is the transpose of; and whether it is that."""
        found = self._flipped.get(value_id)
        return (value_id, False) if found is None else (found, True)

    def _emit(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Sequence[IRValue | None],
        attrs: Mapping[str, Any],
        like: IRNode,
    ) -> Results:
        self.rewriter.emit(op, inputs, outputs, attrs, like)
        if op in _TRANSPOSES and _flips(self.rewriter.of(inputs[0]), attrs) and outputs[0]:
            self._flipped[outputs[0].id] = inputs[0]
        return [None if value is None else value.id for value in outputs]

    def _apart(self, call: OperatorCall) -> Results | None:
        """Append what torch composes the operator of, None where it does not."""
        values = [self.rewriter.of(value_id) for value_id in call.inputs]
        template = self._composites.of(call.op, values, call.attrs)
        if template is None or len(template.results) != len(call.outputs):
            return None
        here = dict(zip(template.graph.inputs, call.inputs, strict=True))
        wanted = {
            made: value
            for made, value in zip(template.results, call.outputs, strict=True)
            if made is not None and value and same_layout(template.graph.values[made], value)
        }
        for node in template.graph.nodes:
            outputs = [
                None
                if i is None
                else wanted.get(i) or self.rewriter.fresh(template.graph.values[i])
                for i in node.results
            ]
            inputs = [here[i] for i in node.inputs]
            inner = OperatorCall(node.op, inputs, node.attrs, outputs, call.like)
            made = self.lower(inner, composed=False)
            here |= {
                old: new
                for old, new in zip(node.results, made, strict=True)
                if old is not None and new is not None
            }
        return [None if i is None else here[i] for i in template.results]


_TRANSPOSES = (
    "aten.t.default",
    "aten.transpose.int",
    "aten.permute.default",
    "aten.numpy_T.default",
    "aten.mT.default",
)


def _flips(value: IRValue, attrs: Mapping[str, Any]) -> bool:
    """Whether one of `_TRANSPOSES` turns the value, a matrix, over."""
    if len(value.shape) != 2:
        return False
    dims = attrs.get("dims") or [attrs.get("dim0", 1), attrs.get("dim1", 0)]
    return [dim % 2 for dim in dims] in ([1, 0], [0, 1]) and (
        "dims" not in attrs or dims[0] % 2 == 1
    )


# --- rules -----------------------------------------------------------------------------------


def _are_floats(decomposer: Decomposer, *values: Any) -> bool:
    """Whether these are tensors of one dtype of floats, or None."""
    found = [decomposer.rewriter.of(v) for v in values if v is not None]
    return len({v.dtype for v in found}) == 1 and found[0].dtype in FLOATS


def _gemm(
    decomposer: Decomposer,
    call: OperatorCall,
    a: tuple[int, bool],
    b: tuple[int, bool],
    *,
    bias: Any = None,
    residual: Any = None,
    alpha: float = 1.0,
) -> Results | None:
    """The call as a gemm, where its result is contiguous as a gemm's is."""
    if call.output.strides is not None or not _are_floats(decomposer, a[0], b[0], bias, residual):
        return None
    inputs, attrs = call_attributes(
        GEMM,
        {
            "a": Tensor(a[0]),
            "b": Tensor(b[0]),
            "bias": bias,
            "residual": residual,
            "transpose_a": a[1],
            "transpose_b": b[1],
            "activation": 0,
            "alpha": alpha,
        },
    )
    return decomposer.last(GEMM, inputs, attrs, call)


def _linear(decomposer: Decomposer, call: OperatorCall) -> Results | None:
    given = bound(call.op, call.inputs, call.attrs)
    x, w, bias = (given[name] for name in ("input", "weight", "bias"))
    if len(decomposer.rewriter.of(x).shape) < 2 or len(decomposer.rewriter.of(w).shape) != 2:
        return None
    matrix, flipped = decomposer.matrix(w)
    left = decomposer.matrix(x)
    return _gemm(decomposer, call, left, (matrix, not flipped), bias=bias)


def _mm(decomposer: Decomposer, call: OperatorCall) -> Results | None:
    a, b = call.inputs
    return _gemm(decomposer, call, decomposer.matrix(a), decomposer.matrix(b))


def _addmm(decomposer: Decomposer, call: OperatorCall) -> Results | None:
    given = bound(call.op, call.inputs, call.attrs)
    added, a, b = (given[name] for name in ("self", "mat1", "mat2"))
    if given["beta"] != 1 or isinstance(given["alpha"], Tensor):
        return None
    shape = decomposer.rewriter.of(added).shape
    if shape not in (call.output.shape, call.output.shape[-1:]):
        return None
    role = "bias" if len(shape) == 1 else "residual"
    operands = decomposer.matrix(a), decomposer.matrix(b)
    alpha = float(given["alpha"])
    return _gemm(decomposer, call, *operands, alpha=alpha, **{role: added})


def _baddbmm(decomposer: Decomposer, call: OperatorCall) -> Results | None:
    given = bound(call.op, call.inputs, call.attrs)
    if isinstance(given["alpha"], Tensor) or isinstance(given["beta"], Tensor):
        return None
    made = decomposer.then("aten.bmm.default", [given["batch1"], given["batch2"]], {}, call)
    if given["alpha"] != 1:
        made = decomposer.then("aten.mul.Tensor", [made], {"other": given["alpha"]}, call)
    added = given["self"]
    if given["beta"] == 0:
        return [made]
    if given["beta"] != 1:
        added = decomposer.then("aten.mul.Tensor", [added], {"other": given["beta"]}, call)
    return decomposer.ends("aten.add.Tensor", [made, added], {"alpha": 1}, call)


def _stack(decomposer: Decomposer, call: OperatorCall) -> Results | None:
    dim = call.attrs["dim"] % len(call.output.shape)
    parts = [
        decomposer.then("aten.unsqueeze.default", [value_id], {"dim": dim}, call)
        for value_id in call.inputs
    ]
    listed = [Input(i) for i in range(len(parts))]
    return decomposer.ends("aten.cat.default", parts, {"tensors": listed, "dim": dim}, call)


def _sum(decomposer: Decomposer, call: OperatorCall) -> Results | None:
    """A sum of another dtype than its input's: the cast can then be part of what is before it."""
    (x,) = call.inputs
    dtype = call.attrs["dtype"]
    if dtype is None or dtype_name(dtype) == decomposer.rewriter.of(x).dtype:
        return None
    cast = decomposer.then("aten._to_copy.default", [x], {"dtype": dtype, **NO_CAST}, call)
    return decomposer.ends(call.op, [cast], {**call.attrs, "dtype": None}, call)


Rule = Callable[[Decomposer, OperatorCall], Results | None]


def _with_backward(decomposer: Decomposer, call: OperatorCall) -> Results:
    """What it was given first: nothing is differentiated any more."""
    return [call.inputs[item.index] for item in call.attrs["made"]]


RULES: Mapping[str, Rule] = {
    "aten.linear.default": _linear,
    "aten.mm.default": _mm,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.stack.default": _stack,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    WITH_BACKWARD: _with_backward,
}
"""By the operator's full name; a rule that gives None leaves the call as it is."""


# --- what torch composes --------------------------------------------------------------------------


_CHOOSING = ("aten.scaled_dot_product_attention.default",)
"""Operators that are no kernels, but choose one by device and operands, and prepare its mask.

What they choose on a GPU only the machine that runs it knows: there they stay one call.
"""

LARGEST = 64
"""Nodes: an operator that comes apart into more (an LSTM, step by step) stays one call."""


class Template(NamedTuple):
    """Nodes whose inputs are the call's, and the values that are its results."""

    graph: IRGraph
    results: list[int | None]


class Composites:
    """Recorded templates, each once; ``device_kind`` is whose kernels are asked for.

    Those of another kind than the CPU are asked of torch's ``meta`` device: what a graph comes
    apart into depends on the kind, and not on the machine where that is done.
    """

    def __init__(self, device_kind: str = "cpu") -> None:
        self._device = device_kind if device_kind == "cpu" else "meta"
        self._mode = FakeTensorMode()
        self._known: dict[object, Template | None] = {}

    def of(self, op: str, inputs: Sequence[IRValue], attrs: Mapping[str, Any]) -> Template | None:
        """What a call comes apart into."""
        if not is_composed(op) or attrs.get("dropout_p"):
            return None
        if op in _CHOOSING and self._device != "cpu":
            return None
        kinds = tuple(value.meta for value in inputs)
        key = (op, kinds, repr(attrs))
        if key not in self._known:
            self._known[key] = self._record(op, kinds, dict(attrs))
        return self._known[key]

    def _record(
        self, op: str, kinds: Sequence[TensorMeta], attrs: dict[str, Any]
    ) -> Template | None:
        overload = resolve(op)

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
            args, kwargs = join_call(overload, tensors, attrs, torch.device(self._device))
            return flatten_results(overload(*args, **kwargs))

        try:
            with torch.no_grad():
                recorded = record(run, kinds, self._mode, self._device)
        except Exception:  # whatever the reason is that torch cannot trace it: it stays one call
            return None
        graph = recorded.builder.graph
        results = simplify(graph, recorded.results)
        unchanged = any(node.op == op for node in graph.nodes)
        return None if unchanged or len(graph.nodes) > LARGEST else Template(graph, results)


@cache
def is_composed(op: str) -> bool:
    """Whether torch runs the operator as others, whatever the device, and draws nothing."""
    if is_marker(op) or op in _CHOOSING:
        return op in _CHOOSING
    overload = resolve(op)
    return is_composite(overload) and torch.Tag.nondeterministic_seeded not in overload.tags
