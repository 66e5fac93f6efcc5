"""Parts of equal weight, few weights between them: METIS's, made stages and refined.

Comes in: a workload, a weight for each of its nodes and edges, and METIS's options. Goes out: a
stage of each node. What always holds: weights are all that counts; no stage weighs more than METIS
allows unless its parts could not be made stages otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.planning.partitions.contiguous import recut
from shardwright.planning.partitions.metis import Edge, metis_stages
from shardwright.planning.partitions.ordering import moved_note
from shardwright.planning.partitions.refine import refine
from shardwright.planning.partitions.shares import Shares
from shardwright.planning.partitions.workload import Sent, Workload

RECUT = "to where the best cut along the order of the stages has them"
REFINED = "one after another, to stages where they leave less to the fullest, or less to send"
"""What notes say of nodes that were moved."""
BALANCE = 1.03
"""METIS's parts may weigh so much more than an even share; refinement goes no further."""


class WeighedStages(NamedTuple):
    """The stage of each node, what had to be moved, and the weight that no mending may exceed."""

    stages: list[int]
    notes: list[str]
    load: Callable[[Shares], float]


def weighed_stages(
    workload: Workload,
    count: int,
    weights: Sequence[float],
    edges: Mapping[Edge, float],
    options: Mapping[str, int],
) -> WeighedStages:
    """So many stages by weights. Raises PlanError as `metis_stages` does."""
    stages, notes = metis_stages(workload, count, weights, edges, options)
    factor = 1 + options["ufactor"] / 1000 if "ufactor" in options else BALANCE
    allowed = factor * sum(weights) / count
    weighed = _weighed(workload, weights, edges)
    better = recut(weighed, stages, allowed=allowed)
    notes += moved_note(workload, stages, better, RECUT)
    stages = refine(weighed, better, load=lambda shares: max(allowed, *shares.work))
    notes += moved_note(workload, better, stages, REFINED)
    return WeighedStages(stages, notes, lambda shares: max(allowed, *_sums(weights, shares.stages)))


def _sums(weights: Sequence[float], stages: Sequence[int]) -> list[float]:
    """The weight of each stage."""
    found = [0.0] * (max(stages) + 1)
    for weight, stage in zip(weights, stages, strict=True):
        found[stage] += weight
    return found


def _weighed(workload: Workload, weights: Sequence[float], edges: Mapping[Edge, float]) -> Workload:
    """The workload in which nodes and edges take what their weights say."""
    sent = tuple(Sent(a, (b,), weight, 0) for (a, b), weight in edges.items())
    return replace(workload, seconds=tuple(weights), sent=sent, stored=())
