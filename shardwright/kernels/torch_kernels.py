"""Torch's kernels: calls bound to outputs in memory that is planned.

An operator whose overload with ``out=`` is its own kernel writes straight to the outputs. Many such
overloads are generated wrappers that compute functionally and copy, some resize what they are
given, and some write to strided outputs as if they were contiguous; these, and operators without
one, are called as they are, and their results copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from shardwright.errors import ExecError
from shardwright.ir.operators import flatten_results
from shardwright.ir.overloads import callable_of
from shardwright.torch_internals import OpOverload, operator_of, schema_of

Attrs = Mapping[str, Any]
Tensors = Sequence[torch.Tensor | None]
Closure = Callable[[], object]
TorchKernel = Callable[[Attrs, Tensors, Tensors], Closure]
"""Attributes, inputs and outputs to a call that writes the outputs in place and looks nothing up.

Operands that are not there are None; tensors need no gradient; an output may lie where the kind
lets it lie in an input.
"""

_OF_IMAGES = {
    "avg_pool2d",
    "max_pool2d_with_indices",
    "upsample_nearest2d",
    "upsample_bilinear2d",
}
"""Operators whose ``out=`` knows channels last; other strides it takes for contiguous ones."""


def present(tensors: Tensors) -> list[torch.Tensor]:
    """The operands that are there."""
    return [tensor for tensor in tensors if tensor is not None]


def needed(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Operands that the kind does not let be absent."""
    found = present(tensors)
    assert len(found) == len(tensors), "lowering gives every operand that a kind needs"
    return found


def rows_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A matrix view with all but the last dimension as rows; None where it would be a copy."""
    try:
        return tensor.view(-1, tensor.shape[-1]) if tensor.numel() else None
    except RuntimeError:
        return None


def store(made: Any, outs: Tensors) -> None:
    """Copies what a functional call made, tensors or none, to where it belongs."""
    for tensor, out in zip(flatten_results(made), outs, strict=False):
        if out is None or tensor is None:
            continue
        if tensor.shape != out.shape:
            raise ExecError(
                f"an operator made {list(tensor.shape)} where its graph says {list(out.shape)}; "
                "its values are not as its operands ask for. Lower the pipeline again, or report it"
            )
        out.copy_(tensor)


# --- operators -----------------------------------------------------------------------------------


def by_operator(overload: OpOverload, *names: str, **fixed: Any) -> TorchKernel:
    """A kind that is one operator, on all inputs, then on the attributes of these names."""

    def bind(attrs: Attrs, ins: Tensors, outs: Tensors) -> Closure:
        return bind_operator(overload, [*ins, *(attrs[name] for name in names)], fixed, outs)

    return bind


def bind_operator(
    overload: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Tensors
) -> Closure:
    """The call of an operator that makes ``outs``: by ``out=`` where it can, else with a copy."""
    function, writer = callable_of(overload), out_overload(overload)
    if (
        function is not overload  # its arguments are looked at first
        or writer is None
        or None in outs
        or len(outs) != len(writer[1])
        or not _fit(overload, outs)
    ):
        return lambda: store(function(*args, **kwargs), outs)
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
                name: torch.empty_strided(
                    out.shape, out.stride(), dtype=out.dtype, device=out.device
                )
                for name, out in zip(names, present(outs), strict=True)
            }
            before = [*map(_layout, trial.values())]
            with warnings.catch_warnings():  # newer torches say in Python that they resize
                warnings.simplefilter("ignore")
                form(*args, **kwargs, **trial)
            keeps = before == [*map(_layout, trial.values())]
            if keeps:
                return store([*trial.values()], outs)
        store(function(*args, **kwargs), outs)

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
