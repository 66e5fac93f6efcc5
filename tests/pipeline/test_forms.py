"""Files of other writers in the one form that the rules know, and files in the plain form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PipelineError
from shardwright.pipeline import Device, Pipeline
from tests.clean_process import printed_by
from tests.cli.program import FILE, SOURCE
from tests.runtime.sketch import Sketch

X = torch.ones(4, 8)
File = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a.json`` in two stages, ``b.json`` split over two devices, and their weights."""
    folder = tmp_path_factory.mktemp("normalize")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    graph = sw.capture(model, (X,))
    sw.build(graph, sw.plan(graph, devices=3)).save(folder / "a.json")
    sw.build(graph, sw.plan(graph, mesh={"tensor": 2})).save(folder / "b.json")
    return folder


def backwards(file: File) -> None:
    file["supertasks"] = dict(reversed(file["supertasks"].items()))


def by_name(file: File) -> None:
    file["supertasks"] = dict(sorted(file["supertasks"].items()))


def unused(file: File) -> None:
    file["tensors"]["u"] = {"shape": [1], "dtype": "f32"}
    file["devices"]["u"] = {"kind": "cpu", "idx": 7}


def one_group_name(file: File) -> None:
    for task in file["supertasks"].values():
        if "group" in task:
            task["group"] = "g"


def second_ends(file: File) -> None:
    nothing = {"inputs": [], "outputs": []}
    file["supertasks"] |= {"i2": {"kind": "input", **nothing}, "o2": {"kind": "output", **nothing}}
    sink = next(t for n, t in file["supertasks"].items() if t["kind"] == "output")
    file["supertasks"]["o2"]["inputs"], sink["inputs"] = sink["inputs"], []


def everything(file: File) -> None:
    for change in (unused, second_ends, backwards):
        change(file)


@pytest.mark.parametrize("name", ["a.json", "b.json"])
@pytest.mark.parametrize(
    "change", [backwards, by_name, unused, one_group_name, second_ends, everything]
)
def test_the_file_runs_as_it_did(folder: Path, name: str, change: Callable[[File], None]) -> None:
    file = json.loads((folder / name).read_text())
    change(file)
    other = folder / "other.json"
    other.write_text(json.dumps(file))
    found = sw.run(other, X, in_process=True)
    assert torch.equal(found, sw.run(folder / name, X, in_process=True))


def test_a_file_that_is_in_form_stays_as_it_is(folder: Path) -> None:
    for name in ("a.json", "b.json"):
        assert Pipeline.load(folder / name).to_json() == (folder / name).read_bytes()


def given_out(file: File, tensor: str, name: str) -> None:
    """Give a tensor out as another output of the original."""
    sink = next(t for t in file["supertasks"].values() if t["kind"] == "output")
    sink["inputs"].append(tensor)
    info, metadata = file["tensors"][tensor], file["metadata"]
    metadata.pop("structure", None)
    outputs = metadata["tensors"]["outputs"]
    outputs[name] = {"shape": info["shape"], "dtype": info["dtype"], "idx": len(outputs)}
    device = next(
        t["device"] for t in file["supertasks"].values() if tensor in t["inputs"] and "device" in t
    )
    metadata["tensor_slices"]["outputs"][tensor] = {
        "placements": [[0, size] for size in info["shape"]],
        "origin": name,
        "dtype": info["dtype"],
        "device": device,
    }


def test_inputs_and_constants_may_be_given_out_directly(folder: Path) -> None:
    file = json.loads((folder / "a.json").read_text())
    constant = next(
        n for n, t in file["tensors"].items() if len(t.get("value", {}).get("placements", ())) == 2
    )
    (x,) = file["metadata"]["tensor_slices"]["inputs"]
    given_out(file, x, "same")
    given_out(file, constant, "weight")
    (folder / "other.json").write_text(json.dumps(file))
    _, same, weight = sw.run(folder / "other.json", X, in_process=True).values()
    assert torch.equal(same, X)
    assert weight.shape == (8, 8)


def test_a_slice_may_be_of_another_dtype_than_its_origin(folder: Path) -> None:
    file = json.loads((folder / "a.json").read_text())
    tensors = file["metadata"]["tensors"]
    for whole in (*tensors["inputs"].values(), *tensors["outputs"].values()):
        whole["dtype"] = "f64"
    (folder / "other.json").write_text(json.dumps(file))
    found = sw.run(folder / "other.json", X.double(), in_process=True)
    assert found.dtype == torch.float64
    assert torch.equal(found.float(), sw.run(folder / "a.json", X, in_process=True))


