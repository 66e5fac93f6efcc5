"""`SynchronousPipeline` as a module: names, checkpoints, copies, devices."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.codegenerate.synchronous import SynchronousPipeline
from shardwright.errors import InputError
from tests.codegenerate.staged import (
    Stage,
    assert_close,
    assert_equal,
    chain,
    configured,
    gradients,
    perceptron,
)


class Normed(nn.Module):
    """A model whose module ``body`` lies in both stages, with buffers and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.first = nn.Linear(6, 6)
        self.body.norm = nn.BatchNorm1d(6)
        self.body.register_buffer("scale", torch.ones(6), persistent=False)
        self.head = nn.Linear(6, 6)
        self.head.weight = self.body.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body.norm(self.body.first(x)) * self.body.scale)

    def configuration(self) -> dict[str | int, Any]:
        first, second = nn.Module(), nn.Module()
        first.first = self.body.first
        second.norm, second.scale = self.body.norm, None
        del second.scale
        second.register_buffer("scale", self.body.scale, persistent=False)

        def compute(stage: Any, x: Tensor) -> Tensor:
            return stage.head(stage.body.norm(x) * stage.body.scale)

        return configured(
            [
                (["x"], ["y"], Stage({"body": first}, lambda stage, x: stage.body.first(x))),
                (["y"], ["output"], Stage({"body": second, "head": self.head}, compute)),
            ]
        )


@pytest.fixture
def model() -> Normed:
    torch.manual_seed(0)
    return Normed()


@pytest.fixture
def pipeline(model: Normed) -> SynchronousPipeline:
    return SynchronousPipeline(model.configuration(), 2)


