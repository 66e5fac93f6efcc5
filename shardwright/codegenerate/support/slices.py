"""Parameters that are slices of the original's: how they are saved, loaded and joined.

In the state of a stage a slice stands as ``h.0.mlp.c_fc.weight[0:768, 0:1536] of [768, 3072]``: the
original's name, the range of each dimension, and the shape of the whole. A stage loads slices, and
wholes under the original's names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.codegenerate.support.configuration import share_tensors, tensor_of
from shardwright.codegenerate.support.exchanges import Slots

Slices = Mapping[str, tuple[str, tuple[int, ...], tuple[str, ...]]]


class Piece(NamedTuple):
    """A slice of a tensor of the original: its name, ranges, and the whole's shape if known."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    shape: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """Its name in a stage's state."""
        spans = ", ".join(f"{start}:{end}" for start, end in self.ranges)
        return f"{self.name}[{spans}]" + (f" of {list(self.shape)}" if self.shape else "")

    def of(self, whole: Tensor) -> Tensor:
        """The slice of a whole, which it shares memory with."""
        for dim, (start, end) in enumerate(self.ranges):
            whole = whole.narrow(dim, start, end - start)
        return whole


def piece_of(key: str) -> Piece:
    """The slice with this name in a state; a tensor that is no slice has no ranges."""
    found = re.fullmatch(r"(.*)\[(\d+:\d+(?:, \d+:\d+)*)\](?: of \[(\d+(?:, \d+)*)\])?", key)
    if found is None:
        return Piece(key, ())
    spans = (span.split(":") for span in found[2].split(", "))
    shape = tuple(map(int, found[3].split(", "))) if found[3] else ()
    return Piece(found[1], tuple((int(start), int(end)) for start, end in spans), shape)


class SplitStage(nn.Module):
    """A stage of which parameters and buffers may be slices of the original's.

    ``slices`` has their paths, with ``*`` for numbers, and for each the original's name, with as
    many, the whole's shape, and the ranges on each slot:
    ``{"h.*.up.bias": ("h.*.up.bias", (8,), ("[0:4]", "[4:8]"))}``.
    """

    slices: ClassVar[Slices] = {}

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots
        self.register_state_dict_post_hook(name_slices)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(take_slices)  # type: ignore[no-untyped-call]

    def pieces(self) -> dict[str, Piece]:
        """Which slices parameters and buffers are, by path."""
        named = [path for path, _ in self.named_parameters(remove_duplicate=False)]
        named += [path for path, _ in self.named_buffers(remove_duplicate=False)]
        found: dict[str, Piece] = {}
        for path in named:
            parts = path.split(".")
            pattern = ".".join("*" if part.isdigit() else part for part in parts)
            if (entry := self.slices.get(path) or self.slices.get(pattern)) is not None:
                name, shape, ranges = entry
                for number in filter(str.isdigit, parts):
                    name = name.replace("*", number, 1)
                found[path] = piece_of(name + ranges[self.slots.slot])._replace(shape=shape)
        return found


def name_slices(stage: SplitStage, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Put slices under their names in a stage's state; the order stays."""
    pieces = {prefix + path: prefix + piece.key for path, piece in stage.pieces().items()}
    items = list(state.items())
    state.clear()
    state.update((pieces.get(name, name), tensor) for name, tensor in items)


def take_slices(
    stage: SplitStage,
    state: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: object,
    unexpected: object,
    errors: list[str],
) -> None:
    """Put what a stage loads under its own names: slices, and slices of wholes."""
    pieces = stage.pieces()
    shapes = {piece.name: piece.shape for piece in pieces.values()}
    wholes: dict[str, Tensor] = {}
    for name in dict.fromkeys((*shapes, *pieces)):
        given = state.pop(prefix + name, None)
        if given is not None and tuple(given.shape) == shapes.get(name):
            wholes[name] = given
        elif given is not None:
            errors.append(
                f"size mismatch for {prefix}{name}: found {list(given.shape)}, but only wholes are "
                f"loaded by plain names, and slices by names as {prefix}{pieces[name].key!r}"
                if name in pieces
                else f"size mismatch for {prefix}{name}: found {list(given.shape)}, expected the "
                f"whole, {list(shapes[name])}"
            )
    for path, piece in pieces.items():
        if prefix + piece.key in state:
            state[prefix + path] = state.pop(prefix + piece.key)
        elif piece.name in wholes:
            state[prefix + path] = piece.of(wholes[piece.name])


