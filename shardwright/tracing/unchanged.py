"""Putting back what a step changes while it is traced.

Comes in: a `Closure`. What always holds: after the block, however it ends, the optimizers,
schedulers, containers and objects of the closure hold what they held, and random numbers go on
where they stood. Models are put back by `export`.
"""

from __future__ import annotations

import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwright.tracing.closures import Closure, held_by, used_names


@contextmanager
def unchanged(closure: Closure) -> Iterator[None]:
    """Put back what the closure's objects hold, and the states of random numbers and gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        for restore in (*_random_numbers(), *_objects(closure)):
            stack.callback(restore)
        yield


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Put back modules' attributes, tensors, submodules, hooks, and what objects in them hold."""
    restorers = [*_model(model)]
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def _model(model: nn.Module) -> Iterator[Callable[[], None]]:
    pending: deque[Any] = deque()
    for module in model.modules():
        yield from _contents(vars(module))
        pending.extend(vars(module).values())
    for item in held_by(pending):
        yield from _contents(item)


def _random_numbers() -> Iterator[Callable[[], Any]]:
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    yield lambda: torch.set_rng_state(torch_state)
    yield lambda: random.setstate(python_state)
    if numpy := sys.modules.get("numpy"):
        numpy_state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(numpy_state)


def _objects(closure: Closure) -> Iterator[Callable[[], None]]:
    for function in closure.functions:
        yield from _function(function)
    for item in closure.mutable:
        yield from _contents(item)
    for optimizer in closure.optimizers.values():
        yield from _optimizer(optimizer)
    for scheduler in closure.schedulers.values():
        yield from _contents(scheduler)


def _optimizer(optimizer: Optimizer) -> Iterator[Callable[[], None]]:
    yield from _contents(optimizer)
    yield from _contents(optimizer.param_groups)
    yield from _contents(optimizer.state)
    for group in optimizer.param_groups:
        yield from _contents(group)
        yield from _contents(group["params"])
    for state in optimizer.state.values():
        yield from _contents(state)


def _contents(item: Any) -> Iterator[Callable[[], None]]:
    """How to put back what ``item`` holds now, in place."""
    if isinstance(item, dict):
        yield _restorer(item, dict(item), item.update)
    elif isinstance(item, (list, deque)):
        yield _restorer(item, list(item), item.extend)
    elif isinstance(item, set):
        yield _restorer(item, set(item), item.update)
    if hasattr(item, "__dict__"):
        yield from _contents(vars(item))


def _restorer(item: Any, before: Any, refill: Callable[[Any], Any]) -> Callable[[], None]:
    def restore() -> None:
        if not _is_same(item, before):
            item.clear()
            refill(before)

    return restore


def _is_same(item: Any, before: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if isinstance(before, dict):
        return _is_same(list(item), list(before)) and _is_same(item.values(), before.values())
    return len(item) == len(before) and all(map(operator.is_, item, before))


def _function(function: types.FunctionType) -> Iterator[Callable[[], None]]:
    """What a function's closure and the globals that it names hold."""
    for cell in function.__closure__ or ():
        if _is_filled(cell):
            yield partial(setattr, cell, "cell_contents", cell.cell_contents)
    names = used_names(function.__code__)
    held = {name: function.__globals__[name] for name in names if name in function.__globals__}
    yield partial(function.__globals__.update, held)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
