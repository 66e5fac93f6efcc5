"""Communication in simulated time."""

from __future__ import annotations

import msgspec
import pytest

from shardwright.clusters import Cluster, Link, Links
from shardwright.clusters.device import CPU_CORE, DEVICES
from shardwright.comm.transport import Membership, memberships
from shardwright.pipeline import Pipeline
from shardwright.simulation.network import Network, SimulatedMember
from tests.runtime.sketch import chain, every_collective

LINKS = Links.of(Link(1.0, 8.0), Link(0.5, 8.0), start=3.0)


class Trial:
    """A network of two slots; who is told to look when."""

    def __init__(self, pipeline: Pipeline, *, gpu: bool, links: Links = LINKS) -> None:
        slots = tuple(pipeline.devices)
        device = DEVICES["A100-80GB"] if gpu else CPU_CORE
        self.told: list[tuple[float, str]] = []
        cluster = Cluster((slots,), inside=links, device=device)
        self.network = Network(slots, cluster, lambda at, slot: self.told.append((at, slot)))
        self.parts = memberships(pipeline)

    def start(self, task: str, now: float, call: int = 0) -> tuple[SimulatedMember, float]:
        return self.network.start(self.parts[task], call, now)


def member(pipeline: Pipeline, kind: str) -> dict[int, str]:
    """The supertasks of a kind, by member."""
    found: dict[str, Membership] = memberships(pipeline)
    return {p.member: task for task, p in found.items() if p.operation.kind == kind}


def test_a_core_copies_what_it_sends() -> None:
    trial = Trial(chain(2), gpu=False)
    nbytes = trial.parts["send.y0@d1"].operation.given(0).nbytes
    receiver, _ = trial.start("recv.y0@d1", 2.0)
    assert (receiver.ready_at, trial.told) == (None, [])
    sender, busy = trial.start("send.y0@d1", 5.0)
    assert busy == nbytes / 8.0
    assert sender.is_ready(5.0 + busy)
    assert receiver.ready_at == 5.0 + busy + 1.0
    assert not receiver.is_ready(5.0 + busy)
    assert receiver.take(9e9) == 0.0
    assert receiver.over


def test_a_line_carries_one_message_after_another() -> None:
    trial = Trial(chain(2), gpu=True)
    nbytes = trial.parts["send.y0@d1"].operation.given(0).nbytes
    parts = [trial.start("send.y0@d1", 0.0, call) for call in range(2)]
    assert [(part.left_at, busy) for part, busy in parts] == [
        (nbytes / 8.0, 0.0),
        (2 * nbytes / 8.0, 0.0),
    ]
    late, _ = trial.start("recv.y0@d1", 1e6, call=1)
    assert late.is_ready(1e6)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_broadcast_and_a_reduce_take_what_was_measured_of_them(gpu: bool) -> None:
    """As long as a send and an all_reduce where nothing was."""
    links = msgspec.structs.replace(LINKS, broadcast=Link(0.25, 4.0), reduce=Link(0.125, 2.0))
    pipeline = every_collective(2)
    for kind in ("broadcast", "reduce"):
        tasks = member(pipeline, kind)
        for here in (links, LINKS):
            trial = Trial(pipeline, gpu=gpu, links=here)
            first, _ = trial.start(tasks[0], 0.0)
            second, _ = trial.start(tasks[1], 0.0)
            nbytes = first.exchange.nbytes
            expected = here.seconds("broadcast" if kind == "broadcast" else "reduce", 2, nbytes)
            assert first.exchange.seconds == expected
            if kind == "broadcast":
                assert max(first.ready_at or 0.0, second.ready_at or 0.0) == pytest.approx(expected)
    assert links.seconds("broadcast", 2, 8) == 3.0 + 2 * (0.25 + 4 / 4.0)
    assert links.seconds("reduce", 2, 8) == 3.0 + 2 * (0.125 + 4 / 2.0)
    assert LINKS.seconds("broadcast", 2, 8) == LINKS.seconds("send", 2, 8)
    assert LINKS.seconds("reduce", 2, 8) == LINKS.seconds("all_reduce", 2, 8)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_a_collective_begins_when_all_have_come(kind: str) -> None:
    pipeline = every_collective(2)
    tasks = member(pipeline, kind)
    trial = Trial(pipeline, gpu=True)
    first, _ = trial.start(tasks[0], 0.0)
    assert first.ready_at is None
    second, busy = trial.start(tasks[1], 7.0)
    assert busy == 0.0
    assert first.ready_at == second.ready_at == 7.0 + first.exchange.seconds


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_cores_take_as_long_together_as_the_links_say(kind: str) -> None:
    pipeline = every_collective(2)
    tasks = member(pipeline, kind)
    trial = Trial(pipeline, gpu=False)
    clocks, parts = [0.0, 7.0], []
    for k in range(2):
        part, busy = trial.start(tasks[k], clocks[k])
        clocks[k] += busy
        parts.append(part)
    while not all(part.over for part in parts):
        for k, part in enumerate(parts):
            if part.ready_at is not None:
                clocks[k] = max(clocks[k], part.ready_at)
                clocks[k] += part.take(clocks[k])
    assert clocks == pytest.approx([7.0 + parts[0].exchange.seconds] * 2)
