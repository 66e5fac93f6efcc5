"""What the automatic planner has computed again can be built: no plan is chosen that is refused."""

from bisect import bisect_right

import msgspec
import pytest
import torch
from torch import nn

from shardwright.building import build
from shardwright.building.recompute import recompute
from shardwright.building.update import localize_step
from shardwright.clusters import Cluster, DeviceModel
from shardwright.errors import PlanError
from shardwright.planner import plan
from shardwright.planning.assemble import step_of
from shardwright.planning.predict import predict
from shardwright.planning.step import with_prepared
from shardwright.planning.step_graph import forward_view
from shardwright.schedules import KINDS
from shardwright.tracing import capture_step
from tests.steps import language_step

WIDTH = 32
VALUE = 4 * WIDTH * WIDTH
"""Bytes of what a layer makes."""


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    rows = torch.randn(WIDTH, WIDTH)
    return capture_step(train, (rows, rows.clone()), {}).graph


def planned(step, machines, **asked):
    try:
        return plan(step, machines, "auto", microbatches=4, **asked)
    except PlanError:
        return None


@pytest.mark.parametrize("kind", KINDS)
def test_within_the_memory_that_is_given(step, kind):
    found = []
    for values in (0.1, 1, 2.3, 5.5, 9, 30):
        made = planned(step, 2, schedule=kind, recompute="auto", memory=round(values * VALUE))
        if made is not None:
            build(step, made)
            found.append(values)
    assert 30 in found
    assert 0.1 not in found


@pytest.mark.parametrize("kind", KINDS)
def test_within_the_memory_of_the_devices(step, kind):
    found = []
    for values in (21, 22.5, 23.3, 24, 26, 60):
        device = DeviceModel("small", "cpu", round(values * VALUE), flops=1e10, bandwidth=1e10)
        made = planned(step, Cluster.of(2, device=device), schedule=kind)
        if made is not None:
            build(step, made)
            found.append(values)
    assert 60 in found


@pytest.mark.parametrize("kind", KINDS)
def test_plans_that_the_prediction_lets_in_are_built(step, kind):
    """The least that is predicted is no less than what a build can do with."""
    full = plan(step, 2, microbatches=4, schedule=kind, recompute="auto", memory=1)
    least = max(slot.memory.activations for slot in predict(step, full).slots)
    build(step, plan(step, 2, microbatches=4, schedule=kind, recompute="auto", memory=least))


def cut(graph, made, positions):
    """The plan with its stages cut at other positions."""
    forward = forward_view(step_of(graph, made).graph)
    count = len(forward.nodes) - len(step_of(graph, made).prepare)
    stages = with_prepared(forward, [bisect_right(positions, i) for i in range(count)])
    slots = [assignment.mesh.devices for assignment in made.assignments]
    places = [slots.index(rank) for rank in made.training.slots]
    return msgspec.structs.replace(
        made,
        nodes=tuple(places[made.training.placement[stage]] for stage in stages),
        training=msgspec.structs.replace(made.training, stages=tuple(stages)),
    )


def within(made, memory):
    training = msgspec.structs.replace(made.training, memory=memory)
    return msgspec.structs.replace(made, training=training)


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("gpipe", (1,)),
        ("gpipe", (6,)),
        ("gpipe", (16,)),
        ("gpipe", (26,)),
        ("gpipe", (36,)),
        ("gpipe", (39,)),
        ("gpipe", (40,)),
        ("zb-v", (16, 21, 37)),
        ("zb-v", (12, 13, 19)),
    ],
)
def test_the_least_that_is_predicted_is_the_least_that_can_be(kind, positions):
    """Wherever stages are cut: what nothing rereads counts nowhere."""
    graph = language_step()
    made = plan(graph, 2, microbatches=4, schedule=kind, recompute="auto", memory=1)
    made = cut(graph, made, positions)
    least = max(slot.memory.activations for slot in predict(graph, made).slots)
    localized = localize_step(step_of(graph, made), made, "cpu")
    recompute(localized, within(made, round(1.01 * least)).training)
    with pytest.raises(PlanError, match="even if all that can be is computed again"):
        recompute(localized, within(made, round(0.95 * least)).training)


def test_a_limit_that_nothing_keeps_to_is_named(step):
    with pytest.raises(PlanError, match="keeps its activations within memory=100: the nearest"):
        plan(step, 2, "auto", microbatches=4, recompute="auto", memory=100)


@pytest.mark.parametrize("memory", [0, -1])
def test_no_memory_is_refused(step, memory):
    with pytest.raises(PlanError, match="memory must be a number of bytes from 1 up"):
        plan(step, 2, "auto", recompute="auto", memory=memory)
