"""The generic kind: any operator of torch, by its name.

In a file, an operator is legal that the catalog allows, which runs on tensors without contents.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from shardwright.errors import ExecError, GraphError
from shardwright.ir import IRValue, resolve
from shardwright.ir.inference import Inference
from shardwright.ir.operators import check_written, split_call, substitute
from shardwright.ir.tensor_meta import TensorMeta, dtype_name
from shardwright.ir.trusting import check_shapes
from shardwright.ir.values import Emitted, Input, from_json, to_json
from shardwright.kernels.attributes import attributes
from shardwright.kernels.row import KernelCall, KernelRow, Makes, NodeCall, OperandPlace, need
from shardwright.kernels.torch_kernels import Attrs, Closure, Tensors, bind_operator, present
from shardwright.ops.catalog import REFUSED, is_allowed
from shardwright.torch_internals import schema_of

# --- what calls make -----------------------------------------------------------------------------


def _makes(call: KernelCall) -> Makes:
    op = call.attrs["op"]
    overload = resolve(op)
    schema = schema_of(overload)
    if schema.is_mutable or any(argument.name == "filename" for argument in schema.arguments):
        raise ExecError(f"{op} writes to its arguments or opens a file; it cannot stand in a file")
    if not is_allowed(op):
        raise ExecError(REFUSED.format(op))
    args, kwargs = call_arguments(call.attrs)
    try:
        check_written(overload, args, kwargs, _is_input)
    except GraphError as error:
        raise ExecError(f"{op} {error}") from None
    tensors, attrs = split_call(overload, args, kwargs, is_tensor=_is_input)
    inputs = [_value(call, tensor.index) for tensor in tensors]
    inference = Inference()
    check_shapes(op, inputs, attrs, inference)
    made = inference.outputs(op, inputs, attrs)
    need(
        len(made) == len(call.outputs),
        f"{op} has {len(call.outputs)} outputs",
        f"{len(made)}, as many as it returns",
    )
    return [[] if t is None else [TensorMeta(tuple(t.shape), dtype_name(t.dtype))] for t in made]


def _is_input(item: object) -> bool:
    return isinstance(item, Input)


def _value(call: KernelCall, index: int) -> IRValue:
    """The operand that an argument is."""
    found = call.inputs[index] if index < len(call.inputs) else None
    if found is None:
        raise ExecError(
            f"{call.attrs['op']} reads operand {index}; expected one of the {len(call.inputs)} "
            "that the call has"
        )
    return IRValue(index, f"x{index}", TensorMeta(found.shape, found.dtype, found.strides))


# --- from operators ------------------------------------------------------------------------------


def emit_generic(call: NodeCall) -> Emitted:
    """The operator by its name, with its arguments as a file's node has them."""
    text = {
        "args": [to_json(_with_inputs(item)) for item in call.args],
        "kwargs": {key: to_json(_with_inputs(item)) for key, item in call.kwargs.items()},
    }
    written = json.dumps(text, separators=(",", ":"), allow_nan=False)
    return call.emit("generic", range(call.n_inputs), op=call.op, call=written)


def _with_inputs(argument: Any) -> Any:
    if isinstance(argument, OperandPlace):
        return Input(int(argument))
    if isinstance(argument, list):
        return [_with_inputs(item) for item in argument]
    return argument


# --- torch's kernel ------------------------------------------------------------------------------


def _torch(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
    given, named = call_arguments(attrs)
    device = next((tensor.device for tensor in present((*ins, *outs))), torch.device("cpu"))
    args = [substitute(item, ins, device) for item in given]
    kwargs = {key: substitute(item, ins, device) for key, item in named.items()}
    return bind_operator(resolve(attrs["op"]), args, kwargs, outs)


def call_arguments(attrs: Attrs) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of a generic call, `Input` for tensors. Raises ExecError."""
    try:
        text = json.loads(attrs["call"])
        kwargs = {key: from_json(item) for key, item in text["kwargs"].items()}
        return [from_json(item) for item in text["args"]], kwargs
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, GraphError) as error:
        raise ExecError(f"the arguments of {attrs['op']} cannot be read: {error!r}") from None


ROWS = (
    # Args as a file's node has them. It may draw random numbers, so calls keep their order.
    KernelRow(
        0,
        "generic",
        "x… → y…",
        _torch,
        _makes,
        attrs=attributes(op="s", call="s"),
        constrains=("ordered",),
    ),
)
