"""Putting back what a step changes while it is traced.

Comes in: a `Closure`. What always holds: after the block, however it ends, the optimizers,
schedulers, containers and objects of the closure hold what they held, and random numbers go on
where they stood. Models are put back by `export`.
"""

from __future__ import annotations

import operator
import random
import sys
import threading
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
def unchanged(closure: Closure) -> Iterator[list[str]]:
    """Put back what the closure's objects hold, and the states of random numbers and gradients.

    Gives a list, in which, after the block, the names are of what the program changed beside its
    modules, optimizers and schedulers.
    """
    changed: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        for restore in (*_random_numbers(), *_objects(closure, changed)):
            stack.callback(restore)
        yield changed


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
    """How to put back the states of the process's random numbers, where the program drew some.

    Another thread that is alive may have drawn them; then they go on from there.
    """
    yield _unless_of_others(torch.get_rng_state, torch.set_rng_state, torch.equal)
    yield _unless_of_others(random.getstate, random.setstate, operator.eq)
    if numpy := sys.modules.get("numpy"):
        state = numpy.random
        yield _unless_of_others(state.get_state, state.set_state, lambda a, b: repr(a) == repr(b))


def _unless_of_others(
    get: Callable[[], Any], put: Callable[[Any], Any], equal: Callable[[Any, Any], Any]
) -> Callable[[], None]:
    before = get()

    def restore() -> None:
        if threading.active_count() == 1 and not equal(get(), before):
            put(before)

    return restore


def _objects(closure: Closure, changed: list[str]) -> Iterator[Callable[[], None]]:
    for function in closure.functions:
        yield from _function(function, changed)
    for item in closure.mutable:
        yield from _contents(item, changed, closure.own.get(id(item)))
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


def _contents(
    item: Any, changed: list[str] | None = None, name: str | None = None
) -> Iterator[Callable[[], None]]:
    """How to put back what ``item`` holds now, in place; ``name`` is noted where it changed."""
    noted = changed if name is not None else None
    if isinstance(item, dict):
        yield _restorer(item, dict(item), item.update, noted, name)
    elif isinstance(item, (list, deque)):
        yield _restorer(item, list(item), item.extend, noted, name)
    elif isinstance(item, set):
        yield _restorer(item, set(item), item.update, noted, name)
    if hasattr(item, "__dict__"):
        yield from _contents(vars(item), changed, name)


def _restorer(
    item: Any,
    before: Any,
    refill: Callable[[Any], Any],
    changed: list[str] | None,
    name: str | None,
) -> Callable[[], None]:
    def restore() -> None:
        if not _is_same(item, before):
            if changed is not None and name is not None:
                changed.extend(_changes(name, item, before))
            item.clear()
            refill(before)

    return restore


def _changes(name: str, after: Any, before: Any) -> Iterator[str]:
    """What of a container changed: keys of a dict, which attributes are too, else all of it."""
    if not isinstance(before, dict):
        yield name
        return
    for key in {**before, **after}:
        if after.get(key, _ABSENT) is not before.get(key, _ABSENT):
            yield f"{name}.{key}"


_ABSENT = object()


def _is_same(item: Any, before: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if isinstance(before, dict):
        return _is_same(list(item), list(before)) and _is_same(item.values(), before.values())
    return len(item) == len(before) and all(map(operator.is_, item, before))


def _function(function: types.FunctionType, changed: list[str]) -> Iterator[Callable[[], None]]:
    """What a function's closure and the globals that it names hold."""

    def put_back_cell(name: str, cell: types.CellType, before: Any) -> None:
        if not _is_filled(cell) or cell.cell_contents is not before:
            cell.cell_contents = before
            changed.append(name)

    def put_back_global(name: str, before: Any) -> None:
        if function.__globals__.get(name) is not before:
            function.__globals__[name] = before
            changed.append(name)

    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if _is_filled(cell):
            yield partial(put_back_cell, name, cell, cell.cell_contents)
    for name in used_names(function.__code__):
        if name in function.__globals__:
            yield partial(put_back_global, name, function.__globals__[name])


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
