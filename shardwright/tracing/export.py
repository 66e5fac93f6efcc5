"""torch.export, called so that the model is left as it was and nothing is printed.

Comes in: a flat model and the tensors of a call. Goes out: torch's exported program, or a
CaptureError. What always holds: modules' attributes, parameters, buffers and modes are afterwards
what they were.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch.export import ExportedProgram

from shardwright.errors import CaptureError
from shardwright.tracing.empty_weights import stand_ins
from shardwright.tracing.failures import CaptureWarning, explain
from shardwright.tracing.flat import FlatModel, fresh_inputs
from shardwright.tracing.origins import takes_notes

# What they say is in the CaptureError.
_LOGGERS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch.export._trace",
)


def export_flat(
    flat: FlatModel, tensors: list[torch.Tensor], *, stacklevel: int = 2
) -> ExportedProgram:
    """The exported program of ``flat`` on tensors like ``tensors``. Raises CaptureError.

    Warnings are of the line ``stacklevel`` frames up, 1 being the caller's.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    program, failure = None, ""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        stack.enter_context(_unchanged(flat.model))
        stack.enter_context(_quiet())
        stack.enter_context(_without_regions())
        notes = stack.enter_context(takes_notes())
        stack.enter_context(stand_ins(flat.model, device))
        try:
            program = torch.export.export(flat, fresh_inputs(tensors), strict=False)
        except CaptureError as error:
            failure = str(error)
        except Exception as error:
            failure = str(explain(error))
    if program is None:  # raised here: a traceback through torch keeps the tracer's tensors alive
        raise CaptureError(failure)
    if notes.functions and flat.model.training and torch.is_grad_enabled():
        _warn_of_functions(notes.functions, stacklevel + 2)
    return program


def _warn_of_functions(names: set[str], stacklevel: int) -> None:
    warnings.warn(
        f"the graph differentiates the forward of {', '.join(sorted(names))} and does not know its "
        "own backward; register it as an operator (torch.library.custom_op) to keep that, or "
        "capture inside `with torch.no_grad():` where no gradient is needed",
        CaptureWarning,
        stacklevel=stacklevel,
    )


_HOLDERS = ("_parameters", "_buffers", "_modules")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back every module's attributes, and its parameters, buffers and submodules."""
    before = [
        (module, dict(vars(module)), {key: dict(vars(module)[key]) for key in _HOLDERS})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, held in before:
            vars(module).clear()
            vars(module).update(attributes)
            for key, items in held.items():
                vars(module)[key].clear()
                vars(module)[key].update(items)


@contextmanager
def _without_regions() -> Iterator[None]:
    """Let a change of settings (``no_grad``, ``autocast``) stand as a call where it was made.

    torch.export makes regions of them, which takes as long as the tracing itself; `origins` notes
    the settings at each call, so that they are not needed.
    """
    before = [(module, name, getattr(module, name)) for module, name in _REGION_PASSES]
    try:
        for module, name, _ in before:
            setattr(module, name, lambda program, signature: (program, signature))
        yield
    finally:
        for module, name, region_pass in before:
            setattr(module, name, region_pass)


_REGION_PASSES = (
    (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass"),
    (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass"),
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log lines about what a CaptureError says, and a warning of its own."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The tensor attribute")
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled
