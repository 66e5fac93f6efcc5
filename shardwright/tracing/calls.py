"""The calls of torch that a program makes on fake tensors, as it writes them, to be compared.

Input: a run under `CallLog`. Output: its calls, in which tensors are numbers in the order in which
they were first seen, so that two runs of one program are equal where they do the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import sympy
import torch
from torch.overrides import TorchFunctionMode

from shardwright.torch_internals import SET_GRAD_ENABLED, FakeTensor, never_compiled, tree_leaves

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
EXPANDING = {torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to}
Call = tuple[Any, tuple[Any, ...], tuple[Any, ...]]
"""A function of torch, what it took and what it gave."""


class TensorNote(NamedTuple):
    """A tensor that a call took or gave."""

    id: int
    is_fake: bool
    dtype: torch.dtype
    shape: tuple[Any, ...]


class CallLog(TorchFunctionMode):
    """Notes calls, but for those that only ask something about a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Call] = []
        self._kept: list[Any] = []

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not SET_GRAD_ENABLED and (result is None or tensors_in(result)):
            self.note(func, (args, kwargs), result)
        return result

    def note(self, function: Any, taken: Any, made: Any) -> None:
        """Note a call."""
        self._calls.append((function, (*_noted(taken),), (*_noted(made),)))
        self._kept.append((taken, made))  # Other tensors could have the ids of these.

    def calls(self, sizes: Mapping[sympy.Symbol, int] | None = None) -> tuple[Call, ...]:
        """The calls, with numbers in the place of symbols.

        Those that only expand a tensor to the shape that it has are left out.
        """
        numbers = {symbol: sympy.Integer(size) for symbol, size in (sizes or {}).items()}
        places: dict[int, int] = defaultdict(count().__next__)
        found: list[Call] = []
        for function, taken, made in self._calls:
            taken, made = _at(taken, numbers), _at(made, numbers)
            if function in EXPANDING and made[0].shape == taken[0].shape:
                places[made[0].id] = places[taken[0].id]
            else:
                found.append((function, _placed(taken, places), _placed(made, places)))
        return tuple(found)


def tensors_in(items: Any) -> list[torch.Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in tree_leaves(items) if isinstance(leaf, torch.Tensor)]


def _noted(items: Any) -> Iterator[Any]:
    """What calls are compared by."""
    for item in tree_leaves(items):
        if isinstance(item, torch.Tensor):
            shape = tuple(map(expression, item.shape))
            yield TensorNote(id(item), isinstance(item, FakeTensor), item.dtype, shape)
        elif isinstance(item, torch.Size):
            yield from map(expression, item)
        elif isinstance(item, slice):
            yield from _noted((item.start, item.stop, item.step))
        elif isinstance(item, (*SYMBOLS, *PLAIN)):
            yield expression(item)
        else:
            yield type(item)


def expression(number: Any) -> Any:
    """A symbol's expression; another number itself, which is equal to itself."""
    if isinstance(number, SYMBOLS):
        return number.node.expr
    return "nan" if isinstance(number, float) and number != number else number


def _at(items: Sequence[Any], numbers: Mapping[sympy.Symbol, sympy.Integer]) -> tuple[Any, ...]:
    """Items with numbers in the place of symbols."""
    found: list[Any] = []
    for item in items:
        if isinstance(item, TensorNote):
            found.append(item._replace(shape=_at(item.shape, numbers)))
        else:
            found.append(item.xreplace(numbers) if isinstance(item, sympy.Basic) else item)
    return tuple(found)


def _placed(items: Sequence[Any], places: dict[int, int]) -> tuple[Any, ...]:
    """Items, fake tensors by when they were seen first; others are the same in each run."""
    return tuple(
        item._replace(id=places[item.id]) if isinstance(item, TensorNote) and item.is_fake else item
        for item in items
    )
