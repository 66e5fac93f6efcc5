"""Good documents pass; hand-made documents with wrong types do not."""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec
import pytest

from shardwright.errors import PipelineError
from shardwright.pipeline import Device, Document, ParamValue, SuperTask, TensorInfo, check
from tests.pipeline.documents import GOOD, linear, two_stages


@pytest.mark.parametrize("make", GOOD.values(), ids=GOOD)
def test_good_documents_pass(make: Callable[[], Document]) -> None:
    check(make())


def test_check_changes_nothing() -> None:
    document = two_stages()
    check(document)
    assert document == two_stages()


def test_a_bare_document_of_the_specification_passes() -> None:
    """Without any optional key."""
    document = two_stages()
    document.version = document.metadata.structure = None
    for task in document.supertasks.values():
        if task.data_blob is not None:
            task.data, task.data_blob = linear(4, 8, 8), None
    document.blobs = None
    for info in document.tensors.values():
        if info.value is not None:
            info.value.shape = None
    check(document)
    file = msgspec.to_builtins(document)
    assert file.keys() == {"name", "devices", "tensors", "supertasks", "metadata"}
    assert file["metadata"].keys() == {"tensors", "tensor_slices"}
    assert file["supertasks"]["d0.0"].keys() == {"kind", "inputs", "outputs", "device", "data"}
    assert file["tensors"]["w1"].keys() == {"shape", "dtype", "value"}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: setattr(d.supertasks["send"], "kind", "post"), ("send", None)),
        (lambda d: setattr(d.supertasks["send"], "device_idx", -1), ("send", None)),
        (lambda d: setattr(d.tensors["h1"], "dtype", "float32"), (None, "h1")),
        (lambda d: setattr(d.tensors["h1"], "shape", (4, -8)), (None, "h1")),
        (lambda d: setattr(d, "name", 7), (None, None)),
        (lambda d: setattr(d, "devices", []), (None, None)),
        (lambda d: setattr(d, "name", object()), (None, None)),
        (lambda d: setattr(d, "name", "\ud800"), (None, None)),
    ],
)
def test_wrong_types_made_in_python(
    change: Callable[[Document], None], where: tuple[str | None, str | None]
) -> None:
    document = two_stages()
    change(document)
    with pytest.raises(PipelineError) as caught:
        check(document)
    assert caught.value.rule == "type"
    assert (caught.value.task, caught.value.tensor) == where


def deep(layers: int) -> Document:
    """Many equal layers, a third of them on each of three devices, with 16 constants a layer."""
    document = two_stages()
    text = (document.blobs or {})["layer"]
    document.devices["d2"] = Device("cpu", 2)
    tasks = {"input": document.supertasks["input"]}
    x, place = "x", "d0"
    for i in range(layers):
        device = f"d{i * 3 // layers}"
        if device != place:
            moved, group = f"{x}@{device}", f"g{device}"
            document.tensors[moved] = TensorInfo((4, 8), "f32")
            tasks[f"send{i}"] = SuperTask("send", (x,), (), place, None, group, 0, {})
            tasks[f"recv{i}"] = SuperTask("recv", (), (moved,), device, None, group, 1, {})
            x, place = moved, device
        for part in range(8):
            name, made = f"w{i}.{part}", f"h{i}.{part}"
            value = ParamValue("w.safetensors", "safetensors", name, "i1", ((0, 8), (0, 8)))
            document.tensors[name] = TensorInfo((8, 8), "f32", value)
            document.tensors[made] = TensorInfo((4, 8), "f32")
            tasks[made] = SuperTask("FX", (x, name), (made,), device, data_blob="layer")
            x = made
    document.tensors["h2"] = TensorInfo((4, 8), "f32")
    for name in ("h1", "h2", "h2@d1", "w1", "w2", "w3", "y"):
        del document.tensors[name]
    slices = document.metadata.tensor_slices.outputs
    slices[x] = msgspec.structs.replace(slices.pop("y"), device=place, placements=((0, 4), (0, 8)))
    document.metadata.tensors.outputs["output"].shape = (4, 8)
    tasks["output"] = SuperTask("output", (x,), ())
    document.supertasks, document.blobs = tasks, {"layer": text}
    return document


def test_work_is_linear_in_the_size_of_the_file() -> None:
    """Counted in calls: four times the layers are at most 4.4 times the work."""

    def calls(document: Document) -> int:
        count = 0

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        try:
            check(document)
        finally:
            sys.setprofile(None)
        return count

    assert calls(deep(240)) < 4.4 * calls(deep(60))
