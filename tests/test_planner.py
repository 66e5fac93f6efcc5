"""The fastest candidates are ranked anew by simulation."""

import pytest

from shardwright.building import build
from shardwright.costs.cost import Analytic
from shardwright.errors import GraphError
from shardwright.planner import auto_plan, plan, simulated_seconds
from shardwright.planning import Plan
from shardwright.planning.predict import predict
from shardwright.simulation.simulate import simulate
from shardwright.tracing.capture import empty_weights
from tests.graphs import language_model
from tests.planning.projections import transformer
from tests.planning.test_search import by_prediction, cluster, random_step
from tests.steps import language_step, trained

GIVEN = {"microbatches": 4}


class Simulated:
    """Takes plans with a word in their ranks' text for the fastest; notes what it was asked."""

    def __init__(self, favours):
        self.favours, self.asked = favours, []

    def __call__(self, graph, plan, costs, cluster):
        self.asked.append(plan)
        return 1.0 if self.favours(plan) else 2.0


def test_what_is_simulated_to_be_fastest_is_chosen():
    graph, machines = language_step(layers=4, width=16, vocabulary=40), cluster(2)
    usual = by_prediction(graph, machines, microbatches=4)
    favourite = "1f1b" if usual.training.schedule != "1f1b" else "gpipe"
    found = Simulated(lambda made: made.training.schedule == favourite)
    made = auto_plan(graph, machines, given=GIVEN, simulate=found)
    assert made.training.schedule == favourite
    assert len(found.asked) == len(set(found.asked)) > 1
    assert all(one.cluster == machines for one in found.asked)
    assert made.prediction == predict(graph, made, machines)
    first = made.explanation.others[0]
    assert first.plan == usual.explanation.plan
    assert first.why == "built and simulated it takes 2000.000 ms, the chosen one 1000.000 ms"
    assert "built and simulated it takes 1000.000 ms a captured batch" in made.explain()


def test_of_equals_it_is_what_is_predicted_to_be_faster():
    graph, machines = language_step(layers=2), cluster(2)
    made = auto_plan(graph, machines, given=GIVEN, simulate=Simulated(lambda made: True))
    assert made.nodes == by_prediction(graph, machines, microbatches=4).nodes


def test_what_cannot_be_built_is_not_chosen_and_is_named():
    graph, machines = language_step(layers=2), cluster(2)
    usual = by_prediction(graph, machines, microbatches=4)

    def refuse(graph, made, costs, machines):
        if made.nodes == usual.nodes and made.training == usual.training:
            raise GraphError("too odd")
        return 1.0

    made = auto_plan(graph, machines, given=GIVEN, simulate=refuse)
    assert (made.nodes, made.training) != (usual.nodes, usual.training)
    assert f"{usual.explanation.plan}: it cannot be built: too odd" in made.explanation.refused
    (unbuilt,) = (one for one in made.explanation.others if one.plan == usual.explanation.plan)
    assert unbuilt.why == "it cannot be built"


def test_where_none_can_be_built_it_is_what_is_predicted_to_be_fastest(tmp_path):
    def refuse(graph, made, costs, machines):
        raise GraphError("too odd")

    graph, machines = language_step(layers=2), cluster(2)
    made = auto_plan(graph, machines, given=GIVEN, simulate=refuse)
    assert made.nodes == by_prediction(graph, machines, microbatches=4).nodes
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_plans_of_large_graphs_are_not_built():
    found = Simulated(lambda made: False)
    auto_plan(trained(transformer(10)), cluster(2), given=GIVEN, simulate=found)
    assert not found.asked


def test_plans_of_users_are_simulated():
    graph, machines = random_step(5, 8), cluster(2)
    assert plan(graph, machines, "auto", microbatches=4).nodes == (
        by_prediction(graph, machines, microbatches=4).nodes
    )


@pytest.mark.parametrize("graph", [language_step(layers=2), language_model()])
def test_it_says_what_the_built_file_takes(graph):
    machines = cluster(2)
    made = plan(graph, machines)
    calls = {} if made.training else {"calls": 16}
    costs = Analytic(machines.device)
    expected = simulate(build(graph, made), costs, machines, **calls).step_time
    assert simulated_seconds(graph, made, costs, machines) == expected


def test_it_needs_no_contents_of_parameters():
    with empty_weights():
        graph = language_step(layers=2)
    made = plan(graph, cluster(2), "auto", microbatches=4)
    assert not made.explanation.refused
