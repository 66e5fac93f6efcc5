import msgspec
import pytest

from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planner import POLICIES, plan
from shardwright.planning import Assignment, Plan
from shardwright.planning.plan import assignments, check_belongs, fingerprint_graph
from tests.graphs import language_model


def test_a_plan_reads_at_a_glance():
    assert str(plan(language_model(layers=2, vocabulary=4), 2)) == (
        "plan for language_model: pipeline, 2 slots\n"
        "  d0: 11 nodes, 51.6% of the work, 0.00 MB stored (50.0%), receives 0.000 MB\n"
        "  d1: 11 nodes, 48.4% of the work, 0.00 MB stored (50.0%), receives 0.000 MB"
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_every_node_is_in_one_stage_and_stages_follow_the_data(devices):
    graph = language_model()
    made = plan(graph, devices)
    slots = [assignment.mesh.devices for assignment in assignments(made, len(graph.nodes))]
    assert slots == sorted(slots)
    assert set(slots) == {(f"d{i}",) for i in range(devices)}


def test_a_plan_is_a_value_that_can_be_written_down():
    made = plan(language_model(), 3)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made


def test_the_fingerprint_is_of_what_is_computed_not_of_names():
    graph, same = language_model(), language_model()
    for value in same.values.values():
        value.name = f"other_{value.id}"
    assert fingerprint_graph(graph) == fingerprint_graph(same)
    assert fingerprint_graph(graph) != fingerprint_graph(language_model(layers=3))
    assert fingerprint_graph(graph) != fingerprint_graph(language_model(tied=True))


def test_a_plan_of_another_graph_is_refused():
    with pytest.raises(PlanError, match="plan again for this graph"):
        check_belongs(plan(language_model(), 2), language_model(layers=3))


@pytest.mark.parametrize(
    ("devices", "policy", "message"),
    [
        (0, "pipeline", "devices must be a number of slots from 1 up, found 0"),
        (True, "pipeline", "found True"),
        (2, "magic", "unknown policy 'magic'; known are pipeline"),
        (100, "pipeline", "100 stages, but the graph 'language_model' has only 40 nodes"),
    ],
)
def test_what_cannot_be_planned_is_refused(devices, policy, message):
    with pytest.raises(PlanError, match=message):
        plan(language_model(), devices, policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_without_nodes_has_no_plan(policy):
    builder = Builder("empty")
    graph = builder.finish(builder.input("x", (2,), "f32"))
    with pytest.raises(PlanError, match="'empty' has no nodes, it gives back its inputs"):
        plan(graph, 2, policy)


def test_a_policy_and_a_mesh_are_not_both_given():
    with pytest.raises(PlanError, match="policy 'tensor' and a mesh are both given"):
        plan(language_model(), policy="tensor", mesh={"data": 2})


def test_a_plan_for_another_number_of_nodes_is_refused():
    made = plan(language_model(), 2)
    with pytest.raises(PlanError, match="the plan assigns 40 nodes, the graph has 39"):
        list(assignments(made, 39))


def test_an_assignment_to_a_slot_that_the_plan_lacks_is_refused():
    graph = language_model()
    assigned = [Assignment.on("d0")] * 39 + [Assignment.on("d7")]
    made = msgspec.structs.replace(
        plan(graph, 1), assignments=tuple(assigned), nodes=tuple(range(40))
    )
    with pytest.raises(PlanError, match="node 39 is assigned to one slot: d7"):
        list(assignments(made, 40))


def test_a_profile_is_no_path():
    with pytest.raises(PlanError, match=r"read a file with Profile\.load"):
        plan(language_model(), 2, "auto", profile="profile.json")
