"""Generated files of split plans: they do, train, load and save what the model does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.codegenerate.codegen import codegen
from shardwright.codegenerate.support.slices import join_state_dicts, piece_of
from tests.codegenerate import split_models
from tests.codegenerate.checkers import assert_passes_mypy, assert_passes_ruff
from tests.codegenerate.generated_rank import OPTIONS
from tests.codegenerate.ranks import results
from tests.codegenerate.test_split_stages import PLANS
from tests.codegenerate.written import imported

TOLERANCE = 1e-10


def eager(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs by name and gradients by parameter."""
    model, inputs = split_models.made(name)
    outputs = split_models.named_outputs(model(*inputs))
    torch.stack([split_models.weighted(tensor) for tensor in outputs.values()]).sum().backward()
    return (
        {key: tensor.detach() for key, tensor in outputs.items()},
        {key: p.grad for key, p in model.named_parameters() if p.grad is not None},
    )


def assert_close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found
    for key, tensor in found.items():
        piece = piece_of(key)
        whole = piece.of(expected[piece.name])
        error = (tensor - whole).abs().max()
        assert tensor.shape == whole.shape, key
        assert error <= TOLERANCE * max(whole.abs().max().item(), 1e-3), (key, error)


def stepped(name: str) -> dict[str, torch.Tensor]:
    """The model's state after a step of AdamW."""
    model, inputs = split_models.made(name)
    made = split_models.named_outputs(model(*inputs))
    torch.stack([split_models.weighted(tensor) for tensor in made.values()]).sum().backward()
    torch.optim.AdamW(model.parameters(), **OPTIONS).step()
    return model.state_dict()


def joined(slots: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    return join_state_dicts([state for slot in slots for state in slot[key]])


@pytest.mark.workers
@pytest.mark.timeout(115)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(("mlp", plan) for plan in PLANS if plan != "sequence 2"),
        *(("decoder", plan) for plan in PLANS),
        *(("uneven", plan) for plan in ("tensor 2", "tensor 4", "sequence 2")),
        *((name, plan) for name in ("gated", "extreme") for plan in ("tensor 2", "data 2")),
        ("tied", "pipeline 2 × tensor 2"),
        ("tied", "pipeline 2 × data 2"),
    ],
)
def test_slots_train_as_the_model_does(name: str, plan: str, tmp_path: Path) -> None:
    check(name, plan, tmp_path)


@pytest.mark.workers
@pytest.mark.zoo
@pytest.mark.timeout(115)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_slots_of_transformers_train_as_they_do(name: str, plan: str, tmp_path: Path) -> None:
    check(name, plan, tmp_path)


def check(name: str, plan: str, folder: Path) -> None:
    slots, keywords = PLANS[plan]
    outputs, gradients = eager(name)
    found = results("generated_rank", {"model": name, "plan": keywords}, slots, folder)
    for slot in found:
        assert_close(slot["outputs"], outputs)
        assert_close(slot["gradients"], gradients)
    assert join_state_dicts([slot["gradients"] for slot in found]).keys() == gradients.keys()
    assert_close(join_state_dicts([slot["outputs"] for slot in found]), outputs)
    model, _ = split_models.made(name)
    for key in ("before", "loaded"):
        state = joined(found, key)
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[k], tensor) for k, tensor in model.state_dict().items())
    assert_close(joined(found, "after"), stepped(name))


def written(name: str, plan: str, folder: Path) -> Path:
    model, inputs = split_models.made(name)
    graph = sw.capture(model, inputs)
    path = folder / f"{name}_{plan.translate({32: None, 215: '_'})}.py"
    codegen(sw.plan(graph, **PLANS[plan][1]), path, graph=graph)
    return path


def test_files_are_clean(tmp_path: Path) -> None:
    paths = [
        written("decoder", "tensor 2", tmp_path),
        written("uneven", "tensor 4", tmp_path),
        written("decoder", "sequence 2", tmp_path),
        written("decoder", "pipeline 2 × data 2", tmp_path),
        written("gated", "tensor 2", tmp_path),
    ]
    for path in paths:
        assert "shardwright." not in path.read_text()
        imported(path)
    assert_passes_ruff(paths)
    if torch.__version__ < "2.14":  # from then on a process group may be Literal[-100] to mypy
        assert_passes_mypy(paths)


def test_a_slot_may_be_looked_at_without_communication(tmp_path: Path) -> None:
    module = imported(written("decoder", "tensor 2", tmp_path))
    model, _ = split_models.made("decoder")
    states = []
    for slot in (0, 1):
        (stage,) = module.create_pipeline_configuration(
            model, debug=True, partitions_only=True, slot=slot
        ).values()
        assert dict(stage.named_parameters())["blocks.0.up.weight"].shape == (40, 20)
        assert stage.head.weight is stage.tokens.weight
        states.append(stage.state_dict())
    assert "blocks.1.qkv.weight[50:60, 0:20] of [60, 20]" in states[1]
    whole = module.join_state_dicts(states)
    assert whole.keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match="missing slices"):
        module.join_state_dicts(states[:1])
    with pytest.raises(RuntimeError, match="give slot=0 to 1"):
        module.create_pipeline_configuration(model)


def test_a_process_gives_and_gets_its_own_rows_where_the_batch_is_split(tmp_path: Path) -> None:
    module = imported(written("decoder", "data 2", tmp_path))
    for slot, rows in ((0, "0:2"), (1, "2:4")):
        configuration = module.create_pipeline_configuration(debug=True, slot=slot)
        assert configuration["model inputs"] == [f"tokens[{rows}, 0:8]"]
        assert configuration["model outputs"] == [f"output[{rows}, 0:8, 0:40]"]


def test_stages_without_a_model_are_unfilled_on_all_slots(tmp_path: Path) -> None:
    module = imported(written("uneven", "tensor 4", tmp_path))
    model, _ = split_models.made("uneven")
    drawn = []
    for slot in range(4):
        torch.manual_seed(3)
        (stage,) = module.create_pipeline_configuration(
            debug=True, partitions_only=True, slot=slot
        ).values()
        drawn.append(torch.rand(3))
        assert all(parameter.isnan().all() for parameter in stage.parameters())
        stage.load_state_dict(model.state_dict())
        assert not any(parameter.isnan().any() for parameter in stage.parameters())
    assert all(torch.equal(drawn[0], other) for other in drawn)


def test_a_model_of_other_shapes_is_refused(tmp_path: Path) -> None:
    module = imported(written("mlp", "tensor 2", tmp_path))
    for name, other in (("up", nn.Linear(20, 31)), ("norm", nn.LayerNorm(21))):
        model, _ = split_models.made("mlp")
        setattr(model, name, other)
        with pytest.raises(ValueError, match=rf"'{name}.*give the model that was partitioned"):
            module.create_pipeline_configuration(model, debug=True, slot=0)


def test_layers_that_are_alike_are_one_class(tmp_path: Path) -> None:
    text = written("decoder", "tensor 2", tmp_path).read_text()
    assert text.count("class GptBlock(") == 1
    assert text.count("def all_reduce(") == 1
    assert "def all_to_all(" not in text
