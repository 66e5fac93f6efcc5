"""A small pipeline written by hand: two slots, repeated layers, a tensor that goes across."""

import json

import pytest

from shardwright.pipeline.schema import (
    Device,
    Document,
    Metadata,
    MetadataTensor,
    MetadataTensors,
    MetadataTensorSlice,
    MetadataTensorSlices,
    ParamValue,
    SuperTask,
    TensorInfo,
)

LAYER = json.dumps({"version": 1, "inputs": ["i0", "i1"], "nodes": [{}, {}], "outputs": []})


def constant(name: str) -> TensorInfo:
    value = ParamValue("model.safetensors", "safetensors", name, "i1", ((0, 8), (0, 8)))
    return TensorInfo((8, 8), "f32", value)


def activation() -> TensorInfo:
    return TensorInfo((4, 8), "f32")


def layer(source: str, weight: str, made: str, device: str) -> SuperTask:
    return SuperTask("FX", (source, weight), (made,), device=device, data_blob="layer")


def transfer(kind: str, name: str, device: str, index: int) -> SuperTask:
    inputs, outputs = ((name,), ()) if kind == "send" else ((), (name,))
    return SuperTask(kind, inputs, outputs, device, None, "g0", index, {})


@pytest.fixture
def document() -> Document:
    whole = ((0, 4), (0, 8))
    return Document(
        name="layers",
        devices={"d0": Device("cpu", 0), "d1": Device("cpu", 1, host="far")},
        tensors={name: activation() for name in ("x", "h0", "h1", "h1@d1", "y")}
        | {name: constant(name) for name in ("w0", "w1", "w2")},
        supertasks={
            "input": SuperTask("input", (), ("x",)),
            "d0.0": layer("x", "w0", "h0", "d0"),
            "d0.1": layer("h0", "w1", "h1", "d0"),
            "send.h1.d0.d1": transfer("send", "h1", "d0", 0),
            "recv.h1.d0.d1": transfer("recv", "h1@d1", "d1", 1),
            "d1.0": layer("h1@d1", "w2", "y", "d1"),
            "output": SuperTask("output", ("y",), ()),
        },
        metadata=Metadata(
            tensors=MetadataTensors(
                {"x": MetadataTensor((4, 8), "f32", 0)},
                {"output": MetadataTensor((4, 8), "f32", 0)},
            ),
            tensor_slices=MetadataTensorSlices(
                {"x": MetadataTensorSlice(whole, "x", "f32", "d0")},
                {"y": MetadataTensorSlice(whole, "output", "f32", "d1")},
            ),
        ),
        blobs={"layer": LAYER},
    )
