"""The table of kinds: unique, readable, and the same as what native code is told."""

import re
from pathlib import Path

import pytest

import shardwright.kernels.native
from shardwright.errors import ExecError
from shardwright.ir.tensor_meta import DTYPES
from shardwright.kernels.attributes import AttrSchema
from shardwright.kernels.lowered import BY_ID, BY_NAME, KINDS, kind_of
from shardwright.kernels.row import ACTIVATIONS

HEADER = (Path(shardwright.kernels.native.__file__).parent / "abi.h").read_text()


def enum(name):
    """The members of an enum of the header, in order."""
    body = re.search(rf"enum {name}[^{{]*{{([^}}]*)}}", HEADER)
    assert body
    return [item.strip() for item in body[1].split(",") if item.strip()]


def test_dtypes_are_numbered_alike():
    assert enum("Dtype") == [name.upper() for name in DTYPES]


def test_ids_and_names_are_unique():
    assert len(BY_ID) == len(BY_NAME) == len(KINDS)


def test_every_binder_of_the_native_sources_is_of_a_kind():
    sources = Path(shardwright.kernels.native.__file__).parent.glob("*.cpp")
    numbers = [
        int(found)
        for source in sources
        for found in re.findall(r"\bRegister\s+\w+[({]\s*(\d+)", source.read_text())
    ]
    assert set(numbers) <= set(BY_ID)
    assert numbers


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_defaults_are_of_the_first_schema(kind):
    defaults = dict(kind.attrs.defaults)
    if kind.has_defaults and defaults:
        assert kind.pack(defaults) == (0, b"")
        assert kind.unpack(0, b"") == defaults
        assert kind.unpack(1, kind.attrs.pack(defaults)) == defaults


def test_attributes_survive_packing():
    attrs = {"stride": (2, 1), "padding": (0, 3), "dilation": (1, 1), "groups": 4, "activation": 1}
    schema, blob = BY_NAME["conv"].pack(attrs)
    assert BY_NAME["conv"].unpack(schema, blob) == attrs


def test_what_a_schema_cannot_read_is_an_error():
    gemm, view = BY_NAME["gemm"], BY_NAME["view"]
    _, blob = gemm.pack({"transpose_b": 1})
    for wrong in (blob[:-1], blob + b"\0", b""):
        with pytest.raises(ExecError, match="gemm, schema 1"):
            gemm.unpack(1, wrong)
    with pytest.raises(ExecError, match="gemm: schema 0 has no blob"):
        gemm.unpack(0, b"\0")
    with pytest.raises(ExecError, match=r"no attribute schema 2; known are 0, 1"):
        gemm.unpack(2, blob)
    with pytest.raises(ExecError, match=r"view has no attribute schema 0; known are 1"):
        view.unpack(0, b"")
    with pytest.raises(ExecError, match="kind 7 is unknown"):
        kind_of(7)


def test_layouts_refuse_what_does_not_fit():
    layout = AttrSchema({"count": "B", "name": "s"})
    assert layout.unpack(layout.pack({"count": 3, "name": "é"})) == {"count": 3, "name": "é"}
    for wrong in ({"count": 300, "name": ""}, {"count": 3}, {"count": 3, "name": 4}):
        with pytest.raises(ExecError):
            layout.pack(wrong)
    with pytest.raises(ExecError, match="ends in attribute 'name'"):
        layout.unpack(layout.pack({"count": 3, "name": "abc"})[:-1])


@pytest.mark.parametrize(
    ("name", "n_in", "n_out", "fits"),
    [
        ("gemm", 4, 1, True),
        ("gemm", 3, 1, False),
        ("gemm", 4, 2, False),
        ("concat", 5, 1, True),
        ("concat", 5, 2, False),
        ("fill", 0, 1, True),
        ("fill", 1, 1, False),
        ("adamw", 13, 8, True),
        ("adamw", 12, 8, False),
        ("adam", 13, 7, False),
        ("sgd", 7, 4, True),
        ("step_inc", 3, 3, True),
        ("step_inc", 3, 2, False),
        ("generic", 0, 9, True),
    ],
)
def test_operands_are_counted(name, n_in, n_out, fits):
    assert BY_NAME[name].takes(n_in, n_out) is fits


def test_activations_begin_with_none():
    assert ACTIVATIONS[0] == "none"
    assert len(set(ACTIVATIONS)) == len(ACTIVATIONS)
