"""What a plan will take: the time of a step, and of each device its work, waiting and memory.

`estimate` puts together what the stages of a placed graph do and hold (`stage`), the schedule in
time (`step_time`), and what a step does once. `sw.simulate` walks a built file task by task, and is
what this is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from shardwright.clusters import Cluster, DeviceModel
from shardwright.costs.placed import (
    BACKWARD,
    FORWARD,
    Floats,
    Integers,
    PlacedCosts,
    first_of_each,
)
from shardwright.costs.roofline import STATE_PASSES, UPDATE_PASSES, worker_seconds
from shardwright.costs.stage import (
    Sent,
    StageTasks,
    added,
    input_bytes,
    stage_tasks,
    traffic,
)
from shardwright.costs.step_time import (
    Laid,
    Order,
    RankLinks,
    StageMessage,
    lay_out,
    messages,
    order_of,
    stage_programs,
)
from shardwright.ir.tensor_meta import count_text
from shardwright.schedules.run import HeldMicrobatches, waits_inside

ITEMS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "messages")
"""What a device's memory holds."""
COPY_PASSES = 2
"""How often what is put together again after a sharded update moves the bytes of a parameter."""


class SlotMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that a device holds at most.

    parameters
        Parameters, buffers and constants.
    gradients, optimizer
        Of trained parameters: gradients, the optimizer's state.
    activations
        What forwards keep for their backwards, of all microbatches under way.
    temporaries
        What tasks have in hand beside that, what a block computes again, what waits for gradients
        of weights, and gradients that were put together.
    messages
        What other devices have sent and is not yet read; where devices share memory for messages,
        what this one has sent and others still hold, too.
    updated
        Of the parameters, those that this device updates.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    messages: int
    updated: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, name) for name in ITEMS)

    def __str__(self) -> str:
        items = (f"{name} {getattr(self, name) / 1e6:.2f}" for name in ITEMS if getattr(self, name))
        return f"{self.total / 1e6:.2f} MB ({', '.join(items)})"


class SlotPrediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one device does in a step: seconds at work and waiting, and the most bytes it holds."""

    device: str
    busy: float
    idle: float
    memory: SlotMemory


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a plan will take.

    step_time
        Seconds of a training step; of a model, seconds between two results where calls follow one
        another.
    latency
        Seconds from the beginning of a step or call to its end.
    microbatches
        How many batches of the captured size a step takes.
    """

    step_time: float
    latency: float
    microbatches: int
    slots: tuple[SlotPrediction, ...]

    @property
    def per_microbatch(self) -> float:
        """Seconds for each batch of the captured size."""
        return self.step_time / self.microbatches

    @property
    def peak_memory(self) -> int:
        """Bytes of the fullest device."""
        return max(slot.memory.total for slot in self.slots)

    def summary(self) -> str:
        """The time and the fullest device in a line."""
        return (
            f"{1e3 * self.step_time:.3f} ms a step of "
            f"{count_text(self.microbatches, 'captured batch')}, "
            f"{self.peak_memory / 1e6:.2f} MB on the fullest slot"
        )

    def __str__(self) -> str:
        lines = [f"a step takes {1e3 * self.step_time:.3f} ms"]
        lines += [
            f"{slot.device}: at work {1e3 * slot.busy:.3f} ms, waits {1e3 * slot.idle:.3f} ms, "
            f"{slot.memory}"
            for slot in self.slots
        ]
        return "\n".join(lines)


