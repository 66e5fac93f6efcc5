"""A program as a module of flat tensors, which is all that a tracer has to understand.

Comes in: a model and the structure of a call of it (`ir.structure`). Goes out: a module whose
``forward`` takes the call's tensors in leaf order and returns the result's, followed by the new
contents of buffers that the model assigned (``self.steps = self.steps + 1``). What always holds:
the result's structure and the names of those buffers are known once ``forward`` has run, and an
exception of the model leaves ``forward`` as a CaptureError that names the model's line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwright.errors import CaptureError, InputError
from shardwright.ir.structure import Arguments, Call, Tree, describe_result, rebuild_call
from shardwright.tracing.failures import explain

PREFIX = "model"
"""Where the model stands in the flat module: the first part of every name that export makes."""


@dataclass
class Outcome:
    """What ``forward`` found out: the result's structure, and what it returns after the result."""

    result: Tree | None = None
    assigned: tuple[str, ...] = ()


class FlatModel(nn.Module):
    """The flat module; ``outcome`` is filled by ``forward``.

    A subclass may run something else than the model, and return more tensors after the result's.
    """

    returns_tensors = True

    def __init__(self, model: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments
        self.outcome = Outcome()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors of the result, then those of the buffers it assigned, then the rest."""
        call = rebuild_call(self.arguments, tensors)
        before = {slot: slot.tensor for slot in _slots(self.model)}
        try:
            result = self.run(call)
        except CaptureError:
            raise
        except Exception as error:
            raise explain(error) from error
        tree, outputs = _describe(result)
        if not outputs and self.returns_tensors:
            raise CaptureError(
                f"the model returned {type(result).__name__} without any tensor; a graph has at "
                "least one output"
            )
        assigned = {
            slot.name: _assigned(slot) for slot, old in before.items() if slot.tensor is not old
        }
        self.outcome.result, self.outcome.assigned = tree, tuple(assigned)
        return (*outputs, *assigned.values(), *self.rest())

    def run(self, call: Call) -> Any:
        """What the program gives for a call."""
        return self.model(*call.args, **call.kwargs)

    def rest(self) -> Sequence[torch.Tensor]:
        """Tensors to return besides, once the program has run."""
        return ()


class _ModuleSlot(NamedTuple):
    """A place of a module that holds a parameter or a buffer."""

    module: nn.Module
    kind: str
    key: str
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        tensor: torch.Tensor | None = getattr(self.module, self.kind).get(self.key)
        return tensor


def _slots(model: nn.Module) -> Iterator[_ModuleSlot]:
    for prefix, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield _ModuleSlot(module, kind, key, f"{prefix}.{key}" if prefix else key)


def _assigned(slot: _ModuleSlot) -> torch.Tensor:
    """The tensor that the model put into a buffer's place."""
    if slot.kind == "_parameters":
        raise CaptureError(
            f"the model assigns its parameter {slot.name!r} while it runs; parameters are fixed in "
            "a graph, so use a buffer, or compute with a new tensor"
        )
    if slot.tensor is None:
        raise CaptureError(
            f"the model removes its buffer {slot.name!r} while it runs; a graph cannot, so leave "
            "the buffer in place"
        )
    return slot.tensor


def _describe(result: Any) -> tuple[Tree, list[torch.Tensor]]:
    try:
        tree, outputs = describe_result(result)
    except InputError as error:
        message = f"the model's result cannot be part of a graph: {error}"
        if "cache" in message.lower():
            message += " (to leave a cache out, call the model with use_cache=False)"
        raise CaptureError(message) from None
    return tree, outputs