def test_what_waits_for_itself_is_still_refused(folder: Path) -> None:
    file = json.loads((folder / "a.json").read_text())
    first = next(t for t in file["supertasks"].values() if t["kind"] == "FX")
    first["inputs"][0] = first["outputs"][0]
    with pytest.raises(PipelineError):
        Pipeline.from_json(json.dumps(file).encode())


# Keys of the specification, by where they stand; * is any name.
KEYS = {
    "": {"name", "devices", "tensors", "supertasks", "metadata"},
    "devices.*": {"kind", "idx"},
    "tensors.*": {"shape", "dtype", "value"},
    "tensors.*.value": {"path", "format", "name", "name_in_graph", "placements"},
    "supertasks.*": {
        *("kind", "inputs", "outputs", "device", "data", "group", "device_idx", "metadata"),
    },
    "metadata": {"tensors", "tensor_slices"},
    "metadata.tensors": {"inputs", "outputs"},
    "metadata.tensors.inputs.*": {"shape", "dtype", "idx"},
    "metadata.tensors.outputs.*": {"shape", "dtype", "idx"},
    "metadata.tensor_slices": {"inputs", "outputs"},
    "metadata.tensor_slices.inputs.*": {"placements", "origin", "dtype", "device"},
    "metadata.tensor_slices.outputs.*": {"placements", "origin", "dtype", "device"},
}


def at(data: Any, path: list[str]) -> list[dict[str, Any]]:
    """The objects that stand at a path; none where a key is left out."""
    found = [data]
    for part in path:
        if part == "*":
            found = [item for entry in found for item in entry.values()]
        else:
            found = [entry[part] for entry in found if part in entry]
    return found


def assert_plain(path: Path) -> None:
    data = json.loads(path.read_text())
    for place, keys in KEYS.items():
        for entry in at(data, place.split(".") if place else []):
            assert entry.keys() <= keys, place
    wanted = KEYS["supertasks.*"] - {"device", "data", "group", "device_idx", "metadata"}
    assert all(wanted <= task.keys() for task in data["supertasks"].values())


class Attention(nn.Module):
    """Heads that are transposed, and cut behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        heads = self.queries(x).view(2, 3, 2, 4).transpose(1, 2)
        return {"out": self.out(torch.softmax(heads, -1).transpose(1, 2).reshape(2, 3, 8))}


def layers(count: int = 4) -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)]).eval()


def built(model: nn.Module, x: torch.Tensor, **told: Any) -> Pipeline:
    graph = sw.capture(model, (x,))
    return sw.build(graph, sw.plan(graph, **told))


PROGRAM = """
import sys, torch
import shardwright as sw
torch.save(sw.run(sys.argv[1], torch.load("x.pt"), in_process=sys.argv[2] == "here"), "y.pt")
"""


@pytest.mark.parametrize(
    ("make", "shape", "told", "lowered"),
    [
        (layers, (2, 8), {"devices": 2}, False),
        (layers, (2, 8), {"devices": 2}, True),
        (layers, (4, 8), {"mesh": {"data": 2}}, False),
        (layers, (4, 8), {"mesh": {"tensor": 2}}, False),
        (Attention, (2, 3, 8), {"devices": 1}, False),
    ],
)
def test_a_plain_file_gives_equal_results_in_a_fresh_process(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    told: dict[str, Any],
    lowered: bool,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    pipeline = built(make().eval(), x, **told)
    pipeline = sw.lower(pipeline) if lowered else pipeline
    expected = sw.run(pipeline, x, in_process=True)
    before = pipeline.metadata.structure
    pipeline.save(tmp_path / "a.json", plain=True)
    assert_plain(tmp_path / "a.json")
    assert before is not None
    assert pipeline.metadata.structure == before, "the object keeps what the file leaves out"
    torch.save(x, tmp_path / "x.pt")
    printed_by("shardwright", "check", "--weights", "a.json", folder=tmp_path)
    printed_by("python", "-c", PROGRAM, "a.json", "here", folder=tmp_path)
    found = torch.load(tmp_path / "y.pt")
    wanted = expected["out"] if isinstance(expected, dict) else expected
    assert torch.equal(found, wanted)
    again = Pipeline.load(tmp_path / "a.json")
    again.save(tmp_path / "b.json", plain=True)
    assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()


class Several(nn.Module):
    """Returns what a plain file knows the names of, and not how they were nested."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.layer, self.nested = nn.Linear(8, 8), nested

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layer(x)
        return {"scores": y, "more": [y.relu(), x + 1]} if self.nested else (y, y.relu())


