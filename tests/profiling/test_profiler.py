"""`profile`: each layer of a graph, measured alone."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.models import GPT, Block
from shardwright.costs.profile import Profile
from shardwright.errors import DeviceError, ProfileError
from shardwright.ir import Builder, IRGraph
from shardwright.profiling import measure as measuring
from shardwright.profiling import profile, profile_network
from shardwright.tracing import capture, compile_ir
from shardwright.tracing.capture import empty_weights
from tests.graphs import language_model
from tests.runtime.programs import gpt, tokens

MB = 1e6


def quick(graph: IRGraph, **options: object) -> Profile:
    return profile(graph, **{"n_iter": 1, "cache": False} | options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def found() -> Profile:
    return quick(language_model(layers=3))


def test_each_node_is_a_layer_and_equal_ones_share_a_measurement(found: Profile) -> None:
    graph = language_model(layers=3)
    assert [layer.nodes for layer in found.layers] == [(node.id,) for node in graph.nodes]
    second, third = (
        [layer.measurement for layer in found.layers[2 + 9 * i : 11 + 9 * i]] for i in (1, 2)
    )
    assert second == third
    assert len(found.measurements) < len(graph.nodes) / 2


def test_sizes_are_those_of_the_tensors(found: Profile) -> None:
    layers = {layer.name: layer for layer in found.layers}
    table = layers["embedding"]
    assert table.layer_size == pytest.approx(50 * 8 * 8 / MB)
    assert table.input_size == pytest.approx(2 * 3 * 8 / MB)
    assert table.output_size == pytest.approx(2 * 3 * 8 * 8 / MB)
    assert table.kind == "aten.embedding.default"


def test_times_and_memory_are_there_and_under_the_seeds_names(found: Profile) -> None:
    for layer in found.layers:
        assert layer.forward_time > 0
        assert layer.cuda_memory_forward == layer.memory_forward
        assert layer.cuda_memory_backward == layer.memory_backward
    linear = next(layer for layer in found.layers if layer.kind == "aten.linear.default")
    assert linear.backward_time > 0
    assert linear.memory_backward > 0
    assert found.forward_time == pytest.approx(sum(layer.forward_time for layer in found.layers))
    assert found.backward_time == pytest.approx(sum(layer.backward_time for layer in found.layers))


def test_the_roofline_is_fitted_to_single_nodes(found: Profile, tmp_path: Path) -> None:
    assert all(measurement.work is not None for measurement in found.measurements.values())
    assert found.device_model().name == found.device
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    (whole,) = quick(language_model(layers=1), depth=0).measurements.values()
    assert whole.work is None


def test_recomputation_keeps_less_and_takes_the_forward_again(tmp_path: Path) -> None:
    graph, cache = language_model(layers=2), tmp_path / "cache.json"
    keeping = quick(graph, depth=1, cache=cache).layers[3]
    again = quick(graph, depth=1, cache=cache, recompute=True).layers[3]
    assert keeping.name == again.name == "layers.1"
    assert again.memory_forward < keeping.memory_forward
    assert again.memory_backward > keeping.memory_backward
    assert again.forward_time == keeping.forward_time
    assert again.backward_time == pytest.approx(keeping.backward_time + keeping.forward_time)


def test_a_training_step_is_profiled_in_its_forward() -> None:
    program = gpt()
    graph = compile_ir(program.step, *tokens(1)[0])
    found = quick(graph, depth=1)
    names = [layer.name for layer in found.layers]
    assert names[:3] == ["tokens", "norms.0", "qkv.0"]
    assert any(layer.kind == "aten.cross_entropy_loss.default" for layer in found.layers)
    assert all(layer.kind not in ("Backward", "adamw_step") for layer in found.layers)


def test_the_program_is_as_it_was() -> None:
    program = gpt()
    graph = compile_ir(program.step, *tokens(1)[0])
    program.step(*tokens(1)[0])
    parameters = list(program.model.parameters())
    before = copy.deepcopy(([p.detach() for p in parameters], [p.grad for p in parameters]))
    state = torch.get_rng_state()
    quick(graph)
    quick(graph, depth=1)
    after = [p.detach() for p in parameters], [p.grad for p in parameters]
    for then, now in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(then, now, strict=True))
    assert all(p.requires_grad for p in parameters)
    assert torch.equal(torch.get_rng_state(), state)


def test_buffers_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    graph = capture(model, (torch.randn(2, 3, 8, 8),))
    before = copy.deepcopy(model.state_dict())
    quick(graph)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


def test_a_model_without_contents_can_be_profiled() -> None:
    with empty_weights():
        model = GPT(layers=2, width=32, heads=2, vocabulary=50, length=8)
    graph = capture(model, (torch.zeros(1, 8, dtype=torch.long),))
    found = quick(graph, basic_blocks=(Block,))
    assert [layer.kind for layer in found.layers].count("Block") == 2


def test_what_was_measured_before_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, cache = language_model(layers=2), tmp_path / "cache.json"
    first = quick(graph, cache=cache)

    def fail(*arguments: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("shardwright.profiling.profiler.measure", fail)
    assert quick(graph, cache=cache) == first
    with pytest.raises(AssertionError, match="again"):
        quick(graph, cache=cache, n_iter=2)


def test_a_failure_is_not_stored_but_what_went_well_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Builder("broken")
    x = builder.call("aten.relu.default", builder.input("x", (4, 4), "f32"))
    graph = builder.finish(builder.call("aten.linalg_cholesky.default", x))
    cache = tmp_path / "cache.json"
    measured = []

    def counted(*arguments: object) -> object:
        measured.append(arguments)
        return measuring.measure(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("shardwright.profiling.profiler.measure", counted)
    for runs in (2, 3):
        with pytest.raises(ProfileError, match="linalg_cholesky"):
            quick(graph, cache=cache)
        assert len(measured) == runs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_iter": 0}, "n_iter is a number from 1 up, found 0"),
        ({"threads": 1.5}, "threads is a number from 1 up, found 1.5"),
        ({"depth": "all"}, "depth='all'"),
        ({"basic_blocks": ("Layer",)}, "class Layer; the graph has tests.Block"),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        quick(language_model(layers=1), **options)


def test_a_model_that_is_not_captured() -> None:
    with pytest.raises(ProfileError, match=r"found a ReLU; capture it first"):
        quick(nn.ReLU())  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda:99", "meta", "toaster"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(DeviceError, match=f"device '{device}' cannot be measured: this machine"):
        quick(language_model(layers=1), device=device)


def test_the_seeds_function_goes_down_to_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    deep = profile_network(net, torch.ones(2, 4), n_iter=1)
    assert [layer.name for layer in deep.layers] == ["0", "1.0", "1.1"]
    shallow = profile_network(net, torch.ones(2, 4), {}, (), 1, 1)
    assert [layer.name for layer in shallow.layers] == ["0", "1"]
