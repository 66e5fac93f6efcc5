"""By the simulator's measure, too, no plan of METIS or PipeDream is faster than that of `auto`.

Slots are so slow that supertasks take far longer than what workers do beside them: of short steps
the simulator counts more for plans over an axis `data` than `predict`, which `auto` goes by.
"""

import pytest

from shardwright.errors import PlanError
from shardwright.layout import Cluster, DeviceModel
from shardwright.planning import plan
from shardwright.planning.simulation.simulate import simulate
from shardwright.profiling.cost import Analytic
from shardwright.transform import build
from tests.planning.automatic.test_auto import FAST
from tests.planning.projections import transformer
from tests.steps import image_step, language_step, trained

TOLERANCE = 1.02
"""The planner compares by `predict`, which is the simulator's measure up to so much."""
SLOW = DeviceModel("slow", "cpu", 10**9, flops=1e6, bandwidth=1e6, overhead=1e-3)
GRAPHS = {
    "language": lambda: language_step(layers=4, width=16, vocabulary=40),
    "tied": lambda: language_step(layers=2, tied=True),
    "image": image_step,
    "transformer": lambda: trained(transformer(2)),
}


def seconds(graph, made, machines):
    return simulate(build(graph, made), Analytic(machines.device), machines).step_time


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", GRAPHS)
def test_when_simulated_neither_is_faster(name, schedule):
    graph, machines = GRAPHS[name](), Cluster.of(2, device=SLOW, inside=FAST)
    asked = {"microbatches": 4, "schedule": schedule}
    best = seconds(graph, plan(graph, machines, "auto", **asked), machines)
    for policy in ("metis", "pipedream"):
        try:
            other = plan(graph, machines, policy, **asked)
        except PlanError:
            continue
        assert best <= TOLERANCE * seconds(graph, other, machines), policy
