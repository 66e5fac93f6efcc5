import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import GraphError
from shardwright.ir import SLOT, Input, IRNode, IRValue, Scope
from shardwright.ir.tensor_meta import DTYPES, TensorMeta
from shardwright.ir.values import LAYOUTS, MEMORY_FORMATS, from_json, is_attribute, to_json


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


# --- test_attributes ------------------------------------------------------------------------------


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TAGGED = st.sampled_from(
    [SLOT, *DTYPES.values(), *LAYOUTS.values(), *MEMORY_FORMATS.values()]
) | st.builds(Input, st.integers(0, 9))
ATTRIBUTES = st.recursive(
    PLAIN | TAGGED | st.complex_numbers(allow_nan=False), lambda inner: st.lists(inner, max_size=3)
)


@given(ATTRIBUTES)
def test_every_attribute_comes_back_from_json(value: object):
    assert is_attribute(value)
    text = json.dumps(to_json(value), allow_nan=False)
    again = from_json(json.loads(text))
    assert again == value
    assert repr(again) == repr(value)  # tells True from 1, and 0.0 from -0.0


def test_not_a_number_comes_back():
    assert math.isnan(from_json(to_json(math.nan)))
    assert math.isnan(from_json(to_json(complex(1, math.nan))).imag)


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (torch.float8_e4m3fn, {"dtype": "f8"}),
        (torch.strided, {"layout": "strided"}),
        (torch.channels_last, {"memory_format": "channels_last"}),
        (SLOT, {"device": "slot"}),
        (-math.inf, {"float": "-inf"}),
        (complex(1, math.inf), {"complex": [1.0, {"float": "inf"}]}),
        ([None, Input(3)], [None, {"input": 3}]),
        ((1, 2), [1, 2]),
    ],
)
def test_what_json_lacks_is_tagged(value: object, data: object):
    assert to_json(value) == data


@pytest.mark.parametrize("value", [torch.zeros(1), torch.device("cpu"), {"a": 1}, {1}, object()])
def test_what_an_attribute_cannot_be(value: object):
    assert not is_attribute(value)
    assert not is_attribute([value])
    with pytest.raises(GraphError, match="an attribute cannot be a"):
        to_json([value])


def test_tuples_are_no_attributes():
    assert not is_attribute((1, 2))


@pytest.mark.parametrize(
    "data",
    [
        {"float": "fast"},
        {"float": ["inf"]},
        {"layout": "round"},
        {"memory_format": None},
        {"device": "cuda:0"},
        {"input": -1},
        {"input": True},
        {"complex": [1]},
        {"complex": ["1", "2"]},
        {"complex": 3},
        {"dtype": ["f32"]},
    ],
)
def test_wrong_contents_of_a_tag(data: dict[str, object]):
    with pytest.raises(GraphError, match=f"is no value of the tag '{next(iter(data))}'"):
        from_json(data)


@pytest.mark.parametrize("data", [{}, {"pickle": "x"}, {"float": "inf", "input": 1}])
def test_unknown_tags(data: dict[str, object]):
    with pytest.raises(GraphError, match=r"unknown tagged value .* known tags are dtype, layout"):
        from_json([data])
    with pytest.raises(GraphError, match="unknown dtype 'f31'"):
        from_json({"dtype": "f31"})
