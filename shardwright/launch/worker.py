"""A slot's worker: programs that share the slot's constants, and the order in which they run.

A slot runs steps of its own pipeline; steps of other pipelines that use its constants; and
functions of this package that are called with the `LoadedSlot`. Steps of another program than the
last, and functions, begin when all that was asked before is done on this slot; so an evaluation
between two steps sees the contents between them. A function or load that fails is the failure of
that alone.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.comm.transport import Membership, Transport
from shardwright.compiler.tasks import compile_slot
from shardwright.engine.board import Board, State
from shardwright.engine.program import Entry, Relay, constants_of, is_training
from shardwright.engine.slot import LoadedSlot
from shardwright.engine.slot_engine import SlotEngine
from shardwright.errors import RunError, WorkerError
from shardwright.launch.operators import load_operators
from shardwright.launch.protocol import (
    CallFunction,
    Completed,
    EngineOptions,
    LoadProgram,
    Mailbox,
    Outcome,
    Parcel,
    RunStep,
    Stop,
    describe_failure,
)
from shardwright.pipeline.schema import Document
from shardwright.pipeline.weights import Weights

_PACKAGE = "shardwright."


class SlotLinks(NamedTuple):
    """A slot's way to the others for one program; ``relays`` bring outputs of steps to rank 0."""

    transport: Transport
    relays: Mapping[Relay, Membership] = {}


class Reply(NamedTuple):
    """What a function returns that is called with a slot: plain data, and tensors by name."""

    value: Any = None
    tensors: Mapping[str, Tensor] = {}


class SlotWorker:
    """The programs of one slot, of which one is at work. Not for several threads.

    ``first`` is program 0; ``connect`` makes the links of each. Raises GraphError, DeviceError,
    WeightError, RunError.
    """

    def __init__(
        self,
        slot: str,
        first: LoadProgram,
        tensors: Mapping[str, Tensor],
        connect: Callable[[Document], SlotLinks],
        board: Board | None = None,
    ) -> None:
        self._name = slot
        self._connect = connect
        self._board = board or Board.private()
        self._queue: deque[Parcel] = deque()
        self._answers: deque[Outcome] = deque()
        self._board.write(State.STARTING)
        self._active = self._load(first, tensors)
        self._programs = {first.program: self._active}
        self.slot: LoadedSlot = self._active.slot

    def take(self, parcel: Parcel) -> None:
        """Take on what is asked; it begins in its turn."""
        self._queue.append(parcel)

    def advance(self) -> bool:
        """Do one piece of work. False where there is nothing to do but wait."""
        return self._admit() or self._active.advance()

    def outcome(self) -> Outcome | None:
        """The next thing that is done, if there is one."""
        if self._answers:
            return self._answers.popleft()
        done = self._active.finished()
        return None if done is None else (Completed(done.call, events=done.events), done.outputs)

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        return bool(self._queue) or self._active.busy

    @property
    def at(self) -> Entry | None:
        """Where the worker was last."""
        return self._active.at

    def wait(self, wakeup: int, timeout: float | None) -> None:
        """Sleep until something comes, or ``wakeup`` is readable.

        Raises WorkerError where a step is under way and nothing comes for ``timeout`` seconds.
        """
        active = self._active
        if active.wait(wakeup, timeout if active.busy else None):
            return
        step, index, _ = active.awaited()
        raise WorkerError(
            f"nothing came for {timeout:g} s (call {step}); is another rank hung? Raise timeout= "
            "if the others take longer",
            rank=self.slot.rank,
            lost=True,
            **active.program.entries[index]._asdict(),
        )

    def reset(self) -> None:
        """Forget all that is under way."""
        self._queue.clear()
        self._answers.clear()
        for program in self._programs.values():
            program.reset()

    def close(self, *, abort: bool = False) -> None:
        """Let go of the links; ``abort`` cuts them, so that who waits for this slot fails."""
        for program in self._programs.values():
            (program.abort if abort else program.close)()

    def _admit(self) -> bool:
        """Begin what may begin now; says whether there was anything."""
        admitted = False
        while self._queue and self._may_begin(self._queue[0]):
            self._begin(*self._queue.popleft())
            admitted = True
        return admitted

    def _may_begin(self, parcel: Parcel) -> bool:
        """Whether all before is done, or of the same program; outcomes are taken first."""
        message = parcel[0]
        if isinstance(message, RunStep) and self._programs[message.program] is self._active:
            return True
        return not self._active.busy and not self._active.has_finished

    def _begin(self, message: object, tensors: Mapping[str, Tensor]) -> None:
        match message:
            case RunStep():
                self._active = self._programs[message.program]
                self._active.begin(message.number, tensors)
            case CallFunction() | LoadProgram():
                self._answers.append(self._answer(message, tensors))

    def _answer(
        self, message: CallFunction | LoadProgram, tensors: Mapping[str, Tensor]
    ) -> Outcome:
        try:
            if isinstance(message, LoadProgram):
                self._programs[message.program] = self._load(message, tensors)
                return Completed(message.number), {}
            found = _function(message.function)(self.slot, message.arguments, tensors)
        except Exception as error:
            return Completed(message.number, error=describe_failure(error)), {}
        reply = found if isinstance(found, Reply) else Reply(found)
        return Completed(message.number, reply.value), reply.tensors

    def _load(self, message: LoadProgram, tensors: Mapping[str, Tensor]) -> SlotEngine:
        """The engine of a program, on the constants that it shares with the first."""
        document = message.document
        threads = torch.get_num_threads()
        load_operators(document, message.sources.modules, message.sources.script)
        torch.set_num_threads(threads)  # Whatever those modules have set.
        infos = constants_of(document, self._name)
        shared = {
            name: self.slot.constants[message.shared[name]]
            for name in infos
            if name in message.shared
        }
        given = {**shared, **tensors}
        folders = None if message.folders is None else list(map(Path, message.folders))
        weights = Weights(message.directory, folders=folders)
        stored = weights.load({name: infos[name] for name in infos if name not in given})
        if message.program == 0:
            self._board.write(State.STARTING)
        return make_engine(
            document,
            self._name,
            {**stored, **given},
            self._connect(document),
            message.options,
            self._board,
            shares=message.program != 0,
        )


