"""GPipe: stages on microbatches in clock cycles, forward; autograd walks them backward.

The stages are those of a generated configuration: each takes inputs of the model and what earlier
stages make, each name is made once, and a parameter that two stages have under one name is one
Parameter.

Each stage and microbatch is one cell: to autograd a single node, whose inputs are the stage's
inputs and parameters, so that hooks, `torch.autograd.grad` and a larger model around it work as
ever. Inside, a cell has an autograd graph of its own, from leaves that share the memory of its
inputs and parameters. Autograd takes the cells of a device in the reverse of the order in which
they ran, so that gradients are summed in the same order in every run: only what stages on several
GPUs share is summed as it arrives. What a cell saved is freed after its backward.

Yanping Huang and others, GPipe, arXiv 1811.06965.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from shardwright.errors import InputError, RunError, WorkerError
from shardwright.torch_internals import keeps_graph

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


# --- cells ----------------------------------------------------------------------------------------


TensorsByName = dict[str, Tensor]


class GPipe:
    """Runs stages on microbatches, one module at a time; a copy has locks and streams of its own.

    ``recompute`` says to compute activations again in the backward, but for those of the last
    microbatch, whose backward is the first.
    """

    def __init__(self, stages: Sequence[PipelineStage], wanted: Sequence[str]) -> None:
        self.stages = stages
        self._wanted = frozenset(wanted)
        self._last_reader = {name: stage.index for stage in stages for name in stage.inputs}
        self._lock = threading.RLock()
        self._copies = _DeviceCopies()

    def __reduce__(self) -> tuple[type[Self], tuple[Sequence[PipelineStage], frozenset[str]]]:
        return type(self), (self.stages, self._wanted)

    def run(
        self, microbatches: Sequence[Mapping[str, Tensor]], *, recompute: bool
    ) -> list[TensorsByName]:
        """The wanted tensors of each microbatch, from the model's inputs. Raises WorkerError."""
        values = [dict(given) for given in microbatches]
        with self._lock:
            devices = devices_of(self.stages)
        for place, number in clock_cycles(len(self.stages), len(values)):
            stage, held = self.stages[place], values[number]
            cell = _Cell(
                stage,
                number,
                devices[place],
                self._lock,
                self._copies,
                recompute=recompute and number != len(values) - 1,
            )
            made = cell(*(held[name] for name in stage.inputs))
            for name in stage.inputs:
                if self._last_reader[name] == place and name not in self._wanted:
                    held.pop(name, None)
            for name, tensor in zip(stage.outputs, made, strict=True):
                if name in self._last_reader or name in self._wanted:
                    held[name] = tensor
        return values


