"""What a slot holds in simulated time, storage by storage, and what its tasks need.

A storage lives as long as a tensor that lies in it; the engine's values are the storages
themselves, and `HeldValues` are where it keeps them. A `Ledger` knows the most that was held at
once, item by item. `TaskWork` says of each task its seconds and its footprint; equal ones are
looked at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.clusters import DeviceModel
from shardwright.costs.cost import Costs
from shardwright.costs.predict import SlotMemory
from shardwright.costs.tasks import TaskTimes
from shardwright.engine.program import SlotProgram
from shardwright.engine.replacement import MemoryUse
from shardwright.ir import IRGraph, IRValue, compile_graph
from shardwright.ir.tensor_meta import contiguous_strides, torch_dtype
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.pipeline.schema import Document, SuperTask, TensorInfo
from shardwright.torch_internals import (
    FakeTensorMode,
    TorchDispatchMode,
    is_fused_step,
    schema_of,
    storage_key,
)

ITEMS = tuple(name for name in SlotMemory.__struct_fields__ if name != "updated")


@dataclass(slots=True, eq=False)
class SimulatedStorage:
    """Memory that tensors lie in; ``item`` is what it counts as, ``users`` how many lie there.

    A ``block`` stays with the slot when nobody uses it any more: memory for messages.
    """

    nbytes: int
    item: str
    users: int = 0
    block: MessageBlock | None = None


@dataclass(slots=True, eq=False)
class MessageBlock:
    """A piece of a slot's memory for messages, which others read where it is.

    ``seen`` are the slots that have read there, ``holders`` how many still do, or will.
    """

    nbytes: int
    seen: set[str]
    holders: int


class Ledger:
    """The memory of one slot."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.held = dict.fromkeys(ITEMS, 0)
        self.peak = dict.fromkeys(ITEMS, 0)
        self.most = -1
        self._blocks: dict[int, list[MessageBlock]] = {}

    def hold(self, storage: SimulatedStorage) -> None:
        """One more tensor lies in a storage from now on."""
        if not storage.users and storage.block is None:
            self.held[storage.item] += storage.nbytes
        storage.users += 1

    def drop(self, storage: SimulatedStorage) -> None:
        """There is one tensor less in a storage."""
        storage.users -= 1
        if not storage.users:
            if storage.block is not None:
                storage.block.holders -= 1
            else:
                self.held[storage.item] -= storage.nbytes

    def note_made(self, storage: SimulatedStorage) -> None:
        """What is held now is noted with a storage that is about to be."""
        extra = 0 if storage.users or storage.block is not None else storage.nbytes
        self.held[storage.item] += extra
        self.note(0)
        self.held[storage.item] -= extra

    def note(self, temporary: int) -> None:
        """This is held now, and so many bytes more for a moment."""
        total = sum(self.held.values()) + temporary
        if total > self.most:
            self.most = total
            self.peak = {**self.held, "temporaries": self.held["temporaries"] + temporary}

    # --- messages that stand where others read them -----------------------------------------

    def lend(self, nbytes: int, holders: int) -> MessageBlock:
        """A block for a message to so many; one that nobody reads any more, or a new one."""
        capacity = _capacity(nbytes)
        for block in self._blocks.setdefault(capacity, []):
            if not block.holders:
                block.holders = holders
                return block
        block = MessageBlock(capacity, {self.slot}, holders)
        self._blocks[capacity].append(block)
        self.held["messages"] += capacity
        return block

    def see(self, block: MessageBlock) -> SimulatedStorage:
        """A message of another slot; its memory is this one's too as soon as it reads there."""
        if self.slot not in block.seen:
            block.seen.add(self.slot)
            self.held["messages"] += block.nbytes
        return SimulatedStorage(block.nbytes, "messages", block=block)

    def memory(self) -> SlotMemory:
        """The most that was held at once."""
        return SlotMemory(**self.peak)


