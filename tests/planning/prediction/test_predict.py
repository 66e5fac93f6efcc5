"""What plans will take: against what `building` writes, and laws that hold for any plan."""

import pytest
import torch
from torch import nn

from shardwright.building.recompute import saved_bytes
from shardwright.building.update import localize_step
from shardwright.clusters import GLOO, Cluster
from shardwright.costs.cost import Analytic
from shardwright.costs.worker_time import COMPUTING
from shardwright.errors import PlanError
from shardwright.planner import plan
from shardwright.planning.assemble import step_of
from shardwright.planning.prediction.exchange import RankLinks
from shardwright.planning.prediction.predict import estimate, predict
from shardwright.planning.prediction.spread import part_of
from shardwright.planning.prediction.spreading import spread_of_plan
from shardwright.planning.prediction.sums import sums_of
from shardwright.tracing import capture
from tests.planning.projections import transformer
from tests.steps import image_step, language_step, trained


@pytest.fixture(scope="module")
def step():
    return trained(transformer(4))


def stage_sums(graph, made):
    cluster = Cluster((made.devices,))
    found = spread_of_plan(graph, made, cluster, Analytic(cluster.device))
    return sums_of(found.spread, found.staged.stages, len(found.staged.placement))


@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"data": 2}, {"pipeline": 2, "data": 2}])
def test_activations_are_those_that_the_build_keeps(step, mesh):
    made = plan(step, mesh=mesh, microbatches=2)
    kept = saved_bytes(localize_step(step_of(step, made), made))
    predicted = stage_sums(step, made).saved
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
    kept = predict(step, plan(step, 2, microbatches=4, schedule="gpipe"))
    again = predict(step, plan(step, 2, microbatches=4, schedule="gpipe", recompute="full"))
    assert again.step_time > kept.step_time
    assert again.slots[0].memory.activations < kept.slots[0].memory.activations / 2
    limit = kept.slots[0].memory.activations * 3 // 4
    some = plan(step, 2, microbatches=4, schedule="gpipe", recompute="auto", memory=limit)
    found = predict(step, some)
    assert kept.step_time < found.step_time < again.step_time
    assert found.slots[0].memory.activations <= limit


def test_more_microbatches_share_the_bubble(step):
    found = [predict(step, plan(step, 2, microbatches=n)).per_microbatch for n in (1, 2, 4, 8)]
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
    cluster = Cluster((made.devices,))
    staged = spread_of_plan(graph, made, cluster, Analytic(cluster.device)).staged
    assert staged.stages == [0, 1, 1, 2]
    assert [staged.slots[rank] for rank in staged.placement] == [("d0",), ("d1",), ("d0",)]


# --- ranks of different numbers of slots ----------------------------------------------------------


def test_a_rank_shares_its_nodes_among_its_own_slots():
    graph = linears(4, rows=3)
    made = plan(graph, 5, "pipedream")
    sizes = {found.mesh.devices: found.mesh.sizes for found in made.assignments}
    assert len(set(sizes.values())) == 2, "ranks of different numbers of slots"
    cluster = Cluster((made.devices,))
    costs = Analytic(cluster.device)
    found = spread_of_plan(graph, made, cluster, costs)
    for position, index in enumerate(made.nodes):
        mesh, splits = made.assignments[index].mesh, made.assignments[index].splits
        axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
        part = part_of(found.spread.source, splits, axes, position)
        expected = costs.node(graph, graph.nodes[position], part).forward
        assert found.spread.forward[position] == pytest.approx(expected)


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
    cluster = Cluster((made.devices,))
    costs = Analytic(cluster.device)
    spread = spread_of_plan(graph, made, cluster, costs).spread
    for position, index in enumerate(made.nodes):
        mesh, splits = made.assignments[index].mesh, made.assignments[index].splits
        if position not in spread.source.prepare and any(splits):
            node = spread.source.view.nodes[position]
            axes = dict(zip(mesh.axes, mesh.sizes, strict=True))
            part = part_of(spread.source, splits, axes, position)
            expected = costs.node(spread.source.whole, node, part).forward
            assert spread.forward[position] == pytest.approx(expected)


def test_unequal_ranks_deal_out_their_own_states(step):
    made = plan(step, mesh={"pipeline": 2, "data": 2}, microbatches=2, zero=1)
    cluster = Cluster((made.devices,))
    found = spread_of_plan(step, made, cluster, Analytic(cluster.device))
    staged = found.staged
    assert found.shards == [2, 2]

    def states(shards):
        arguments = found.spread, staged.stages, staged.options, cluster, staged.slots
        held = estimate(*arguments, shards=shards).memory
        return [(one.optimizer, one.updated, one.gradients) for one in held]

    assert states([1, 2]) == [states([1, 1])[0], states([2, 2])[1]]
    assert states([1, 1])[0] != states([2, 2])[0]
