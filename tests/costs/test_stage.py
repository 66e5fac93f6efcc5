"""What stages are predicted to keep of a microbatch, against what building keeps."""

from bisect import bisect_right

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.building.recompute import demand, stages_of
from shardwright.building.update import localize_step
from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic
from shardwright.costs.stage import stage_tasks
from shardwright.planner import plan
from shardwright.planning.assemble import step_of
from shardwright.planning.predict import forward_of, placed_plan
from shardwright.planning.step import with_prepared
from shardwright.planning.step_graph import forward_view
from shardwright.schedules.run import waits_inside
from shardwright.tracing import compile_ir
from tests.planning.test_search import random_step
from tests.steps import image_step

LOSSES = [
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    lambda made, wanted: ((made - wanted) ** 2).mean(),
    lambda made, wanted: functional.cross_entropy(made, wanted.argmax(-1)),
]
MESHES = [{"pipeline": 1}, {"data": 2}, {"tensor": 2}, {"sequence": 2}, {"pipeline": 2, "data": 2}]


def regression(loss, model=None, shape=(8, 32)):
    model = model or nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        made = loss(model(x), y)
        made.backward()
        optimizer.step()
        return made

    rows = torch.ones(shape)
    return compile_ir(step, rows, rows.clone())


def cuts(graph, made):
    """The plan of two stages, with its cut behind each node in turn."""
    forward = forward_view(step_of(graph, made).graph)
    count = len(forward.nodes) - len(step_of(graph, made).prepare)
    for cut in range(1, count):
        stages = with_prepared(forward, [bisect_right((cut,), i) for i in range(count)])
        training = msgspec.structs.replace(made.training, stages=tuple(stages))
        yield msgspec.structs.replace(made, nodes=tuple(stages), training=training)


def check(graph, made):
    """All that is kept is as predicted, what must be is no more; and whether slots wait inside."""
    cluster = Cluster((made.devices,))
    found = placed_plan(forward_of(graph, made), made, cluster, Analytic(cluster.device))
    cut = found.placed, found.stages, len(found.placement)
    tasks, every = (
        stage_tasks(*cut, apart=False, again=again) for again in (None, found.placed.again)
    )
    for stage in stages_of(localize_step(step_of(graph, made), made)):
        kept = stage.kept_bytes(demand(block, block.needed) for block in stage.blocks)
        least = stage.kept_bytes(demand(block, ()) for block in stage.blocks)
        assert tasks.kept[stage.stage] == pytest.approx(kept, rel=0.01, abs=16)
        assert every.kept[stage.stage] >= 0.99 * min(least, kept) - 16
        waits = waits_inside(tasks.brought[stage.stage], tasks.kept[stage.stage])
        assert waits == waits_inside(stage.brought, kept)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_of_any_loss(loss, mesh):
    graph = regression(loss)
    check(graph, plan(graph, mesh=mesh, microbatches=2))


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_of_sums_that_are_sent_to_another_stage(seed):
    graph = random_step(seed, 8)
    check(graph, plan(graph, mesh={"pipeline": 2, "tensor": 2}, microbatches=2))


@pytest.mark.parametrize("inner", ["data", "tensor", "sequence"])
def test_of_attention_that_brings_values_in_several_layouts(inner):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    graph = regression(functional.mse_loss, model, (4, 6, 32))
    check(graph, plan(graph, mesh={inner: 2}, microbatches=2))
    check(graph, plan(graph, mesh={"pipeline": 2, inner: 2}, microbatches=2))


def test_of_a_batch_norm():
    graph = image_step()
    check(graph, plan(graph, 2, microbatches=2))
    for made in cuts(graph, plan(graph, 2, microbatches=2)):
        check(graph, made)


@pytest.mark.parametrize("loss", LOSSES)
def test_wherever_stages_are_cut(loss):
    graph = regression(loss)
    for made in cuts(graph, plan(graph, 2, microbatches=2)):
        check(graph, made)