def clock_cycles(stages: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """Stages and microbatches in the order of GPipe's clock cycles.

    Of one cycle the last stage comes first, so that what a device copies from another waits for
    nothing that is asked of that one later.
    """
    for clock in range(stages + microbatches - 1):
        for stage in reversed(range(stages)):
            if 0 <= clock - stage < microbatches:
                yield stage, clock - stage


@dataclass(frozen=True, slots=True)
class _Cell:
    """One stage on one microbatch; ``device`` is where, None where its inputs are.

    The lock is held while a module is called, or its tensors are looked at: it has others then.
    """

    stage: PipelineStage
    microbatch: int
    device: torch.device | None
    lock: threading.RLock
    copies: _DeviceCopies
    recompute: bool

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """The stage's outputs, differentiable where autograd records. Raises WorkerError."""
        apply: Callable[..., Sequence[Tensor]] = _CellFunction.apply
        with self.lock:
            parameters = [p for p in self.stage.module.parameters() if p.requires_grad]
            if torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *parameters)):
                return apply(self, *inputs, *parameters)
            return self.compute([self.moved(tensor) for tensor in inputs], self._moved_tensors({}))

    def compute(self, inputs: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The outputs, with some of the module's tensors replaced. Raises WorkerError."""
        runs = 0

        def run(*arguments: Tensor) -> Any:
            nonlocal runs
            runs += 1
            with self.lock:
                # A second run must not change buffers again.
                kept = {name: b.clone() for name, b in _buffers(self.stage.module) if runs > 1}
                return functional_call(self.stage.module, {**kept, **tensors}, arguments)

        try:
            if self.recompute and torch.is_grad_enabled():
                return self._checked(checkpoint(run, *inputs, use_reentrant=False))
            return self._checked(run(*inputs))
        except Exception as error:
            raise self._failed("forward", error) from error

    def differentiate(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        leaves: Sequence[Tensor],
        *,
        keep: bool,
    ) -> list[Tensor | None]:
        """The gradients of the leaves that take one; None for others. Raises WorkerError."""
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not pairs or not wanted:
            return [None] * len(leaves)
        try:
            found = iter(
                torch.autograd.grad(
                    [output for output, _ in pairs],
                    wanted,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                    retain_graph=keep,
                )
            )
        except Exception as error:
            raise self._failed("backward", error) from error
        return [next(found) if leaf.requires_grad else None for leaf in leaves]

    def leaves(
        self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
        """Leaves for inputs and parameters, and what the module computes with in their place."""
        arguments = [self.moved(t.detach()).requires_grad_(t.requires_grad) for t in inputs]
        known = {id(p): self.moved(p.detach()).requires_grad_() for p in parameters}
        return arguments, [known[id(p)] for p in parameters], self._moved_tensors(known)

    def _moved_tensors(self, known: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """By name what stands for the module's parameters, and for tensors of other devices."""
        named = self.stage.module.named_parameters(remove_duplicate=False)
        tensors = [*named, *_buffers(self.stage.module)]
        pairs = ((name, t, known.get(id(t), self.moved(t))) for name, t in tensors)
        return {name: there for name, tensor, there in pairs if there is not tensor}

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor on the cell's device."""
        return self.copies.moved(tensor, self.device)

    def _checked(self, made: Any) -> list[Tensor]:
        """What the stage returned, a tensor an output. Raises InputError."""
        found, names = [made] if isinstance(made, Tensor) else list(made or ()), self.stage.outputs
        if len(found) != len(names) or not all(isinstance(part, Tensor) for part in found):
            raise InputError(
                f"the stage returned {', '.join(type(t).__name__ for t in found) or 'nothing'}; "
                f"expected a tensor for each of its outputs: {', '.join(names)}"
            )
        return found

    def _failed(self, phase: str, error: Exception) -> WorkerError:
        message = f"{phase}: {type(error).__name__}: {error}"
        return WorkerError(message, stage=self.stage.index, microbatch=self.microbatch)


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(remove_duplicate=False)


class _CellFunction(torch.autograd.Function):
    """A cell as a node of autograd; its tensors are the stage's inputs, then its parameters."""

    @staticmethod
    def forward(ctx: Any, cell: _Cell, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(cell.stage.inputs)
        with torch.enable_grad():
            arguments, leaves, replaced = cell.leaves(tensors[:count], tensors[count:])
            made = cell.compute(arguments, replaced)
        outputs = tuple(tensor.detach() for tensor in made)
        pairs = zip(outputs, made, strict=True)
        ctx.mark_non_differentiable(*(out for out, tensor in pairs if not tensor.requires_grad))
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.recorded = cell, ([*arguments, *leaves], made)
        ctx.devices = [tensor.device for tensor in tensors]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of inputs and parameters. Raises RunError where there is none."""
        if torch.is_grad_enabled():
            raise RunError(
                "the backward of a pipeline cannot be differentiated again; leave "
                "create_graph=True out, or use the model itself for second derivatives"
            )
        if ctx.recorded is None:
            raise RunError(
                "the backward of this call has run, and what it needed is freed; give "
                "retain_graph=True to the first backward, or call the pipeline again"
            )
        (leaves, made), keep = ctx.recorded, keeps_graph()
        if not keep:
            ctx.recorded = None
        found = ctx.cell.differentiate(made, gradients, leaves, keep=keep)
        pairs = zip(found, ctx.devices, strict=True)
        return None, *(None if g is None else ctx.cell.copies.moved(g, d) for g, d in pairs)


class _DeviceCopies:
    """Copies of tensors between devices; between GPUs on streams of their own.

    Such a copy waits for what its source has been asked for so far, and its target's next work
    waits for it: a stage continues with its next microbatch while its last one travels (the copy
    streams of torchgpipe, arXiv 2004.09910).
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def moved(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """The tensor on a device; itself where it is there, or where there is none to go to."""
        if device is None or tensor.device == device:
            return tensor
        if not tensor.is_cuda or device.type != "cuda":
            # Towards the CPU the copy must have ended before anybody there reads it.
            return tensor.to(device, non_blocking=device.type == "cuda")
        out, into = self._stream(tensor.device, "out"), self._stream(device, "in")
        out.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(out), torch.cuda.stream(into):
            moved = tensor.to(device, non_blocking=True)
        here = torch.cuda.current_stream(device)
        here.wait_stream(into)
        tensor.record_stream(out)
        moved.record_stream(here)
        return moved

    def _stream(self, device: torch.device, direction: str) -> torch.cuda.Stream:
        if (device, direction) not in self._streams:
            self._streams[device, direction] = torch.cuda.Stream(device)
        return self._streams[device, direction]
