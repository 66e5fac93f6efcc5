"""Bytes of a file: round trips of any document, and everything that is not a document."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PipelineError
from shardwright.ir.structure import (
    Arguments,
    DictTree,
    Fixed,
    FixedFloat,
    Leaf,
    ListTree,
    ObjectTree,
    Parameter,
    TupleTree,
)
from shardwright.pipeline import (
    Device,
    Document,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    MetadataTensorSlices,
    ParamValue,
    Pipeline,
    Structure,
    SuperTask,
    TensorInfo,
    Training,
)
from shardwright.pipeline import schema as s
from shardwright.pipeline.serialize import read, reread, write
from tests.pipeline.documents import GOOD, two_stages

# --- any document -----------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
NATURALS = st.integers(0, 2**63 - 1)
SIZES = st.lists(NATURALS, max_size=4).map(tuple)
PLACEMENTS = st.lists(st.tuples(NATURALS, NATURALS), max_size=4).map(tuple)


def chosen(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(literal.__args__)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def maps(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(NAMES, strategy, max_size=4)


DTYPES = chosen(s.DType)
NAME_LISTS = st.lists(NAMES, max_size=3).map(tuple)
CONSTANTS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES
)
TREES = st.recursive(
    st.builds(Leaf, NAMES, st.integers(0, 9))
    | st.builds(Fixed, CONSTANTS)
    | st.builds(FixedFloat, st.sampled_from(["inf", "-inf", "nan"])),
    lambda inner: st.one_of(
        st.builds(ListTree, st.lists(inner, max_size=3).map(tuple)),
        st.builds(TupleTree, st.lists(inner, max_size=3).map(tuple)),
        st.builds(
            DictTree,
            st.lists(CONSTANTS, max_size=2).map(tuple),
            st.lists(inner, max_size=2).map(tuple),
        ),
        st.builds(ObjectTree, NAMES, NAME_LISTS, st.lists(inner, max_size=2).map(tuple)),
    ),
    max_leaves=6,
)
DOCUMENTS = st.builds(
    Document,
    NAMES,
    maps(
        st.builds(
            Device, chosen(s.DeviceKind), NATURALS, optional(NAMES), optional(st.just((0, 1)))
        )
    ),
    maps(
        st.builds(
            TensorInfo,
            SIZES,
            DTYPES,
            optional(
                st.builds(
                    ParamValue,
                    NAMES,
                    chosen(s.ParamfileFormat),
                    NAMES,
                    NAMES,
                    PLACEMENTS,
                    optional(SIZES),
                )
            ),
            optional(SIZES),
            optional(st.just("zeros")),
        )
    ),
    maps(
        st.builds(
            SuperTask,
            chosen(s.SuperTaskKind),
            NAME_LISTS,
            NAME_LISTS,
            *[optional(NAMES)] * 3,
            optional(NATURALS),
            optional(maps(NATURALS | NAMES)),
            optional(NAMES),
            optional(chosen(s.Phase)),
        )
    ),
    st.builds(
        Metadata,
        st.builds(MetadataTensors, *[maps(st.builds(MetadataTensor, SIZES, DTYPES, NATURALS))] * 2),
        st.builds(
            MetadataTensorSlices,
            *[maps(st.builds(MetadataTensorSlice, PLACEMENTS, NAMES, DTYPES, NAMES))] * 2,
        ),
        optional(
            st.builds(
                Structure,
                st.builds(
                    Arguments,
                    st.lists(st.builds(Parameter, NAMES, NAMES, optional(TREES)), max_size=2).map(
                        tuple
                    ),
                ),
                TREES,
            )
        ),
    ),
    optional(NATURALS),
    optional(maps(NAMES)),
    optional(st.builds(Training, maps(NAMES))),
    optional(NAME_LISTS),
)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS)
def test_any_document_comes_back(document: Document) -> None:
    data = write(document)
    again = read(data, Document)
    assert again == document
    assert write(again) == data


@settings(max_examples=100, deadline=None)
@given(PLACEMENTS)
def test_any_placements_come_back(placements: s.Placements) -> None:
    document = two_stages()
    value = document.tensors["w1"].value
    assert value is not None
    value.placements = placements
    assert read(write(document), Document).tensors["w1"].value == value


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_good_documents_come_back(make: Callable[[], Document]) -> None:
    assert read(write(make()), Document) == make()


def test_the_file_has_a_line_an_entry() -> None:
    lines = write(two_stages()).decode().splitlines()
    assert lines[0] == "{"
    assert lines[-1] == "}"
    assert '"send": {"kind":"send","inputs":["h2"],"outputs":[],"device":"d0","group":"g0",' in (
        "\n".join(lines)
    )
    assert sum(line.startswith('"w') for line in lines) == 3


# --- what is no document -----------------------------------------------------------------------

GOOD_FILE = write(two_stages())


def failure(data: bytes) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        read(data, Pipeline)
    return caught.value


@given(st.integers(0, len(GOOD_FILE.rstrip()) - 1))
def test_a_file_cut_short(length: int) -> None:
    error = failure(GOOD_FILE[:length])
    assert error.rule == "json"


def test_the_message_of_a_file_cut_short() -> None:
    message = str(failure(GOOD_FILE[:700]))
    assert "the file ends too early; it was cut short" in message
    assert "of 700 bytes" in message


@given(st.binary(max_size=60))
def test_garbage(data: bytes) -> None:
    assert failure(data).rule in ("json", "type")


@given(st.integers(0, len(GOOD_FILE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_one_error(place: int, byte: int) -> None:
    data = bytearray(GOOD_FILE)
    data[place] = byte
    try:
        read(bytes(data), Pipeline)
    except PipelineError as error:
        assert error.rule in ("json", "type", "unique-keys", "version")  # noqa: PT017


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_nesting(data: bytes) -> None:
    assert failure(data).rule == "json"


def test_a_structure_nested_too_deep() -> None:
    deep = sys.getrecursionlimit()
    tree = b'{"type":"list","items":[' * deep + b"]}" * deep
    document = json.loads(GOOD_FILE)
    document["metadata"]["structure"]["outputs"] = "HERE"
    assert failure(json.dumps(document).encode().replace(b'"HERE"', tree)).rule == "json"


@pytest.mark.parametrize("data", [b"null", b"[]", b"1", b'"pipeline"', b"{}"])
def test_json_that_is_no_pipeline(data: bytes) -> None:
    assert failure(data).rule == "type"


def changed(path: tuple[str, ...], item: Any) -> bytes:
    """The good file with an entry replaced; an Ellipsis takes it away."""
    document = json.loads(GOOD_FILE)
    entry = document
    for key in path[:-1]:
        entry = entry[key]
    if item is ...:
        del entry[path[-1]]
    else:
        entry[path[-1]] = item
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "item", "place", "task", "tensor"),
    [
        (("name",), 3, "$.name", None, None),
        (("name",), ..., "name", None, None),
        (("color",), "red", "color", None, None),
        (("devices",), [], "$.devices", None, None),
        (("devices", "d0", "kind"), "tpu", "$.devices['d0'].kind: Invalid enum value", None, None),
        (("devices", "d0", "idx"), -1, "$.devices['d0'].idx", None, None),
        (("devices", "d0", "idx"), 0.5, "$.devices['d0'].idx", None, None),
        (("tensors", "h1", "dtype"), "f23", "$.tensors['h1'].dtype", None, "h1"),
        (("tensors", "h1", "shape"), "4,8", "$.tensors['h1'].shape", None, "h1"),
        (("tensors", "h1", "shape"), [True], "$.tensors['h1'].shape[0]", None, "h1"),
        (("tensors", "h1", "shape"), [2**63], "$.tensors['h1'].shape[0]", None, "h1"),
        (("tensors", "h1", "shape"), ..., "missing required field `shape`", None, "h1"),
        (("tensors", "w1", "value", "format"), "zip", "$.tensors['w1'].value.format", None, "w1"),
        (
            ("tensors", "w1", "value", "placements"),
            [[0, 8, 1], [0, 8]],
            "$.tensors['w1'].value.placements[0]",
            None,
            "w1",
        ),
        (("tensors", "w1", "value", "size"), 1, "unknown field `size`", None, "w1"),
        (("supertasks", "send", "kind"), "post", "$.supertasks['send'].kind", "send", None),
        (("supertasks", "send", "kind"), ..., "missing required field `kind`", "send", None),
        (("supertasks", "send", "inputs"), ["h2", None], "['send'].inputs[1]", "send", None),
        (("supertasks", "send", "metadata"), {"a": 0.5}, "['send'].metadata", "send", None),
        (("supertasks", "send", "devise"), "d0", "unknown field `devise`", "send", None),
        (("metadata",), None, "$.metadata", None, None),
        (("metadata", "tensors", "inputs", "x", "idx"), "0", "['x'].idx", None, "x"),
        (
            ("metadata", "tensor_slices", "outputs", "y", "origin"),
            1,
            "$.metadata.tensor_slices.outputs['y'].origin",
            None,
            "y",
        ),
        (("metadata", "structure", "outputs"), {"type": "set"}, "structure.outputs", None, None),
        (("version",), "1", "$.version", None, None),
    ],
)
def test_a_wrong_type_is_named_by_its_place(
    path: tuple[str, ...], item: Any, place: str, task: str | None, tensor: str | None
) -> None:
    error = failure(changed(path, item))
    assert (error.rule, error.task, error.tensor) == ("type", task, tensor)
    assert place in str(error)


def test_a_newer_version_is_said_before_its_new_fields() -> None:
    document = json.loads(GOOD_FILE) | {"version": 2, "dreams": []}
    error = failure(json.dumps(document).encode())
    assert error.rule == "version"
    assert "upgrade shardwright" in str(error)


def test_a_key_that_stands_twice() -> None:
    data = GOOD_FILE.replace(b'"d0.1":', b'"d0.0":')
    error = failure(data)
    assert error.rule == "unique-keys"
    assert "'d0.0' stands twice" in str(error)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(number: str) -> None:
    data = GOOD_FILE.replace(b'"idx":0', f'"idx":{number}'.encode())
    assert failure(data).rule == "type"


def test_a_struct_with_a_wrong_type_is_found() -> None:
    document = two_stages()
    document.supertasks["send"].device = 3  # type: ignore[assignment]
    with pytest.raises(PipelineError, match="supertask 'send'") as caught:
        reread(document)
    assert caught.value.rule == "type"


def test_what_python_writes_otherwise_is_put_right() -> None:
    document = two_stages()
    document.tensors["x"].shape = [4, 8]  # type: ignore[assignment]
    document.supertasks["d1.0"].kind = "fx"
    assert reread(document) == two_stages()


@pytest.mark.parametrize("constant", [math.inf, -math.inf, math.nan])
def test_numbers_that_would_come_back_as_none(constant: float) -> None:
    document = two_stages()
    assert document.metadata.structure is not None
    document.metadata.structure.outputs = TupleTree((Leaf("output", 0), Fixed(constant)))
    with pytest.raises(PipelineError, match=rf"FixedFloat\('{constant}'\)"):
        write(document)
    number = FixedFloat(str(constant))  # type: ignore[arg-type]
    document.metadata.structure.outputs = TupleTree((Leaf("output", 0), number))
    assert reread(document) == document


def test_reading_imports_nothing_and_runs_nothing() -> None:
    """Not even for a class that the structure names and that could be imported."""
    document = two_stages()
    assert document.metadata.structure is not None
    document.metadata.structure.outputs = ObjectTree("this:s", ("y",), (Leaf("output", 0),))
    data = write(document)
    Pipeline.from_json(data)
    seen: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("import", "exec", "compile", "open", "pickle.find_class"):
            seen.append(f"{event} {arguments[:1]}")

    sys.addaudithook(hook)
    Pipeline.from_json(data)
    watching = False
    assert seen == []
    assert "this" not in sys.modules
