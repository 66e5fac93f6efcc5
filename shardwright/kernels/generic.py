"""The generic kind: any operator of torch, by its name.

In a file, an operator is legal that the catalog allows, which runs on tensors without contents.

An operator whose overload with ``out=`` is its own kernel writes straight to the outputs. Many such
overloads are generated wrappers that compute functionally and copy, some resize what they are
given, and some write to strided outputs as if they were contiguous; these, and operators without
one, are called as they are, and their results copied.
"""

from __future__ import annotations

import json
import warnings
from functools import cache
from typing import Any

import torch

from shardwright.errors import ExecError, GraphError
from shardwright.ir import IRValue, resolve
from shardwright.ir.inference import Inference
from shardwright.ir.operators import check_written, flatten_results, split_call, substitute
from shardwright.ir.overloads import callable_of
from shardwright.ir.tensor_meta import TensorMeta, dtype_name
from shardwright.ir.values import Emitted, Input, from_json, to_json
from shardwright.kernels.node_call import NodeCall, OperandPlace
from shardwright.kernels.row import (
    Attrs,
    Closure,
    KernelCall,
    KernelRow,
    Makes,
    Tensors,
    attributes,
    need,
    present,
)
from shardwright.ops.catalog import REFUSED, is_allowed
from shardwright.ops.trusting import check_shapes
from shardwright.torch_internals import OpOverload, operator_of, schema_of

_OF_IMAGES = {
    "avg_pool2d",
    "max_pool2d_with_indices",
    "upsample_nearest2d",
    "upsample_bilinear2d",
}
"""Operators whose ``out=`` knows channels last; other strides it takes for contiguous ones."""

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
    overload, (given, named) = resolve(attrs["op"]), call_arguments(attrs)
    device = next((tensor.device for tensor in present((*ins, *outs))), torch.device("cpu"))
    args = [substitute(item, ins, device) for item in given]
    kwargs = {key: substitute(item, ins, device) for key, item in named.items()}
    function, writer = callable_of(overload), out_overload(overload)
    if (
        function is not overload  # its arguments are looked at first
        or writer is None
        or None in outs
        or len(outs) != len(writer[1])
        or not _fit(overload, outs)
    ):
        return lambda: _store_flat(function(*args, **kwargs), outs)
    form, names = writer
    written = dict(zip(names, outs, strict=True))
    keeps: bool | None = None

    def run() -> None:
        """By ``out=``, unless a first run, on memory of its own, resizes what it is given.

        A loss does so that is reduced in the end: it would write over what lies behind its result.
        """
        nonlocal keeps
        if keeps:
            form(*args, **kwargs, **written)
            return
        if keeps is None:
            trial = {
                name: torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=device)
                for name, out in zip(names, present(outs), strict=True)
            }
            before = [*map(_layout, trial.values())]
            with warnings.catch_warnings():  # newer torches say in Python that they resize
                warnings.simplefilter("ignore")
                form(*args, **kwargs, **trial)
            keeps = before == [*map(_layout, trial.values())]
            if keeps:
                return _store_flat([*trial.values()], outs)
        _store_flat(function(*args, **kwargs), outs)

    return run


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies, and how much memory is behind it."""
    memory = tensor.untyped_storage()
    return memory.data_ptr(), memory.nbytes(), tensor.shape, tensor.stride()


def _fit(overload: OpOverload, outs: Tensors) -> bool:
    """Whether the overload with ``out=`` honours the strides of these outputs."""
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return False  # which would draw twice at its first run
    if torch.Tag.pointwise in overload.tags:
        return True
    images = operator_of(overload) in _OF_IMAGES
    return all(out.is_contiguous() or (images and _is_last(out)) for out in present(outs))


def _is_last(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies channels last."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def call_arguments(attrs: Attrs) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of a generic call, `Input` for tensors. Raises ExecError."""
    try:
        text = json.loads(attrs["call"])
        kwargs = {key: from_json(item) for key, item in text["kwargs"].items()}
        return [from_json(item) for item in text["args"]], kwargs
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, GraphError) as error:
        raise ExecError(f"the arguments of {attrs['op']} cannot be read: {error!r}") from None


def _store_flat(made: Any, outs: Tensors) -> None:
    """Copies results, of which some may be no tensors, to the outputs."""
    for tensor, out in zip(flatten_results(made), outs, strict=True):
        if out is None:
            continue
        if tensor.shape != out.shape:
            raise ExecError(
                f"an operator made {list(tensor.shape)} where its graph says {list(out.shape)}; "
                "its values are not as its operands ask for. Lower the pipeline again, or report it"
            )
        out.copy_(tensor)


@cache
def out_overload(overload: OpOverload) -> tuple[OpOverload, tuple[str, ...]] | None:
    """The overload that computes into given outputs, and their names; None where torch has none.

    Wrappers that torch generated around the functional form do not count.
    """
    ours = [(a.name, str(a.type)) for a in schema_of(overload).arguments]
    packet = getattr(getattr(torch.ops, overload.namespace), operator_of(overload))
    if any("List" in str(item.type) for item in schema_of(overload).returns):
        return None
    for other in packet.overloads():
        form = getattr(packet, other)
        if torch.Tag.generated in form.tags:
            continue
        written = [a for a in schema_of(form).arguments if a.is_out]
        theirs = [(a.name, str(a.type)) for a in schema_of(form).arguments if not a.is_out]
        if written and theirs == ours and len(written) == len(schema_of(overload).returns):
            return form, tuple(a.name for a in written)
    return None


ROWS = (
    # Args as a file's node has them. It may draw random numbers, so calls keep their order.
    KernelRow(
        0,
        "generic",
        "x… → y…",
        _torch,
        _makes,
        schemas=attributes(op="s", call="s"),
        constrains=("ordered",),
    ),
)
