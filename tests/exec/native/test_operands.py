"""What calls of every kind are refused for, whatever the kernel: operands empty, absent, too few.

Each kind has one call that its kernel takes, with all optional operands.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from shardwright.exec.kinds import BY_NAME, KINDS
from shardwright.exec.native.library import Bound, Operand
from tests.exec.native.calls import native_bind, native_library, operand

Operands = Sequence[torch.Tensor | None]


class Call(NamedTuple):
    attrs: Mapping[str, Any]
    inputs: Operands
    outputs: Operands


def floats(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape) for shape in shapes]


def images(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape).to(memory_format=torch.channels_last) for shape in shapes]


def numbers(*shape: int) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int64)]


LINE, ROW, HEADS = (2, 3), (3,), (1, 2, 3, 4)
ADAM = dict.fromkeys(("beta1", "beta2", "eps", "weight_decay"), 0.5) | {"amsgrad": 1, "maximize": 0}
CALLS: Mapping[str, Call] = {
    "copy": Call({}, floats(LINE), floats(LINE)),
    "fill": Call({"value": 1.0}, [], floats(LINE)),
    "concat": Call({"dim": 0}, floats(LINE, (1, 3)), floats((3, 3))),
    "add": Call({}, floats(LINE, LINE), floats(LINE)),
    "bias_add": Call({}, floats(LINE, ROW), floats(LINE)),
    "relu": Call({}, floats(LINE), floats(LINE)),
    "relu_bwd": Call({}, floats(LINE, LINE), floats(LINE)),
    "chain": Call({"program": "add x0 x1 -> %0"}, floats(LINE, LINE), floats(LINE)),
    "dropout": Call(
        {"p": 0.5, "seed": 0, "site": 0, "offsets": (0, 0), "whole_shape": LINE},
        [*floats(LINE), *numbers(1)],
        floats(LINE),
    ),
    "reduce_sum": Call({"dims": (1,), "scale": 1.0}, floats(LINE), floats((2,))),
    "gemm": Call({}, floats(LINE, (3, 4), (4,), (2, 4)), floats((2, 4))),
    "bmm": Call({}, floats((5, 2, 3), (5, 3, 4)), floats((5, 2, 4))),
    "softmax": Call({"dim": 1, "log": 0}, floats(LINE), floats(LINE)),
    "softmax_bwd": Call({"dim": 1, "log": 0}, floats(LINE, LINE), floats(LINE)),
    "layer_norm": Call({"dims": 1, "eps": 1e-5}, floats(LINE, ROW, ROW), floats(LINE, (2,), (2,))),
    "layer_norm_bwd": Call({}, floats(LINE, LINE, (2,), (2,), ROW, ROW), floats(LINE, ROW, ROW)),
    "batch_norm": Call(
        {"training": 1, "momentum": 0.1, "eps": 1e-5},
        floats(LINE, ROW, ROW, ROW, ROW),
        floats(LINE, ROW, ROW, ROW, ROW),
    ),
    "batch_norm_bwd": Call(
        {"training": 1, "eps": 1e-5},
        floats(LINE, LINE, ROW, ROW, ROW, ROW, ROW),
        floats(LINE, ROW, ROW),
    ),
    "attention": Call(
        {"causal": 0, "scale": 1.0}, floats(HEADS, HEADS, HEADS, (3, 3)), floats(HEADS, (1, 2, 3))
    ),
    "attention_bwd": Call(
        {"causal": 0, "scale": 1.0},
        floats(HEADS, HEADS, HEADS, HEADS, HEADS, (1, 2, 3), (3, 3)),
        floats(HEADS, HEADS, HEADS),
    ),
    "embedding": Call({}, [*floats((5, 3)), *numbers(2)], floats(LINE)),
    "embedding_bwd": Call({}, [*floats(LINE), *numbers(2)], floats((5, 3))),
    "cross_entropy": Call({}, [*floats(LINE), *numbers(2), *floats(ROW)], floats((), (), LINE)),
    "cross_entropy_bwd": Call({}, [*floats((), LINE), *numbers(2), *floats((), ROW)], floats(LINE)),
    "mse": Call({}, floats(LINE, LINE), floats(())),
    "mse_bwd": Call({}, floats((), LINE, LINE), floats(LINE)),
    "conv": Call(
        {},
        images((1, 8, 5, 5), (4, 8, 3, 3)) + floats((4,)) + images((1, 4, 3, 3)),
        images((1, 4, 3, 3)),
    ),
    "pool": Call(
        {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "mean": 0, "count_padding": 0},
        floats((1, 3, 4, 4)),
        floats((1, 3, 2, 2)),
    ),
    "sgd": Call({"momentum": 0.9}, floats(LINE, LINE, LINE, ()), floats(LINE, LINE)),
    "adam": Call(ADAM, floats(*[LINE] * 5, (), ()), floats(*[LINE] * 4)),
    "adamw": Call(ADAM, floats(*[LINE] * 5, (), ()), floats(*[LINE] * 4)),
    "step_inc": Call({}, floats(()), floats(())),
}
each_kind = pytest.mark.parametrize("kind", CALLS)


def bound(kind: str, operands: Operands, n_in: int) -> Bound | str:
    """A kind's call with other operands than its own."""
    return native_bind(kind, CALLS[kind].attrs, operands[:n_in], operands[n_in:])


def with_other(kind: str, place: int, other: torch.Tensor | None) -> Bound | str:
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
    assert isinstance(found, Bound), found


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
    assert isinstance(found, Bound) == (kind == "step_inc"), found  # which has numbers alone


@each_kind
def test_an_absent_operand_that_is_needed_is_refused(kind: str) -> None:
    row, call = BY_NAME[kind], CALLS[kind]
    for place in range(len(call.inputs) + len(call.outputs)):
        there = [-1 if k == place else k for k in range(len(call.inputs) + len(call.outputs))]
        n_in = len(call.inputs)
        found = with_other(kind, place, None)
        if name := row.lacks(there[:n_in], there[n_in:]):
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
        blob = (
            BY_NAME[kind].layout(1).pack({**BY_NAME[kind].defaults, **call.attrs})
            if (BY_NAME[kind].schemas)
            else b""
        )
        described: list[Operand | None] = [operand(t, i) for i, t in enumerate(given)]
        found = native_library().bind(BY_NAME[kind].id, 1, blob, described, count)
        assert isinstance(found, str), (len(given), count)
