"""Legal files of other writers: whatever order and names they have, they are read and run."""

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
from shardwright.pipeline import Pipeline

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
