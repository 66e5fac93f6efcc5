import dataclasses
import functools
import inspect
import math
from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import InputError
from shardwright.ir.structure import (
    Arguments,
    AttributeDict,
    Leaf,
    Parameter,
    Tree,
    describe_arguments,
    describe_result,
    flatten_call,
    leaves,
    rebuild,
    rebuild_call,
    with_keyword,
)


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Box:
    x: Any
    y: Any = 1
    area: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Output(OrderedDict):
    """As transformers' ModelOutput: a mapping of the fields that are not None."""

    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                self[field.name] = value


T = torch.zeros(1)


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.tensor(i) for i in range(count)]


def names(result: Any) -> list[str]:
    return [leaf.name for leaf in leaves(describe_result(result)[0])]


def argument_names(function: Any, *args: Any, **kwargs: Any) -> list[str]:
    return [leaf.name for leaf in leaves(describe_arguments(function, args, kwargs)[0])]


def same(left: Any, right: Any) -> bool:
    """Equality of nested objects, tensors by identity, types and not-a-number included."""
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return left is right
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    return left == right or (left != left and right != right)


def through_json(structure: Any, kind: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(structure), type=kind)


# --- names -----------------------------------------------------------------------------------


def test_arguments_are_named_by_parameter_and_place():
    def forward(input_ids, past_key_values, options, *rest, **others): ...

    cache = [(T, T) for _ in range(4)]
    found = argument_names(forward, T, cache, {"mask": T, 3: [T]}, T, T, bias=T, pair=(T, T))
    assert found[0] == "input_ids"
    assert found[8] == "past_key_values_3_1"
    assert found[9:] == [
        "options_mask",
        "options_3_0",
        "rest_0",
        "rest_1",
        "bias",
        "pair_0",
        "pair_1",
    ]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (T, ["output"]),
        ((T, T), ["output_0", "output_1"]),
        ((T, [T, (T,)]), ["output_0", "output_1_0", "output_1_1_0"]),
        ([T, 3, None, T], ["output_0", "output_3"]),
        ({"logits": T, "states": (T, T)}, ["logits", "states_0", "states_1"]),
        (Output(logits=T, states=[T]), ["logits", "states_0"]),
        (Box(T, y=Pair(T, T)), ["x", "y_first", "y_second"]),
        (Pair(T, T), ["first", "second"]),
        ((Pair(T), T), ["output_0_first", "output_1"]),
        (torch.max(torch.eye(2), 0), ["values", "indices"]),
        (torch.Size([2]), []),
    ],
)
def test_results_are_named_by_key_or_place(result: Any, expected: list[str]):
    assert names(result) == expected


def test_names_that_meet_get_the_smallest_free_number():
    result = {"a_0": T, "a": [T, T], "a_0__1": T, "b": {"c_0": T, "c": [T]}, "b_c": [T]}
    assert names(result) == ["a_0", "a_0__1", "a_1", "a_0__1__1", "b_c_0", "b_c_0__1", "b_c_0__2"]


# --- there and back --------------------------------------------------------------------------

CONSTANTS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
KEYS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
OBJECTS = st.recursive(
    CONSTANTS | st.builds(lambda: torch.zeros(1)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Box, inner, inner),
    ),
    max_leaves=12,
)


@given(OBJECTS)
def test_results_fold_back_after_a_trip_through_json(result: Any):
    tree, flat = describe_result(result)
    found = list(leaves(tree))
    assert [leaf.index for leaf in found] == list(range(len(flat)))
    assert len({leaf.name for leaf in found}) == len(found)
    assert same(rebuild(through_json(tree, Tree), flat), result)


@given(
    st.tuples(OBJECTS, OBJECTS), st.lists(OBJECTS, max_size=2), st.dictionaries(st.text(), OBJECTS)
)
def test_calls_fold_back_after_a_trip_through_json(two: Any, rest: Any, others: Any):
    def forward(a, /, b, *rest, c=None, **others): ...

    others = {key: value for key, value in others.items() if key not in "abc"}
    args, kwargs = (*two, *rest), {"c": 3.5, **others}
    structure, flat = describe_arguments(forward, args, kwargs)
    structure = through_json(structure, Arguments)
    found = flatten_call(structure, args, kwargs)
    assert list(map(id, found)) == list(map(id, flat))
    call = rebuild_call(structure, flat)
    signature = inspect.signature(forward)
    bound = signature.bind(*call.args, **call.kwargs).arguments
    assert same(bound, signature.bind(*args, **kwargs).arguments)


