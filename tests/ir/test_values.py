import dataclasses

import pytest

from shardwright.ir import IRNode, IRValue, Scope
from shardwright.ir.tensor_meta import TensorMeta


def test_a_value_knows_its_size():
    value = IRValue(0, "x", TensorMeta((2, 3), "f16"))
    assert (value.numel, value.nbytes, value.is_stored) == (6, 12, False)
    assert IRValue(0, "x", TensorMeta((), "f64")).nbytes == 8


@pytest.mark.parametrize("role", ["param", "buffer", "state", "constant"])
def test_stored_roles(role):
    assert IRValue(0, "w", TensorMeta((1,), "f32"), role=role).is_stored


def test_a_node_knows_its_innermost_module():
    node = IRNode(0, "aten.relu.default", [], [], {}, (Scope("a", "A"), Scope("a.b", "B")))
    assert (node.scope, node.scope_class) == ("a.b", "B")
    node.scopes = ()
    assert (node.scope, node.scope_class) == ("", "")


def test_a_value_between_other_nodes_is_the_same_in_all_else():
    fields = {field.name for field in dataclasses.fields(IRValue)}
    value = IRValue(
        7,
        "x",
        TensorMeta((2, 3), "f64", (1, 2)),
        "cuda",
        "buffer",
        names=("a", "b"),
        placements=((0, 2), (1, 4)),
        init="zeros",
        producer=3,
        users=[4],
        persistent=False,
        batched=True,
    )
    wired = value.wired(5, [6])
    assert (wired.producer, wired.users) == (5, [6])
    plain = IRValue(0, "", TensorMeta((), "f32"))
    for name in fields - {"producer", "users"}:
        assert getattr(value, name) != getattr(plain, name), "a value that tells the fields apart"
        assert getattr(wired, name) == getattr(value, name)
