"""The most that slots are predicted to hold, against what walking the built file says.

A slot that is said to have room where it has none is the worst error: a prediction may be more too
high than too low. What a slot that waits has done ahead of its turn depends on who is late; it
counts whole, most of all where slots have several stages.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.building import build
from shardwright.clusters import Cluster, DeviceModel
from shardwright.costs.cost import Analytic
from shardwright.planner import plan
from shardwright.planning.predict import predict
from shardwright.schedules import KINDS
from shardwright.simulation.simulate import simulate
from tests.costs.test_stage import regression
from tests.steps import language_step

PIPELINES = [
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 2, "data": 2},
]
ALONE = [{"data": 2}, {"tensor": 2}, {"sequence": 2}]
FEW = 0.05
"""So much less than what is held may be predicted."""
MORE = {"none": 0.10, "full": 0.13, "auto": 0.18}
"""So much more may be; blocks are given up whole, so that more is than a budget asks for."""
SEVERAL_STAGES = 0.22
GPU = DeviceModel("gpu", "cuda", 10**9, flops=1e12, bandwidth=1e11, overhead=1e-6)


@pytest.fixture(scope="module")
def step():
    return language_step(layers=4, width=256, vocabulary=1000, batch=8, length=64)


def ratio(step, made, device=None):
    """Bytes of the fullest slot: those predicted of those simulated."""
    cluster = Cluster((made.devices,), device=device) if device else Cluster((made.devices,))
    predicted = predict(step, made, cluster)
    simulated = simulate(build(step, made), Analytic(cluster.device), cluster)
    return predicted.peak_memory / max(slot.memory.total for slot in simulated.slots)


def half_of_what_may_be_let_go(step, **options):
    """A budget for activations."""
    found = []
    for recompute in ("none", "full"):
        made = plan(step, recompute=recompute, **options)
        found.append(max(s.memory.activations for s in predict(step, made).slots))
    return sum(found) // 2


@pytest.mark.parametrize("recompute", ["none", "auto", "full"])
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [(mesh, kind) for mesh in PIPELINES for kind in KINDS] + [(mesh, "1f1b") for mesh in ALONE],
    ids=str,
)
def test_of_every_schedule(step, mesh, schedule, recompute):
    options = {"mesh": mesh, "schedule": schedule, "microbatches": 4}
    memory = half_of_what_may_be_let_go(step, **options) if recompute == "auto" else None
    found = ratio(step, plan(step, recompute=recompute, memory=memory, **options))
    more = MORE[recompute]
    if schedule in ("interleaved", "zb-v"):
        more = max(more, SEVERAL_STAGES)
    assert 1 - FEW < found < 1 + more


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mesh", [{"data": 2}, {"pipeline": 2, "data": 2}], ids=str)
def test_of_states_that_are_dealt_out(step, mesh, recompute):
    made = plan(step, mesh=mesh, microbatches=4, recompute=recompute, zero=1)
    assert ratio(step, made) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_where_messages_are_copied(step, schedule, recompute):
    made = plan(step, mesh={"pipeline": 2}, schedule=schedule, microbatches=4, recompute=recompute)
    assert ratio(step, made, GPU) == pytest.approx(1, abs=0.1)


# Devices of a stage that are never late do no forward ahead of its turn; it counts in half.
NEVER_LATE = pytest.mark.xfail(strict=True, reason="predicted 11 to 29% too high")


@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline": 2},
        {"data": 2},
        pytest.param({"tensor": 2}, marks=NEVER_LATE),
        pytest.param({"pipeline": 2, "tensor": 2}, marks=NEVER_LATE),
    ],
    ids=str,
)
def test_of_a_layer_that_is_cut(mesh):
    """Its queries, keys and values are parts of one value; the gradient of each fills it."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    graph = regression(functional.mse_loss, model, (16, 64, 64))
    assert ratio(graph, plan(graph, mesh=mesh, microbatches=2)) == pytest.approx(1, abs=0.1)
