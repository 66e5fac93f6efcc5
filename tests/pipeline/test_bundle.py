"""Bundles: several pipelines as one folder, written whole, read whole or refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import InputError, PipelineError, WeightError
from shardwright.pipeline import Bundle
from shardwright.pipeline.bundle import INDEX, first_of, load_either
from tests.clean_process import run_program


class Net(nn.Module):
    """What is added by position is a constant that each program has anew."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.tensor([[float(k)] for k in range(32)])
        return self.down(self.up(x) + places[: x.shape[1]])


def made(devices: int = 2) -> tuple[Net, Bundle]:
    torch.manual_seed(0)
    model = Net().eval()
    programs = sw.capture(model, (torch.randn(3, 5, 8),), dynamic={"x": ("batch", "length", None)})
    return model, sw.build(programs, sw.plan(programs, devices=devices))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _, bundle = made()
    bundle.at(batch=8, length=16)
    bundle.save(tmp_path / "net")
    return tmp_path / "net"


def test_a_folder_has_a_pipeline_for_each_and_the_weights_once(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "batch=4,length=8.pipeline.json",
        "batch=8,length=16.pipeline.json",
        "bundle.json",
        "bundle.weights.safetensors",
    ]
    stored = load_file(folder / "bundle.weights.safetensors")
    assert sum(name.startswith("up.") for name in stored) == 2
    assert len(stored) == 6, "two layers, and a table for each length"
    for name in names[:2]:
        alone = sw.Pipeline.load(folder / name)
        alone.weights.check(alone.tensors)


def test_what_one_process_writes_another_runs(folder: Path) -> None:
    model, _ = made()
    x = torch.randn(6, 13, 8)
    torch.save(x, folder.parent / "x.pt")
    code = (
        "import sys, torch, shardwright as sw\n"
        "x = torch.load(sys.argv[1])\n"
        "with sw.Runner(sys.argv[2], in_process=True) as runner:\n"
        "    torch.save(runner(x), sys.argv[1])\n"
    )
    done = run_program(code, str(folder.parent / "x.pt"), str(folder))
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(folder.parent / "x.pt"), model(x))


def test_a_bundle_is_read_as_it_was_written(folder: Path) -> None:
    bundle = Bundle.load(folder)
    assert [*bundle.sizes()] == [{"batch": 4, "length": 8}, {"batch": 8, "length": 16}]
    assert bundle.shapes == made()[1].shapes
    assert isinstance(load_either(folder), Bundle)
    assert first_of(folder).to_json() == bundle.first.to_json()
    assert str(bundle).splitlines()[0] == "bundle of Net, 2 device slots"


def test_a_call_runs_on_the_next_larger_one_there_is(folder: Path) -> None:
    bundle = Bundle.load(folder)
    assert bundle.fitting({"batch": 2, "length": 8}) == {"batch": 4, "length": 8}
    assert bundle.fitting({"batch": 5, "length": 8}) == {"batch": 8, "length": 16}
    larger = bundle.fitting({"batch": 5, "length": 17})
    with pytest.raises(
        InputError,
        match=r"no program for batch=8,length=32; those there are: batch=4,length=8; batch=8",
    ):
        bundle.at(**larger)


def test_a_folder_that_does_not_say_what_is_padded_pads_nothing(folder: Path) -> None:
    members = json.loads((folder / INDEX).read_text())["members"]
    changed(folder, members=[{k: v for k, v in m.items() if k != "least"} for m in members])
    model, _ = made()
    with sw.Runner(folder, in_process=True) as runner:
        x = torch.randn(4, 8, 8)
        torch.testing.assert_close(runner(x), model(x))
        with pytest.raises(InputError, match="no program for batch=3,length=8"):
            runner(x[:3])


def test_saving_again(folder: Path) -> None:
    model, bundle = made()
    bundle.save(folder)
    assert len([*Bundle.load(folder).sizes()]) == 1
    bundle.at(batch=2, length=2)
    bundle.save(folder)
    assert len([*Bundle.load(folder).sizes()]) == 2
    x = torch.randn(2, 2, 8)
    with sw.Runner(folder, in_process=True) as runner:
        torch.testing.assert_close(runner(x), model(x))
    assert [path.name for path in folder.parent.iterdir()] == ["net"], "nothing is left beside it"