class StateSlice(NamedTuple):
    """A slice that a state has, or a whole, with all of its range; ``state`` is its number."""

    piece: Piece
    tensor: Tensor
    state: int


def join_state_dicts(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The original's state from those of all slots of all stages.

    Raises ValueError where a slice is missing, and where states differ in what both have.
    """
    found: dict[str, list[StateSlice]] = {}
    for number, state in enumerate(states):
        for key, tensor in state.items():
            piece = piece_of(key)
            if not piece.ranges:
                shape = tuple(tensor.shape)
                piece = Piece(key, tuple((0, size) for size in shape), shape)
            found.setdefault(piece.name, []).append(StateSlice(piece, tensor.detach(), number))
    return {name: joined(name, held) for name, held in found.items()}


def joined(name: str, held: Sequence[StateSlice]) -> Tensor:
    """A tensor from its slices. Raises ValueError where one is missing, or where two differ."""
    whole = held[0].tensor.new_empty(whole_shape(held))
    states = torch.full(whole.shape, -1, dtype=torch.int32, device=whole.device)
    for piece, tensor, state in held:
        there, known = piece.of(whole), piece.of(states)
        if (tensor.shape, tensor.dtype) != (there.shape, there.dtype):
            raise ValueError(
                f"{name!r} of state {state} is {tensor.dtype}{list(tensor.shape)}, expected "
                f"{there.dtype}{list(there.shape)}"
            )
        given = tensor.to(whole.device)
        alike = (given == there) | ((given != given) & (there != there))
        differing = known[~alike & (known >= 0)]
        if differing.numel():
            raise ValueError(
                f"the states {int(differing[0])} and {state} differ in {name!r}; give states of "
                "one time, of slots that began alike"
            )
        there.copy_(given)
        known.fill_(state)
    if (states < 0).any():
        raise ValueError(
            f"{name!r} has missing slices, found {', '.join(one.piece.key for one in held)}; give "
            "the states of all slots"
        )
    return whole


def whole_shape(held: Sequence[StateSlice]) -> tuple[int, ...]:
    """The shape of the whole; of slices that do not say it as far as they go.

    Raises ValueError where they are of wholes of several shapes.
    """
    known = {piece.shape: state for piece, _, state in held if piece.shape}
    if len(known) > 1:
        shapes = ", ".join(f"{list(shape)} of state {state}" for shape, state in known.items())
        raise ValueError(
            f"{held[0].piece.name!r} has the shapes {shapes}; give states of one model"
        )
    ends = zip(*([end for _, end in piece.ranges] for piece, _, _ in held), strict=True)
    return next(iter(known), tuple(map(max, ends)))


def unfilled(
    partition: Callable[[dist.ProcessGroup | None, int], nn.Module],
    group: dist.ProcessGroup | None,
    slot: int,
) -> nn.Module:
    """A stage of which every parameter is NaN until a state is loaded.

    Slots would not begin alike with random numbers of their own; so none are drawn, either.
    """
    with torch.random.fork_rng(devices=()):
        stage = partition(group, slot)
    for parameter in stage.parameters():
        filler = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
        nn.init.constant_(parameter, filler)
    return stage


def share(stage: nn.Module, model: nn.Module, made: dict[object, Tensor]) -> None:
    """Give a stage the model's parameters and buffers: slices of them, or the very same.

    Slices have memory of their own, and a tensor's are made once: ``made`` has those of stages.
    """
    pieces: dict[str, Piece] = getattr(stage, "pieces", dict)()
    for path, piece in pieces.items():
        owner, _, name = path.rpartition(".")
        module = stage.get_submodule(owner)
        own: Tensor = getattr(module, name)
        if not own.is_meta:
            continue  # what is not on meta is the stage's own
        whole = tensor_of(model, piece.name, piece.shape, own.dtype)
        key = (id(whole), piece.ranges)
        if key not in made:
            taken = piece.of(whole.detach()).clone(memory_format=torch.contiguous_format)
            is_parameter = isinstance(whole, nn.Parameter)
            made[key] = nn.Parameter(taken, whole.requires_grad) if is_parameter else taken
        setattr(module, name, made[key])
    share_tensors(stage, model)
