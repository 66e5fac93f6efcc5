"""One slot of a generated file: outputs, gradients, states, and a step of AdamW.

A job has ``model`` (a key of `split_models.MODELS`) and ``plan`` (keywords of `sw.plan`). Every
slot does its stage of each partition, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.codegenerate.codegen import codegen
from tests.codegenerate import split_models
from tests.codegenerate.written import imported

OPTIONS = {"lr": 1e-3, "eps": 1e-6}
"""A gradient that is zero but for rounding, a key's bias's, moves it by less than 1e-12."""


def prepare(job: Mapping[str, Any]) -> Callable[[int], Any]:
    """What a rank does."""
    model, inputs = split_models.made(job["model"])
    graph = sw.capture(model, inputs)
    path = Path(job["folder"]) / "generated.py"
    codegen(sw.plan(graph, **job["plan"]), path, graph=graph)
    return lambda rank: work(imported(path), model, inputs)


def work(module: ModuleType, model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    """All that a slot does."""
    configuration = module.create_pipeline_configuration(model, debug=True)
    partitions = [configuration[i] for i in range(len(configuration) - 2)]
    stages = [partition["model"] for partition in partitions]
    before = [cloned(stage.state_dict()) for stage in stages]
    own = [cloned(stage.state_dict()) for stage in loaded(module, model)]
    outputs = forward(module, configuration, inputs)
    shares = [
        split_models.weighted(tensor, module.piece_of(name).ranges)
        for name, tensor in outputs.items()
    ]
    torch.stack(shares).sum().backward()
    parameters: dict[nn.Parameter, str] = {}
    for stage in stages:
        for path, parameter in stage.named_parameters():
            parameters.setdefault(parameter, keys(stage).get(path, path))
    gradients = {key: parameter.grad for parameter, key in parameters.items()}
    torch.optim.AdamW(list(parameters), **OPTIONS).step()
    return {
        "outputs": {name: tensor.detach() for name, tensor in outputs.items()},
        "gradients": gradients,
        "before": before,
        "after": [cloned(stage.state_dict()) for stage in stages],
        "loaded": own,
    }


def forward(
    module: ModuleType, configuration: Mapping[str | int, Any], inputs: tuple[Tensor, ...]
) -> dict[str, Tensor]:
    """The outputs that leave, by port."""
    names = configuration["model inputs"]
    pairs = zip(names, inputs, strict=True)
    ports = {name: module.piece_of(name).of(tensor) for name, tensor in pairs}
    for number in range(len(configuration) - 2):
        partition = configuration[number]
        made = partition["model"](*(ports[name] for name in partition["inputs"]))
        made = (made,) if isinstance(made, Tensor) else made
        ports |= dict(zip(partition["outputs"], made, strict=True))
    return {name: ports[name] for name in configuration["model outputs"]}


def loaded(module: ModuleType, model: nn.Module) -> list[nn.Module]:
    """Stages of their own parameters, filled from the model's checkpoint."""
    stages = module.create_pipeline_configuration(debug=True, partitions_only=True)
    whole = model.state_dict()
    for stage in stages.values():
        found = stage.load_state_dict(whole, strict=len(stages) == 1)
        assert not found.missing_keys
    return list(stages.values())


def keys(stage: Any) -> dict[str, str]:
    """Names in a state, by the paths of slices."""
    return {path: piece.key for path, piece in stage.pieces().items()}


def cloned(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in state.items()}
