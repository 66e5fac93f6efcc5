"""What a step function closes over, and putting it back as it was.

An object is found under the name by which the program knows it, nearest first: closure cells,
globals that its code names, defaults, ``self``, arguments of a partial; and from there containers,
attributes, and functions of the program that it calls. Nothing is called and nothing is changed; an
object is found once, whatever the number of ways to it; what is inside a model belongs to the
model.
"""

from __future__ import annotations

import operator
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shardwright.tracing.failures import is_of_program

_LIBRARIES = tuple(
    sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED = ("/site-packages/", "/dist-packages/")  # of whatever environment is on the path
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OF_TORCH = (nn.Module, torch.Tensor)
_CACHED = type(cache(len))


@dataclass
class Closure:
    """The objects found, by name.

    ``mutable`` are all containers and plain objects on the way, ``functions`` the program's own.
    ``own`` are the names of those of ``mutable`` that are no part of a module, an optimizer or a
    scheduler, by id.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    schedulers: dict[str, LRScheduler] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)
    mutable: list[Any] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    own: dict[int, str] = field(default_factory=dict)


_KINDS: tuple[tuple[type, str], ...] = (
    (nn.Module, "modules"),
    (Optimizer, "optimizers"),
    (LRScheduler, "schedulers"),
    (torch.Tensor, "tensors"),
    (torch.amp.GradScaler, "scalers"),
)


def find_closure(function: Callable[..., Any]) -> Closure:
    """What ``function`` closes over."""
    found = Closure()
    seen: dict[int, Any] = {}  # keeps the objects, and so their ids
    pending: deque[tuple[str, Any, bool]] = deque([("step", function, True)])
    while pending:
        name, item, own = pending.popleft()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        kind = next((kind for cls, kind in _KINDS if isinstance(item, cls)), None)
        if kind is not None:
            _file(getattr(found, kind), name, item)
        if isinstance(item, _CONTAINERS) or (kind is None and _attributes(item)):
            found.mutable.append(item)
            if own:
                found.own[id(item)] = name
        if isinstance(item, types.FunctionType) and _is_users(item.__code__.co_filename):
            found.functions.append(item)
        reached = _reached_from(name, item, start=item is function)
        own = own and kind is None
        pending.extend((key, it, own) for key, it in reached if type(it) not in _PLAIN)
    found.modules = _outermost(found.modules)
    found.tensors = _apart_from(found.tensors, found.modules)
    return found


def _held_by(items: Iterable[Any]) -> Iterator[Any]:
    """The containers and plain objects of the program among ``items``, and those in them."""
    seen: dict[int, Any] = {}
    pending = deque(items)
    while pending:
        item = pending.popleft()
        if id(item) in seen or type(item) in _PLAIN or isinstance(item, _OF_TORCH):
            continue
        seen[id(item)] = item
        attributes = {} if isinstance(item, _CONTAINERS) else _attributes(item)
        if attributes or isinstance(item, _CONTAINERS):
            yield item
            pending.extend(inner for _, inner in _elements("", attributes or item))


def _file(table: dict[str, Any], name: str, item: Any) -> None:
    """Add ``item`` under ``name``, or the next free ``name_k``."""
    free, k = name, 0
    while free in table:
        k += 1
        free = f"{name}_{k}"
    table[free] = item


def _reached_from(name: str, item: Any, *, start: bool) -> Iterator[tuple[str, Any]]:
    """What can be reached from ``item`` in one step, with names."""
    if isinstance(item, partial):
        yield name, item.func
        yield from _elements(name, item.args)
        yield from item.keywords.items()
    elif isinstance(item, types.MethodType):
        yield name, item.__self__
        yield name, item.__func__
    elif isinstance(item, types.FunctionType):
        if start or _is_users(item.__code__.co_filename):
            yield from _names_of_function(item)
        if wrapped := getattr(item, "__wrapped__", None):
            yield name, wrapped
    elif isinstance(item, _CONTAINERS):
        yield from _elements(name, item)
    else:
        yield from _attributes(item).items()
        if start and not isinstance(item, type):
            yield name, vars(type(item)).get("__call__")


def _names_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        content = _content_of(cell)
        if content is not _ABSENT:
            yield key, content
    used = _used_names(code)
    for key in used:
        item = function.__globals__.get(key)
        if isinstance(item, types.ModuleType):
            yield from _names_of_module(item, used)
        elif item is not None:
            yield key, item
    given = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(given[len(given) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names_of_module(module: types.ModuleType, used: list[str]) -> Iterator[tuple[str, Any]]:
    """``train.model`` where a program says ``import train``."""
    if _is_users(getattr(module, "__file__", None) or "<built-in>"):
        yield from ((key, vars(module)[key]) for key in used if key in vars(module))


def _used_names(code: types.CodeType) -> list[str]:
    """Globals and attributes that a function's code names, functions inside it included."""
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    names = [*code.co_names, *(name for item in inner for name in _used_names(item))]
    return list(dict.fromkeys(names))


def _elements(name: str, items: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(items, Mapping):
        for key, item in items.items():
            yield (key if isinstance(key, str) else f"{name}.{key}"), item
    else:
        for i, item in enumerate(items):
            yield f"{name}.{i}", item


def _attributes(item: Any) -> dict[str, Any]:
    """Attributes of an object of the program, and what a module holds beside its modules."""
    if isinstance(item, nn.Module):
        return {key: value for key, value in vars(item).items() if not key.startswith("_")}
    if isinstance(item, (type, types.ModuleType, types.FunctionType, torch.Tensor)):
        return {}
    if type(item).__module__.partition(".")[0] in ("torch", "builtins", "numpy"):
        return {}
    return dict(getattr(item, "__dict__", {}))


def _is_users(file: str) -> bool:
    """Whether a function may be one of the program's own rather than a library's."""
    installed = file.startswith(_LIBRARIES) or any(part in file for part in _INSTALLED)
    return is_of_program(file) and not installed


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Those that are part of no other."""
    inner = {
        id(part) for module in modules.values() for part in module.modules() if part is not module
    }
    return {name: module for name, module in modules.items() if id(module) not in inner}


def _apart_from(
    tensors: dict[str, torch.Tensor], modules: dict[str, nn.Module]
) -> dict[str, torch.Tensor]:
    """Those that are no parameter or buffer of a module."""
    held = {
        id(tensor)
        for module in modules.values()
        for named in (module.parameters, module.buffers)
        for tensor in named()
    }
    return {name: tensor for name, tensor in tensors.items() if id(tensor) not in held}


# --- putting back what a program changes while it is traced ---------------------------------------


@contextmanager
def unchanged(closure: Closure) -> Iterator[list[str]]:
    """Put back what the closure's objects hold, and the states of random numbers and gradients.

    Models are put back by `model_unchanged`. Gives a list, in which, after the block, the names are
    of what the program changed beside its modules, optimizers and schedulers.
    """
    changed: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        for restore in (*_random_numbers(), *_objects(closure, changed)):
            stack.callback(restore)
        yield changed


@contextmanager
def model_unchanged(model: nn.Module) -> Iterator[None]:
    """Put back modules' attributes, tensors, submodules, hooks, and what objects in them hold.

    What functions in the modules' files keep of their results (`functools.cache`) is dropped.
    """
    tables = [vars(module) for module in model.modules()]
    held = _held_by(item for table in tables for item in table.values())
    restorers = [restore for item in (*tables, *held) for restore in _contents(item)]
    restorers += _caches(model)
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def _caches(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """How to empty the caches that get more meanwhile: it may be fake tensors."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    own = {kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins")}
    spaces = [
        *own,
        *{sys.modules[kind.__module__] for kind in own if kind.__module__ in sys.modules},
    ]
    for item in {id(item): item for space in spaces for item in vars(space).values()}.values():
        cached = getattr(item, "__func__", item)  # Of a static or class method.
        if isinstance(cached, _CACHED):
            yield partial(_empty_if_grown, cached, cached.cache_info().misses)


