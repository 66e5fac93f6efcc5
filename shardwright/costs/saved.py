"""What a node's backward reads of its forward.

`READS` says it for each operator: for each of its inputs, what the gradient of that input reads, by
number, inputs as they are, outputs with ``=``, and with ``~`` what is read only if it is of
floating point. For an operator that does not stand there it is all that is of floating point.
`BESIDE` has what a forward keeps that is none of its inputs and outputs, such as the means of a
norm.

What always holds: a value stands for what it is a view of; what is stored may be among what is read
(parameters are there anyway). The numbers are torch's own derivatives', on CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from shardwright.costs.operations import FREE
from shardwright.costs.views import moves_nothing
from shardwright.ir import IRGraph, IRNode, IRValue
from shardwright.ir.dropout import DROPOUT
from shardwright.ir.dtypes import itemsize, torch_dtype

Reads = tuple[str, ...]
"""What each input's gradient reads; the last entry stands for all inputs that follow."""

EACH_OF_ITS_OWN = frozenset(("aten.broadcast_tensors.default",))
"""Each output is a view of the input at its place."""

NOTHING: Reads = ("",)
FACTORS: Reads = ("1", "0")
INPUT: Reads = ("0",)
OUTPUT: Reads = ("=0",)
BOTH: Reads = ("0 1",)
ATTENTION: Reads = ("0 1 2 3~ =0",)

_ROWS: tuple[tuple[Reads, str], ...] = (
    (
        NOTHING,
        "add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Scalar div.Scalar neg.default "
        "clone.default contiguous.default dropout.default to.dtype to.device type_as.default "
        "_to_copy.default lerp.Scalar cat.default stack.default constant_pad_nd.default "
        "repeat.default repeat_interleave.self_int flip.default roll.default tril.default "
        "triu.default sum.default sum.dim_IntList mean.default mean.dim cumsum.default "
        "pixel_shuffle.default movedim.int numpy_T.default narrow.default expand_as.default "
        "select_scatter.default slice_scatter.default upsample_nearest2d.vec "
        "upsample_bilinear2d.vec upsample_bicubic2d.vec im2col.default fill.Scalar "
        "broadcast_tensors.default l1_loss.default zeros_like.default",
    ),
    (
        FACTORS,
        "mul.Tensor mm.default bmm.default mv.default dot.default outer.default matmul.default",
    ),
    (("1", "0", ""), "linear.default"),
    (("1 2", "0 2", "0 1"), "einsum.default"),
    (("", "2", "1"), "addmm.default baddbmm.default addcmul.default"),
    (("1", "0 1"), "div.Tensor"),
    (("", "0", "0"), "where.self where.ScalarOther"),
    (("1", "", "1"), "masked_fill.Scalar masked_fill.Tensor scatter.src scatter.value"),
    (("1", ""), "embedding.default gather.default index_select.default"),
    (("1 2 3 4", ""), "index.Tensor"),
    (
        INPUT,
        "pow.Tensor_Scalar abs.default sin.default cos.default erf.default silu.default "
        "square.default mish.default hardswish.default hardtanh.default log.default log1p.default "
        "log2.default gelu.default leaky_relu.default elu.default softplus.default glu.default "
        "clamp.default clamp_min.default nan_to_num.default var.correction prod.dim_int "
        "max_pool1d.default max_pool2d.default avg_pool1d.default avg_pool2d.default",
    ),
    (
        OUTPUT,
        "pow.Scalar exp.default tanh.default sigmoid.default relu.default expm1.default "
        "sqrt.default rsqrt.default reciprocal.default softmax.int log_softmax.int "
        "_softmax.default _log_softmax.default",
    ),
    (("=1",), "max.dim min.dim median.dim topk.default sort.default sort.stable"),
    (("0 =0",), "logsumexp.default amax.default amin.default linalg_vector_norm.default"),
    (
        BOTH,
        "maximum.default minimum.default mse_loss.default smooth_l1_loss.default "
        "huber_loss.default conv1d.default conv1d.padding conv2d.default conv2d.padding "
        "conv3d.default conv3d.padding convolution.default conv_transpose1d.default "
        "conv_transpose2d.input conv_transpose3d.input prelu.default",
    ),
    (("0 1 2",), "layer_norm.default"),
    (("0 1 3 4",), "batch_norm.default"),
    (("0 1 =1 =2", "0 =1 =2", ""), "_native_batch_norm_legit_functional.default"),
    (("0 1",), "group_norm.default"),
    (("0 1", ""), "rms_norm.default"),
    (("1", ""), "cross_entropy_loss.default"),
    (ATTENTION, "scaled_dot_product_attention.default"),
)
READS: Mapping[str, Reads] = {
    f"aten.{name}": reads for reads, names in _ROWS for name in names.split()
} | {DROPOUT: NOTHING}

IN_ONE_PASS = frozenset(
    (
        "aten.layer_norm.default",
        "aten.rms_norm.default",
        "aten.group_norm.default",
        "aten.batch_norm.default",
        "aten._native_batch_norm_legit_functional.default",
    )
)
"""All their gradients come out of one pass over the same tensors."""

Measure = Callable[[IRNode, Sequence[IRValue], Sequence[IRValue]], int]
"""Bytes, from a node, its inputs and its outputs."""


