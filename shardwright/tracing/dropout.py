"""Dropout as a function of the element's place, in place of torch's random numbers.

A graph gets `ir.dropout`'s operator wherever it drops elements, and one more input ``rng``
(i64[1]), given by keyword, which counts steps and microbatches. Every other value is what it was,
strides included; the sites are numbered in the order of the nodes.

    dropout, native_dropout               elements
    feature_dropout                       whole channels, the first two dimensions
    alpha_dropout, feature_alpha_dropout  as SELU wants it: to a value that keeps mean and variance
    scaled_dot_product_attention          weights; written out
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import CaptureError
from shardwright.ir.builder import Builder
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.graph import IRGraph
from shardwright.ir.structure import Arguments, leaves, with_keyword
from shardwright.ir.tensor_meta import TensorMeta
from shardwright.ir.values import IRNode, IRValue
from shardwright.tracing.emitter import GraphEmitter

RNG = "rng"
"""The name of the input that counts."""


def philox_dropout(graph: IRGraph, seed: int) -> IRGraph:
    """The graph with its dropout drawn from ``seed`` (taken modulo 2**64) and the input ``rng``.

    The graph itself where it drops nothing. Raises CaptureError, with the line, where an operator
    draws inside and cannot be taken apart (recurrent layers), or where ``rng`` is taken.
    """
    if not any(map(_drops, graph.nodes)):
        return graph
    arguments = _with_rng(graph)
    builder = Builder(graph.name)
    emitter = GraphEmitter(builder)
    mapping: dict[int, int] = {}  # values here by the original's id
    given = iter(graph.inputs)
    for leaf in leaves(arguments):
        if leaf.name == RNG:
            rng = builder.input(RNG, (1,), "i64")
        else:
            value_id = next(given)
            mapping[value_id] = builder.copy_value(graph, graph.values[value_id]).id
    for value in graph.stored():
        mapping[value.id] = builder.copy_value(graph, value).id
    sites = _Sites(emitter, (seed + 2**63) % 2**64 - 2**63, rng)
    for node in graph.nodes:
        if not _drops(node):
            builder.copy_node(graph, node, mapping)
            continue
        emitter.scopes, emitter.source = node.scopes, node.source
        if node.op not in _RULES:
            raise emitter.refuse(
                f"{node.op} drops elements between its layers, where they cannot be numbered; "
                "use single layers, with nn.Dropout between them"
            )
        inputs = [builder.graph.values[mapping[value_id]] for value_id in node.inputs]
        made = _RULES[node.op](sites, node, inputs)
        for value_id, value in zip(node.outputs, made, strict=True):
            mapping[value_id] = _with_strides(emitter, value, graph.values[value_id].meta).id
    return builder.finish(
        [mapping[value_id] for value_id in graph.outputs],
        in_structure=arguments,
        out_structure=graph.out_structure,
        updates={mapping[old]: mapping[new] for old, new in graph.updates.items()},
    )


def _with_rng(graph: IRGraph) -> Arguments:
    """The structure of the graph's inputs with one more, by keyword."""
    assert graph.in_structure is not None
    names = {parameter.name for parameter in graph.in_structure.parameters}
    if RNG in names | {value.name for value in graph.values.values()}:
        raise CaptureError(
            f"{graph.name} has a value or an argument named {RNG!r}, which is the name of the "
            "input that dropout counts with; rename it"
        )
    return with_keyword(graph.in_structure, RNG)


def _drops(node: IRNode) -> bool:
    attrs = node.attrs
    if node.op in _RULES:
        return bool(attrs.get("p", attrs.get("dropout_p")) and attrs.get("train") is not False)
    return node.op.startswith(_RECURRENT) and bool(attrs["dropout"] and attrs["train"])


_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")


@dataclass(slots=True)
class _Sites:
    """Writes dropouts, each at a site of its own."""

    emitter: GraphEmitter
    seed: int
    rng: IRValue
    count: int = 0

    def dropped(self, x: IRValue, p: float) -> IRValue:
        """The dropout of a value."""
        site, self.count = self.count, self.count + 1
        whole = list(x.shape)
        return self.emitter.one(DROPOUT, x, p, self.seed, self.rng, site, [0] * len(whole), whole)

    def kept(self, x: IRValue, p: float, shape: Sequence[int]) -> IRValue:
        """The dropout of ones of ``shape``, in the dtype of ``x``."""
        return self.dropped(self.emitter.one("aten.new_ones.default", x, list(shape)), p)


def _with_strides(e: GraphEmitter, value: IRValue, wanted: TensorMeta) -> IRValue:
    """The value with its elements in another order in memory, where it has one."""
    strides = wanted.full_strides
    if value.meta.same_order(strides):
        return value
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    packed = e.one("aten.contiguous.default", e.one("aten.permute.default", value, order))
    return e.one("aten.permute.default", packed, [order.index(dim) for dim in range(len(order))])


# --- operators ------------------------------------------------------------------------------------

Inputs = Sequence[IRValue]