def _empty_if_grown(cached: Any, misses: int) -> None:
    if cached.cache_info().misses != misses:
        cached.cache_clear()


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
        yield from _names(function, changed)
    for item in closure.mutable:
        name = closure.own.get(id(item))
        yield from _contents(item, None if name is None else partial(_note, changed, name))
    for optimizer in closure.optimizers.values():
        groups = optimizer.param_groups
        for item in (
            *(optimizer, groups, optimizer.state, *groups, *optimizer.state.values()),
            *(group["params"] for group in groups),
        ):
            yield from _contents(item)
    for scheduler in closure.schedulers.values():
        yield from _contents(scheduler)


def _contents(
    item: Any, note: Callable[[Any, Any], None] | None = None
) -> Iterator[Callable[[], None]]:
    """How to put back what ``item`` holds now, in place.

    ``note`` is told of a change: it is called with what is held before it is put back, and what
    was held.
    """
    for cls, copy, refill in _CONTENTS:
        if isinstance(item, cls):
            yield partial(_put_back, item, copy(item), getattr(item, refill), note)
    if hasattr(item, "__dict__"):
        yield from _contents(vars(item), note)


_CONTENTS: tuple[tuple[type, Callable[[Any], Any], str], ...] = (
    (dict, dict, "update"),
    (list, list, "extend"),
    (deque, list, "extend"),
    (set, set, "update"),
)
"""Containers, what copies one's contents, and the method that takes them up again."""


def _put_back(
    item: Any,
    before: Any,
    refill: Callable[[Any], Any],
    note: Callable[[Any, Any], None] | None,
) -> None:
    if not _is_same(item, before):
        if note is not None:
            note(item, before)
        item.clear()
        refill(before)


def _note(changed: list[str], name: str, after: Any, before: Any) -> None:
    """Note what of a container changed: keys of a dict, which attributes are too, else all."""
    if not isinstance(before, dict):
        changed.append(name)
        return
    for key in {**before, **after}:
        if after.get(key, _ABSENT) is not before.get(key, _ABSENT):
            changed.append(f"{name}.{key}")


_ABSENT = object()


def _is_same(item: Any, before: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if isinstance(before, dict):
        return _is_same(list(item), list(before)) and _is_same(item.values(), before.values())
    return len(item) == len(before) and all(map(operator.is_, item, before))


def _names(function: types.FunctionType, changed: list[str]) -> Iterator[Callable[[], None]]:
    """How to put back what a function's closure and the globals that it names hold."""

    def put_back_cell(name: str, cell: types.CellType, before: Any) -> None:
        if _content_of(cell) is not before:
            cell.cell_contents = before
            changed.append(name)

    def put_back_global(name: str, before: Any) -> None:
        if function.__globals__.get(name) is not before:
            function.__globals__[name] = before
            changed.append(name)

    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        content = _content_of(cell)
        if content is not _ABSENT:
            yield partial(put_back_cell, name, cell, content)
    for name in _used_names(function.__code__):
        if name in function.__globals__:
            yield partial(put_back_global, name, function.__globals__[name])


def _content_of(cell: types.CellType) -> Any:
    """What a cell holds; `_ABSENT` where it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
