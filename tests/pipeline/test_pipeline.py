"""The user's object: save and load, weights beside the file, paths, errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch

from shardwright.errors import PipelineError, WeightError
from shardwright.pipeline import Pipeline, Weights, write_paramfile
from tests.pipeline.documents import linear, two_stages

NAMES = ("layers.0.weight", "layers.1.weight", "head.weight")


def contents() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(zip(NAMES, (torch.randn(8, 8), torch.randn(8, 8), torch.randn(2, 8)), strict=True))


def built() -> Pipeline:
    """`two_stages` as a Pipeline, its weights in memory."""
    document = two_stages()
    pipeline = Pipeline(**{f: getattr(document, f) for f in document.__struct_fields__})
    for name, tensor in contents().items():
        pipeline.weights.put("mlp.safetensors", name, tensor)
    return pipeline


def values(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """The contents of the constants, by stored name."""
    loaded = pipeline.weights.load(pipeline.tensors)
    assert loaded.keys() == {"w1", "w2", "w3"}
    return dict(zip(NAMES, (loaded["w1"], loaded["w2"], loaded["w3"]), strict=True))


def test_the_representation_is_a_line() -> None:
    pipeline = built()
    counts = len(pipeline.devices), len(pipeline.supertasks), len(pipeline.tensors)
    assert repr(pipeline) == "Pipeline(devices={}, supertasks={}, tensors={})".format(*counts)


def assert_right(pipeline: Pipeline) -> None:
    for name, tensor in contents().items():
        assert torch.equal(values(pipeline)[name], tensor)


def paths(pipeline: Pipeline) -> set[str]:
    return {info.value.path for info in pipeline.tensors.values() if info.value is not None}


def test_the_way_of_a_pipeline(tmp_path: Path) -> None:
    pipeline = built()
    assert_right(pipeline)
    pipeline.save(tmp_path / "m.pipeline.json")
    assert {path.name for path in tmp_path.iterdir()} == {
        "m.pipeline.json",
        "m.weights.safetensors",
    }
    assert paths(pipeline) == {"m.weights.safetensors"}
    assert_right(pipeline)
    loaded = Pipeline.load(tmp_path / "m.pipeline.json")
    assert loaded == pipeline
    assert_right(loaded)
    assert str(loaded) == str(pipeline)


def test_the_bytes_say_nothing_of_weights(tmp_path: Path) -> None:
    pipeline = built()
    assert pipeline.to_json() == Pipeline.from_json(pipeline.to_json()).to_json()
    assert "weights" not in json.loads(pipeline.to_json())


def test_a_file_and_its_weights_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    built().save(tmp_path / "a" / "m.json")
    (tmp_path / "a").rename(tmp_path / "b")
    assert_right(Pipeline.load(tmp_path / "b" / "m.json"))


def test_saved_again_weights_stay_where_they_are(tmp_path: Path) -> None:
    built().save(tmp_path / "m.pipeline.json")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    pipeline = Pipeline.load(tmp_path / "m.pipeline.json")
    pipeline.save(tmp_path / "deep" / "er" / "n.pipeline.json")
    assert paths(pipeline) == {"../../m.weights.safetensors"}
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["n.pipeline.json"]
    assert_right(pipeline)
    again = Pipeline.load(tmp_path / "deep" / "er" / "n.pipeline.json", weights_in=tmp_path)
    assert_right(again)


def test_saved_again_in_place(tmp_path: Path) -> None:
    built().save(tmp_path / "m.pipeline.json")
    before = (tmp_path / "m.pipeline.json").read_bytes()
    pipeline = Pipeline.load(tmp_path / "m.pipeline.json")
    pipeline.save(tmp_path / "m.pipeline.json")
    assert (tmp_path / "m.pipeline.json").read_bytes() == before
    assert_right(pipeline)


def test_a_file_with_absolute_paths_to_weights_becomes_relative(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "out").mkdir()
    file = tmp_path / "checkpoint" / "model.safetensors"
    write_paramfile(file, contents())
    pipeline = built()
    pipeline.weights = Weights()
    for info in pipeline.tensors.values():
        if info.value is not None:
            info.value.path = str(file)
    assert_right(pipeline)
    pipeline.save(tmp_path / "out" / "m.pipeline.json")
    assert paths(pipeline) == {"../checkpoint/model.safetensors"}
    assert_right(pipeline)
    assert_right(Pipeline.load(tmp_path / "out" / "m.pipeline.json", weights_in=file.parent))


def test_through_symbolic_links(tmp_path: Path) -> None:
    """``..`` steps over where a link leads; the file's own link stays, as caches have them."""
    (tmp_path / "real" / "out").mkdir(parents=True)
    (tmp_path / "cache").mkdir()
    write_paramfile(tmp_path / "cache" / "blob", contents())
    (tmp_path / "cache" / "model.safetensors").symlink_to("blob")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    pipeline = built()
    pipeline.weights = Weights()
    for info in pipeline.tensors.values():
        if info.value is not None:
            info.value.path = str(tmp_path / "cache" / "model.safetensors")
    pipeline.save(tmp_path / "link" / "m.json")
    assert paths(pipeline) == {"../../cache/model.safetensors"}
    for folder in (tmp_path / "link", tmp_path / "real" / "out"):
        assert_right(Pipeline.load(folder / "m.json", weights_in=tmp_path / "cache"))


