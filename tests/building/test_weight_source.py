import msgspec
import pytest
import torch
from safetensors.torch import save_file

from shardwright.errors import WeightError
from tests.graphs import language_model, tokens
from tests.walk import built, walk


def test_weights_are_references_into_the_users_file(tmp_path):
    graph = language_model()
    names = {v.names[0]: graph.tensors[v.id] for v in graph.stored()}
    save_file(
        {f"model.{name}": tensor for name, tensor in names.items()}, tmp_path / "m.safetensors"
    )
    pipeline = built(
        graph, 2, weights=tmp_path / "m.safetensors", rename=lambda name: f"model.{name}"
    )
    paths = {info.value.path for info in pipeline.tensors.values() if info.value is not None}
    assert paths == {str(tmp_path / "m.safetensors")}
    assert torch.equal(walk(pipeline, {"tokens": tokens()})["output"], graph.run(tokens()))


def change(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda tensors: tensors.pop("head.weight"), "no tensor 'head.weight'"),
        (change("head.weight", torch.zeros(3, 8)), r"f32\[3, 8\], but the model's 'head.weight'"),
        (change("head.weight", torch.zeros(50, 8)), r"is f32\[50, 8\].*f64\[50, 8\]"),
        (change("head.weight", torch.zeros(50, 8).double()), "other contents than the model's"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, mutate, message):
    graph = language_model()
    for value in graph.stored():
        if value.names == ("head.weight",) and "no tensor" in message:
            graph.tensors[value.id] = graph.tensors[value.id].to("meta")
    tensors = {v.names[0]: language_model().tensors[v.id] for v in graph.stored()}
    mutate(tensors)
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(WeightError, match=message):
        built(graph, 2, weights=tmp_path / "m.safetensors")


def test_a_model_on_meta_needs_weights():
    graph = language_model()
    graph.tensors = {value_id: tensor.to("meta") for value_id, tensor in graph.tensors.items()}
    with pytest.raises(WeightError, match=r"built on the meta device.*weights="):
        built(graph, 2)


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path):
    graph = language_model()
    tensors = {v.names[0]: graph.tensors[v.id] for v in graph.stored()}
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    places = {name: file for file, held in files.items() for name in held}
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(msgspec.json.encode({"metadata": {}, "weight_map": places}))
    pipeline = built(graph, 2, weights=index)
    paths = {info.value.path for info in pipeline.tensors.values() if info.value is not None}
    assert paths == {str(tmp_path / file) for file in files}
    assert torch.equal(walk(pipeline, {"tokens": tokens()})["output"], graph.run(tokens()))
