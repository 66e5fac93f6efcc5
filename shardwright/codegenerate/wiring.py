"""The stages of a generated configuration: what each takes and makes, and how it is called.

A stage takes inputs of the model and what earlier stages make; each name is made once; a parameter
that two stages have under one name is one Parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import InputError

MODEL_INPUTS = "model inputs"
MODEL_OUTPUTS = "model outputs"
FIELDS = ("inputs", "outputs", "model")
"""What a configuration says of each stage."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One partition; ``inputs`` and ``outputs`` are the names of its arguments and results.

    sources
        For each input the stage that makes it; None where it is the model's.
    shapes
        For each input the shape that the module's docstring says it takes, as that of a generated
        class does; None where it says nothing.
    """

    index: int
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[int | None, ...]
    shapes: tuple[Shape | None, ...]


class Wiring(NamedTuple):
    """The stages of a model in order, and the names of its inputs and outputs."""

    stages: tuple[PipelineStage, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def wiring_of(configuration: Mapping[Any, Any]) -> Wiring:
    """What a configuration says. Raises InputError where that is not a pipeline."""
    numbers = sorted(key for key in configuration if isinstance(key, int))
    missing = [key for key in (MODEL_INPUTS, MODEL_OUTPUTS) if key not in configuration]
    if missing or not numbers or numbers != list(range(len(numbers))):
        raise InputError(
            f"a configuration has {MODEL_INPUTS!r}, {MODEL_OUTPUTS!r} and the stages 0, 1, …; this "
            f"one has {', '.join(map(repr, configuration)) or 'nothing'}; give what "
            "create_pipeline_configuration(model) of the generated file returns"
        )
    made: dict[str, int | None] = dict.fromkeys(configuration[MODEL_INPUTS])
    stages: list[PipelineStage] = []
    for number in numbers:
        stages.append(_stage(number, configuration[number], made))
        made.update(dict.fromkeys(stages[-1].outputs, number))
    for name in configuration[MODEL_OUTPUTS]:
        if name not in made:
            raise InputError(f"no stage makes the model's output {name!r}")
    _check_apart(stages)
    _join_parameters(stages)
    inputs, outputs = configuration[MODEL_INPUTS], configuration[MODEL_OUTPUTS]
    return Wiring(tuple(stages), tuple(inputs), tuple(outputs))


def _stage(number: int, described: Any, made: Mapping[str, int | None]) -> PipelineStage:
    """A stage of a configuration; ``made`` are the tensors that there are before it."""
    if not isinstance(described, Mapping) or any(key not in described for key in FIELDS):
        raise InputError(
            f"stage {number} must be a dict with {', '.join(map(repr, FIELDS))}, but is "
            f"{described!r}; partitions_only=True gives modules alone"
        )
    module, inputs, outputs = described["model"], described["inputs"], described["outputs"]
    if not isinstance(module, nn.Module):
        raise InputError(f"the model of stage {number} is a {type(module).__name__}, no module")
    for name in inputs:
        if name not in made:
            raise InputError(f"stage {number} takes {name!r}, which nothing before it makes")
    for name in outputs:
        if name in made:
            raise InputError(f"stage {number} makes {name!r}, which is there already")
    sources = tuple(made[name] for name in inputs)
    shapes = tuple(_captured_shape(module, name) for name in inputs)
    return PipelineStage(number, module, tuple(inputs), tuple(outputs), sources, shapes)


def _captured_shape(module: nn.Module, name: str) -> Shape | None:
    """The shape of an input in ``Takes ids i64[2, 8], mask f32[8].`` of a docstring."""
    text = " ".join((type(module).__doc__ or "").split())
    found = re.search(rf"(?:[Tt]akes |\], ){re.escape(name)} \w+\[([\d, ]*)\]", text)
    return None if found is None else tuple(int(size) for size in found[1].split(",") if size)


def _check_apart(stages: Sequence[PipelineStage]) -> None:
    """Raise InputError where stages share a module: each is moved and loaded by itself."""
    owners: dict[nn.Module, int] = {}
    for stage in stages:
        for module in stage.module.modules():
            if owners.setdefault(module, stage.index) != stage.index:
                raise InputError(
                    f"stages {owners[module]} and {stage.index} share the module "
                    f"{type(module).__name__}; each needs one of its own, which may have the same "
                    "Parameters"
                )


def _join_parameters(stages: Sequence[PipelineStage]) -> None:
    """Give stages that have a parameter under one name the first one's. Raises InputError."""
    known: dict[str, tuple[int, nn.Parameter, str]] = {}
    for stage in stages:
        slices = _slices(stage.module)
        for path, parameter in list(stage.module.named_parameters(remove_duplicate=False)):
            own = slices.get(path, path)
            index, first, piece = known.setdefault(path, (stage.index, parameter, own))
            if first.shape != parameter.shape or first.dtype != parameter.dtype:
                raise InputError(
                    f"the parameter {path!r} is {first.dtype}{list(first.shape)} in stage {index} "
                    f"and {parameter.dtype}{list(parameter.shape)} in stage {stage.index}"
                )
            if piece != own:
                raise InputError(
                    f"stage {index} has {piece!r} and stage {stage.index} {own!r}, which would be "
                    "trained apart; write the stages again"
                )
            if first is not parameter:
                owner, _, name = path.rpartition(".")
                stage.module.get_submodule(owner)._parameters[name] = first


def _slices(module: nn.Module) -> dict[str, str]:
    """Which slices of the model's the parameters of a split stage are, by path."""
    pieces = getattr(module, "pieces", None)
    return {path: piece.key for path, piece in pieces().items()} if callable(pieces) else {}


# --- what stages hold -----------------------------------------------------------------------------


class TensorAttribute(NamedTuple):
    """Where a module keeps a parameter or buffer."""

    holder: dict[str, Any]
    name: str


def places(module: nn.Module) -> Iterator[tuple[TensorAttribute, Tensor]]:
    """Every parameter and buffer of a module and its children, once a name."""
    for owner in module.modules():
        for holder in (owner._parameters, owner._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield TensorAttribute(holder, name), tensor


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Every parameter and buffer of a module and its children."""
    return (tensor for _, tensor in places(module))


@contextmanager
def ties_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """What was one tensor before the block is one tensor after it, also where it was replaced."""
    groups: dict[int, list[TensorAttribute]] = {}
    before = [pair for module in modules for pair in places(module)]
    for place, tensor in before:
        groups.setdefault(id(tensor), []).append(place)
    yield
    for first, *others in groups.values():
        for place in others:
            place.holder[place.name] = first.holder[first.name]


def devices_of(stages: Sequence[PipelineStage]) -> list[torch.device | None]:
    """Where each stage computes: where most of its own parameters and buffers lie.

    One without any is None: it computes where its inputs come from.
    """
    held = [dict.fromkeys(tensors_of(stage.module)) for stage in stages]
    users = {tensor: sum(tensor in own for own in held) for tensors in held for tensor in tensors}
    found: list[torch.device | None] = []
    for tensors in held:
        own = [tensor for tensor in tensors if users[tensor] == 1] or list(tensors)
        nbytes: dict[torch.device, int] = {}
        for tensor in own:
            nbytes[tensor.device] = nbytes.get(tensor.device, 0) + tensor.nbytes
        found.append(max(nbytes, key=nbytes.__getitem__, default=None))
    return found
