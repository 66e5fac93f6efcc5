"""Functions of torch replaced in one thread, and attributes of objects, for the time of a block.

What always holds: everything is as before when the block ends, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwright.torch_internals import never_compiled


class Replacing(TorchFunctionMode):
    """Calls ``replacements`` in place of functions of torch, and all others with stand-ins.

    ``stand_in`` gives for each tensor that reaches torch the one to use in its place.
    """

    def __init__(
        self,
        replacements: Mapping[Any, Callable[..., Any]],
        stand_in: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self._replacements = replacements
        self._stand_in = stand_in

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        replacement = self._replacements.get(func)
        if replacement is not None:
            return replacement(*args, **(kwargs or {}))
        return func(*self._replaced(args), **self._replaced(kwargs or {}))

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._replaced, value))
        if type(value) is dict:
            return {key: self._replaced(item) for key, item in value.items()}
        return value


@contextmanager
def replaced_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """An attribute of an object replaced, or put before its class's."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_ABSENT = object()
