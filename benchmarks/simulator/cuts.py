"""One GPT cut in two at many places: is a cut that is predicted to be faster faster?

Only cuts that differ can be put in an order: of all places those are taken whose steps, by analytic
costs, take times that lie as far from one another as can be, from the best cut to the worst. Each
is then predicted from measured supertasks and run, all cuts in turn, round after round.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from scipy.stats import rankdata, spearmanr

import shardwright as sw
from benchmarks.simulator.report import milliseconds
from benchmarks.simulator.steps import gpt, in_turn, step_graph, take_steps
from shardwright.clusters import Cluster
from shardwright.ir import IRGraph
from shardwright.planning import Plan, predict
from shardwright.planning.assemble import step_of
from shardwright.planning.step import with_prepared
from shardwright.planning.step_graph import forward_view

HEADINGS = ("cut behind node", "by shapes", "step", "measured", "off", "rank", "measured")


class Cut(NamedTuple):
    """Where a model is cut, what a step takes by shapes alone, predicted and measured, a round."""

    place: int
    by_shapes: float
    pairs: list[tuple[float, float]]

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians of what was predicted, and of what was measured."""
        predicted, measured = zip(*self.pairs, strict=True)
        return statistics.median(predicted), statistics.median(measured)


def cuts(
    count: int, rounds: int, cluster: Cluster, say: Callable[[str], None], microbatches: int = 4
) -> list[Cut]:
    """Predict and run a GPT that is cut at so many places."""
    program = gpt()
    graph = step_graph(program, microbatches)
    plan = sw.plan(graph, mesh={"pipeline": 2}, microbatches=microbatches)
    times = [predict(graph, made).step_time for made in every_cut(graph, plan)]
    found = [Cut(i + 1, times[i], []) for i in sorted(apart(times, count))]
    for number in range(rounds):
        for cut in found[:: 1 if number % 2 == 0 else -1]:
            pipeline = sw.build(graph, cut_behind(graph, plan, cut.place))
            with sw.TrainingRunner(pipeline, threads=1) as session:
                take_steps(session, program.batch)
                cut.pairs.extend(in_turn(session, pipeline, cluster, program.batch, 1).pairs)
            shown = ", measured ".join(map(milliseconds, cut.pairs[-1]))
            say(f"round {number + 1} of {rounds}, cut behind node {cut.place}: {shown}")
    return found


def every_cut(graph: IRGraph, plan: Plan) -> list[Plan]:
    """The plan with its two stages cut behind each node but the last."""
    step = step_of(graph, plan)
    count = len(forward_view(step.graph).nodes) - len(step.prepare)
    return [cut_behind(graph, plan, place) for place in range(1, count)]


def cut_behind(graph: IRGraph, plan: Plan, place: int) -> Plan:
    """The plan with its two stages cut behind so many nodes."""
    training = plan.training
    assert training is not None
    step = step_of(graph, plan)
    forward = forward_view(step.graph)
    count = len(forward.nodes) - len(step.prepare)
    stages = with_prepared(forward, [bisect_right((place,), i) for i in range(count)])
    slots = [assignment.mesh.devices for assignment in plan.assignments]
    places = [slots.index(rank) for rank in training.slots]
    return msgspec.structs.replace(
        plan,
        nodes=tuple(places[stage] for stage in stages),
        training=msgspec.structs.replace(training, stages=tuple(stages)),
    )


def apart(times: Sequence[float], count: int) -> list[int]:
    """The least, the most, and one by one what lies farthest from all that are taken."""
    order = range(len(times))
    taken = [min(order, key=times.__getitem__), max(order, key=times.__getitem__)][:count]
    while len(taken) < min(count, len(times)):
        rest = [i for i in order if i not in taken]
        taken.append(max(rest, key=lambda i: min(abs(times[i] - times[j]) for j in taken)))
    return taken


def rows(found: Sequence[Cut]) -> list[tuple[str, ...]]:
    """What is said of each cut; ranks count from the fastest."""
    predicted, measured = zip(*(cut.seconds for cut in found), strict=True)
    ranks = zip(rankdata(predicted), rankdata(measured), strict=True)
    return [
        (
            str(cut.place),
            *map(milliseconds, (cut.by_shapes, *cut.seconds)),
            f"{cut.seconds[0] / cut.seconds[1] - 1:+.1%}",
            *(f"{rank:g}" for rank in pair),
        )
        for cut, pair in zip(found, ranks, strict=True)
    ]


def summary(found: Sequence[Cut]) -> list[str]:
    """How well the orders agree, and over which range."""
    predicted, measured = zip(*(cut.seconds for cut in found), strict=True)
    agree = spearmanr(predicted, measured).statistic if len(found) > 1 else 1.0
    return [
        f"rank correlation of predicted and measured over {len(found)} cuts: {agree:.3f}",
        f"steps from {milliseconds(min(measured))} to {milliseconds(max(measured))}",
    ]
