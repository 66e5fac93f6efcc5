import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import GraphError
from shardwright.ir import SLOT, Input, resolve
from shardwright.ir.operators import (
    allow_namespace,
    is_marker,
    join_call,
    named_arguments,
    operator_name,
    signature,
    split_call,
)


class Tensor(str):
    """Stands for a tensor in the calls below."""

    def __repr__(self) -> str:
        return f"<{self}>"


X, Y, Z, I = (Tensor(name) for name in "xyzi")  # noqa: E741


def split(op: str, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    return split_call(resolve(op), args, kwargs, is_tensor=lambda item: isinstance(item, Tensor))


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], list[Any], dict[str, Any]]] = [
    # operator, arguments, keywords; tensors, attributes
    ("aten.relu.default", (X,), {}, [X], {}),
    ("aten.add.Tensor", (X, Y), {"alpha": 2}, [X, Y], {"alpha": 2}),
    ("aten.add.Tensor", (X,), {"other": 1.5}, [X], {"other": 1.5, "alpha": 1}),
    ("aten.linear.default", (X, Y), {}, [X, Y], {"bias": None}),
    ("aten.linear.default", (), {"input": X, "weight": Y, "bias": Z}, [X, Y, Z], {}),
    (
        "aten.layer_norm.default",
        (X, (8,), None, Y),
        {},
        [X, Y],
        {"normalized_shape": [8], "weight": None, "eps": 1e-05, "cudnn_enable": True},
    ),
    ("aten.cat.default", ([X, Y], 1), {}, [X, Y], {"tensors": [Input(0), Input(1)], "dim": 1}),
    ("aten.cat.default", ([X, X],), {}, [X, X], {"tensors": [Input(0), Input(1)], "dim": 0}),
    ("aten.cat.default", ([],), {}, [], {"tensors": [], "dim": 0}),
    (
        "aten.index_put.default",
        (X, [None, I], Y),
        {},
        [X, Y, I],
        {"indices": [None, Input(2)], "accumulate": False},
    ),
    ("aten.index.Tensor", (X, [I, None]), {}, [X, I], {"indices": [Input(1), None]}),
    ("aten.where.ScalarSelf", (X, 0.0, Y), {}, [X, Y], {"self": 0.0}),
    (
        "aten.lstm.input",
        (X, [Y, Z], [X, X], False, 1, 0.0, False, False, True),
        {},
        [X, Y, Z, X, X],
        {
            "hx": [Input(1), Input(2)],
            "params": [Input(3), Input(4)],
            "has_biases": False,
            "num_layers": 1,
            "dropout": 0.0,
            "train": False,
            "bidirectional": False,
            "batch_first": True,
        },
    ),
    (
        "aten.einsum.default",
        ("ij,jk", [X, Y]),
        {},
        [X, Y],
        {"equation": "ij,jk", "tensors": [Input(0), Input(1)], "path": None},
    ),
    (
        "aten.sum.dim_IntList",
        (X, [-1]),
        {"dtype": torch.float64},
        [X],
        {"dim": [-1], "keepdim": False, "dtype": torch.float64},
    ),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "tensors", "attrs"), CALLS)
def test_a_call_splits_and_joins(op, args, kwargs, tensors, attrs):
    assert split(op, *args, **kwargs) == (tensors, attrs)
    joined_args, joined_kwargs = join_call(resolve(op), tensors, attrs)
    given = {p.name for p in signature(resolve(op)).parameters}
    assert len(joined_args) + len(joined_kwargs) == len(given)
    assert split(op, *joined_args, **joined_kwargs) == (tensors, attrs)
    for name, value in kwargs.items():
        assert value in (joined_kwargs.get(name), *joined_args)
    named = named_arguments(resolve(op), tensors, attrs)
    assert list(named) == [p.name for p in signature(resolve(op)).parameters]
    assert [*named.values()] == [*joined_args, *joined_kwargs.values()]


ANY_TENSOR = st.sampled_from([X, Y, Z])
INDICES = st.lists(st.none() | ANY_TENSOR, max_size=4)


@given(ANY_TENSOR, INDICES, ANY_TENSOR, st.booleans())
def test_joining_is_the_inverse_with_any_mix_of_tensors_and_none(x, indices, values, accumulate):
    overload = resolve("aten.index_put.default")
    call = (x, indices, values, accumulate)
    tensors, attrs = split("aten.index_put.default", *call)
    assert join_call(overload, tensors, attrs) == (call, {})