def test_a_folder_is_there_all_the_time_while_it_is_replaced(tmp_path: Path) -> None:
    _, bundle = made()
    place = tmp_path / "place"
    bundle.save(place)
    (tmp_path / "link").symlink_to(place)
    with ThreadPoolExecutor() as pool:
        saves = pool.submit(lambda: [bundle.save(tmp_path / "link") for _ in range(20)])
        while not saves.done():
            assert (place / INDEX).is_file()
    saves.result()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "place"]


def test_a_link_that_names_another_folder_later(tmp_path: Path) -> None:
    """Versions in folders of their own, and a link to the one that is used."""
    for version in ("first", "second"):
        _, bundle = made(1)
        bundle.at(batch=4, length=16)
        bundle.save(tmp_path / version)
    link = tmp_path / "current"
    link.symlink_to("first")
    with sw.Runner(link, in_process=True) as runner:
        runner(torch.randn(3, 5, 8))
        link.unlink()
        link.symlink_to("second")
        with pytest.raises(WeightError, match="load the bundle again"):
            runner(torch.randn(3, 13, 8))


def test_what_reads_its_weights_there_is_saved_elsewhere(folder: Path) -> None:
    bundle = Bundle.load(folder)
    with pytest.raises(PipelineError, match="would be replaced; save it in another folder"):
        bundle.save(folder)
    bundle.save(folder.parent / "other")
    again = Bundle.load(folder.parent / "other", weights_in=folder)
    again.first.weights.check(again.first.tensors)


def test_other_things_are_not_replaced(tmp_path: Path) -> None:
    _, bundle = made()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PipelineError, match="holds something else than a bundle"):
        bundle.save(tmp_path)
    with pytest.raises(PipelineError, match="does not exist; make it first"):
        bundle.save(tmp_path / "no" / "where")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_plain_files_have_the_specification_s_keys_only(tmp_path: Path) -> None:
    _, bundle = made()
    bundle.save(tmp_path / "plain", plain=True)
    text = json.loads((tmp_path / "plain" / "batch=4,length=8.pipeline.json").read_text())
    assert "blobs" not in text
    assert "structure" not in text["metadata"]
    Bundle.load(tmp_path / "plain")


# --- damaged folders ------------------------------------------------------------------------------


def changed(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, **changes}))


def test_indexes_that_are_refused(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    members, shapes = index["members"], index["shapes"]
    outside = [{**members[0], "file": "../x.pipeline.json"}]
    swapped = [{**members[0], "sizes": members[1]["sizes"]}]
    missing = [{**members[0], "sizes": {"batch": 4}}]
    for wrong, message in (
        ({"version": 2}, "has version 2"),
        ({"members": []}, "names no pipeline"),
        ({"members": [*members, members[0]]}, "two pipelines for the same sizes"),
        ({"members": outside}, "which is no file beside it"),
        ({"members": swapped}, "its inputs are of batch=4,length=8"),
        ({"members": missing}, "expected are numbers from 1 up for batch, length"),
        ({"more": 1}, "is damaged"),
        ({"shapes": {**shapes, "sizes": {}}}, "no size that varies"),
    ):
        changed(folder, **wrong)
        with pytest.raises(PipelineError, match=message) as raised:
            Bundle.load(folder)
        assert raised.value.rule in ("bundle", "version")
        changed(folder, version=1, members=members, shapes=shapes)
        (folder / INDEX).write_text(json.dumps(index))
    for place in ([7], [0, 3]):
        wrong_shapes = json.loads(json.dumps(shapes))
        wrong_shapes["sizes"]["batch"]["inputs"]["x"] = place
        changed(folder, shapes=wrong_shapes)
        with pytest.raises(PipelineError, match="its dimension"):
            Bundle.load(folder)


def test_a_folder_without_what_it_names(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is no bundle"):
        Bundle.load(tmp_path)
    (folder / "batch=8,length=16.pipeline.json").unlink()
    with pytest.raises(PipelineError, match="cannot be read"):
        Bundle.load(folder)
