import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir import IRNode, IRValue, Scope
from shardwright.ir.values import contiguous_strides, strides_or_none

SHAPES = st.lists(st.integers(0, 4), max_size=4)


@given(SHAPES)
def test_contiguous_strides_are_those_of_torch(shape: list[int]):
    assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert strides_or_none(shape, contiguous_strides(shape)) is None


@given(SHAPES, st.randoms())
def test_strides_stand_exactly_where_a_tensor_is_not_contiguous(shape: list[int], random):
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.empty(shape).permute(order)
    found = strides_or_none(tensor.shape, tensor.stride())
    assert found == (None if tensor.is_contiguous() else tensor.stride())


def test_a_value_knows_its_size():
    value = IRValue(0, "x", (2, 3), "f16")
    assert (value.numel, value.nbytes, value.is_stored) == (6, 12, False)
    assert IRValue(0, "x", (), "f64").nbytes == 8


@pytest.mark.parametrize("role", ["param", "buffer", "state", "constant"])
def test_stored_roles(role):
    assert IRValue(0, "w", (1,), "f32", role=role).is_stored


def test_a_node_knows_its_innermost_module():
    node = IRNode(0, "aten.relu.default", [], [], {}, (Scope("a", "A"), Scope("a.b", "B")))
    assert (node.scope, node.scope_class) == ("a.b", "B")
    node.scopes = ()
    assert (node.scope, node.scope_class) == ("", "")


def test_a_value_between_other_nodes_is_the_same_in_all_else():
    fields = {field.name for field in dataclasses.fields(IRValue)}
    others = {
        "shape": (2, 3),
        "dtype": "f64",
        "device": "cuda",
        "role": "buffer",
        "strides": (1, 2),
    }
    value = IRValue(
        7,
        "x",
        names=("a", "b"),
        placements=((0, 2), (1, 4)),
        init="zeros",
        producer=3,
        users=[4],
        persistent=False,
        batched=True,
        **others,
    )
    wired = value.wired(5, [6])
    assert (wired.producer, wired.users) == (5, [6])
    plain = IRValue(0, "", (), "f32")
    for name in fields - {"producer", "users"}:
        assert getattr(value, name) != getattr(plain, name), "a value that tells the fields apart"
        assert getattr(wired, name) == getattr(value, name)
