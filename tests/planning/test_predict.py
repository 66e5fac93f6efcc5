"""What plans will take: against what `building` writes, and laws that hold for any plan."""

from collections import defaultdict

import pytest
import torch
from torch import nn

from shardwright.building import build
from shardwright.building.recompute import saved_bytes
from shardwright.building.update import localize_step
from shardwright.clusters import GLOO, Cluster, DeviceModel
from shardwright.costs.cost import Analytic
from shardwright.costs.predict import estimate
from shardwright.costs.roofline import COMPUTING
from shardwright.costs.stage import stage_tasks
from shardwright.costs.step_time import RankLinks
from shardwright.errors import PlanError
from shardwright.pipeline.graphs import TaskGraphs
from shardwright.planner import plan
from shardwright.planning.assemble import step_of
from shardwright.planning.predict import forward_of, placed_plan, predict
from shardwright.sharding.strategy import CallShapes, strategy
from shardwright.simulation.memory import TaskWork
from shardwright.simulation.simulate import simulate
from shardwright.tracing import capture
from tests.planning.projections import transformer
from tests.planning.test_search import FAST, random_step
from tests.steps import image_step, language_step, trained

SLOW = DeviceModel("slow", "cpu", 10**9, flops=1e6, bandwidth=1e6, overhead=1e-3)


@pytest.fixture(scope="module")
def step():
    return trained(transformer(4))


def placed(graph, made, costs=None):
    cluster = Cluster((made.devices,))
    return placed_plan(forward_of(graph, made), made, cluster, costs or Analytic(cluster.device))


def tasks_of(graph, made):
    found = placed(graph, made)
    return stage_tasks(found.placed, found.stages, len(found.placement), apart=False)


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"data": 2}, {"pipeline": 2, "data": 2}])
def test_activations_are_those_that_the_build_keeps(step, mesh):
    made = plan(step, mesh=mesh, microbatches=2)
    kept = saved_bytes(localize_step(step_of(step, made), made))
    predicted = tasks_of(step, made).kept
    for (_, stage), nbytes in kept.items():
        assert predicted[stage] == pytest.approx(nbytes, rel=0.02)


def test_parameters_gradients_and_states_are_those_of_the_graph():
    graph = language_step(layers=2, tied=True)
    stored = sum(value.nbytes for value in graph.stored() if value.role == "param")
    states = sum(value.nbytes for value in graph.stored() if value.role == "state")
    (slot,) = predict(graph, plan(graph, 1)).slots
    assert slot.memory.parameters == stored
    assert slot.memory.gradients == stored
    assert slot.memory.optimizer == states


def test_a_tied_weight_is_held_by_both_stages():
    graph = language_step(layers=2, tied=True, vocabulary=1000)
    table = 1000 * 8 * 8
    slots = predict(graph, plan(graph, 2)).slots
    assert all(slot.memory.parameters >= table for slot in slots)


def test_zero_deals_out_the_optimizer_state(step):
    whole = predict(step, plan(step, mesh={"data": 2}))
    dealt = predict(step, plan(step, mesh={"data": 2}, zero=1))
    for a, b in zip(whole.slots, dealt.slots, strict=True):
        assert b.memory.optimizer == pytest.approx(a.memory.optimizer / 2)
        assert b.memory.parameters == a.memory.parameters


def test_what_is_computed_again_takes_time_and_spares_memory(step):
    """On slots so slow that what workers do beside supertasks is little."""
    slow = Cluster.of(2, device=SLOW)
    kept = predict(step, plan(step, 2, microbatches=4, schedule="gpipe"), slow)
    again = predict(step, plan(step, 2, microbatches=4, schedule="gpipe", recompute="full"), slow)
    assert again.step_time > kept.step_time
    assert again.slots[0].memory.activations < kept.slots[0].memory.activations / 2
    limit = kept.slots[0].memory.activations * 3 // 4
    some = plan(step, 2, microbatches=4, schedule="gpipe", recompute="auto", memory=limit)
    found = predict(step, some, slow)
    assert kept.step_time < found.step_time < again.step_time
    assert found.slots[0].memory.activations <= limit


