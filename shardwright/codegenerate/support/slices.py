"""Parameters that are slices of the original's: how they are saved, loaded and joined.

In the state of a stage a slice stands as ``h.0.mlp.c_fc.weight[0:768, 0:1536]``: the original's
name, and the range of each dimension. A stage loads slices, and wholes under the original's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.codegenerate.support.slots import Slots

Slices = Mapping[str, tuple[str, tuple[str, ...]]]


class Piece(NamedTuple):
    """A slice of a tensor of the original: its name, and the range of each dimension."""

    name: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """Its name in a stage's state."""
        return f"{self.name}[{', '.join(f'{start}:{end}' for start, end in self.ranges)}]"

    def of(self, whole: Tensor) -> Tensor:
        """The slice of a whole, which it shares memory with."""
        for dim, (start, end) in enumerate(self.ranges):
            whole = whole.narrow(dim, start, end - start)
        return whole


def piece_of(key: str) -> Piece:
    """The slice with this name in a state; a tensor that is no slice has no ranges."""
    found = re.fullmatch(r"(.*)\[(\d+:\d+(?:, \d+:\d+)*)\]", key)
    if found is None:
        return Piece(key, ())
    spans = (span.split(":") for span in found[2].split(", "))
    return Piece(found[1], tuple((int(start), int(end)) for start, end in spans))


class SplitStage(nn.Module):
    """A stage of which parameters and buffers may be slices of the original's.

    ``slices`` has their paths, with ``*`` for numbers, and for each the original's name, with as
    many, and the ranges on each slot: ``{"h.*.up.weight": ("h.*.up.weight", ("[0:4]", "[4:8]"))}``.
    """

    slices: ClassVar[Slices] = {}

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots
        self.register_state_dict_post_hook(name_slices)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(take_slices)  # type: ignore[no-untyped-call]

    def pieces(self, slot: int | None = None) -> dict[str, Piece]:
        """Which slices parameters and buffers are, by path, here or on another slot."""
        named = [path for path, _ in self.named_parameters(remove_duplicate=False)]
        named += [path for path, _ in self.named_buffers(remove_duplicate=False)]
        found: dict[str, Piece] = {}
        for path in named:
            parts = path.split(".")
            pattern = ".".join("*" if part.isdigit() else part for part in parts)
            if (entry := self.slices.get(path) or self.slices.get(pattern)) is not None:
                name, ranges = entry
                for number in filter(str.isdigit, parts):
                    name = name.replace("*", number, 1)
                found[path] = piece_of(name + ranges[self.slots.slot if slot is None else slot])
        return found

    def whole_shapes(self) -> dict[str, list[int]]:
        """The shapes of the original's tensors that slots hold slices of, by name."""
        shapes: dict[str, list[int]] = {}
        slots = max((len(ranges) for _, ranges in self.slices.values()), default=0)
        for slot in range(slots):
            for piece in self.pieces(slot).values():
                ends = [end for _, end in piece.ranges]
                known = shapes.get(piece.name, ends)
                shapes[piece.name] = [max(pair) for pair in zip(known, ends, strict=True)]
        return shapes


def name_slices(stage: SplitStage, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Put slices under their names in a stage's state; the order stays."""
    pieces = {prefix + path: prefix + piece.key for path, piece in stage.pieces().items()}
    items = list(state.items())
    state.clear()
    state.update((pieces.get(name, name), tensor) for name, tensor in items)


def take_slices(stage: SplitStage, state: dict[str, Any], prefix: str, *rest: object) -> None:
    """Put what a stage loads under its own names: slices, and slices of wholes."""
    pieces, shapes = stage.pieces(), stage.whole_shapes()
    wholes = {
        piece.name: state[prefix + piece.name]
        for piece in pieces.values()
        if list(getattr(state.get(prefix + piece.name), "shape", ())) == shapes[piece.name]
    }
    for name in wholes:
        del state[prefix + name]
    for path, piece in pieces.items():
        if prefix + piece.key in state:
            state[prefix + path] = state.pop(prefix + piece.key)
        elif piece.name in wholes:
            state[prefix + path] = piece.of(wholes[piece.name])


def join_state_dicts(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The original's state from those of all slots of all stages.

    Raises ValueError where a slice is missing.
    """
    whole: dict[str, Tensor] = {}
    found: dict[str, dict[Piece, Tensor]] = {}
    for state in states:
        for key, tensor in state.items():
            piece = piece_of(key)
            if piece.ranges:
                found.setdefault(piece.name, {})[piece] = tensor
                whole.setdefault(piece.name, tensor)
            else:
                whole.setdefault(key, tensor)
    for name, pieces in found.items():
        whole[name] = joined(name, pieces)
    return whole


def joined(name: str, pieces: Mapping[Piece, Tensor]) -> Tensor:
    """A tensor from its slices. Raises ValueError where one is missing."""
    ends = zip(*([end for _, end in piece.ranges] for piece in pieces), strict=True)
    whole = next(iter(pieces.values())).new_empty([max(found) for found in ends])
    missing = torch.ones(whole.shape, dtype=torch.bool)
    for piece, tensor in pieces.items():
        piece.of(whole).copy_(tensor)
        piece.of(missing).fill_(False)
    if missing.any():
        raise ValueError(
            f"{name!r} has missing slices, found {', '.join(piece.key for piece in pieces)}; give "
            "the states of all slots"
        )
    return whole


def share(stage: nn.Module, model: nn.Module, made: dict[object, Tensor]) -> None:
    """Give a stage the parameters and buffers of the model: the very same, or slices of them.

    ``made`` has the slices that stages have already: a tensor's are made once.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    pieces = stage.pieces() if isinstance(stage, SplitStage) else {}
    for path, module in stage.named_modules():
        for name in (*module._parameters, *module._buffers):
            if (own := getattr(module, name)) is None or not own.is_meta:
                continue  # what is not on meta is the stage's own
            key = f"{path}.{name}" if path else name
            piece = pieces.get(key, Piece(key, ()))
            whole = tensors.get(piece.name)
            if whole is None:
                raise ValueError(
                    f"the model has no {piece.name!r}; give the model that was partitioned"
                )
            setattr(module, name, shared(whole, piece, made) if piece.ranges else whole)


def shared(whole: Tensor, piece: Piece, made: dict[object, Tensor]) -> Tensor:
    """A slice of a tensor of the model, with memory of its own."""
    key = (id(whole), piece.ranges)
    if key not in made:
        taken = piece.of(whole.detach()).clone(memory_format=torch.contiguous_format)
        is_parameter = isinstance(whole, nn.Parameter)
        made[key] = nn.Parameter(taken, whole.requires_grad) if is_parameter else taken
    return made[key]
