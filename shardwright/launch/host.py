"""Everything that is asked of one slot, in the order in which it is asked.

A slot runs calls, or steps, of its own pipeline; calls of other pipelines that use its constants;
and requests, functions of this package that are called with the `LoadedSlot`. A `Host` hands each
to the worker that does it.

What always holds: what is asked of another worker, and every request, begins when all that was
asked before is over on this slot; so an evaluation between two steps sees the contents between
them. A request that fails is the failure of that request alone.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shardwright.engine.slot import LoadedSlot
from shardwright.engine.slot_engine import Finished, SlotEngine
from shardwright.errors import RunError

_PACKAGE = "shardwright."


class Call(NamedTuple):
    """A call, or step, to run: its number, its slot's inputs, and which pipeline's it is."""

    number: int
    inputs: dict[str, Tensor]
    pipeline: int = 0


class Reply(NamedTuple):
    """What a request gives: plain data, and tensors by name."""

    value: Any = None
    tensors: Mapping[str, Tensor] = {}


class Request(NamedTuple):
    """A function to call with the slot: ``module:function``, plain data, and tensors by name."""

    number: int
    function: str
    arguments: Any = None
    tensors: Mapping[str, Tensor] = {}


class Load(NamedTuple):
    """Another pipeline to keep ready: its number, and what makes its worker."""

    number: int
    pipeline: int
    make: Callable[[LoadedSlot], SlotEngine]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a request or a load: a reply, or the exception it raised."""

    number: int
    reply: Reply = field(default_factory=Reply)
    error: Exception | None = None


Item = Call | Request | Load


class Host:
    """The workers of one slot, of which one is at work. Not for several threads."""

    def __init__(self, worker: SlotEngine) -> None:
        self.slot = worker.slot
        self.active = worker
        self._workers = {0: worker}
        self._queue: deque[Item] = deque()
        self._answers: deque[Answer] = deque()

    def take(self, item: Item) -> None:
        """Take on what is asked; it begins in its turn."""
        self._queue.append(item)

    def advance(self) -> bool:
        """Do one piece of work. False where there is nothing to do but wait."""
        return self._admit() or self.active.advance()

    def outcome(self) -> Finished | Answer | None:
        """The next thing that is over, if there is one."""
        if self._answers:
            return self._answers.popleft()
        return self.active.finished()

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._queue) or self.active.busy

    def reset(self) -> None:
        """Forget all that is under way."""
        self._queue.clear()
        self._answers.clear()
        for worker in self._workers.values():
            worker.reset()

    def close(self) -> None:
        """Let go of the connections to other slots."""
        for worker in self._workers.values():
            worker.close()

    def abort(self) -> None:
        """Cut the connections to other slots, so that whoever waits for this one fails."""
        for worker in self._workers.values():
            worker.abort()

    def _admit(self) -> bool:
        """Begin what may begin now; says whether there was anything."""
        admitted = False
        while self._queue and self._may_begin(self._queue[0]):
            self._begin(self._queue.popleft())
            admitted = True
        return admitted

    def _may_begin(self, item: Item) -> bool:
        """Whether all that came before is over, or of the same worker; outcomes are taken first."""
        if isinstance(item, Call) and self._workers[item.pipeline] is self.active:
            return True
        return not self.active.busy and not self.active.has_finished

    def _begin(self, item: Item) -> None:
        match item:
            case Call():
                self.active = self._workers[item.pipeline]
                self.active.begin(item.number, item.inputs)
            case Request():
                self._answers.append(_answer(item.number, lambda: _call(self.slot, item)))
            case Load():
                self._answers.append(_answer(item.number, lambda: self._load(item)))

    def _load(self, item: Load) -> Reply:
        self._workers[item.pipeline] = item.make(self.slot)
        return Reply()


def _answer(number: int, act: Callable[[], Reply]) -> Answer:
    try:
        return Answer(number, act())
    except Exception as error:
        return Answer(number, error=error)


def _call(slot: LoadedSlot, request: Request) -> Reply:
    """Call a request's function. Raises RunError where there is none of that name."""
    module, _, name = request.function.partition(":")
    if not module.startswith(_PACKAGE):
        raise RunError(
            f"a request calls functions of {_PACKAGE}* only, not {request.function!r}; name one as "
            "shardwright.package.module:function"
        )
    function = getattr(importlib.import_module(module), name)
    found = function(slot, request.arguments, request.tensors)
    return found if isinstance(found, Reply) else Reply(found)