def test_more_microbatches_share_the_bubble(step):
    slow = Cluster.of(2, device=SLOW)
    made = [plan(step, 2, microbatches=n) for n in (1, 2, 4, 8)]
    found = [predict(step, one, slow).per_microbatch for one in made]
    assert found[0] > found[1] > found[-1]


def test_work_and_waiting_make_a_step(step):
    found = predict(step, plan(step, mesh={"pipeline": 2, "tensor": 2}, microbatches=2))
    assert [slot.device for slot in found.slots] == ["d0", "d1", "d2", "d3"]
    for slot in found.slots:
        assert slot.busy + slot.idle == pytest.approx(found.step_time)
    assert str(found).splitlines()[0].startswith("a step takes")


def test_slow_links_cost_time(step):
    made = plan(step, mesh={"pipeline": 2, "tensor": 2}, microbatches=2)
    near, far = (predict(step, made, Cluster.of(4, hosts)) for hosts in (4, 1))
    assert far.step_time > near.step_time


@pytest.mark.parametrize("policy", ["pipeline", "data", "tensor", "sequence"])
def test_models_have_predictions_too(policy):
    graph = transformer(2)
    alone = predict(graph, plan(graph, 1))
    found = predict(graph, plan(graph, 2, policy))
    assert 0 < found.step_time <= found.latency
    assert found.slots[0].memory.gradients == found.slots[0].memory.optimizer == 0
    if policy == "pipeline":
        assert found.step_time < alone.step_time < found.latency


def test_batch_norm_and_convolutions():
    graph = image_step()
    assert predict(graph, plan(graph, mesh={"data": 2}, microbatches=2)).step_time > 0


def test_a_plan_of_other_slots_or_another_graph_is_refused(step):
    made = plan(step, 2)
    with pytest.raises(PlanError, match="names the device slot 'd1', which the cluster lacks"):
        predict(step, made, Cluster.of(1))
    with pytest.raises(PlanError, match="plan again for this graph"):
        predict(language_step(), made)


# --- stages that return to an earlier slot --------------------------------------------------------


def linears(count, rows=64):
    layers = [part for _ in range(count) for part in (nn.Linear(512, 512), nn.ReLU())]
    return capture(nn.Sequential(*layers), (torch.randn(rows, 512),), {})


def turns(graph, resource):
    for position, node in enumerate(graph.nodes()):
        graph.assign(node, position % 2)
    return graph


def returns(graph, resource):
    for position, node in enumerate(graph.nodes()):
        graph.assign(node, 0 if position in (0, 3) else 1)
    return graph


def begins(graph, resource):
    for position, node in enumerate(graph.nodes()[:2]):
        graph.assign(node, position)
    return graph


@pytest.mark.parametrize("policy", [turns, returns, begins])
def test_stages_may_return_to_a_slot(policy):
    graph = linears(8)
    alone, made = predict(graph, plan(graph, 1)), plan(graph, 2, policy)
    found = predict(graph, made)
    assert sorted(slot.device for slot in found.slots) == ["d0", "d1"]
    beside = sum(slot.busy for slot in found.slots) - alone.step_time
    assert 0 <= beside < 50 * COMPUTING, "messages, and what workers need beside supertasks"
    assert found.step_time >= max(slot.busy for slot in found.slots)
    assert found.latency > alone.latency
    stored = sum(slot.memory.parameters for slot in found.slots)
    assert stored == alone.slots[0].memory.parameters


def test_what_returns_is_one_stage_a_visit():
    graph = linears(2)
    made = plan(graph, 2, returns)
    staged = placed(graph, made)
    assert staged.stages == [0, 1, 1, 2]
    assert [staged.slots[rank] for rank in staged.placement] == [("d0",), ("d1",), ("d0",)]


