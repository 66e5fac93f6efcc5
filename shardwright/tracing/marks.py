"""Marks: the places of an exported program where a step of training stands.

Comes in: while the program is traced, what it asks for (a backward, an optimizer's step) and the
tensors concerned. Goes out: a call of the operator `MARK` in the exported program, whose number
leads to a record of what was asked for. What always holds: a mark computes nothing; it gives
tensors like those that it is told to, so that the program can go on with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from shardwright.tracing.optimizers import OptimizerGroup

_LIBRARY = torch.library.Library("shardwright_step", "DEF")
_LIBRARY.define("mark(int number, Tensor[] reads, Tensor[] like) -> Tensor[]")


def _mark(
    number: int, reads: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in like]


torch.library.register_fake("shardwright_step::mark", _mark, lib=_LIBRARY)
_LIBRARY.impl("mark", torch.library.fallthrough_kernel, "Autograd")

MARK = torch.ops.shardwright_step.mark.default
torch.fx.node.has_side_effect(MARK)  # or export drops what nothing reads


@dataclass(frozen=True)
class BackwardMark:
    """Reads the loss, the gradient it is given if any, and the gradients that exist already.

    ``parameters`` get a gradient, ``existing`` of them had one, and the others' are made.
    """

    parameters: tuple[str, ...]
    existing: tuple[str, ...]
    has_gradient: bool


@dataclass(frozen=True)
class ZeroGrad:
    """Reads the gradients that become zeros; none where they become None."""

    parameters: tuple[str, ...]
    set_to_none: bool


@dataclass(frozen=True)
class Clip:
    """Reads gradients, which are clipped in place; ``op`` is the marker, ``attrs`` its own.

    What it makes besides is their total norm, where that is asked for.
    """

    op: str
    parameters: tuple[str, ...]
    attrs: dict[str, Any]


@dataclass(frozen=True)
class UpdateMark:
    """An optimizer's step for one group: reads parameters, then their gradients."""

    group: OptimizerGroup
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Own:
    """A marker that the program writes itself (`active`); makes tensors under these names."""

    op: str
    attrs: dict[str, Any]
    names: tuple[str, ...]


Record = BackwardMark | ZeroGrad | Clip | UpdateMark | Own
