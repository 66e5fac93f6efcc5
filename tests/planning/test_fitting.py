"""What does not fit in a cluster's memory is refused: which slot, how many bytes, what would do."""

import re

import pytest

from shardwright.clusters import Cluster, DeviceModel
from shardwright.errors import PlanError
from shardwright.planner import POLICIES, plan
from shardwright.planning import predict
from tests.graphs import language_model
from tests.steps import language_step


def cluster(memory: int, slots: int = 2) -> Cluster:
    device = DeviceModel("small", "cpu", memory=memory, flops=1e9, bandwidth=1e9)
    return Cluster(((*(f"s{i}" for i in range(slots)),),), device=device)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("graph", [language_model(), language_step()], ids=["model", "step"])
def test_a_plan_that_does_not_fit_is_refused_with_slot_and_bytes(graph, policy):
    with pytest.raises(PlanError) as raised:
        plan(graph, cluster(10_000), policy)
    found = str(raised.value)
    assert re.search(r"slot '?s[01]", found), found
    assert re.search(r"\d bytes", found), found
    enough = re.search(r"slots of (\d+) bytes", found)
    assert enough, found
    assert int(enough[1]) > 10_000


@pytest.mark.parametrize("policy", ["pipeline", "data", "tensor", "sequence"])
def test_the_bytes_that_it_says_would_do_do(policy):
    graph = language_step()
    with pytest.raises(PlanError) as raised:
        plan(graph, cluster(10_000), policy)
    found = re.search(
        r"slot '(s\d)' would hold .*, (\d+) bytes more than its 10000; it would fit in slots of "
        r"(\d+) bytes; give those",
        str(raised.value),
    )
    assert found, raised.value
    enough = int(found[3])
    assert int(found[2]) == enough - 10_000
    made = plan(graph, cluster(enough), policy)
    assert predict(graph, made, cluster(enough)).peak_memory == enough
    with pytest.raises(PlanError, match=" 1 bytes more than its"):
        plan(graph, cluster(enough - 1), policy)


@pytest.mark.parametrize("policy", ["pipedream"])
def test_fewest_bytes_a_slot_that_a_partitioner_names_do(policy):
    """As far as it counts: stored values and activations, without what operators have in hand."""
    graph = language_model()
    with pytest.raises(PlanError) as raised:
        plan(graph, cluster(10_000), policy)
    least = int(re.search(r"would fit in slots of (\d+) bytes", str(raised.value))[1])
    with pytest.raises(PlanError, match=r"no cut .* 1 more than a slot's"):
        plan(graph, cluster(least - 1), policy)
    with pytest.raises(PlanError, match="does not fit"):
        plan(graph, cluster(least), policy)


def test_a_rank_of_several_slots_is_named_by_its_first():
    mesh = {"tensor": 2, "pipeline": 2}
    with pytest.raises(PlanError, match=r"no cut in 2 stages fits .* on slot 's[01]' with"):
        plan(language_model(), cluster(2_000, 4), "metis", mesh=mesh)


def test_a_policy_function_is_held_to_memory_too():
    def first(graph, resource):
        return graph

    assert plan(language_model(), cluster(10**9), first)
    with pytest.raises(PlanError, match=r"by first does not fit: slot 's\d' would hold"):
        plan(language_model(), cluster(10_000), first)
