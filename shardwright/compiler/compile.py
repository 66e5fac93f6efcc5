"""`compile`: a model or a training step as a program of planned calls on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.compiler.bind import Binder
from shardwright.compiler.program import CompiledProgram
from shardwright.compiler.replay import Replaying, check_count
from shardwright.compiler.sources import Source, source_of
from shardwright.errors import DeviceError, ExecError, InputError
from shardwright.ir import IRGraph

DEVICES = ("cpu", "cuda")


def compile(
    program: nn.Module | IRGraph | Callable[..., Any],
    *example_args: Any,
    device: str | torch.device | None = None,
    threads: int | None = None,
    replay: Replaying | None = None,
    seed: int = 0,
    **example_kwargs: Any,
) -> CompiledProgram:
    """Compile a model or a training step for one device; the result is called like the original.

    program
        A module, compiled for inference; a training step function (as for `train`), compiled to one
        plan of forward, backward and update; or a graph.
    example_args, example_kwargs
        Arguments of a call. Their shapes, dtypes and structure matter, not their contents. Calls
        with other shapes are captured when they come. Without an example, the first call is.
    device
        ``cpu`` or ``cuda``; by default the device of the program's parameters.
    threads
        Number of threads of native kernels; by default as many as torch.
    replay
        Roles, and the number of captures kept.
    seed
        Seed of the dropout of a step.

    Parameters, buffers and optimizer state are used in place: a step trains the program's own. The
    next call notices changes of the program: weights changed in place or replaced, ``train`` and
    ``eval``, plain attributes of modules, hyper-parameters. After writes through ``.data`` or
    NumPy, and other changes in Python, call ``refresh()``.

    Calls from several threads are safe, but wait for one another.

    Raises CaptureError if the program cannot be captured, DeviceError, WeightError, and PlanError
    or GraphError if a step cannot be differentiated.
    """
    source = source_of(program, seed)
    chosen = _device(source, device, (*example_args, *example_kwargs.values()))
    if not isinstance(replay, Replaying | None):
        raise ExecError(f"replay={replay!r}; give a sw.Replaying, such as sw.Replaying(bound=2)")
    replaying = (replay or Replaying()).of_mode(source.mode)
    if threads is not None:
        check_count("threads", threads, 1)
    made = CompiledProgram(source, Binder(chosen, threads), chosen, replaying)
    if example_args or example_kwargs or _takes_nothing(source):
        made.capture(*example_args, **example_kwargs)
    return made


def _takes_nothing(source: Source) -> bool:
    """Whether a call of the program has no arguments, so that nothing is lacking to capture it."""
    try:
        arguments, _ = source.describe((), {})
    except InputError:
        return False
    return not arguments.parameters


def _device(
    source: Source, device: str | torch.device | None, examples: tuple[Any, ...]
) -> torch.device:
    """Where a program runs. Raises DeviceError."""
    if device is None:
        tensors = [*source.tensors(), *(item for item in examples if isinstance(item, Tensor))]
        chosen = tensors[0].device if tensors else torch.device("cpu")
    else:
        chosen = parsed(device)
    return available(torch.device("cpu") if chosen.type == "meta" else chosen)


def parsed(device: str | torch.device) -> torch.device:
    """A device by its name. Raises DeviceError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise DeviceError(
            f"device={device!r} is no device; a program is compiled for one of {', '.join(DEVICES)}"
        ) from None


def available(chosen: torch.device) -> torch.device:
    """The device with its number, if this machine has it. Raises DeviceError."""
    if chosen.type not in DEVICES:
        raise DeviceError(
            f"a program is compiled for one of {', '.join(DEVICES)}, found {chosen.type!r}"
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"device={str(chosen)!r}, but this machine has no CUDA device; compile for the cpu, or "
            "run it where one is"
        )
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
