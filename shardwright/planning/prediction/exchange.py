"""What stages send one another for a microbatch, and what that takes of lines and of workers.

Comes in: messages by pair of stages, where stages are, and the links. Goes out: `Traffic` on lines,
and stages' seconds with those of their workers. As in a run and in `simulation`: where slots are
CPU cores, who sends copies the bytes itself, and only the latency is left for the line; elsewhere
bytes move beside the work.

Numbers may be arrays, one entry a candidate, as in `timing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.clusters import Cluster
from shardwright.clusters.links import Link
from shardwright.costs.worker_time import worker_seconds
from shardwright.errors import PlanError
from shardwright.planning.prediction.sums import Sums
from shardwright.planning.prediction.timing import Number, Passing, StageTimes, Traffic

Messages = Mapping[tuple[int, int], tuple[Number, Number]]
"""How many messages, and of how many bytes, by the stage that gives and the one that takes."""


@dataclass(frozen=True, slots=True)
class RankLinks:
    """What links two ranks: that inside a host where slots at the same place share one."""

    cluster: Cluster
    hosts: Sequence[tuple[int, ...]]
    """Of each rank, the host of each slot."""

    @classmethod
    def of(cls, cluster: Cluster, slots: Sequence[Sequence[str]]) -> RankLinks:
        """The links between ranks of these slots. Raises PlanError for one that is not there."""
        hosts = {device: number for number, host in enumerate(cluster.hosts) for device in host}
        if unknown := [device for devices in slots for device in devices if device not in hosts]:
            raise PlanError(
                f"the plan names the device slot {unknown[0]!r}, which the cluster lacks; it has "
                f"{', '.join(cluster.devices[:8])}{', …' if len(hosts) > 8 else ''}"
            )
        return cls(cluster, [tuple(hosts[device] for device in devices) for devices in slots])

    @property
    def copied(self) -> bool:
        """Whether slots move their bytes themselves."""
        return self.cluster.device.kind == "cpu"

    def between(self, here: int, there: int) -> Link:
        """The link of messages."""
        hosts = self.hosts[here], self.hosts[there]
        same = hosts[0] == hosts[1] or len({*hosts[0], *hosts[1]}) == 1
        return (self.cluster.inside if same else self.cluster.between).send


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of a microbatch, and what stages do it in.

    placement
        The rank of each stage.
    blocks, brought
        How many blocks each stage has, each a supertask in the forward, the backward and that of
        weights; and how many values communication inside its mesh brings in the forward: the
        backward brings about as many.
    """

    links: RankLinks
    placement: Sequence[int]
    forward: Messages
    backward: Messages
    blocks: Sequence[Number]
    brought: Sequence[Number]

    @classmethod
    def of(cls, links: RankLinks, placement: Sequence[int], sums: Sums) -> Exchange:
        """The messages of stages that were summed up."""
        there = {(sent.giver, sent.taker): (sent.values, sent.bytes) for sent in sums.traffic}
        back = {
            (sent.taker, sent.giver): (sent.answers, sent.answer_bytes)
            for sent in sums.traffic
            if sent.answers
        }
        return cls(links, placement, there, back, sums.blocks.tolist(), sums.brought.tolist())

    def traffic(self) -> Traffic:
        """Seconds on lines."""
        return Traffic(self._lines(self.forward), self._lines(self.backward))

    def with_workers(self, times: StageTimes) -> StageTimes:
        """Seconds of stages with those that workers need beside them."""
        answers = [0 * count for count in self.blocks]
        for (giver, _), (count, _) in self.backward.items():
            answers[giver] = answers[giver] + count
        split = [2 * count for count in self.brought]
        backward = [
            count * (sent > 0) + extra
            for count, sent, extra in zip(self.blocks, answers, split, strict=True)
        ]
        forward = [count + extra for count, extra in zip(self.blocks, split, strict=True)]
        return StageTimes(
            self._with_workers(times.forward, forward, self.forward),
            self._with_workers(times.backward, backward, self.backward),
            self._with_workers(times.weight, self.blocks, {}),
            self._taking(self.forward),
            self._taking(self.backward),
        )

    def of_calls(self, seconds: Sequence[Number]) -> list[Number]:
        """Seconds of a model's stages with all that workers need beside them."""
        none = [0 * one for one in seconds]
        worked = self.with_workers(StageTimes(seconds, none, none))
        return [a + b for a, b in zip(worked.forward, worked.taking, strict=True)]

    def _lines(self, messages: Messages) -> dict[tuple[int, int], Passing]:
        found = {}
        for (giver, taker), (count, nbytes) in messages.items():
            link = self.links.between(self.placement[giver], self.placement[taker])
            moving = 0.0 if self.links.copied else nbytes / link.bandwidth
            sent = np.where(count > 0, 0.0, -np.inf) if isinstance(count, np.ndarray) else 0.0
            found[giver, taker] = Passing(count * link.latency + moving, sent)
        return found

    def _with_workers(
        self, seconds: Sequence[Number], supertasks: Sequence[Number], messages: Messages
    ) -> list[Number]:
        """Seconds of each stage with those for its supertasks and what it sends."""
        each = worker_seconds(self.links.cluster.device)
        found = [there + each * count for there, count in zip(seconds, supertasks, strict=True)]
        for (giver, taker), (count, nbytes) in messages.items():
            here, there = self.placement[giver], self.placement[taker]
            if here != there:
                moving = nbytes / self.links.between(here, there).bandwidth
                found[giver] = found[giver] + count * each + moving * self.links.copied
        return found

    def _taking(self, messages: Messages) -> list[Number]:
        """Seconds of each stage for what is sent to it."""
        each = worker_seconds(self.links.cluster.device)
        found = [0.0 * count for count in self.blocks]
        for (giver, taker), (count, _) in messages.items():
            if self.placement[giver] != self.placement[taker]:
                found[taker] = found[taker] + count * each
        return found
