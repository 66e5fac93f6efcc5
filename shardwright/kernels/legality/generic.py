"""The rule of the generic kind: its operator runs on tensors without contents."""

from __future__ import annotations

import torch

from shardwright.errors import ExecError, GraphError
from shardwright.ir import IRValue, resolve
from shardwright.ir.inference import Inference
from shardwright.ir.operators import check_written, split_call
from shardwright.ir.tensor_meta import TensorMeta, dtype_name
from shardwright.ir.values import Input
from shardwright.kernels.families.generic import call_arguments
from shardwright.kernels.legality.call import Call, Made, Makes, Operand, Table, need
from shardwright.ops.in_files import REFUSED, is_allowed
from shardwright.ops.trusting import check_shapes
from shardwright.torch_internals import schema_of


def _generic(call: Call) -> Makes:
    op = call.attrs["op"]
    overload = resolve(op)
    schema = schema_of(overload)
    if schema.is_mutable or any(argument.name == "filename" for argument in schema.arguments):
        raise ExecError(f"{op} writes to its arguments or opens a file; it cannot stand in a file")
    if not is_allowed(op):
        raise ExecError(REFUSED.format(op))
    args, kwargs = call_arguments(call.attrs)
    try:
        check_written(overload, args, kwargs, lambda item: isinstance(item, Input))
    except GraphError as error:
        raise ExecError(f"{op} {error}") from None
    tensors, attrs = split_call(
        overload, args, kwargs, is_tensor=lambda item: isinstance(item, Input)
    )
    inputs = [_value(call, tensor.index) for tensor in tensors]
    inference = Inference()
    check_shapes(op, inputs, attrs, inference)
    made = inference.outputs(op, inputs, attrs)
    need(
        len(made) == len(call.outputs),
        f"{op} has {len(call.outputs)} outputs",
        f"{len(made)}, as many as it returns",
    )
    return [[_made(tensor)] if tensor is not None else [] for tensor in made]


def _value(call: Call, index: int) -> IRValue:
    """The operand that an argument is."""
    found: Operand | None = call.inputs[index] if index < len(call.inputs) else None
    if found is None:
        raise ExecError(
            f"{call.attrs['op']} reads operand {index}; expected one of the {len(call.inputs)} "
            "that the call has"
        )
    return IRValue(index, f"x{index}", TensorMeta(found.shape, found.dtype, found.strides))


def _made(tensor: torch.Tensor) -> Made:
    return Made(tuple(tensor.shape), dtype_name(tensor.dtype))


TABLE: Table = {"generic": _generic}