def _capacity(nbytes: int) -> int:
    """As the workers' arenas round it: sixteenths of a power of two."""
    step = max(64, 1 << nbytes.bit_length() >> 4)
    return -(-nbytes // step) * step


class HeldValues(dict[Any, SimulatedStorage]):
    """Storages by what lies in them; a ledger knows of those that are here."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __setitem__(self, key: Any, storage: SimulatedStorage) -> None:
        self.pop(key, None)
        self._ledger.hold(storage)
        super().__setitem__(key, storage)

    def pop(self, key: Any, default: Any = None) -> Any:
        """Let go of what lies at a key."""
        storage = super().pop(key, None)
        if storage is not None:
            self._ledger.drop(storage)
        return default if storage is None else storage

    def clear(self) -> None:
        """Let go of all."""
        for storage in self.values():
            self._ledger.drop(storage)
        super().clear()


def hold_constants(ledger: Ledger, program: SlotProgram) -> HeldValues:
    """A slot's constants, each in a storage of the item that it counts as."""
    found = HeldValues(ledger)
    for name, info in program.constants.items():
        found[name] = SimulatedStorage(info.nbytes, _item(info, name in program.sums))
    return found


def _item(info: TensorInfo, is_sum: bool) -> str:
    name = info.origin.name if info.origin else info.value.name if info.value else ""
    if name.startswith("optimizer."):
        return "optimizer"
    return "gradients" if is_sum or name.startswith("grad.") else "parameters"


# --- footprints of tasks --------------------------------------------------------------------------


class OutputMemory(NamedTuple):
    """Where an output lies: in the memory of the input ``input``, or in new memory.

    Outputs of one supertask with the same ``storage`` share new memory of ``nbytes``.
    """

    input: int | None
    storage: int = 0
    nbytes: int = 0


class Footprint(NamedTuple):
    """``most`` bytes at once beyond the inputs, outputs included; where each output lies."""

    most: int
    homes: tuple[OutputMemory, ...]

    @property
    def left(self) -> int:
        """Bytes of new memory that the outputs keep."""
        return sum(
            {home.storage: home.nbytes for home in self.homes if home.input is None}.values()
        )


def footprint(
    graph: IRGraph,
    donated: Mapping[int, int],
    zeros: Collection[int] = (),
    fresh: Collection[int] = (),
) -> Footprint:
    """The footprint of a graph's program.

    ``donated`` and ``zeros`` are what `compile_graph` takes; the outputs at the positions ``fresh``
    get memory of their own.
    """
    program = compile_graph(graph, donated=donated, zeros=zeros)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        inputs = [_fake(graph.values[value_id]) for value_id in program.arguments]
        with _StorageCounter(inputs) as storages:
            outputs = program(inputs)
            outputs = [t.clone() if k in fresh else t for k, t in enumerate(outputs)]
        del fake
        return Footprint(storages.most, tuple(_homes(inputs, outputs)))


def _fake(value: IRValue) -> Tensor:
    strides = value.strides or contiguous_strides(value.shape)
    return torch.empty_strided(value.shape, strides, dtype=torch_dtype(value.dtype))


def _homes(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[OutputMemory]:
    given = {storage_key(tensor): k for k, tensor in enumerate(inputs)}
    made: dict[int, int] = {}
    found = []
    for tensor in outputs:
        storage = storage_key(tensor)
        if storage in given:
            found.append(OutputMemory(given[storage]))
        else:
            number = made.setdefault(storage, len(made))
            found.append(OutputMemory(None, number, tensor.untyped_storage().nbytes()))
    return found


class _StorageCounter(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, as long as something shows them."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._known = {storage_key(tensor) for tensor in inputs}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and note new storages among its results."""
        if is_fused_step(func) and schema_of(func).is_mutable:
            return None  # it has no fake kernel, the real one would run, and it makes nothing
        results = func(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, (list, tuple)) else (results,):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return results

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage_key(tensor), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._now += nbytes
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._now -= nbytes


PASSES = {"zero": 1, "copy": 2, "stack": 2}
"""How often work that stands in no file moves the bytes of its tensors."""
MOST_FOOTPRINTS = 2000
_FOOTPRINTS: dict[Hashable, Footprint] = {}
"""By what they depend on: candidates of one search have most of their tasks alike."""


@dataclass(slots=True)
class TaskWork:
    """What the steps of a pipeline's slots take, by `TaskTimes` or by node `Costs`."""

    document: Document
    costs: TaskTimes | Costs
    device: DeviceModel
    graphs: TaskGraphs
    _seconds: dict[Hashable, float] = field(default_factory=dict)

    def seconds(self, task: str) -> float:
        """Seconds of one run of a compute supertask."""
        if isinstance(self.costs, TaskTimes):
            return self.costs.seconds(task)
        key = self.graphs.key(task)
        if key not in self._seconds:
            graph = self.graphs.of(task)
            costs = self.costs
            self._seconds[key] = sum(costs.node(graph, node).forward for node in graph.nodes)
        return self._seconds[key]

    def moving(self, does: str, nbytes: int) -> float:
        """Seconds of work that stands in no file, on tensors of so many bytes."""
        return PASSES[does] * nbytes / self.device.bandwidth

    def footprint(self, task: str, memory: MemoryUse, *, first: bool) -> Footprint:
        """What one run needs; measured bytes beside the outputs go before those that are seen."""
        spec = self.document.supertasks[task]
        if self.is_lowered(task):
            return self._lowered(spec, memory)
        zeros = memory.zeros if first else frozenset[str]()
        over = [
            (spec.inputs.index(old), spec.outputs.index(new)) for new, old in memory.over.items()
        ]
        fresh = sorted(map(spec.outputs.index, memory.fresh))
        zeroed = sorted(map(spec.inputs.index, zeros))
        key = (self.graphs.key(task), tuple(over), tuple(fresh), tuple(zeroed))
        if key not in _FOOTPRINTS:
            if len(_FOOTPRINTS) >= MOST_FOOTPRINTS:
                _FOOTPRINTS.clear()
            _FOOTPRINTS[key] = self._found(task, over, fresh, zeroed)
        found = _FOOTPRINTS[key]
        if isinstance(self.costs, TaskTimes):
            measured = self.costs.temporary_bytes(task) + found.left
            return found._replace(most=max(found.most, measured))
        return found

    def is_lowered(self, task: str) -> bool:
        """Whether a supertask's program is planned where it is loaded; it then lets nothing go."""
        return self.document.supertasks[task].kind == "dfg"

    def kept(self, tasks: Iterable[str]) -> int:
        """Bytes that the programs of a slot's supertasks have for themselves, run or not.

        Lowered ones run on one arena, as large as the largest of them needs.
        """
        lowered = [task for task in tasks if self.is_lowered(task)]
        if not lowered or not isinstance(self.costs, TaskTimes):
            return 0
        times = self.costs
        return max(map(times.temporary_bytes, lowered)) + sum(map(times.kept_bytes, lowered))

    def _lowered(self, spec: SuperTask, memory: MemoryUse) -> Footprint:
        """All that is not made in an input's memory has its own."""
        homes = [
            OutputMemory(spec.inputs.index(memory.over[name]))
            if name in memory.over
            else OutputMemory(None, k, self.document.tensors[name].nbytes)
            for k, name in enumerate(spec.outputs)
        ]
        found = Footprint(0, tuple(homes))
        return found._replace(most=found.left)

    def _found(
        self,
        task: str,
        over: Sequence[tuple[int, int]],
        fresh: Sequence[int],
        zeroed: Sequence[int],
    ) -> Footprint:
        graph = self.graphs.of(task)
        donated = {graph.inputs[old]: graph.outputs[new] for old, new in over}
        return footprint(graph, donated, [graph.inputs[old] for old in zeroed], fresh)
