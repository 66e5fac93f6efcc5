"""What a node's backward reads of its forward.

`SAVED` says it for operators whose backward reads less than all: which inputs and outputs, by
number. For any other these are all inputs and outputs of floating point. A view stands for what it
is a view of.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.ir import IRGraph, IRNode
from shardwright.ir.dtypes import torch_dtype
from shardwright.profiling.operations import FREE

Numbers = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of inputs, and of outputs."""
NOTHING: Numbers = ((), ())

SAVED: Mapping[str, Numbers] = {
    "aten.linear.default": ((0, 1), ()),
    "aten.addmm.default": ((1, 2), ()),
    "aten.baddbmm.default": ((1, 2), ()),
    "aten.matmul.default": ((0, 1), ()),
    "aten.mm.default": ((0, 1), ()),
    "aten.bmm.default": ((0, 1), ()),
    "aten.add.Tensor": NOTHING,
    "aten.sub.Tensor": NOTHING,
    "aten.embedding.default": ((1,), ()),
    "aten.gelu.default": ((0,), ()),
    "aten.silu.default": ((0,), ()),
    "aten.relu.default": ((), (0,)),
    "aten.tanh.default": ((), (0,)),
    "aten.sigmoid.default": ((), (0,)),
    "aten.softmax.int": ((), (0,)),
    "aten.log_softmax.int": ((), (0,)),
    "aten.layer_norm.default": ((0, 1), ()),
}


def saved_for_backward(graph: IRGraph, node: IRNode) -> tuple[int, ...]:
    """The ids of the values that a node's backward reads, each once; views are resolved."""
    if node.op in FREE:
        return ()
    if node.op in SAVED:
        inputs, outputs = SAVED[node.op]
        found = [node.inputs[i] for i in inputs] + [node.outputs[i] for i in outputs]
    else:
        found = [
            v
            for v in (*node.inputs, *node.outputs)
            if torch_dtype(graph.values[v].dtype).is_floating_point
        ]
    return tuple(dict.fromkeys(found))
