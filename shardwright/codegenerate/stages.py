"""The stages of a generated configuration: what each takes and makes, and how it is called.

Comes in: the dict that ``create_pipeline_configuration`` of a generated file gives. Goes out: its
`PipelineStage`s. What always holds: a stage takes inputs of the model and what earlier stages make;
each name is made once; a parameter that two stages have under one name is one Parameter.

A stage computes with stand-ins of its parameters: leaves of its own that share their memory, on the
device of the stage. So two stages can differentiate by one tied parameter at the same time, hooks
of a parameter see its whole gradient once, and a parameter may lie on another stage's device.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.errors import InputError

MODEL_INPUTS = "model inputs"
MODEL_OUTPUTS = "model outputs"
FIELDS = ("inputs", "outputs", "model")
"""What a configuration says of each stage."""

Shape = tuple[int, ...]


class OneAtATime:
    """A lock that guards one module; a copy guards another."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[type[OneAtATime], tuple[()]]:
        return type(self), ()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One partition.

    inputs, outputs
        Names, in the order of the arguments and results of ``module``.
    sources
        For each input the stage that makes it; None where it is the model's.
    shapes
        For each input the shape that the module's docstring says it takes, as that of a generated
        class does; None where it says nothing.
    alone
        Held while the module computes with stand-ins.
    """

    index: int
    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sources: tuple[int | None, ...]
    shapes: tuple[Shape | None, ...]
    alone: OneAtATime = field(default_factory=OneAtATime)

    @property
    def before(self) -> tuple[int, ...]:
        """The stages that this one takes something from."""
        return tuple(sorted({source for source in self.sources if source is not None}))


class Wiring(NamedTuple):
    """The stages of a model in order, and the names of its inputs and outputs."""

    stages: tuple[PipelineStage, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def wiring_of(configuration: Mapping[Any, Any]) -> Wiring:
    """What a configuration says. Raises InputError where that is not a pipeline."""
    numbers = sorted(key for key in configuration if isinstance(key, int))
    lacking = [key for key in (MODEL_INPUTS, MODEL_OUTPUTS) if key not in configuration]
    if lacking or not numbers or numbers != list(range(len(numbers))):
        raise InputError(
            f"a configuration has {MODEL_INPUTS!r}, {MODEL_OUTPUTS!r} and the stages 0, 1, …; this "
            f"one has {', '.join(map(repr, configuration)) or 'nothing'}; give what "
            "create_pipeline_configuration(model) of the generated file returns"
        )
    made: dict[str, int | None] = dict.fromkeys(configuration[MODEL_INPUTS])
    stages = []
    for number in numbers:
        stages.append(_stage(number, configuration[number], made))
        made.update(dict.fromkeys(stages[-1].outputs, number))
    for name in configuration[MODEL_OUTPUTS]:
        if name not in made:
            raise InputError(f"no stage makes the model's output {name!r}")
    _check_apart(stages)
    return Wiring(
        tuple(stages), tuple(configuration[MODEL_INPUTS]), tuple(configuration[MODEL_OUTPUTS])
    )


def _stage(number: int, described: Any, made: Mapping[str, int | None]) -> PipelineStage:
    """A stage of a configuration; ``made`` are the tensors that there are before it."""
    if not isinstance(described, Mapping) or any(field not in described for field in FIELDS):
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
    shapes = tuple(_shape_of(module, name) for name in inputs)
    return PipelineStage(number, module, tuple(inputs), tuple(outputs), sources, shapes)


def _shape_of(module: nn.Module, name: str) -> Shape | None:
    """The shape of an input in ``Takes ids i64[2, 8], mask f32[8].`` of a docstring."""
    text = " ".join((type(module).__doc__ or "").split())
    found = re.search(rf"(?:[Tt]akes |\], ){re.escape(name)} \w+\[([\d, ]*)\]", text)
    return None if found is None else tuple(int(size) for size in found[1].split(",") if size)


def _check_apart(stages: Sequence[PipelineStage]) -> None:
    """Raise InputError where stages share a module: they run, and are changed, at one time."""
    owners: dict[nn.Module, int] = {}
    for stage in stages:
        for module in stage.module.modules():
            if owners.setdefault(module, stage.index) != stage.index:
                raise InputError(
                    f"stages {owners[module]} and {stage.index} share the module "
                    f"{type(module).__name__}; each needs one of its own, which may have the same "
                    "Parameters"
                )


class Place(NamedTuple):
    """Where a module keeps a parameter or buffer."""

    holder: dict[str, Any]
    name: str


def places(module: nn.Module) -> Iterator[tuple[Place, Tensor]]:
    """Every parameter and buffer of a module and its children, once a name."""
    for owner in module.modules():
        for holder in (owner._parameters, owner._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield Place(holder, name), tensor


def join_equal_names(stages: Sequence[PipelineStage]) -> None:
    """Give stages that have a parameter under one name the first one's. Raises InputError."""
    known: dict[str, tuple[int, nn.Parameter]] = {}
    slices: dict[str, str] = {}
    for stage in stages:
        own = _slices(stage.module)
        for path, parameter in list(stage.module.named_parameters(remove_duplicate=False)):
            index, first = known.setdefault(path, (stage.index, parameter))
            if first.shape != parameter.shape or first.dtype != parameter.dtype:
                raise InputError(
                    f"the parameter {path!r} is {first.dtype}{list(first.shape)} in stage {index} "
                    f"and {parameter.dtype}{list(parameter.shape)} in stage {stage.index}"
                )
            if slices.setdefault(path, own.get(path, path)) != own.get(path, path):
                raise InputError(
                    f"stage {index} has {slices[path]!r} and stage {stage.index} "
                    f"{own.get(path, path)!r}, which would be trained apart; write the stages again"
                )
            if first is not parameter:
                owner, _, name = path.rpartition(".")
                stage.module.get_submodule(owner)._parameters[name] = first


