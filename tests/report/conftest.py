"""What reports are made of: a small pipeline and the events of a run, written by hand."""

import json
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console, RenderableType

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
from shardwright.runtime.timeline import Event

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
    """Two slots, layers that share a graph, a tensor that goes across."""
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


@pytest.fixture
def drawn() -> Callable[..., str]:
    """What a renderable looks like in a terminal."""

    def draw(renderable: RenderableType, width: int = 84, color: str | None = None) -> str:
        console = Console(
            file=StringIO(), width=width, color_system=color, force_terminal=bool(color)
        )
        console.print(renderable)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    return draw


@pytest.fixture
def stream() -> Callable[[int], list[Event]]:
    """Calls of 10 ms a slot: d0 computes and sends; d1 waits for the first, then does the same."""

    def event(slot: str, call: int, kind: str, start: float, end: float, nbytes: int = 0) -> Event:
        return Event(
            slot, int(slot[1:]), call, f"{kind}.{slot}", kind, start / 1e3, end / 1e3, nbytes
        )

    def make(calls: int) -> list[Event]:
        events = [event("d1", 0, "wait", 0, 11)]
        for call in range(calls):
            start = 10 * call
            events.append(event("d0", call, "compute", start, start + 10))
            events.append(event("d0", call, "send", start + 10, start + 10.5, 4000))
            events.append(event("d1", call, "recv", start + 10.5, start + 11, 4000))
            events.append(event("d1", call, "compute", start + 11, start + 21))
        return events

    return make
