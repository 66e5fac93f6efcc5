"""What calls of every kind are refused for: operands that are empty, absent, too few."""

import pytest
import torch

from shardwright.kernels.lowered import BY_NAME, KINDS
from shardwright.kernels.native.library import BoundCall, NativeOperand
from tests.kernels.kind_calls import CALLS, Operands
from tests.kernels.native.calls import native_bind, native_library, operand

each_kind = pytest.mark.parametrize("kind", CALLS)


def bound(kind: str, operands: Operands, n_in: int) -> BoundCall | str:
    """A kind's call with other operands than its own."""
    return native_bind(kind, CALLS[kind].attrs, operands[:n_in], operands[n_in:])


def with_other(kind: str, place: int, other: torch.Tensor | None) -> BoundCall | str:
    """A kind's call with another operand at one place."""
    inputs, outputs = CALLS[kind].inputs, CALLS[kind].outputs
    operands = [*inputs, *outputs]
    operands[place] = other
    return bound(kind, operands, len(inputs))


def test_every_native_kind_has_a_call() -> None:
    assert CALLS.keys() == {kind.name for kind in KINDS} - {"generic", "view"}


@each_kind
def test_its_call_is_taken(kind: str) -> None:
    call = CALLS[kind]
    found = native_bind(kind, call.attrs, call.inputs, call.outputs)
    assert isinstance(found, BoundCall), found


@each_kind
def test_an_empty_operand_is_refused(kind: str) -> None:
    """Whichever it is, and along whichever dimension: some kernels would read beyond it."""
    for place, tensor in enumerate([*CALLS[kind].inputs, *CALLS[kind].outputs]):
        assert tensor is not None
        for dim in range(max(1, tensor.dim())):
            shape = [0 if d == dim else n for d, n in enumerate(tensor.shape or (1,))]
            found = with_other(kind, place, tensor.new_zeros(shape))
            assert found == "an operand is empty", (place, dim)


@each_kind
def test_all_operands_empty_are_refused(kind: str) -> None:
    call = CALLS[kind]
    empty = [
        torch.zeros_like(t)[..., :0] if t is not None and t.dim() else t
        for t in (*call.inputs, *call.outputs)
    ]
    found = bound(kind, empty, len(call.inputs))
    assert isinstance(found, BoundCall) == (kind == "step_inc"), found  # which has numbers alone


@each_kind
def test_an_absent_operand_that_is_needed_is_refused(kind: str) -> None:
    row, call = BY_NAME[kind], CALLS[kind]
    for place in range(len(call.inputs) + len(call.outputs)):
        there = [-1 if k == place else k for k in range(len(call.inputs) + len(call.outputs))]
        n_in = len(call.inputs)
        found = with_other(kind, place, None)
        if name := row.missing(there[:n_in], there[n_in:]):
            assert found == f"{name} is absent"
        elif row.lists or row.operands.startswith("x…"):
            assert isinstance(found, str), (place, found)


@each_kind
def test_another_number_of_operands_is_refused(kind: str) -> None:
    call = CALLS[kind]
    operands = [*call.inputs, *call.outputs]
    n_in = len(call.inputs)
    for given, count in (
        ([], 0),
        (operands[:-1], n_in),
        ([*operands, operands[-1]], n_in),
        (operands, n_in + 1),
        (operands, len(operands) + 1),
        (operands, -1),
    ):
        attrs = BY_NAME[kind].attrs
        blob = attrs.pack({**attrs.defaults, **call.attrs})
        described: list[NativeOperand | None] = [operand(t, i) for i, t in enumerate(given)]
        found = native_library().bind(BY_NAME[kind].id, 1, blob, described, count)
        assert isinstance(found, str), (len(given), count)
