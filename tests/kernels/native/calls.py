"""Runs one native kernel on torch tensors, for tests."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
import torch

from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import dtype_name
from shardwright.kernels.lowered import BY_NAME
from shardwright.kernels.native.build import find_compiler
from shardwright.kernels.native.library import BoundCall, Library, NativeOperand, addresses, load


def native_library() -> Library:
    """The kernels; skips the test where there is no compiler."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    library = load()
    assert library is not None, "the native kernels do not build"
    return library


def operand(tensor: torch.Tensor | None, buffer: int, static: bool = False) -> NativeOperand | None:
    """A tensor as an operand at the beginning of a buffer."""
    if tensor is None:
        return None
    name, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    return NativeOperand(buffer, 0, name, shape, tensor.stride(), static)


def native_bind(
    kind_name: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor | None],
    *,
    static: Collection[int] = (),
) -> BoundCall | str:
    """Binds a kernel on tensors, each in a buffer of its own, in order; ``static`` are indices."""
    kind = BY_NAME[kind_name]
    blob = kind.attrs.pack({**kind.attrs.defaults, **attrs})
    operands = [operand(t, i, i in static) for i, t in enumerate([*inputs, *outputs])]
    return native_library().bind(kind.id, 1, blob, operands, len(inputs))


def native_call(
    kind_name: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor | None],
    *,
    static: Collection[int] = (),
    threads: int = 1,
) -> None:
    """Runs a kernel on tensors; a tensor may be given twice. Raises where it is refused."""
    bound = native_bind(kind_name, attrs, inputs, outputs, static=static)
    if isinstance(bound, str):
        raise ExecError(f"{kind_name}: {bound}")
    bases = addresses([None if t is None else t.data_ptr() for t in [*inputs, *outputs]])
    bound.prepare(bases, threads)
    native_library().program([bound]).run(bases, threads)