def _slices(module: nn.Module) -> dict[str, str]:
    """Which slices of the model's the parameters of a split stage are, by path."""
    pieces = getattr(module, "pieces", None)
    return {path: piece.key for path, piece in pieces().items()} if callable(pieces) else {}


@contextmanager
def ties_kept(modules: Sequence[nn.Module]) -> Iterator[None]:
    """What was one tensor before the block is one tensor after it, also where it was replaced."""
    groups: dict[int, list[Place]] = {}
    before = [pair for module in modules for pair in places(module)]
    for place, tensor in before:
        groups.setdefault(id(tensor), []).append(place)
    yield
    for first, *others in groups.values():
        for other in others:
            other.holder[other.name] = first.holder[first.name]


class StandIns:
    """What a stage computes with in one call of the pipeline, in place of its parameters.

    parameters, leaves
        Those that gradients are asked for, each once, and the tensors that stand for them.
    """

    def __init__(
        self, stage: PipelineStage, device: torch.device | None, *, recording: bool
    ) -> None:
        known: dict[int, Tensor] = {}
        self.parameters: list[Tensor] = []
        self.leaves: list[Tensor] = []
        self._replaced: list[tuple[Place, Tensor, Tensor]] = []
        self._alone = stage.alone
        with stage.alone:
            found = list(places(stage.module))
        for place, tensor in found:
            differentiated = recording and tensor.requires_grad
            elsewhere = device is not None and tensor.device != device
            if not (differentiated or elsewhere):
                continue
            if id(tensor) not in known:
                known[id(tensor)] = self._stand_in(tensor, device, differentiated)
            self._replaced.append((place, tensor, known[id(tensor)]))

    def _stand_in(
        self, tensor: Tensor, device: torch.device | None, differentiated: bool
    ) -> Tensor:
        leaf = tensor.detach().to(device) if device is not None else tensor.detach()
        if differentiated:
            self.parameters.append(tensor)
            self.leaves.append(leaf.requires_grad_())
        return leaf

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the module compute with them in the block, for no other call."""
        with self._alone:
            for place, _, leaf in self._replaced:
                place.holder[place.name] = leaf
            try:
                yield
            finally:
                for place, tensor, _ in self._replaced:
                    place.holder[place.name] = tensor


@contextmanager
def buffers_left(module: nn.Module) -> Iterator[None]:
    """Let a module compute in the block with copies of its buffers, so that these stay."""
    kept = [
        (Place(owner._buffers, name), buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for place, buffer in kept:
        place.holder[place.name] = buffer.clone()
    try:
        yield
    finally:
        for place, buffer in kept:
            place.holder[place.name] = buffer


def devices_of(stages: Sequence[PipelineStage]) -> list[torch.device | None]:
    """Where each stage computes: where most of its own parameters and buffers lie.

    One without any is None: it computes where its inputs come from.
    """
    users: dict[int, set[int]] = {}
    for stage in stages:
        for _, tensor in places(stage.module):
            users.setdefault(id(tensor), set()).add(stage.index)
    return [_device(stage, users) for stage in stages]


def _device(stage: PipelineStage, users: Mapping[int, set[int]]) -> torch.device | None:
    own: dict[torch.device, int] = {}
    shared: dict[torch.device, int] = {}
    for _, tensor in places(stage.module):
        counted = own if len(users[id(tensor)]) == 1 else shared
        counted[tensor.device] = counted.get(tensor.device, 0) + tensor.nbytes
    found = own or shared
    return max(found, key=lambda device: found[device]) if found else None
