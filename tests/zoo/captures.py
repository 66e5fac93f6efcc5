"""Models of the zoo, captured once for all tests of a process.

Comes in: a model's name, a dtype, a number of layers. Goes out: the model in eval mode, the
arguments of a call, and their graph, whose tensors are the model's own. None of it may be changed:
who runs a backward or a step takes a copy, or leaves all as it was (`unchanged`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.ir import IRGraph
from shardwright.ir.structure import flatten_call
from zoo.models import BY_NAME, LAYERS
from zoo.training import Trained

SHALLOW = 2
"""Layers of a model that is cut in two stages at most: one is as another, and half is made."""


@dataclass(frozen=True)
class Captured:
    """A model, the keyword arguments of a call, and the graph of that call."""

    model: nn.Module
    kwargs: dict[str, Tensor]
    graph: IRGraph

    @property
    def inputs(self) -> list[Tensor]:
        """The arguments in the order of the graph's inputs."""
        assert self.graph.in_structure is not None
        return flatten_call(self.graph.in_structure, (), self.kwargs)

    @property
    def double(self) -> bool:
        """Whether all of it is computed in float64."""
        return all(value.dtype != "f32" for value in self.graph.values.values())


@cache
def captured(name: str, dtype: torch.dtype, layers: int) -> Captured:
    """A model of the zoo with its floating-point tensors in ``dtype``."""
    model, _, kwargs = BY_NAME[name].make(layers=layers)
    kwargs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in kwargs.items()}
    model = model.to(dtype)
    return Captured(model, kwargs, sw.capture(model, (), kwargs, name=name))


def single(name: str, layers: int = LAYERS) -> Captured:
    """A model as it is made, in float32."""
    return captured(name, torch.float32, layers)


def widest(name: str, layers: int = LAYERS) -> Captured:
    """A model in the widest dtype that it knows."""
    dtype = torch.float32 if BY_NAME[name].single_only else torch.float64
    return captured(name, dtype, layers)


@contextmanager
def unchanged(entry: Trained) -> Iterator[None]:
    """Undo what steps change in a model; its optimizer forgets them."""
    before = {key: tensor.clone() for key, tensor in entry.model.state_dict().items()}
    try:
        yield
    finally:
        entry.model.load_state_dict(before)
        entry.optimizer.zero_grad()
        entry.optimizer.state.clear()