class Options(Protocol):
    """How a training step is scheduled (`planning.training.StepOptions`)."""

    @property
    def microbatches(self) -> int:
        """How many there are."""
        ...

    @property
    def schedule(self) -> str:
        """The kind of the schedule."""
        ...

    @property
    def chunks(self) -> int | None:
        """Virtual stages of each rank; None for as many as the schedule has by default."""
        ...

    @property
    def recompute(self) -> str:
        """What the backward computes again: none, full, or auto."""
        ...

    @property
    def memory(self) -> int | None:
        """Bytes for activations, where that is auto."""
        ...

    @property
    def zero(self) -> int:
        """Whether the optimizer's state is sharded."""
        ...


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a partition of a placed forward takes, by pipeline rank."""

    step_time: float
    latency: float
    microbatches: int
    slots: Sequence[Sequence[str]]
    busy: Sequence[float]
    memory: Sequence[SlotMemory]

    def prediction(self) -> Prediction:
        """The same for each device."""
        return Prediction(
            self.step_time,
            self.latency,
            self.microbatches,
            tuple(
                SlotPrediction(device, busy, max(self.step_time - busy, 0.0), memory)
                for devices, busy, memory in zip(self.slots, self.busy, self.memory, strict=True)
                for device in devices
            ),
        )


def estimate(
    placed: PlacedCosts,
    stages: Sequence[int] | Integers,
    options: Options,
    cluster: Cluster,
    slots: Sequence[Sequence[str]],
    *,
    placement: Sequence[int] | None = None,
    shards: Sequence[int] = (1,),
) -> Estimate:
    """What a forward takes whose nodes are in these virtual stages; ``slots`` of each rank.

    ``placement`` is the rank of each stage of a model, where a rank has several; a training step's
    is its schedule's. ``shards`` is how many devices of each rank, or of all, share the batch.
    """
    links = RankLinks.of(cluster, slots)
    if not placed.source.training:
        return _of_model(placed, stages, placement or range(len(slots)), links, slots)
    order = order_of(options.schedule, len(slots), options.microbatches, options.chunks)
    apart = order.schedule.splits_backward or (len(slots) > 1 and options.recompute == "none")
    device = cluster.device
    tasks = stage_tasks(placed, stages, order.schedule.stages, apart=apart)
    if options.recompute != "none":
        tasks = _with_again(tasks, order, options, apart=apart)
    sends = messages(traffic(placed, tasks.stages), order.schedule.placement, links)
    ranks = np.asarray(order.schedule.placement, dtype=np.int64)[tasks.stages]
    inputs = options.microbatches * input_bytes(placed.inputs, ranks, len(slots))
    programs = stage_programs(tasks, device)
    laid = lay_out(order, sends, programs, inputs.tolist(), device, apart=apart)
    parts = [*shards] * (len(slots) if len(shards) == 1 else 1)
    dealt = parts if options.zero else [1] * len(slots)
    memory = _memory(tasks, ranks, order, dealt, laid, device, again=options.recompute != "none")
    ends = _once(placed, ranks, dealt, device)
    step = max(done + end for done, end in zip(laid.done, ends, strict=True))
    busy = [work + end for work, end in zip(laid.busy, ends, strict=True)]
    return Estimate(step, step, options.microbatches, slots, busy, memory)


# --- what is done again ---------------------------------------------------------------------------


def _with_again(tasks: StageTasks, order: Order, options: Options, *, apart: bool) -> StageTasks:
    """The tasks where blocks of the forward are done again: all, or as much as a budget asks for.

    Building gives up values, the cheapest to do again first, until what is kept fits, and so keeps
    nearly what the budget has room for. Here each value is given up in part, so that just that is
    kept: whole blocks would leave much of it free.
    """
    placed, stages, count = tasks.placed, tasks.stages, tasks.count
    every = stage_tasks(placed, stages, count, apart=apart, again=np.ones(count))
    if options.recompute == "full":
        return every
    assert options.memory is not None
    shares = np.zeros(count)
    for rank in range(order.schedule.ranks):
        most, least = (_counted(one, order, rank, again=one is every) for one in (tasks, every))
        if most > least:
            share = min(max((most - options.memory) / (most - least), 0.0), 1.0)
            shares[[*order.schedule.stages_of(rank)]] = share
    return stage_tasks(placed, stages, count, apart=apart, again=shares)


def _counted(tasks: StageTasks, order: Order, rank: int, *, again: bool = False) -> float:
    """What a rank keeps of its forwards, as building counts it."""
    numbers = [*order.schedule.stages_of(rank)]
    kept = tasks.kept + _lent(tasks, order.schedule.placement, again=again)
    waits = waits_inside(tasks.brought[numbers].sum(), tasks.kept[numbers].sum())
    held = HeldMicrobatches(order.held[rank], order.ahead[rank] if waits else None)
    return held.most(kept[numbers])


def _lent(tasks: StageTasks, placement: Sequence[int], *, again: bool) -> Floats:
    """Bytes that building counts for the stage that makes them, too.

    The backward of another stage of its rank reads them, and its own does not, or makes them
    ``again``.
    """
    placed, ranks = tasks.placed, np.asarray(placement, dtype=np.int64)
    rows = placed.kept_rows(again=False)
    storage = placed.storage[rows]
    giver, taker = tasks.stages[placed.maker[storage]], tasks.stages[placed.node[rows]]
    own = np.isin(storage * tasks.count + giver, storage * tasks.count + taker) & (not again)
    which = (giver != taker) & (ranks[giver] == ranks[taker]) & ~own
    giver, storage = giver[which], storage[which]
    first = first_of_each(giver, storage)
    return added(giver[first], placed.size[storage[first]], tasks.count)


def left_for_activations(
    placed: PlacedCosts,
    stages: Sequence[int] | Integers,
    options: Options,
    cluster: Cluster,
    slots: Sequence[Sequence[str]],
    shards: Sequence[int],
) -> int | None:
    """The bytes that the fullest device has left for activations if all else is done again.

    ``options`` ask for that. None where it has too few for what has to be kept.
    """
    found = estimate(placed, stages, options, cluster, slots, shards=shards).memory
    left = cluster.device.memory - max(one.total - one.activations for one in found)
    return left if left >= max(1, *(one.activations for one in found)) else None


# --- memory ---------------------------------------------------------------------------------------


def least_memory(tasks: StageTasks, order: Order, shards: int) -> float:
    """Bytes that the fullest device holds at least, whenever its tasks are done.

    That is what is stored, its optimizer's state over ``shards``, and what the microbatches in
    flight keep for their backwards.
    """
    ranks = np.asarray(order.schedule.placement, dtype=np.int64)[tasks.stages]
    parameters, gradients, states = _stored_bytes(tasks, ranks, order.schedule.ranks)
    stored = parameters + gradients + states / shards
    kept = (
        HeldMicrobatches(rows).most(tasks.kept[[*order.schedule.stages_of(rank)]])
        for rank, rows in enumerate(order.surely_held)
    )
    return max(float(bytes_stored) + held for bytes_stored, held in zip(stored, kept, strict=True))


def _stored_bytes(tasks: StageTasks, ranks: Integers, count: int) -> tuple[Floats, ...]:
    """Bytes of parameters, gradients and states of each rank; each value once on a rank."""
    stored = tasks.placed.stored
    rows = first_of_each(ranks[stored.node], stored.number)
    return tuple(
        added(ranks[stored.node[rows]], one[rows], count)
        for one in (stored.size, stored.gradient, stored.state)
    )


def _memory(
    tasks: StageTasks,
    ranks: Integers,
    order: Order,
    dealt: Sequence[int],
    laid: Laid,
    device: DeviceModel,
    *,
    again: bool = False,
) -> list[SlotMemory]:
    """What a device of each rank holds: what is stored, what the walk says, what is sent."""
    count = len(laid.most)
    sums = _stored_bytes(tasks, ranks, count)
    sent = _sent_bytes(tasks, order, laid, lends=device.kind == "cpu")
    found = []
    for rank, (parameters, gradients, state) in enumerate(np.stack(sums, axis=1).tolist()):
        counted = _counted(tasks, order, rank, again=again)
        held = laid.most[rank]
        if device.kind == "cpu" and count == 1:
            # Devices that move their bytes themselves do a forward ahead of its turn where one is
            # late; the walk, in which none is, does not show that.
            numbers = [*order.schedule.stages_of(rank)]
            held += counted - HeldMicrobatches(order.held[rank]).most(tasks.kept[numbers])
        activations = min(counted, held)
        found.append(
            SlotMemory(
                round(parameters),
                round(gradients),
                round(state / dealt[rank]),
                round(activations),
                round(held - activations),
                round(sent[rank]),
                round(gradients / dealt[rank]),
            )
        )
    return found


def _sent_bytes(tasks: StageTasks, order: Order, laid: Laid, *, lends: bool) -> list[float]:
    """Bytes of each rank of what stages send one another for a microbatch, beside what is held.

    What a rank sends elsewhere counts once. Where messages stand in shared memory (``lends``) the
    giver has those of all the microbatches that the taker still holds, and collectives are sent
    from there.
    """
    placement = order.schedule.placement
    found = [0.0] * order.schedule.ranks
    if lends:
        for stage, nbytes in enumerate(tasks.buffers.tolist()):
            found[placement[stage]] += nbytes
    for sent in traffic(tasks.placed, tasks.stages):
        giver, taker = placement[sent.giver], placement[sent.taker]
        if giver == taker:
            continue
        found[giver] += sent.answer_bytes
        if not lends:
            found[taker] += sent.bytes
            continue
        there = laid.under_way.get((sent.giver, sent.taker, FORWARD), 1)
        found[giver] += sent.bytes * there
        found[taker] += sent.bytes * max(there - order.most_held[sent.taker], 0.0)
        if sent.answers:
            back = sent.taker, sent.giver, BACKWARD
            found[taker] += sent.answer_bytes * laid.under_way.get(back, 1)
    return found


# --- once a step ----------------------------------------------------------------------------------


def update_seconds(
    gradients: Floats, states: Floats, shards: int | Integers, device: DeviceModel
) -> Floats:
    """The update of parameters of whole gradients and states of these bytes, over ``shards``.

    An update reads a parameter, its gradient and its state, and writes all but the gradient. What
    is sharded over devices (ZeRO) is put together again: a collective more than its gradient
    takes, and a copy to where the parameter stands.
    """
    over = np.asarray(shards)
    is_dealt = (over > 1) & (gradients > 0)
    moved = (UPDATE_PASSES * gradients + STATE_PASSES * states) / over
    moved = moved + COPY_PASSES * is_dealt * gradients
    return np.asarray(moved / device.bandwidth + worker_seconds(device) * is_dealt)


def _once(
    placed: PlacedCosts, ranks: Integers, dealt: Sequence[int], device: DeviceModel
) -> list[float]:
    """Seconds of each rank for what is prepared, and for the update."""
    prepared = np.zeros(len(ranks))
    at = [*placed.source.prepare]
    prepared[at] = placed.seconds[at, 0]
    stored, count = placed.stored, len(dealt)
    rows = first_of_each(ranks[stored.node], stored.number)
    where, gradients = ranks[stored.node[rows]], stored.gradient[rows]
    each = update_seconds(gradients, stored.state[rows], np.asarray(dealt)[where], device)
    tasks = added(where, gradients, count) > 0
    found = added(ranks, prepared, count) + added(where, each, count)
    return [float(seconds) for seconds in found + worker_seconds(device) * tasks]


# --- models ---------------------------------------------------------------------------------------


def _of_model(
    placed: PlacedCosts,
    stages: Sequence[int] | Integers,
    placement: Sequence[int],
    links: RankLinks,
    slots: Sequence[Sequence[str]],
) -> Estimate:
    """A model's calls follow one another; the slowest rank or line decides how fast."""
    at, device = np.asarray(stages, dtype=np.int64), links.cluster.device
    ranks = np.asarray(placement, dtype=np.int64)[at]
    tasks = stage_tasks(placed, ranks, len(slots), apart=False)
    sent = traffic(placed, ranks)
    order = order_of("gpipe", len(slots), 1, 1)
    held = input_bytes(placed.inputs, ranks, len(slots))
    np.maximum.at(held, tasks.stage, held[tasks.stage] + tasks.most)
    calls = messages(sent, range(len(slots)), links)[FORWARD]
    busy = _of_call(tasks, calls, device)
    laid = Laid(busy, busy, held.tolist(), {})
    memory = _memory(tasks, ranks, order, [1] * len(slots), laid, device)
    step = max([*busy, *(one.line for one in calls)])
    each = stage_tasks(placed, at, len(placement), apart=False)
    return Estimate(
        step, _latency(each, traffic(placed, at), placement, links), 1, slots, busy, memory
    )


def _of_call(tasks: StageTasks, sent: Sequence[StageMessage], device: DeviceModel) -> list[float]:
    """Seconds of each stage in a call of a model."""
    once = added(tasks.stages, tasks.placed.once, tasks.count)
    each = tasks.seconds + tasks.lines + worker_seconds(device) * (1 + tasks.moves)
    found = added(tasks.stage, each, tasks.count) + once
    for message in sent:
        found[message.giver] += message.sending
        found[message.taker] += message.taking
    return [float(seconds) for seconds in found]


def _latency(
    tasks: StageTasks, sent: Sequence[Sent], placement: Sequence[int], links: RankLinks
) -> float:
    """Seconds of one call of a model: stages in order, each when its rank and what it reads are."""
    calls = messages(sent, placement, links)[FORWARD]
    free: dict[int, float] = {}
    done: list[float] = []
    for stage, seconds in enumerate(_of_call(tasks, calls, links.cluster.device)):
        rank = placement[stage]
        arrivals = (done[one.giver] + one.line for one in calls if one.taker == stage)
        free[rank] = max([free.get(rank, 0.0), *arrivals]) + seconds
        done.append(free[rank])
    return max(done)