def serve(
    worker: SlotWorker,
    mailbox: Mailbox,
    tell: Callable[[Completed, Mapping[str, Tensor]], None],
    timeout: float | None = None,
) -> None:
    """Do what comes by ``mailbox`` until `Stop`; hand what is done to ``tell``.

    Raises what a step raises, and WorkerError where a step needs something that does not come for
    ``timeout`` seconds (None leaves the watch to the driver).
    """
    while True:
        while (parcel := mailbox.take()) is not None:
            if isinstance(parcel[0], Stop):
                return
            worker.take(parcel)
        if worker.advance():
            while (outcome := worker.outcome()) is not None:
                tell(*outcome)
        else:
            worker.wait(mailbox.wakeup, timeout)
            mailbox.drain()


def make_engine(
    document: Document,
    name: str,
    constants: Mapping[str, Tensor],
    links: SlotLinks,
    options: EngineOptions,
    board: Board,
    *,
    shares: bool,
) -> SlotEngine:
    """What runs a slot's part of a pipeline; ``shares``: other programs change its constants."""
    slot = compile_slot(
        document,
        name,
        constants,
        lookahead=options.lookahead,
        relays=links.relays,
        fixed=not shares and not is_training(document),
    )
    return SlotEngine(slot, links.transport, trace=options.trace, board=board, shares=shares)


def _function(name: str) -> Callable[[LoadedSlot, Any, Mapping[str, Tensor]], Any]:
    """A function of this package. Raises RunError where there is none of that name."""
    module, _, attribute = name.partition(":")
    if not module.startswith(_PACKAGE):
        raise RunError(
            f"a request calls functions of {_PACKAGE}* only, not {name!r}; name one as "
            "shardwright.package.module:function"
        )
    found: Callable[[LoadedSlot, Any, Mapping[str, Tensor]], Any]
    found = getattr(importlib.import_module(module), attribute)
    return found
