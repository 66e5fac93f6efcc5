"""The numbers among what a step or an evaluation returns, by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.errors import InputError
from shardwright.ir.structure import describe_result, leaves

LOSS = "loss"


def measures(result: Any, alone: str) -> dict[str, float]:
    """The numbers of a result: its tensors of one element."""
    named = _named(result, alone)
    return {name: tensor.item() for name, tensor in named.items() if tensor.numel() == 1}


def means(result: Any, alone: str) -> dict[str, float]:
    """The mean of each tensor of a result. Raises InputError where there is none."""
    named = _named(result, alone)
    if not named:
        raise InputError(f"{alone} returns no tensor; return what it measures")
    return {name: tensor.double().mean().item() for name, tensor in named.items()}


def _named(result: Any, alone: str) -> dict[str, Tensor]:
    """The tensors of a result by name; ``alone`` is that of one which is all of it."""
    if isinstance(result, Tensor):
        return {alone: result}
    tree, tensors = describe_result(result)
    return {leaf.name: tensors[leaf.index] for leaf in leaves(tree)}


def loss_of(found: dict[str, float]) -> float:
    """The loss among a step's numbers: the one of that name, else the first. Raises InputError."""
    if not found:
        raise InputError("the step returns no number to show as its loss; return the loss")
    return found[LOSS] if LOSS in found else next(iter(found.values()))