@pytest.mark.parametrize(
    ("nested", "names"),
    [(True, ["scores", "more_0", "more_1"]), (False, ["output_0", "output_1"])],
)
def test_several_results_of_a_plain_file_are_a_dict_by_name(
    nested: bool, names: list[str], tmp_path: Path
) -> None:
    model, x = Several(nested), torch.randn(2, 8)
    built(model, x, devices=1).save(tmp_path / "a.json", plain=True)
    found = sw.run(tmp_path / "a.json", x, in_process=True)
    assert list(found) == names
    wanted = torch.utils._pytree.tree_leaves(model(x))
    assert all(map(torch.equal, found.values(), wanted))
    assert sw.verify(tmp_path / "a.json", model, (x,)).equal


def test_the_command_writes_a_plain_file_that_workers_run(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(SOURCE)
    name = FILE.removesuffix(".py")
    build = ("shardwright", "build", f"{name}.py:make", "--devices", "2", "-o", "a.json")
    printed_by(*build, "--plain", folder=tmp_path)
    assert_plain(tmp_path / "a.json")
    said = printed_by("shardwright", "verify", "a.json", f"{name}.py:make", folder=tmp_path)
    assert "equal" in said


def on_hosts(pipeline: Pipeline) -> None:
    for k, device in enumerate(pipeline.devices.values()):
        device.host = f"h{k}"


def cuda(pipeline: Pipeline) -> None:
    pipeline.devices["d1"] = Device("cuda", 0)


def fused(pipeline: Pipeline) -> None:
    pipeline.devices["d1"] = Device("npu", 0, pes=(0, 1))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (on_hosts, r"host \(devices of 2 hosts\)"),
        (cuda, r"the device kind 'cuda' \(of 'd1'\)"),
        (fused, r"pes \(of device 'd1'\)"),
    ],
)
def test_what_a_plain_file_cannot_say_of_devices_is_refused(
    tmp_path: Path, change: Callable[[Pipeline], None], named: str
) -> None:
    pipeline = built(layers(), torch.ones(2, 8), devices=2)
    change(pipeline)
    with pytest.raises(PipelineError, match=named) as caught:
        pipeline.save(tmp_path / "a.json", plain=True)
    assert caught.value.rule == "plain"
    assert list(tmp_path.iterdir()) == []
    pipeline.save(tmp_path / "a.json")


def test_one_host_of_all_devices_is_left_out(tmp_path: Path) -> None:
    pipeline = built(layers(), torch.ones(2, 8), devices=2)
    for device in pipeline.devices.values():
        device.host = "h"
    pipeline.save(tmp_path / "a.json", plain=True)
    assert_plain(tmp_path / "a.json")


class Doubled(nn.Module):
    """Adds what it is given to itself, of any dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Counting(nn.Module):
    """Writes a buffer."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


def step() -> Pipeline:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graph = sw.compile_ir(train, torch.ones(4, 8))
    return sw.build(graph, sw.plan(graph, devices=2, microbatches=2))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: built(
                nn.Sequential(Doubled()), torch.ones(2, dtype=torch.complex64), devices=1
            ),
            "'c64'",
        ),
        (lambda: built(Counting(), torch.ones(2), devices=1), "training .buffers"),
        (step, r"training \(a training step\)"),
    ],
)
def test_programs_that_need_an_extension_are_refused(
    tmp_path: Path, make: Callable[[], Pipeline], named: str
) -> None:
    with pytest.raises(PipelineError, match=named) as caught:
        make().save(tmp_path / "a.json", plain=True)
    assert caught.value.rule == "plain"
    assert list(tmp_path.iterdir()) == []


def sent(op: str) -> Pipeline:
    """Sends a transposed tensor to a slot that calls an operator on it."""
    sketch = Sketch(2)
    sketch.input("x", (2, 3))
    sketch.fx("d0.0", "d0", ["x"], ["y"], lambda b, x: b.call("aten.t.default", x))
    sketch.send("y", "d0", "d1")
    sketch.fx("d1.0", "d1", ["y@d1"], ["z"], lambda b, y: b.call(op, y))
    return sketch.finish(["z"])


def test_strides_are_left_out_only_where_graphs_do_without_them(tmp_path: Path) -> None:
    pipeline, x = sent("aten.t.default"), torch.arange(6.0).reshape(2, 3)
    assert pipeline.tensors["y@d1"].strides == (1, 3)
    with pytest.raises(PipelineError, match=r"strides \(of 'y@d1', which is not contiguous"):
        pipeline.save(tmp_path / "a.json", plain=True)
    pipeline = sent("aten.sum.default")
    pipeline.save(tmp_path / "a.json", plain=True)
    assert_plain(tmp_path / "a.json")
    assert sw.run(tmp_path / "a.json", x, in_process=True).item() == 15.0