def _dropout(sites: _Sites, node: IRNode, inputs: Inputs) -> list[IRValue]:
    return [sites.dropped(inputs[0], node.attrs["p"])]


def _native_dropout(sites: _Sites, node: IRNode, inputs: Inputs) -> list[IRValue]:
    """The result, and which elements are kept."""
    e, x, p = sites.emitter, inputs[0], node.attrs["p"]
    kept = e.one("aten.ne.Scalar", sites.kept(x, p, x.shape), 0)
    some = e.one("aten.where.ScalarOther", kept, x, 0.0)
    return [e.one("aten.mul.Tensor", some, 1 / (1 - p) if p < 1 else 0.0), kept]


def _feature_dropout(sites: _Sites, node: IRNode, inputs: Inputs) -> list[IRValue]:
    kept = sites.kept(inputs[0], node.attrs["p"], _channels(inputs[0]))
    return [sites.emitter.one("aten.mul.Tensor", inputs[0], kept)]


def _channels(x: IRValue) -> list[int]:
    return [*x.shape[:2], *[1] * (len(x.shape) - 2)]


def _alpha_dropout(sites: _Sites, node: IRNode, inputs: Inputs) -> list[IRValue]:
    """Dropped elements become SELU's least value; then mean and variance are put right.

    "Self-Normalizing Neural Networks" (Klambauer et al., 2017).
    """
    e, x, p = sites.emitter, inputs[0], node.attrs["p"]
    if p == 1:
        return [e.one("aten.mul.Tensor", x, 0.0)]
    shape = _channels(x) if "feature" in node.op else x.shape
    kept = e.one("aten.ne.Scalar", sites.kept(x, p, shape), 0)
    some = e.one("aten.where.ScalarOther", kept, x, SELU_LEAST)
    scale = 1 / math.sqrt((SELU_LEAST**2 * p + 1) * (1 - p))
    scaled = e.one("aten.mul.Tensor", some, scale)
    return [e.one("aten.add.Tensor", scaled, -scale * SELU_LEAST * p)]


SELU_LEAST = -1.7580993408473766
"""What SELU tends to on the left."""


def _attention(sites: _Sites, node: IRNode, inputs: Inputs) -> list[IRValue]:
    p = node.attrs["dropout_p"]
    return [
        write_attention(
            sites.emitter, inputs, node.attrs, lambda weights: sites.dropped(weights, p)
        )
    ]


_RULES: dict[str, Callable[[_Sites, IRNode, Inputs], list[IRValue]]] = {
    "aten.dropout.default": _dropout,
    "aten.native_dropout.default": _native_dropout,
    "aten.feature_dropout.default": _feature_dropout,
    "aten.alpha_dropout.default": _alpha_dropout,
    "aten.feature_alpha_dropout.default": _alpha_dropout,
    "aten.scaled_dot_product_attention.default": _attention,
}
"""What each operator becomes: its outputs, in order."""


# --- attention ------------------------------------------------------------------------------------
#
# A row whose keys are all masked is zero, as torch has it.


def write_attention(
    e: GraphEmitter,
    inputs: Sequence[IRValue],
    attrs: dict[str, Any],
    dropped: Callable[[IRValue], IRValue],
) -> IRValue:
    """The nodes of one call; ``dropped`` writes the dropout of the weights that it is given."""
    query, key, value, *mask = inputs
    if attrs["enable_gqa"]:
        key, value = (_repeated(e, item, query.shape[-3]) for item in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if attrs["scale"] is None else attrs["scale"]
    scaled = e.one("aten.mul.Tensor", query, scale)
    scores = e.one("aten.matmul.default", scaled, e.one("aten.transpose.int", key, -2, -1))
    if attrs["is_causal"]:
        scores = _masked(e, scores, _later_keys(e, scores))
    softmax = "aten.softmax.int"
    if mask:
        scores = _with_mask(e, scores, mask[0])
        softmax = "aten._safe_softmax.default"
    return e.one("aten.matmul.default", dropped(e.one(softmax, scores, -1)), value)


def _repeated(e: GraphEmitter, value: IRValue, heads: int) -> IRValue:
    """Each head several times in a row, so that there are ``heads``."""
    times = heads // value.shape[-3]
    if times == 1:
        return value
    return e.one("aten.repeat_interleave.self_int", value, times, -3)


def _later_keys(e: GraphEmitter, scores: IRValue) -> IRValue:
    """Whether a key comes after its query."""
    every = e.one("aten.ones.default", list(scores.shape[-2:]), dtype=torch.bool)
    return e.one("aten.triu.default", every, 1)


def _with_mask(e: GraphEmitter, scores: IRValue, mask: IRValue) -> IRValue:
    """Bools say which keys count; numbers are added."""
    if mask.dtype == "bool":
        return _masked(e, scores, e.one("aten.logical_not.default", mask))
    return e.one("aten.add.Tensor", scores, mask)


def _masked(e: GraphEmitter, scores: IRValue, away: IRValue) -> IRValue:
    return e.one("aten.masked_fill.Scalar", scores, away, -math.inf)
