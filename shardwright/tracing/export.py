"""A program traced on fake tensors, so that the model is left as it was and nothing is printed.

Comes in: a flat model and the tensors of a call. Goes out: the ATen calls that it makes, and what
they take beside the arguments, or a CaptureError. What always holds: modules' attributes,
parameters, buffers, hooks and modes are afterwards what they were; captures wait for each other,
since torch's tracing keeps some of its state for all threads, and nothing else waits for them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.fx
from torch import nn

from shardwright.errors import CaptureError
from shardwright.ir.values import Source
from shardwright.torch_internals import FakeTensor, FakeTensorMode
from shardwright.tracing.empty_weights import check_buffers
from shardwright.tracing.failures import CaptureWarning, explain, line_before
from shardwright.tracing.flat import FlatModel
from shardwright.tracing.functions import traces_functions
from shardwright.tracing.memory import Owner
from shardwright.tracing.tracer import Traced, trace
from shardwright.tracing.unchanged import model_unchanged
from shardwright.tracing.value_checks import fake_mode
from shardwright.tracing.wrapped import parts_of, with_parts

# What they say is in the CaptureError.
_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
_captures = threading.RLock()


def one_at_a_time() -> AbstractContextManager[object]:
    """Waits until no other thread captures; the thread that captures does not wait for itself."""
    return _captures


class Constant(NamedTuple):
    """A tensor that is neither given nor stored; ``spec`` is what was traced in its place."""

    name: str
    tensor: torch.Tensor
    spec: torch.Tensor


@dataclass(frozen=True)
class Program:
    """The calls of a flat model.

    The graph's placeholders are the tensors ``stored``, by their paths in the model, then the
    inputs; ``constants`` are what its other tensors are, by the targets of ``get_attr`` nodes.
    ``left_out`` are lines that look at contents only to raise, or for nothing.
    """

    graph: torch.fx.Graph
    stored: tuple[tuple[str, Owner], ...]
    constants: dict[str, Constant]
    left_out: tuple[Source, ...]


def export_flat(flat: FlatModel, tensors: list[torch.Tensor], *, stacklevel: int = 2) -> Program:
    """The program of ``flat`` on tensors like ``tensors``. Raises CaptureError.

    Warnings are of the line ``stacklevel`` frames up, 1 being the caller's.
    """
    program, failure = None, ""
    with ExitStack() as stack:
        stack.enter_context(one_at_a_time())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(model_unchanged(flat.model))
        stack.enter_context(_quiet())
        stack.enter_context(traces_functions())
        try:
            program = _traced(flat, tensors)
        except CaptureError as error:
            failure = str(error)
        except Exception as error:
            failure = str(explain(error))
    if program is None:  # raised here: a traceback through torch keeps the tracer's tensors alive
        raise CaptureError(failure)
    for source in program.left_out:
        warnings.warn(
            f"{line_before(source)}this looks at the contents of a tensor, of which a graph knows "
            "nothing, and only checks them: the graph goes on without the check",
            CaptureWarning,
            stacklevel=stacklevel + 1,
        )
    return program


def _traced(flat: FlatModel, tensors: list[torch.Tensor]) -> Program:
    check_buffers(flat.model)
    mode, answers = fake_mode()
    names = _attribute_names(flat.model)
    device = tensors[0].device if tensors else torch.device("cpu")
    stored = _let_stand_in(flat.model, mode, device)
    arguments = [_like(mode, index, tensor) for index, tensor in enumerate(tensors)]
    traced = trace(flat.forward, arguments, [fake for _, _, fake in stored], mode)
    constants = dict(_constants(traced, mode, names))
    return Program(
        traced.graph,
        tuple((path, owner) for path, owner, _ in stored),
        constants,
        tuple(sorted(traced.looked | answers.left_out, key=str)),
    )


def _let_stand_in(
    model: nn.Module, mode: FakeTensorMode, device: torch.device
) -> list[tuple[str, Owner, torch.Tensor]]:
    """Put a fake tensor in the place of each parameter and buffer; tied ones are one again.

    One that holds several gets fakes of these.
    Those on meta are traced as if they were on ``device``. Gives them by their first paths.
    """
    fakes: dict[int, torch.Tensor] = {}
    found: list[tuple[str, Owner, torch.Tensor]] = []
    owners: tuple[tuple[Owner, str], ...] = (("param", "_parameters"), ("buffer", "_buffers"))
    for owner, holder in owners:
        for path, module in model.named_modules():
            held: dict[str, torch.Tensor | None] = getattr(module, holder)
            for key, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    place = f"{path}.{key}" if path else key
                    parts = [(n, _fake(mode, part, device)) for n, part in parts_of(place, tensor)]
                    found += [(name, owner, fake) for name, fake in parts]
                    fakes[id(tensor)] = with_parts(tensor, iter([fake for _, fake in parts]))
                held[key] = fakes[id(tensor)]
    return found


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not tensor.is_meta:
        fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
        return fake
    with mode:
        empty = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)


def _like(mode: FakeTensorMode, index: int, tensor: torch.Tensor) -> torch.Tensor:
    """An argument: of its tensor's kind, sharing memory with none. Raises CaptureError."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise CaptureError(
            f"input tensor number {index} has the layout {tensor.layout}; graphs hold dense "
            "tensors only, so pass its dense parts"
        )
    with mode:
        return torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )


# --- constants -------------------------------------------------------------------------------


def _attribute_names(model: nn.Module) -> dict[int, str]:
    """Paths of the tensors that modules hold as plain attributes, by id."""
    return {
        id(item): f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, item in vars(module).items()
        if isinstance(item, torch.Tensor)
    }


def _constants(
    traced: Traced, mode: FakeTensorMode, names: dict[int, str]
) -> Iterator[tuple[str, Constant]]:
    numbers = itertools.count()
    for target, tensor in traced.constants.items():
        name = names.get(id(tensor)) or f"lifted_tensor_{next(numbers)}"
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} was taken past torch's operators, as by "
                "`x.data`: use x.detach()"
            )
        yield target, Constant(name, tensor, mode.from_tensor(tensor, static_shapes=True))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log lines that torch writes in this thread about what a CaptureError says."""
    here = threading.get_ident()

    def is_of_another_thread(record: logging.LogRecord) -> bool:
        return record.thread != here

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(is_of_another_thread)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_another_thread)
