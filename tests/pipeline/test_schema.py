"""The types of the file, and the JSON Schema kept beside them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import shardwright.pipeline.schema as schema
from shardwright.ir.tensor_meta import DTYPES
from shardwright.pipeline import SuperTask, TensorInfo, json_schema, json_schema_text


def test_the_json_schema_is_kept_beside_the_types() -> None:
    kept = Path(schema.__file__).with_name("schema.json")
    assert kept.read_text() == json_schema_text(), "the format's types changed: make schema"


def test_the_json_schema_names_every_type_of_the_specification() -> None:
    definitions = json_schema()["$defs"]
    assert {
        "Device",
        "TensorInfo",
        "ParamValue",
        "SuperTask",
        "Metadata",
        "MetadataTensors",
        "MetadataTensor",
        "MetadataTensorSlices",
        "MetadataTensorSlice",
    } < definitions.keys()
    assert definitions["SuperTask"]["required"] == ["kind", "inputs", "outputs"]
    assert definitions["TensorInfo"]["properties"]["dtype"]["enum"] == sorted(DTYPES)


def test_the_dtypes() -> None:
    assert set(schema.DType.__args__) == set(DTYPES)  # type: ignore[attr-defined]


def test_fx_is_read_as_FX() -> None:
    task = msgspec.json.decode(b'{"kind":"fx","inputs":[],"outputs":[]}', type=SuperTask)
    assert task.kind == "FX"
    assert b'"kind":"FX"' in msgspec.json.encode(task)


@pytest.mark.parametrize(
    ("info", "nbytes", "constant"),
    [
        (TensorInfo((2, 3), "bf16"), 12, False),
        (TensorInfo((), "f64"), 8, False),
        (TensorInfo((4, 0), "f32", init="zeros"), 0, True),
        (TensorInfo((5,), "f8", init="zeros"), 5, True),
    ],
)
def test_what_a_tensor_info_says(info: TensorInfo, nbytes: int, constant: bool) -> None:
    assert (info.nbytes, info.is_constant) == (nbytes, constant)
