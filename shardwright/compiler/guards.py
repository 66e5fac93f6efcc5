"""Guards: what a capture took from its program besides the arguments, compared at each call.

`Facts` are plain values by which captures are told apart (``training`` and other attributes of
modules, ``requires_grad``, hyper-parameters). A `Guard` says whether facts, the objects in their
places, and the contents of tensors are still those of the capture. It reads no contents: torch
counts what is written to a tensor (``_version``), this package counts what its own kernels write,
and a hook tells of steps of optimizers, as torch counts nothing for fused ones.

Not compared: attributes that are no plain values (configurations, lists), those of classes, those
that came after the capture, variables that a step reads, and what nobody counts: writes through
``.data`` outside of an optimizer, through NumPy, or by another process.
"""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.torch_internals import version_of

PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of the attributes that are compared, and of the elements of tuples that are."""
RATES = frozenset({"lr", "initial_lr"})
"""What of an optimizer's group may change from call to call: it is an input of the step."""

_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
_address = Tensor.data_ptr
_END = object()


@dataclass(frozen=True, slots=True)
class GuardedParts:
    """What a program is made of, as far as a guard looks at it.

    ``functions`` are the program's own, which may come to name other modules and optimizers.
    """

    modules: Sequence[nn.Module] = ()
    optimizers: Sequence[Optimizer] = ()
    functions: Sequence[types.FunctionType] = ()
    trains: bool = False
    """Whether it matters which parameters are trained."""

    def all_modules(self) -> list[nn.Module]:
        """The modules with all inside of them, each once."""
        inner = (part for module in self.modules for part in module.modules())
        return list(dict.fromkeys(inner))

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))


class Facts:
    """Plain values that a capture depends on."""

    def __init__(self, parts: GuardedParts) -> None:
        groups = (group for optimizer in parts.optimizers for group in optimizer.param_groups)
        named = [(held, _plain_keys(held)) for held in map(vars, parts.all_modules())]
        named += [(group, _plain_keys(group) - RATES) for group in groups]
        self._names = [tuple(sorted(keys)) for _, keys in named if keys]
        self._held = [(itemgetter(*sorted(keys)), held) for held, keys in named if keys]
        self._trained = parts.parameters() if parts.trains else []
        self._optimizers = parts.optimizers
        self._seen = self._look()

    def _look(self) -> list[Any]:
        found: list[Any] = [get(held) for get, held in self._held]
        if self._trained:
            found.append([*map(_requires_grad, self._trained)])
        for optimizer in self._optimizers:
            found.append([len(group["params"]) for group in optimizer.param_groups])
        return found

    def hold(self) -> bool:
        """Whether all values are what they were."""
        try:
            return self._look() == self._seen
        except (KeyError, RuntimeError, ValueError):  # gone, or an array now: which is no number
            return False

    @functools.cached_property
    def key(self) -> str:
        """The values as text: 1, 1.0 and True differ."""
        return repr((self._names, self._seen))


def _plain_keys(held: Mapping[str, Any]) -> set[str]:
    """The names of plain values."""
    return {key for key, value in held.items() if _is_plain(value)}


def _is_plain(value: object) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and {*map(type, value)} <= PLAIN)


class Guard:
    """Whether a capture is still of the program as it is.

    facts
        As they were before the program was captured.
    tensors
        Stored values whose contents were taken into the capture: packed, folded, or copied.
    """

    def __init__(self, parts: GuardedParts, facts: Facts, tensors: Sequence[Tensor]) -> None:
        self.facts = facts
        self._is_stepped = False
        self._ids = set() if parts.trains else {*map(id, parts.parameters())}
        modules = parts.all_modules()
        kept = (_tables(module) for module in modules)
        self._tables = [*(table for tables in kept for table in tables if table), {"": _END}]
        self._objects = [*chain.from_iterable(map(dict.values, self._tables))]
        self._named = [*_named_by(parts)]
        placed = (item for item in (*self._objects, *tensors) if is_placed(item))
        self._placed = list({id(tensor): tensor for tensor in placed}.values())
        self._addresses = [*map(_address, self._placed)]
        counted = (tensor for tensor in tensors if is_counted(tensor))
        self._read = list({_identity(tensor): tensor for tensor in counted}.values())
        self._versions = self.versions()
        if self._ids:
            _watch(self)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self.has_same_contents() and self.facts.hold() and self.has_same_objects()

    def has_same_objects(self) -> bool:
        """Whether modules, parameters, buffers and groups are those that were, in their memory."""
        if [*map(_address, self._placed)] != self._addresses:
            return False
        now = chain.from_iterable(map(dict.values, self._tables))
        if not all(map(is_, now, self._objects)):
            return False
        return not self._named or all(get() is found for get, found in self._named)

    def has_same_contents(self) -> bool:
        """Whether nobody wrote to a tensor whose contents were taken."""
        return [*map(version_of, self._read)] == self._versions and not self._is_stepped

    def versions(self) -> list[int]:
        """How often each tensor whose contents were taken has been written to; steps begin anew."""
        self._is_stepped = False
        return [*map(version_of, self._read)]

    def took(self, versions: list[int]) -> None:
        """The contents were taken anew, no earlier than these versions."""
        self._versions = versions

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        params = (p for group in optimizer.param_groups for p in group["params"])
        self._is_stepped = self._is_stepped or any(id(p) in self._ids for p in params)


_watching: weakref.WeakSet[Guard] = weakref.WeakSet()
_lock = threading.Lock()


def _watch(guard: Guard) -> None:
    """Tell a guard of the steps of all optimizers, as long as it lives."""
    with _lock:
        _listen()
        _watching.add(guard)


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_tell)


def _tell(optimizer: Optimizer, args: object, kwargs: object) -> None:
    with _lock:
        guards = [*_watching]
    for guard in guards:
        guard.stepped(optimizer)


def is_counted(tensor: Tensor) -> bool:
    """Whether torch counts what is written to a tensor: not to those of inference mode."""
    return not tensor.is_inference()


def _identity(tensor: Tensor) -> int:
    """A tensor's memory, which several may share; else the tensor itself."""
    return _address(tensor) if is_placed(tensor) else id(tensor)


def is_placed(item: object) -> bool:
    """Whether this is a tensor of one piece of memory: subclasses may be of several."""
    if not isinstance(item, Tensor) or type(item) not in (Tensor, nn.Parameter):
        return False
    return item.layout == torch.strided


def _tables(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """Where a module keeps its modules, parameters and buffers."""
    held = vars(module)
    return held["_modules"], held["_parameters"], held["_buffers"]


def _named_by(parts: GuardedParts) -> Iterator[tuple[Callable[[], object], object]]:
    """What finds an object elsewhere than in a module, and the object that it finds now.

    These are the groups of optimizers, and the modules and optimizers that functions name.
    """
    for optimizer in parts.optimizers:
        yield functools.partial(getattr, optimizer, "param_groups"), optimizer.param_groups
    for function in parts.functions:
        cells = [functools.partial(_content, cell) for cell in function.__closure__ or ()]
        names = function.__code__.co_names
        values = [functools.partial(function.__globals__.get, name) for name in names]
        for get in (*cells, *values):
            if isinstance(found := get(), nn.Module | Optimizer):
                yield get, found


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
