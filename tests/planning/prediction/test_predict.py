"""What plans will take: against what `transform` writes, and laws that hold for any plan."""

import pytest

from shardwright.errors import PlanError
from shardwright.layout import Cluster
from shardwright.planning import plan, step_of
from shardwright.planning.prediction.predict import predict
from shardwright.planning.prediction.spreading import spread_of_plan
from shardwright.planning.prediction.sums import sums_of
from shardwright.profiling.cost import Analytic
from shardwright.transform.recompute import saved_bytes
from shardwright.transform.step import localize_step
from tests.planning.projections import transformer
from tests.steps import image_step, language_step, trained


@pytest.fixture(scope="module")
def step():
    return trained(transformer(4))


def stage_sums(graph, made):
    cluster = Cluster((made.devices,))
    found = spread_of_plan(graph, made, cluster, Analytic(cluster.device))
    return sums_of(found.spread, found.stages, max(found.stages) + 1)


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