def test_names_are_the_model_s(model: Normed, pipeline: SynchronousPipeline) -> None:
    assert list(pipeline.state_dict()) == list(model.state_dict())
    found, expected = dict(pipeline.named_parameters()), dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name] is expected[name] for name in expected)
    assert list(map(id, pipeline.parameters())) == list(map(id, model.parameters()))
    everything = dict(pipeline.named_parameters(remove_duplicate=False))
    assert everything.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert dict(pipeline.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert [name for name, _ in pipeline.named_modules()].count("head") == 1
    outer = nn.ModuleDict({"pipe": pipeline})
    assert list(outer.state_dict()) == [f"pipe.{name}" for name in model.state_dict()]
    assert [name for name, _ in outer.named_parameters()] == [f"pipe.{name}" for name in expected]
    assert repr(pipeline) == "SynchronousPipeline(2 stages, 2 microbatches)"


def test_checkpoints_go_both_ways(model: Normed, pipeline: SynchronousPipeline) -> None:
    state = {
        name: torch.full_like(tensor, number)
        for number, (name, tensor) in enumerate(model.state_dict().items())
    }
    state["head.weight"] = state["body.first.weight"]
    assert str(pipeline.load_state_dict(state)) == "<All keys matched successfully>"
    assert_equal(model.state_dict(), state)
    assert_equal(pipeline.state_dict(), state)


def test_keys_that_lack_or_are_too_many(pipeline: SynchronousPipeline) -> None:
    state = dict(pipeline.state_dict())
    del state["body.norm.bias"]
    state["body.other"] = torch.ones(1)
    found = pipeline.load_state_dict(state, strict=False)
    assert found.missing_keys == ["body.norm.bias"]
    assert found.unexpected_keys == ["body.other"]
    message = r'Missing key.*"body.norm.bias".*\n.*Unexpected key.*"body.other"'
    with pytest.raises(RuntimeError, match=message):
        pipeline.load_state_dict(state)
    outer = nn.ModuleDict({"pipe": pipeline})
    named = {f"pipe.{name}": tensor for name, tensor in state.items()}
    found = outer.load_state_dict(named, strict=False)
    assert found.missing_keys == ["pipe.body.norm.bias"]
    assert found.unexpected_keys == ["pipe.body.other"]
    state["head.bias"] = torch.ones(7)
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias"):
        pipeline.load_state_dict(state, strict=False)


def test_a_size_that_does_not_fit_hides_no_key(pipeline: SynchronousPipeline) -> None:
    state = dict(pipeline.state_dict())
    del state["body.norm.bias"]
    state |= {"head.bias": torch.ones(7), "body.other": torch.ones(1)}
    with pytest.raises(RuntimeError) as caught:
        pipeline.load_state_dict(state)
    told = str(caught.value)
    assert 'Missing key(s) in state_dict: "body.norm.bias".' in told
    assert 'Unexpected key(s) in state_dict: "body.other".' in told
    assert "size mismatch for head.bias" in told


def test_versions_of_modules_are_those_of_the_state(
    model: Normed, pipeline: SynchronousPipeline
) -> None:
    state = model.state_dict()
    del state["body.norm.num_batches_tracked"]
    expected = model.load_state_dict(state, strict=False)
    assert expected.missing_keys == ["body.norm.num_batches_tracked"]
    assert pipeline.load_state_dict(state, strict=False).missing_keys == expected.missing_keys
    old = dict(state)
    assert not model.load_state_dict(old, strict=False).missing_keys
    assert not pipeline.load_state_dict(old, strict=False).missing_keys


def test_what_lies_in_a_stage_is_found_by_its_path(
    model: Normed, pipeline: SynchronousPipeline
) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert pipeline.get_parameter(name) is parameter
    assert pipeline.get_buffer("body.scale") is model.body.scale
    assert pipeline.get_submodule("body.norm") is model.body.norm
    assert pipeline.get_submodule("") is pipeline
    with pytest.raises(AttributeError, match="'body' lies in 2 stages in part"):
        pipeline.get_submodule("body")
    with pytest.raises(AttributeError, match=r"no stage has a parameter 'body\.other'"):
        pipeline.get_parameter("body.other")
    with pytest.raises(AttributeError, match="no stage has a buffer 'head'"):
        pipeline.get_buffer("head")


def test_assigned_tensors_stay_tied(pipeline: SynchronousPipeline) -> None:
    state = {name: tensor.clone() for name, tensor in pipeline.state_dict().items()}
    state["head.weight"] = state["body.first.weight"]
    pipeline.load_state_dict(state, assign=True)
    assert len(list(pipeline.parameters())) == 5
    assert pipeline.stages[0].body.first.weight is pipeline.stages[1].head.weight
    assert pipeline.stages[1].head.weight.data_ptr() == state["head.weight"].data_ptr()


def test_modes_reach_every_module(model: Normed, pipeline: SynchronousPipeline) -> None:
    pipeline.eval()
    assert not any(module.training for module in (*pipeline.modules(), *model.body.norm.modules()))
    assert not any(stage.training for stage in pipeline.stages)
    x = torch.randn(4, 6)
    model.eval()
    torch.testing.assert_close(pipeline(x), model(x))
    pipeline.train()
    assert all(module.training for module in pipeline.modules())
    seen: list[nn.Module] = []
    pipeline.apply(seen.append)
    assert model.head in seen
    assert pipeline in seen


def test_conversions_keep_the_model_s_parameters(
    model: Normed, pipeline: SynchronousPipeline
) -> None:
    before = list(model.parameters())
    assert pipeline.to(torch.float64) is pipeline
    assert list(map(id, pipeline.parameters())) == list(map(id, before))
    assert all(tensor.dtype == torch.float64 for tensor in before)
    assert pipeline.stages[1].body.scale.dtype == torch.float64
    x = torch.randn(4, 6, dtype=torch.float64)
    pipeline(x).sum().backward()
    assert all(parameter.grad is not None for parameter in before)
    pipeline.zero_grad()
    assert all(parameter.grad is None for parameter in before)
    pipeline.requires_grad_(False)
    assert not pipeline(x).requires_grad


def test_ties_last_when_storage_is_made_anew(pipeline: SynchronousPipeline) -> None:
    pipeline.to("meta")
    pipeline.to_empty(device="cpu")
    assert len(list(pipeline.parameters())) == 5
    assert pipeline.stages[0].body.first.weight is pipeline.stages[1].head.weight


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_have_everything_of_their_own(copied: Any) -> None:
    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64)
    with SynchronousPipeline(chain(model, 4), 2) as pipeline:
        expected = pipeline(x)
        other = copied(pipeline)
        assert not set(map(id, other.parameters())) & set(map(id, pipeline.parameters()))
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert torch.equal(pipeline(x), expected)
        assert not torch.equal(other(x), expected)


def test_an_average_of_models(model: Normed, pipeline: SynchronousPipeline) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(pipeline)
    with torch.no_grad():
        for parameter in pipeline.parameters():
            parameter.add_(2)
    averaged.update_parameters(pipeline)
    averaged.update_parameters(pipeline)
    found = dict(averaged.module.named_parameters())
    for name, parameter in model.named_parameters():
        assert found[name] is not parameter
        torch.testing.assert_close(found[name], parameter)