@pytest.mark.parametrize(
    "result",
    [
        Output(logits=T, states=(T, None)),
        Output(),
        defaultdict(None, {"a": T}),
        UserDict({"a": T}),
        torch.max(torch.eye(2), 0),
        OrderedDict({1: T, "1": T}),
    ],
)
def test_loaded_classes_come_back(result: Any):
    again = rebuild(*describe_result(result))
    assert type(again) is type(result)
    assert same(describe_result(again)[1], describe_result(result)[1])


def test_fields_outside_the_constructor_come_back():
    box = Box(T)
    box.area = T
    again = rebuild(*describe_result(box))
    assert (again.x, again.y, again.area) == (T, 1, T)


@pytest.mark.parametrize(
    "cls",
    [
        "no_such_module:Box",
        "dataclasses:NoSuchClass",
        "subprocess:Popen",
        "os:system",
        f"{Pair.__module__}:Pair",
        f"{Box.__module__}:Box",
    ],
)
def test_other_classes_come_back_as_records(cls: str):
    tree = msgspec.structs.replace(describe_result(Box(T))[0], cls=cls, fields=("x", "b", "c"))
    again = rebuild(tree, [T])
    assert type(again) is AttributeDict
    assert again == {"x": T, "b": 1, "c": None}
    assert again.x is T
    with pytest.raises(AttributeError, match="missing"):
        _ = again.missing


def test_a_record_fits_where_its_object_was():
    structure, _ = describe_arguments(lambda box: None, (Box(T, 2),), {})
    for given_ in (AttributeDict(x=T, y=2, area=None), {"x": T, "y": 2, "area": None}):
        assert flatten_call(structure, (given_,), {})[0] is T


# --- calls -----------------------------------------------------------------------------------


def forward(input_ids, mask=None, flag=True, *, scale: Any = 1.0, shape=(1, 2)): ...


def test_positional_or_keyword_makes_no_difference():
    structure, _ = describe_arguments(forward, (T,), {"mask": T})
    x, y = tensors(2)
    for args, kwargs in [
        ((x, y), {}),
        ((x,), {"mask": y}),
        ((), {"mask": y, "input_ids": x}),
        ((x, y, True), {"scale": 1.0}),
    ]:
        assert flatten_call(structure, args, kwargs) == [x, y]


def test_what_was_left_out_stays_left_out():
    structure, _ = describe_arguments(forward, (T,), {})
    assert structure.parameters[4] == Parameter("shape", "KEYWORD_ONLY", None)
    call = rebuild_call(structure, [T])
    assert call == ((T,), {"mask": None, "flag": True, "scale": 1.0})


def test_defaults_are_keywords_so_that_decorators_can_set_them():
    def function(x, flag=None): ...

    @functools.wraps(function)
    def decorated(*args, **kwargs):
        return function(*args, **{"flag": True, **kwargs})

    structure, _ = describe_arguments(decorated, (T,), {})
    call = rebuild_call(structure, [T])
    decorated(*call.args, **call.kwargs)


def test_arguments_after_one_left_out_are_keywords():
    def function(a, b=(), c=2, /, d=3): ...

    structure, _ = describe_arguments(function, (T,), {"d": 4})
    call = rebuild_call(structure, [T])
    assert call == ((T,), {"d": 4})
    inspect.signature(function).bind(*call.args, **call.kwargs)


def nested(x, pair=None, options=None, box=None, **others): ...


