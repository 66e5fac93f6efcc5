"""Models without the memory of their weights.

`empty_weights` builds them: every parameter that is registered inside is moved to the meta
device, while buffers keep their contents, which no checkpoint may hold. `stand_ins` lets
torch.export trace them: meta parameters are replaced by fake tensors on the device of the
arguments, and put back however the block ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from shardwright.errors import CaptureError
from shardwright.ir.torch_internals import FakeTensorMode


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build models whose parameters have no contents.

        with sw.empty_weights():
            model = MyModel(config)

    Parameters registered inside are on the meta device; tied ones stay tied. Buffers are as they
    would be outside.
    """
    register = nn.Module.register_parameter
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param if param is None else _without_contents(param, seen))

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _without_contents(
    param: nn.Parameter, seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]]
) -> nn.Parameter:
    """The same parameter on meta: one for one, as long as the original lives."""
    if param.is_meta or is_lazy(param):
        return param
    original, empty = seen.get(id(param), (None, None))
    if empty is None or original is None or original() is not param:
        empty = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        empty.__dict__.update(param.__dict__)
        seen[id(param)] = (weakref.ref(param), empty)
    return empty


@contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Replace the model's meta parameters by fake tensors on ``device`` inside the block.

    Raises CaptureError where a buffer is on meta: nothing could fill it later.
    """
    _check_buffers(model)
    slots = [
        (module._parameters, key, param)
        for module in model.modules()
        for key, param in module._parameters.items()
        if param is not None and param.is_meta
    ]
    mode = _fake_mode() if slots else None
    fakes: dict[int, torch.Tensor] = {}
    try:
        for parameters, key, param in slots:
            if mode is not None and id(param) not in fakes:
                fakes[id(param)] = _fake(mode, param, device)
            parameters[key] = fakes[id(param)]  # type: ignore[assignment]
        with tracing(TracingContext(mode)) if mode else nullcontext():
            yield
    finally:
        for parameters, key, param in slots:
            parameters[key] = param


def _check_buffers(model: nn.Module) -> None:
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise CaptureError(
            f"buffer {empty[0]!r} is on the meta device and has no contents"
            f"{f' (and {len(empty) - 1} more)' if len(empty) > 1 else ''}; build the model inside "
            "`with sw.empty_weights():`, which empties parameters only"
        )


def _fake_mode() -> FakeTensorMode:
    """The mode that torch.export would make, made by us so that parameters may be in it."""
    env = ShapeEnv(tracked_fakes=[])
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=True)


def _fake(mode: FakeTensorMode, param: nn.Parameter, device: torch.device) -> Any:
    with mode:
        empty = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
        return nn.Parameter(empty, requires_grad=param.requires_grad)