def test_training_equals_the_model_s() -> None:
    def losses(model: nn.Module, sizes: list[int], module: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        found = []
        for _ in range(10):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(8, 6)
            loss = (module(x) - x.flip(0)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            found.append(loss.item())
        return found

    first, second = perceptron(), perceptron()
    expected = losses(first, [8], first)
    with SynchronousPipeline(chain(second, 2, 6), 4) as pipeline:
        found = losses(second, [2] * 4, pipeline)
    assert found == pytest.approx(expected, rel=1e-12)
    assert expected[-1] < 0.9 * expected[0]
    assert_close(dict(second.named_parameters()), dict(first.named_parameters()), 1e-10)


# --- configurations --------------------------------------------------------------------------


def test_parameters_under_one_name_become_one() -> None:
    stages = [Stage({"layer": nn.Linear(3, 3)}) for _ in range(2)]
    configuration = configured([(["x"], ["y"], stages[0]), (["y"], ["output"], stages[1])])
    pipeline = SynchronousPipeline(configuration, 1)
    assert stages[0].layer.weight is stages[1].layer.weight
    assert [name for name, _ in pipeline.named_parameters()] == ["layer.weight", "layer.bias"]
    stages = [Stage({"layer": nn.Linear(3, width)}) for width in (3, 4)]
    configuration = configured([(["x"], ["y"], stages[0]), (["y"], ["output"], stages[1])])
    with pytest.raises(InputError, match=r"'layer.weight' is torch.float32\[3, 3\] in stage 0 and"):
        SynchronousPipeline(configuration, 1)


def layer() -> Stage:
    return Stage({"layer": nn.Linear(3, 3)})


SHARED = layer()


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ({}, "this one has nothing"),
        ({0: layer(), 1: layer()}, "this one has 0, 1; give what create_pipeline_configuration"),
        ({**configured([(["x"], ["output"], layer())]), 2: {}}, "the stages 0, 1, …"),
        ({**configured([]), 0: layer()}, "stage 0 must be a dict with 'inputs', 'outputs', 'mod"),
        (configured([(["y"], ["output"], layer())]), "stage 0 takes 'y', which nothing before"),
        (configured([(["x"], ["x"], layer())]), "stage 0 makes 'x', which is there already"),
        (configured([(["x"], ["y"], layer())]), "no stage makes the model's output 'output'"),
        (configured([(["x"], ["output"], "Stage0")]), "the model of stage 0 is a str, no module"),
        (
            configured([(["x"], ["y"], SHARED), (["y"], ["output"], SHARED)]),
            "stages 0 and 1 share the module Stage; each needs one of its own",
        ),
    ],
)
def test_configurations_that_are_no_pipeline(configuration: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SynchronousPipeline(configuration, 2)


def test_a_dropped_pipeline_leaves_nothing() -> None:
    pipeline = SynchronousPipeline(chain(perceptron(), 4), 2)
    pipeline(torch.randn(4, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(Exception, match="stage 0, microbatch 0"):
        pipeline(torch.randn(4, 5, dtype=torch.float64))
    left = [weakref.ref(module) for module in (pipeline, *pipeline.stages)]
    del pipeline
    gc.collect()
    assert [module() for module in left] == [None, None, None]


# --- GPUs ------------------------------------------------------------------------------------

needs_device = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device here"
)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_stages_on_gpus(devices: tuple[str, str], microbatches: int, checkpoint: bool) -> None:
    model = perceptron()
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    wanted, of_x = gradients(model), x.grad
    x.grad = None
    configuration = chain(model, 4)
    for number, device in enumerate(devices):
        configuration[number]["model"].to(device)
    with SynchronousPipeline(configuration, microbatches, checkpoint=checkpoint) as pipeline:
        for _ in range(3):
            found = pipeline(x)
            assert found.device.type == devices[1]
            found.square().sum().backward()
            assert_close({k: v.cpu() for k, v in gradients(model).items()}, wanted)
            torch.testing.assert_close(x.grad, of_x)
            x.grad = None


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_parameter_of_two_devices(where: str) -> None:
    torch.manual_seed(0)
    model = Normed().double().eval()
    x = torch.randn(8, 6, dtype=torch.float64)
    model(x).square().sum().backward()
    wanted = gradients(model)
    configuration = model.configuration()
    configuration[1]["model"].to("cuda")
    model.head.weight.data = model.head.weight.data.to(where)
    with SynchronousPipeline(configuration, 2) as pipeline:
        pipeline(x).square().sum().backward()
    assert model.head.weight.grad.device.type == where
    assert_close({k: v.cpu() for k, v in gradients(model).items()}, wanted)


@pytest.mark.gpu
@needs_device
@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_on_a_gpu_follows_from_the_seed(checkpoint: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)).cuda()
    found = []
    with SynchronousPipeline(chain(model, 2), 2, checkpoint=checkpoint) as pipeline:
        for _ in range(2):
            torch.manual_seed(0)
            pipeline(torch.ones(8, 6, device="cuda")).square().sum().backward()
            found.append(gradients(model))
    assert_equal(*found)
