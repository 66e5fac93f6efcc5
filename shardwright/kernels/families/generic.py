"""The generic kind: any operator of torch, by its name.

An operator whose overload with ``out=`` is its own kernel writes straight to the outputs. Many such
overloads are generated wrappers that compute functionally and copy, some resize what they are
given, and some write to strided outputs as if they were contiguous; these, and operators without
one, are called as they are, and their results copied.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from shardwright.errors import ExecError, GraphError
from shardwright.ir.operators import flatten_results, resolve, substitute
from shardwright.ir.overloads import callable_of
from shardwright.ir.values import from_json
from shardwright.kernels.families.kernel import Closure, Kernel, Tensors, present
from shardwright.torch_internals import OpOverload, operator_of, schema_of

_OF_IMAGES = {
    "avg_pool2d",
    "max_pool2d_with_indices",
    "upsample_nearest2d",
    "upsample_bilinear2d",
}
"""Operators whose ``out=`` knows channels last; other strides it takes for contiguous ones."""


def _generic(attrs: Mapping[str, Any], ins: Tensors, outs: Tensors) -> Closure:
    overload, (given, named) = resolve(attrs["op"]), call_arguments(attrs)
    device = next((tensor.device for tensor in present((*ins, *outs))), torch.device("cpu"))
    args = [_filled(item, ins, device) for item in given]
    kwargs = {key: _filled(item, ins, device) for key, item in named.items()}
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
            before = [*map(_lies, trial.values())]
            with warnings.catch_warnings():  # newer torches say in Python that they resize
                warnings.simplefilter("ignore")
                form(*args, **kwargs, **trial)
            keeps = before == [*map(_lies, trial.values())]
            if keeps:
                return _store_flat([*trial.values()], outs)
        _store_flat(function(*args, **kwargs), outs)

    return run


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies, and how much memory is behind it."""
    memory = tensor.untyped_storage()
    return memory.data_ptr(), memory.nbytes(), tensor.shape, tensor.stride()


def _fit(overload: OpOverload, outs: Tensors) -> bool:
    """Whether the overload with ``out=`` honours the strides of these outputs."""
    if (
        torch.Tag.nondeterministic_seeded in overload.tags
    ):  # which would draw twice at its first run
        return False
    if torch.Tag.pointwise in overload.tags:
        return True
    images = operator_of(overload) in _OF_IMAGES
    return all(out.is_contiguous() or (images and _is_last(out)) for out in present(outs))


def _is_last(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies channels last."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def call_arguments(attrs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of a generic call, `Input` for tensors. Raises ExecError."""
    try:
        text = json.loads(attrs["call"])
        kwargs = {key: from_json(item) for key, item in text["kwargs"].items()}
        return [from_json(item) for item in text["args"]], kwargs
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, GraphError) as error:
        raise ExecError(f"the arguments of {attrs['op']} cannot be read: {error!r}") from None


def _filled(argument: Any, ins: Tensors, device: torch.device) -> Any:
    return substitute(argument, ins, device)


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


KERNELS: Mapping[str, Kernel] = {"generic": _generic}
