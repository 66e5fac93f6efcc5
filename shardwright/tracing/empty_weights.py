"""Models without the memory of their weights.

`empty_weights` builds them: every parameter that is registered inside is moved to the meta
device, while buffers keep their contents, which no checkpoint may hold. A capture traces such
parameters as if they were on the device of the arguments.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from shardwright.errors import CaptureError


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build models whose parameters have no contents.

        with sw.empty_weights():
            model = MyModel(config)

    Parameters registered inside, by this thread, are on the meta device; tied ones stay tied.
    Buffers are as they would be outside.
    """
    here = threading.get_ident()
    seen: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def empty(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or threading.get_ident() != here:
            return None  # registered as it is
        return _without_contents(param, seen)

    register: Any = register_module_parameter_registration_hook  # torch types it as giving None
    hook = register(empty)
    try:
        yield
    finally:
        hook.remove()


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


def check_buffers(model: nn.Module) -> None:
    """Raise CaptureError where a buffer is on meta: nothing could fill it later."""
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise CaptureError(
            f"buffer {empty[0]!r} is on the meta device and has no contents"
            f"{f' (and {len(empty) - 1} more)' if len(empty) > 1 else ''}; build the model inside "
            "`with sw.empty_weights():`, which empties parameters only"
        )
