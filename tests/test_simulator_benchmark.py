"""The benchmark of the simulator: which cuts it takes, and what it writes."""

import pytest

import shardwright as sw
from benchmarks.models import loss_of, training_gpt
from benchmarks.simulator import cuts as cutting
from benchmarks.simulator.cuts import Cut, apart, cuts, every_cut, rows, summary
from benchmarks.simulator.report import Part, markdown
from benchmarks.simulator.steps import Program, step_graph
from shardwright.clusters import Cluster
from shardwright.planning import predict


def test_cuts_lie_as_far_from_one_another_as_can_be():
    times = [5.0, 5.01, 1.0, 1.01, 3.0, 3.01, 2.0]
    assert sorted(times[i] for i in apart(times, 4)) == [1.0, 2.0, 3.0, 5.01]
    assert sorted(apart(times, 20)) == list(range(7))
    assert apart(times, 1) == [2]


def small_gpt():
    model, ids, labels = training_gpt(1, batch=4, length=8, vocabulary=64, width=32)
    return Program(model, (ids, labels), lambda ids, labels: loss_of(model(ids), labels))


@pytest.mark.workers
def test_cuts_are_predicted_and_run_round_after_round(monkeypatch):
    monkeypatch.setattr(cutting, "gpt", small_gpt)
    said = []
    found = cuts(3, 2, Cluster.of(2), said.append, microbatches=2)
    assert [len(cut.pairs) for cut in found] == [2, 2, 2]
    assert all(predicted > 0 and measured > 0 for cut in found for predicted, measured in cut.pairs)
    assert len(said) == 6
    assert said[0].startswith("round 1 of 2, cut behind node ")


def test_cuts_of_a_gpt_differ():
    program = small_gpt()
    graph = step_graph(program, 2)
    made = every_cut(graph, sw.plan(graph, mesh={"pipeline": 2}, microbatches=2))
    assert len({one.nodes for one in made}) == len(made)
    times = [predict(graph, one).step_time for one in made]
    found = sorted(times[i] for i in apart(times, 8))
    assert found[0] == min(times)
    assert found[-1] == max(times)
    assert len(set(found)) == 8


def test_orders_are_compared_by_medians():
    found = [
        Cut(1, 1.0, [(0.1, 0.2), (0.1, 0.3), (0.1, 0.2)]),
        Cut(2, 2.0, [(0.2, 0.3), (0.2, 0.3), (0.2, 0.1)]),
    ]
    assert rows(found)[0] == ("1", "1000 ms", "100 ms", "200 ms", "-50.0%", "1", "1")
    assert summary(found) == [
        "rank correlation of predicted and measured over 2 cuts: 1.000",
        "steps from 200 ms to 300 ms",
    ]
    part = Part("Cuts", ("cut", "step"), [("1", "100 ms")], ["all is well"])
    assert markdown("Words.", [part]) == (
        "# The simulator against reality\n\nWords.\n\n## Cuts\n\n"
        "| cut | step |\n| ---: | ---: |\n| 1 | 100 ms |\n\n- all is well\n"
    )