NESTED = describe_arguments(
    nested,
    (T, (T, [T]), {"a": T, "limit": 3, "rate": math.nan}),
    {"box": Box(T), "extra": T},
)[0]
GOOD: dict[str, Any] = {
    "x": T,
    "pair": (T, [T]),
    "options": {"a": T, "limit": 3, "rate": math.nan},
    "box": Box(T),
    "extra": T,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"x": 3}, "input x must be a tensor, found 3"),
        ({"x": None}, "input x must be a tensor, found None"),
        ({"pair": T}, "input pair must be a tuple of 2, found a Tensor"),
        ({"pair": (T,)}, "input pair must be a tuple of 2, found a tuple of 1"),
        ({"pair": (T, (T,))}, r"input pair\[1\] must be a list of 1, found a tuple of 1"),
        ({"pair": (T, [T, T])}, r"input pair\[1\] must be a list of 1, found a list of 2"),
        (
            {"options": {"a": T}},
            "input options must have the keys 'a', 'limit', 'rate', found a dict with the keys 'a'",
        ),
        ({"options": {}}, "found a dict with the keys none"),
        ({"options": [T]}, "input options must have the keys .* found a list of 1"),
        (
            {"options": {"a": T, "limit": 4, "rate": math.nan}},
            r"input options\['limit'\] is 4, but the graph was captured with 3, which is part of",
        ),
        ({"options": {"a": T, "limit": 3.0, "rate": math.nan}}, "is 3.0, but .* captured with 3"),
        ({"options": {"a": T, "limit": 3, "rate": math.inf}}, "is inf, but .* captured with nan"),
        ({"options": {"a": T, "limit": T, "rate": math.nan}}, "is a Tensor, but .* with 3"),
        ({"box": Box(T, 2)}, r"input box\['y'\] is 2, but the graph was captured with 1"),
        ({"box": Pair(T)}, "input box must have the keys 'x', 'y', 'area', found a dict with the"),
        ({"box": 5}, "input box must have the keys 'x', 'y', 'area', found 5"),
        ({"another": T}, "input others must have the keys 'extra', found a dict with the keys 'ex"),
    ],
)
def test_calls_are_held_against_what_was_captured(change: dict[str, Any], message: str | None):
    if message is None:
        assert len(flatten_call(NESTED, (), GOOD)) == 6
        return
    with pytest.raises(InputError, match=message):
        flatten_call(NESTED, (), GOOD | change)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "input 'input_ids' is missing; the inputs are: input_ids, mask, flag, scale"),
        ((T, T, True, T), {}, "too many positional arguments; the inputs are: input_ids"),
        ((T,), {"input_ids": T}, "multiple values for argument 'input_ids'"),
        ((T,), {"maks": T}, "unexpected keyword argument 'maks'; the inputs are: input_ids, mask"),
        ((T,), {"shape": (1, 2)}, "input 'shape' was not given at capture; the inputs are"),
        ((T,), {"flag": 1}, "input flag is 1, but the graph was captured with True"),
        ((T, T), {}, "input mask is a Tensor, but the graph was captured with None"),
    ],
)
def test_calls_that_do_not_fit_the_signature(args, kwargs, message):
    structure, _ = describe_arguments(forward, (T,), {})
    with pytest.raises(InputError, match=message):
        flatten_call(structure, args, kwargs)


def test_keywords_unknown_at_capture_are_named():
    structure, _ = describe_arguments(nested, (T,), {})
    with pytest.raises(InputError, match="input 'speed' was not given at capture"):
        flatten_call(structure, (T,), {"speed": 1})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (),
            {},
            "the arguments do not fit the signature: missing a required argument: 'input_ids'",
        ),
        ((T,), {"mask": {1, 2}}, "mask is a builtins.set, which cannot be taken apart"),
        ((T,), {"mask": [T, {"a": object()}]}, r"mask\[1\]\['a'\] is a builtins.object"),
        ((T,), {"mask": {(1, 2): T}}, r"mask has the key \(1, 2\); keys must be strings, numbers"),
        ((T,), {"mask": {math.inf: T}}, "mask has the key inf"),
    ],
)
def test_arguments_that_cannot_be_described(args, kwargs, message):
    with pytest.raises(InputError, match=message):
        describe_arguments(forward, args, kwargs)


def test_a_keyword_is_added_before_further_keywords():
    def function(x, *, flag=True, **others):
        return x

    def widened(x, *, flag=True, rng, **others):
        return x

    x, y, z, rng = (torch.zeros(i) for i in range(4))
    arguments, _ = describe_arguments(function, (x,), {"y": [y, 1], "z": {"a": z}})
    added = with_keyword(arguments, "rng")
    kwargs = {"y": [y, 1], "z": {"a": z}, "rng": rng}
    expected, tensors = describe_arguments(widened, (x,), kwargs)
    assert added == expected
    assert list(map(id, flatten_call(added, (x,), kwargs))) == list(map(id, tensors))
    with pytest.raises(InputError, match="'rng' is missing"):
        flatten_call(added, (x,), {"y": [y, 1], "z": {"a": z}})


def test_a_tree_reads_in_the_file():
    tree, _ = describe_result(Pair([T, None], math.inf))
    assert msgspec.json.decode(msgspec.json.encode(tree)) == {
        "type": "object",
        "class": f"{Pair.__module__}:Pair",
        "fields": ["first", "second"],
        "items": [
            {
                "type": "list",
                "items": [
                    {"type": "tensor", "name": "first_0", "index": 0},
                    {"type": "constant", "value": None},
                ],
            },
            {"type": "float", "value": "inf"},
        ],
    }
    assert next(leaves(tree)) == Leaf("first_0", 0)
