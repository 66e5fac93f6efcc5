"""What is predicted of a plan is what its pipeline comes to: by phase, and as simulated.

Slots are so slow that supertasks take far longer than what workers do beside them.
"""

from collections import defaultdict

import pytest

from shardwright.building import build
from shardwright.clusters import Cluster, DeviceModel
from shardwright.costs.cost import Analytic
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.planner import plan
from shardwright.planning.prediction.predict import predict
from shardwright.planning.prediction.spreading import spread_of_plan
from shardwright.simulation.simulate import simulate
from shardwright.simulation.task_work import TaskWork
from tests.planning.automatic.test_auto import FAST, random_step
from tests.planning.projections import transformer
from tests.steps import language_step, trained

SLOW = DeviceModel("slow", "cpu", 10**9, flops=1e6, bandwidth=1e6, overhead=1e-3)
GRAPHS = {
    "transformer": lambda: trained(transformer(2)),
    "language": lambda: language_step(layers=2, width=16, vocabulary=40),
    "random 3": lambda: random_step(3, 8),
    "random 5": lambda: random_step(5, 8),
}
MESHES = [({"data": 2}, 0), ({"data": 2}, 1), ({"tensor": 2}, 0), ({"data": 2, "tensor": 2}, 0)]
CLOSE = 0.05


@pytest.mark.parametrize(("mesh", "zero"), MESHES)
@pytest.mark.parametrize("name", GRAPHS)
def test_over_an_axis_a_step_takes_what_its_pipeline_does(name, mesh, zero):
    """Weights, their gradients and their updates are whole on every slot of an axis `data`."""
    graph = GRAPHS[name]()
    made = plan(graph, mesh=mesh, microbatches=4, zero=zero)
    machines = Cluster((made.devices,), device=SLOW, inside=FAST)
    costs, pipeline = Analytic(SLOW), build(graph, made)
    simulated = simulate(pipeline, costs, machines).step_time
    assert predict(graph, made, machines).step_time == pytest.approx(simulated, rel=CLOSE)
    spread = spread_of_plan(graph, made, machines, costs).spread
    found = by_phase(pipeline, costs)
    assert spread.forward.sum() == pytest.approx(found["forward"], rel=CLOSE)
    backward = spread.backward.sum() + spread.weight.sum()
    assert backward == pytest.approx(found["backward"], rel=CLOSE)


def by_phase(pipeline, costs):
    """Seconds of a slot's supertasks."""
    work = TaskWork(pipeline, costs, SLOW, TaskGraphs(pipeline))
    found = defaultdict(float)
    for name, task in pipeline.supertasks.items():
        if task.kind == "FX" and task.phase is not None:
            found[task.phase] += work.seconds(name) / len(pipeline.devices)
    return found