def saved_for_backward(
    graph: IRGraph,
    node: IRNode,
    needing: Collection[int] | None = None,
    bases: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """The ids of the values that a node's backward reads, each once; views are resolved.

    ``needing`` are the values that want gradients, every one of floating point by default;
    ``bases`` are those of `view_bases`, to be given where more than a few nodes are asked for.
    """
    if node.op in FREE:
        return ()
    bases = view_bases(graph) if bases is None else bases
    read = (v for i in _wanting(graph, node, needing) for v in _read(graph, node, i))
    return tuple(dict.fromkeys(bases.get(value_id, value_id) for value_id in read))


def saved_for_stored(
    graph: IRGraph, node: IRNode, trained: Collection[int], bases: Mapping[int, int]
) -> tuple[int, ...] | None:
    """What the gradients of a node's parameters read, where they are made apart from others.

    None where there are none, or where they come out of one pass with others, as those of norms do.
    """
    wanting = [i for i, v in enumerate(node.inputs) if bases.get(v, v) in trained]
    if not wanting or node.op in FREE or node.op in IN_ONE_PASS:
        return None
    return tuple(dict.fromkeys(v for i in wanting for v in _read(graph, node, i)))


def saved_beside(graph: IRGraph, node: IRNode, needing: Collection[int] | None = None) -> int:
    """The bytes that a node's backward reads of what are none of its inputs and outputs."""
    if node.op not in BESIDE or not _wanting(graph, node, needing):
        return 0
    inputs = [graph.values[value_id] for value_id in node.inputs]
    return BESIDE[node.op](node, inputs, [graph.values[value_id] for value_id in node.outputs])


def view_bases(graph: IRGraph) -> dict[int, int]:
    """For each view, what it is a view of in the end."""
    bases: dict[int, int] = {}
    for node in graph.nodes:
        if node.op in EACH_OF_ITS_OWN:
            pairs = zip(node.outputs, node.inputs, strict=True)
            bases |= {made: bases.get(seen, seen) for made, seen in pairs}
        elif node.op in FREE and moves_nothing(graph, node):
            base = bases.get(node.inputs[0], node.inputs[0])
            bases |= dict.fromkeys(node.outputs, base)
    return bases


def _wanting(graph: IRGraph, node: IRNode, needing: Collection[int] | None) -> list[int]:
    """The numbers of the inputs that want a gradient."""
    return [
        i
        for i, value_id in enumerate(node.inputs)
        if (_is_real(graph, value_id) if needing is None else value_id in needing)
    ]


def _read(graph: IRGraph, node: IRNode, number: int) -> Iterator[int]:
    """The values that the gradient of an input reads."""
    if node.op not in READS:
        yield from (v for v in (*node.inputs, *node.outputs) if _is_real(graph, v))
        return
    reads = READS[node.op]
    for name in reads[min(number, len(reads) - 1)].split():
        values = node.outputs if name.startswith("=") else node.inputs
        index = int(name.strip("=~"))
        found = values[index : index + 1]  # optional inputs may be missing
        yield from (v for v in found if not name.endswith("~") or _is_real(graph, v))


def _is_real(graph: IRGraph, value_id: int) -> bool:
    return torch_dtype(graph.values[value_id].dtype).is_floating_point


# --- what stands beside -----------------------------------------------------------------------


def _statistic(value: IRValue) -> int:
    """Bytes of a mean or the like of a value's elements."""
    return max(itemsize(value.dtype), 4)


def _layer_norm(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    row: int = math.prod(node.attrs["normalized_shape"])
    rows = inputs[0].numel // max(row, 1)
    return 2 * rows * _statistic(inputs[0])


def _rms_norm(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    """One number a row, and for the gradient of the weight all that it is multiplied by."""
    return _layer_norm(node, inputs, outputs) // 2 + inputs[0].nbytes * (len(inputs) > 1)


def _group_norm(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    groups: int = node.attrs["num_groups"]
    return 2 * inputs[0].shape[0] * groups * _statistic(inputs[0])


def _batch_norm(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    return 2 * inputs[0].shape[1] * _statistic(inputs[0]) if node.attrs["training"] else 0


def _attention(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    """The logarithm of each row's sum; a mask of truth values as numbers."""
    masks = sum(value.numel for value in inputs[3:] if value.dtype == "bool")
    rows = outputs[0].numel // max(outputs[0].shape[-1], 1)
    return rows * _statistic(inputs[0]) + masks * itemsize(inputs[0].dtype)


def _cross_entropy(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    """The logarithms of all probabilities, and the sum of the weights."""
    return inputs[0].nbytes + itemsize(inputs[0].dtype)


def _difference(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    """How far apart its inputs are."""
    return max(value.nbytes for value in inputs)


def _places(node: IRNode, inputs: Sequence[IRValue], outputs: Sequence[IRValue]) -> int:
    """Where each largest element was."""
    return 8 * outputs[0].numel


BESIDE: Mapping[str, Measure] = {
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.group_norm.default": _group_norm,
    "aten.batch_norm.default": _batch_norm,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.cross_entropy_loss.default": _cross_entropy,
    "aten.l1_loss.default": _difference,
    "aten.max_pool1d.default": _places,
    "aten.max_pool2d.default": _places,
}
"""Bytes that an operator's forward keeps beside its inputs and outputs."""
