"""What is predicted from sums against what walking the built file says, task by task."""

import pytest

from shardwright.building import build
from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic
from shardwright.planner import plan
from shardwright.planning.prediction.predict import predict
from shardwright.simulation.simulate import simulate
from tests.steps import language_step


@pytest.fixture(scope="module")
def step():
    return language_step(layers=4, width=256, vocabulary=1000, batch=8, length=64)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"pipeline": 2}},
        {"mesh": {"pipeline": 2}, "schedule": "gpipe"},
        {"mesh": {"pipeline": 2}, "schedule": "zb-h1"},
        {"mesh": {"pipeline": 2}, "schedule": "interleaved"},
        {"mesh": {"pipeline": 2}, "recompute": "full", "schedule": "gpipe"},
        {"mesh": {"data": 2}},
        {"mesh": {"tensor": 2}},
        {"mesh": {"sequence": 2}},
        {"mesh": {"tensor": 4}},
        {"mesh": {"pipeline": 2, "tensor": 2}},
    ],
)
def test_a_step_takes_what_its_file_takes(step, options):
    """A slot may run a forward ahead of its turn, which holds one microbatch more, or a part."""
    made = plan(step, microbatches=4, **options)
    cluster = Cluster((made.devices,))
    predicted = predict(step, made, cluster)
    simulated = simulate(build(step, made), Analytic(cluster.device), cluster)
    assert predicted.step_time == pytest.approx(simulated.step_time, rel=0.06)
    for one, other in zip(predicted.slots, simulated.slots, strict=True):
        assert one.memory.parameters == pytest.approx(other.memory.parameters, rel=0.01)
        assert one.memory.gradients == pytest.approx(other.memory.gradients, rel=0.01)
        assert one.memory.optimizer == pytest.approx(other.memory.optimizer, rel=0.01)
        assert one.memory.total == pytest.approx(other.memory.total, rel=0.15)


@pytest.fixture(scope="module")
def small():
    """Its supertasks take about as long as a worker needs beside them."""
    return language_step(layers=8, width=128, vocabulary=500, batch=4, length=32)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_of_small_supertasks_too(small, schedule, ranks):
    made = plan(small, mesh={"pipeline": ranks}, schedule=schedule, microbatches=4)
    cluster = Cluster((made.devices,))
    predicted = predict(small, made, cluster)
    simulated = simulate(build(small, made), Analytic(cluster.device), cluster)
    assert predicted.step_time == pytest.approx(simulated.step_time, rel=0.06)