def test_devices_are_left_to_the_slot():
    attrs = split("aten.zeros.default", [2])[1]
    assert attrs["device"] is SLOT
    assert split("aten.arange.default", 5, device=torch.device("cuda:1"))[1]["device"] is SLOT
    assert split("aten.zeros.default", [2], device="cpu")[1]["device"] is SLOT
    assert split("aten.zeros_like.default", X)[1]["device"] is None, "follows its input"
    assert split("aten.to.device", X, torch.device("cpu"), torch.float32)[1]["device"] is SLOT
    args, kwargs = join_call(resolve("aten.zeros.default"), [], attrs, torch.device("meta"))
    assert torch.ops.aten.zeros.default(*args, **kwargs).is_meta


def test_not_a_number_is_one_object_so_that_attributes_compare():
    first, second = (split("aten.mul.Scalar", X, float("nan"))[1] for _ in range(2))
    assert first == second
    assert first["other"] is math.nan


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("aten.relu.default", (), {}),
        ("aten.relu.default", (X, Y), {}),
        ("aten.relu.default", (X,), {"inplace": False}),
        ("aten.relu.default", (X,), {"self": X}),
        ("aten.add.Tensor", (X, Y, 2), {}),
    ],
)
def test_calls_that_do_not_fit_the_schema(op, args, kwargs):
    with pytest.raises(GraphError, match=f"a call of {op} with .* does not fit its schema aten::"):
        split(op, *args, **kwargs)


@pytest.mark.parametrize(
    ("inputs", "attrs"),
    [([X], {}), ([X, Y, Z], {"bias": None}), ([X, Y], {"bias": None, "scale": 2})],
)
def test_nodes_that_do_not_fill_the_schema(inputs, attrs):
    with pytest.raises(GraphError, match=r"aten\.linear\.default with \d inputs and attributes"):
        join_call(resolve("aten.linear.default"), inputs, attrs)


def test_names_lead_to_overloads_and_back():
    for overload in (torch.ops.aten.add.Tensor, torch.ops.aten.linear.default):
        assert resolve(operator_name(overload)) is overload


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("os.system.default", "namespace 'os' is not allowed .allowed are aten, "),
        ("prims.add.default", "namespace 'prims' is not allowed"),
        ("aten.linear", "'aten.linear' does not exist"),
        ("aten.linear.out_of_this_world", "does not exist in torch"),
        ("aten.no_such_thing.default", "does not exist in torch"),
        ("aten.linear.__doc__", "does not exist in torch"),
        ("aten..default", "does not exist in torch"),
        ("aten.a.b.default", "does not exist in torch"),
        ("Backward", "'Backward' is a marker, a step of training"),
    ],
)
def test_names_that_lead_nowhere(op: str, message: str):
    with pytest.raises(GraphError, match=message):
        resolve(op)


def test_a_namespace_can_be_allowed(monkeypatch):
    monkeypatch.setattr("shardwright.ir.operators._allowed_namespaces", {"aten"})
    with torch.library._scoped_library("tests_ir_operators", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        with pytest.raises(GraphError, match="register the operator first"):
            resolve("tests_ir_operators.twice.default")
        allow_namespace("tests_ir_operators")
        assert operator_name(resolve("tests_ir_operators.twice.default")) == (
            "tests_ir_operators.twice.default"
        )
        resolve.cache_clear()


def test_markers_have_no_dot():
    assert is_marker("adamw_step")
    assert not is_marker("aten.add.Tensor")


@pytest.mark.parametrize(
    ("op", "one", "returned"),
    [
        ("aten.relu.default", True, 1),
        ("aten.max.dim", False, 2),
        ("aten.lstm.input", False, 3),
        ("aten.split.Tensor", False, None),
        ("aten._assert_async.msg", False, 0),
    ],
)
def test_what_a_schema_returns(op: str, one: bool, returned: int | None):
    found = signature(resolve(op))
    assert (found.returns_one, found.returned) == (one, returned)


def test_a_number_may_stand_for_lists_of_a_length():
    lengths = {p.name: p.length for p in signature(resolve("aten.conv2d.default")).parameters}
    assert (lengths["stride"], lengths["input"]) == (2, None)
