"""PipeDream's partition: contiguous stages, of which each may have several slots.

Input: a workload and a cluster. Output: where stages begin, and how many slots each has. Slots
of one stage take each some of a microbatch's rows, and add up their gradients once a step. The
dynamic program is that of "PipeDream: Generalized Pipeline Parallelism for DNN Training"
(Narayanan et al., SOSP 2019), section 3.1: the best way to give the nodes from i on m slots is a
stage of m' slots in front of the best way to give the rest m - m'. How many stages there are
follows. Slots are handed out in the order of the cluster, so that each stage's links are known: a
stage that spans hosts adds its gradients up over the links between them. As in the paper, the slots
of a stage share all of its seconds evenly, what each operator costs to begin too.

Invariant: no other contiguous cut and no other numbers of slots have a smaller largest
time of any stage for a microbatch; of those with the same, it has the fewest stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from shardwright.clusters import Cluster
from shardwright.errors import PlanError
from shardwright.planning.stages import (
    TOLERANCE,
    MemoryLimit,
    Table,
    Tables,
    cut_places,
    lacking,
    range_tables,
)
from shardwright.planning.workload import Workload

LARGEST_TABLE = 5e8
"""Entries to look at; cuts are tried at fewer places where there would be more."""


class PipedreamCut(NamedTuple):
    """Where stages begin and the last one ends, how many slots each has, and the slowest's time."""

    cuts: list[int]
    replicas: list[int]
    seconds: float


def pipedream(
    workload: Workload,
    cluster: Cluster,
    *,
    rows: int,
    microbatches: int = 1,
    gradients: float = 1.0,
    limit: MemoryLimit | None = None,
    most_stages: int | None = None,
) -> PipedreamCut:
    """The best cut on all slots of a cluster. Raises PlanError where none fits in memory.

    ``rows`` are those of a microbatch: a stage has as many slots at most. ``gradients`` is the
    share of a stage's stored bytes that its slots add up once a step; 0 of a model that is not
    trained.
    """
    slots = len(cluster.devices)
    stages = min(slots, len(workload), most_stages or slots)
    most = max(8, int((LARGEST_TABLE / max(1, stages * slots * slots)) ** 0.5))
    places = cut_places(workload, stages, most)
    tables = range_tables(workload, places)
    search = _PipedreamSearch(tables, cluster, rows, microbatches, gradients, limit)
    return search.run(stages, places)


class _PipedreamChoice(NamedTuple):
    """What the best way from each place on begins with: its end, and its slots."""

    stop: np.ndarray
    replicas: np.ndarray


@dataclass(slots=True)
class _PipedreamSearch:
    """``best[s][m]`` has, for each place, the time of the best s stages on the last m slots."""

    tables: Tables
    cluster: Cluster
    rows: int
    microbatches: int
    gradients: float
    limit: MemoryLimit | None
    by_bytes: bool = False
    """Whether the most bytes of a slot shall be few, in place of the most seconds."""
    best: list[dict[int, np.ndarray]] = field(default_factory=list)
    choices: list[dict[int, _PipedreamChoice]] = field(default_factory=list)

    def run(self, stages: int, places: Sequence[int]) -> PipedreamCut:
        slots, size = len(self.cluster.devices), len(places)
        done = np.full(size, np.inf)
        done[-1] = 0.0
        self.best, self.choices = [{0: done}], [{}]
        for count in range(1, stages + 1):
            self._add(count, slots)
        times = [found[slots][0] if slots in found else np.inf for found in self.best]
        least = min(times)
        if not np.isfinite(least):
            raise PlanError(self._why(stages, places))
        count = next(i for i, time in enumerate(times) if time <= least * (1 + TOLERANCE))
        return self._follow(count, slots, places, float(least))

    def _add(self, count: int, slots: int) -> None:
        """The best ways with one stage more, on any number of slots."""
        size = len(self.tables.seconds)
        best: dict[int, np.ndarray] = {}
        choices: dict[int, _PipedreamChoice] = {}
        for used in range(count, slots + 1):
            time, stop, many = np.full(size, np.inf), np.zeros(size, int), np.zeros(size, int)
            for replicas in range(1, min(used, self.rows) + 1):
                rest = self.best[count - 1].get(used - replicas)
                if rest is None:
                    continue
                joined = np.maximum(self._stage(count, used, replicas), rest[None, :])
                at, found = joined.argmin(1), joined.min(1)
                better = found < time * (1 - TOLERANCE)
                better |= ~np.isfinite(time) & np.isfinite(found)
                time[better], stop[better], many[better] = found[better], at[better], replicas
            best[used], choices[used] = time, _PipedreamChoice(stop, many)
        self.best.append(best)
        self.choices.append(choices)

    def _stage(self, from_end: int, used: int, replicas: int) -> Table:
        """The time of each range as a stage of so many slots, the first of the last ``used``."""
        tables, devices = self.tables, self.cluster.devices
        first = len(devices) - used
        own = devices[first : first + replicas]
        seconds = tables.seconds / replicas
        if replicas > 1 and self.gradients:
            links = self.cluster.among(own)
            add_up = _all_reduce(links.seconds, replicas, self.gradients * tables.stored)
            seconds = seconds + add_up / self.microbatches
        if self.limit is None:
            return seconds
        under_way = self.limit.under_way(0, from_end)
        held = tables.stored + under_way * tables.kept / replicas
        if self.by_bytes:
            return np.where(np.isfinite(seconds), held, np.inf)
        return np.where(held <= self.limit.nbytes, seconds, np.inf)

    def _follow(
        self, count: int, slots: int, places: Sequence[int], seconds: float
    ) -> PipedreamCut:
        cuts, replicas, at = [0], [], 0
        for left in range(count, 0, -1):
            choice = self.choices[left][slots]
            replicas.append(int(choice.replicas[at]))
            slots -= replicas[-1]
            at = int(choice.stop[at])
            cuts.append(places[at])
        return PipedreamCut(cuts, replicas, seconds)

    def _why(self, stages: int, places: Sequence[int]) -> str:
        """What stands in the way: memory, or rows too few for the slots."""
        slots, limit = len(self.cluster.devices), self.limit
        if limit is None or stages * self.rows < slots:
            return (
                f"{slots} slots have no work: {stages} stages of at most {self.rows} slots, one a "
                "row of a microbatch; use fewer slots, or capture with a larger batch"
            )
        search = replace(self, by_bytes=True, best=[], choices=[])
        nearest = search.run(stages, places)
        return (
            f"no cut on {slots} slots fits in {limit.nbytes:.0f} bytes a slot: even the least full "
            f"leaves slot {search.fullest(nearest, places)!r} with "
            f"{lacking(nearest.seconds, limit.nbytes)}"
        )

    def fullest(self, found: PipedreamCut, places: Sequence[int]) -> str:
        """The first slot of the stage for which a cut has the most of what is counted."""
        before = list(accumulate(found.replicas, initial=0))
        count, slots = len(found.replicas), before[-1]
        cuts = [places.index(cut) for cut in found.cuts]
        most = [
            self._stage(count - stage, slots - before[stage], replicas)[
                cuts[stage], cuts[stage + 1]
            ]
            for stage, replicas in enumerate(found.replicas)
        ]
        return self.cluster.devices[before[most.index(max(most))]]


def _all_reduce(price: Callable[..., float], members: int, nbytes: Table) -> Table:
    """Seconds of adding up so many bytes; the price is a start and a rate."""
    start = price("all_reduce", members, 0)
    rate = (price("all_reduce", members, 10**9) - start) / 10**9
    found: Table = np.where(nbytes > 0, start + rate * nbytes, 0.0)
    return found