# --- ranks of different numbers of slots ----------------------------------------------------------


def test_a_rank_shares_its_nodes_among_its_own_slots():
    graph = linears(4, rows=3)
    made = plan(graph, 5, "pipedream")
    sizes = {found.mesh.devices: found.mesh.sizes for found in made.assignments}
    assert len(set(sizes.values())) == 2, "ranks of different numbers of slots"
    check_parts(graph, made)


def check_parts(graph, made):
    """Each node takes what its part takes on the mesh of its own rank."""
    costs = Analytic(Cluster((made.devices,)).device)
    found = placed(graph, made, costs).placed
    for position, index in enumerate(made.nodes):
        mesh, splits = made.assignments[index].mesh, made.assignments[index].splits
        if position in found.source.prepare or not any(splits):
            continue
        node, view = found.source.view.nodes[position], found.source.view
        shapes = CallShapes(
            *(tuple(view.values[v].shape for v in ids) for ids in (node.inputs, node.outputs))
        )
        part = strategy(found.source.outline.bound(position), shapes, mesh.sizes, splits).part
        expected = costs.node(found.source.whole, node, part).forward
        assert found.seconds[position, 0] == pytest.approx(expected)


def test_ranks_of_one_host_are_linked_inside_it_whatever_their_slots():
    cluster = Cluster((("d0", "d1", "d2"), ("d3",)))
    links = RankLinks.of(cluster, [("d0",), ("d1", "d2"), ("d2", "d3"), ("d3",)])
    inside, between = cluster.inside.send, cluster.between.send
    assert inside != between
    assert links.between(0, 1) == links.between(2, 2) == inside
    assert links.between(1, 2) == links.between(0, 3) == between


def test_a_training_step_of_unequal_ranks():
    graph = trained(transformer(2))
    made = plan(graph, Cluster.of(5, inside=GLOO), "pipedream", microbatches=1)
    assert len({len(slots) for slots in made.training.slots}) == 2
    check_parts(graph, made)


def test_unequal_ranks_deal_out_their_own_states(step):
    made = plan(step, mesh={"pipeline": 2, "data": 2}, microbatches=2, zero=1)
    cluster = Cluster((made.devices,))
    found = placed(step, made)
    assert found.shards == [2, 2]

    def states(shards):
        arguments = found.placed, found.stages, found.options, cluster, found.slots
        held = estimate(*arguments, shards=shards).memory
        return [(one.optimizer, one.updated, one.gradients) for one in held]

    assert states([1, 2]) == [states([1, 1])[0], states([2, 2])[1]]
    assert states([1, 1])[0] != states([2, 2])[0]


# --- against what walking the built file says ----------------------------------------------------


@pytest.fixture(scope="module")
def language():
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
def test_a_step_takes_what_its_file_takes(language, options):
    """A slot may run a forward ahead of its turn, which holds one microbatch more, or a part."""
    made = plan(language, microbatches=4, **options)
    cluster = Cluster((made.devices,))
    predicted = predict(language, made, cluster)
    simulated = simulate(build(language, made), Analytic(cluster.device), cluster)
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
    seconds = placed_plan(forward_of(graph, made), made, machines, costs).placed.seconds
    seconds[[*forward_of(graph, made).prepare]] = 0.0
    found = by_phase(pipeline, costs)
    assert seconds[:, 0].sum() == pytest.approx(found["forward"], rel=CLOSE)
    assert seconds[:, 1:].sum() == pytest.approx(found["backward"], rel=CLOSE)


def by_phase(pipeline, costs):
    """Seconds of a slot's supertasks."""
    work = TaskWork(pipeline, costs, SLOW, TaskGraphs(pipeline))
    found = defaultdict(float)
    for name, task in pipeline.supertasks.items():
        if task.kind == "FX" and task.phase is not None:
            found[task.phase] += work.seconds(name) / len(pipeline.devices)
    return found