def test_relative_paths_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pipeline = built()
    pipeline.save("m.pipeline.json")
    (tmp_path / "elsewhere").mkdir()
    loaded = Pipeline.load("m.pipeline.json")
    assert_right(loaded)
    monkeypatch.chdir("elsewhere")
    loaded = Pipeline.load("../m.pipeline.json")
    assert_right(loaded)


def test_new_weights_never_overwrite_those_still_needed(tmp_path: Path) -> None:
    built().save(tmp_path / "m.pipeline.json")
    pipeline = Pipeline.load(tmp_path / "m.pipeline.json")
    pipeline.weights.put("m.weights.safetensors", "head.weight", torch.zeros(2, 8))
    pipeline.save(tmp_path / "m.pipeline.json")
    assert paths(pipeline) == {"m.weights.safetensors", "m.weights.1.safetensors"}
    found = values(Pipeline.load(tmp_path / "m.pipeline.json"))
    assert torch.equal(found["layers.0.weight"], contents()["layers.0.weight"])
    assert torch.equal(found["head.weight"], torch.zeros(2, 8))


def test_a_users_checkpoint_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_text("mine")
    built().save(tmp_path / "m.pipeline.json")
    assert (tmp_path / "m.safetensors").read_text() == "mine"


def test_weights_of_one_name_from_two_places(tmp_path: Path) -> None:
    pipeline = built()
    value = pipeline.tensors["w2"].value
    assert value is not None
    value.path, value.name = "other", "layers.0.weight"
    pipeline.weights.put("other", "layers.0.weight", contents()["layers.1.weight"])
    pipeline.save(tmp_path / "m.json")
    assert_right(Pipeline.load(tmp_path / "m.json"))


def test_a_constant_on_two_devices_is_written_once(tmp_path: Path) -> None:
    pipeline = built()
    pipeline.supertasks["d1.0"].data = linear(4, 8, 8)
    value = pipeline.tensors["w2"].value
    pipeline.tensors["w3"] = msgspec.structs.replace(
        pipeline.tensors["w2"], value=msgspec.structs.replace(value)
    )
    pipeline.tensors["y"].shape = pipeline.metadata.tensors.outputs["output"].shape = (4, 8)
    pipeline.metadata.tensor_slices.outputs["y"].placements = ((0, 4), (0, 8))
    pipeline.save(tmp_path / "m.json")
    assert (tmp_path / "m.weights.safetensors").stat().st_size < 2 * 256 + 400
    loaded = values(pipeline)
    assert torch.equal(loaded["head.weight"], loaded["layers.1.weight"])


# --- what goes wrong ---------------------------------------------------------------------------


def test_a_broken_pipeline_is_not_written(tmp_path: Path) -> None:
    pipeline = built()
    pipeline.supertasks["send"].device_idx = 5
    with pytest.raises(PipelineError, match="group-members"):
        pipeline.save(tmp_path / "m.json")
    assert list(tmp_path.iterdir()) == []


def test_weights_without_contents_are_not_written(tmp_path: Path) -> None:
    built().save(tmp_path / "m.json")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    pipeline = built()
    pipeline.weights.put("mlp.safetensors", "head.weight", torch.ones(2, 8, device="meta"))
    with pytest.raises(WeightError, match=r"'head\.weight' has no contents"):
        pipeline.save(tmp_path / "m.json")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert paths(pipeline) == {"mlp.safetensors"}


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"the directory .* does not exist; make it first"):
        built().save(tmp_path / "q" / "m.json")


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(PipelineError, match="cannot be read") as caught:
        Pipeline.load(tmp_path / name)
    assert caught.value.rule == "file"


def test_a_file_that_is_no_pipeline_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"name": ')
    with pytest.raises(PipelineError) as caught:
        Pipeline.load(path)
    assert caught.value.rule == "json"
    assert caught.value.__notes__ == [f"in {path}"]


def test_loading_checks(tmp_path: Path) -> None:
    pipeline = built()
    pipeline.tensors["h1"].shape = (5, 8)
    (tmp_path / "m.json").write_bytes(pipeline.to_json())
    with pytest.raises(PipelineError) as caught:
        Pipeline.load(tmp_path / "m.json")
    assert (caught.value.rule, caught.value.task, caught.value.tensor) == (
        "graph-tensors",
        "d0.0",
        "h1",
    )


def test_a_missing_weight_file_is_found_without_reading(tmp_path: Path) -> None:
    built().save(tmp_path / "m.json")
    os.remove(tmp_path / "m.weights.safetensors")
    pipeline = Pipeline.load(tmp_path / "m.json")
    with pytest.raises(WeightError, match=r"constant 'w1': .*m\.weights\.safetensors does not"):
        pipeline.weights.check(pipeline.tensors)


# --- reading the object ------------------------------------------------------------------------


def test_tasks_and_data() -> None:
    pipeline = built()
    assert pipeline.tasks_of("d0") == ["d0.0", "d0.1", "send"]
    assert pipeline.tasks_of("d1") == ["recv", "d1.0"]
    assert pipeline.data_of("d0.1") == linear(4, 8, 8)
    assert pipeline.data_of("d1.0") == linear(4, 8, 2)


def test_pipelines_do_not_share_weights() -> None:
    assert built().weights is not built().weights
    assert Pipeline.from_json(built().to_json()).weights.directory is None
