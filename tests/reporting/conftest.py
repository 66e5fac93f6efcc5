"""What reports are made of: a small pipeline and the events of a run, written by hand."""

import json
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from shardwright.engine.timeline import Event
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
def split() -> Document:
    """Four slots, each with a part of every layer's weight, and an all_gather after each layer."""
    slots = [f"d{i}" for i in range(4)]
    document = Document(
        name="split",
        devices={slot: Device("cpu", i) for i, slot in enumerate(slots)},
        tensors={f"x@{slot}": TensorInfo((8, 8), "f32") for slot in slots},
        supertasks={"input": SuperTask("input", (), tuple(f"x@{slot}" for slot in slots))},
        metadata=Metadata(
            tensors=MetadataTensors(
                {"x": MetadataTensor((8, 8), "f32", 0)},
                {"output": MetadataTensor((8, 8), "f32", 0)},
            ),
            tensor_slices=MetadataTensorSlices(
                {
                    f"x@{slot}": MetadataTensorSlice(((0, 8), (0, 8)), "x", "f32", slot)
                    for slot in slots
                },
                {
                    f"h2@{slot}": MetadataTensorSlice(rows(i), "output", "f32", slot)
                    for i, slot in enumerate(slots)
                },
            ),
        ),
        blobs={"layer": LAYER},
    )
    source = "x"
    for layer_number in range(3):
        for i, slot in enumerate(slots):
            add_part(document, layer_number, i, slot, source)
        source = f"h{layer_number}"
    return document


def rows(index: int) -> tuple[tuple[int, int], ...]:
    return ((2 * index, 2 * index + 2), (0, 8))


def add_part(document: Document, number: int, index: int, slot: str, source: str) -> None:
    """A layer's part on one slot: two rows of its weight, and the gathering of the result."""
    weight, part, made = (f"{name}{number}@{slot}" for name in "wah")
    value = ParamValue("model.safetensors", "safetensors", f"w{number}", "i1", rows(index))
    document.tensors[weight] = TensorInfo((2, 8), "f32", value)
    document.tensors[part] = TensorInfo((2, 8), "f32")
    document.tensors[made] = TensorInfo((8, 8), "f32")
    document.supertasks[f"{slot}.{number}"] = layer(f"{source}@{slot}", weight, part, slot)
    document.supertasks[f"g{number}.{slot}"] = SuperTask(
        "all_gather", (part,), (made,), slot, None, f"g{number}", index, {"dim": 0}
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
