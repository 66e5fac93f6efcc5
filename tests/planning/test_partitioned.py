"""Plans by partitioners build, compute what the graph does, and train as eager does."""

import msgspec
import pytest
import torch

from shardwright.building import build
from shardwright.clusters import CPU_CORE, GLOO, Cluster, DeviceModel
from shardwright.costs import Analytic, NodeCost
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.pipeline import check as check_file
from shardwright.planner import plan
from shardwright.planning import Plan
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.partition import Task
from shardwright.planning.partitioners import PARTITIONERS
from tests.building.test_training_steps import check, compiled
from tests.graphs import language_model, tokens
from tests.planning.projections import transformer
from tests.steps import language_step
from tests.walk import walk


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("policy", sorted(PARTITIONERS.keys() - {"pipedream"}))
def test_models_compute_what_their_graphs_do(policy, devices):
    graph = language_model(layers=6)
    pipeline = build(graph, plan(graph, devices, policy))
    assert torch.equal(walk(pipeline, {"tokens": tokens()})["output"], graph.run(tokens()))


@pytest.mark.parametrize("policy", PARTITIONERS)
def test_a_plan_is_of_all_slots_and_can_be_written_down(policy):
    graph = language_model(layers=6)
    made = plan(graph, 2, policy)
    assert made.policy == policy
    assert all(load.nodes for load in made.loads)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made
    assert len(planned(graph, made).nodes) == len(made.nodes) == len(made.stages)
    check_file(build(graph, made))


TRAINED = [
    ("gpt", {"policy": "metis", "mesh": {"pipeline": 2}}),
    ("gpt", {"policy": "pipedream", "mesh": {"pipeline": 3}}),
    ("llama", {"policy": "memory", "mesh": {"pipeline": 3}}),
    ("llama", {"policy": "metis", "mesh": {"pipeline": 2, "tensor": 2}}),
    ("translator", {"policy": "metis", "mesh": {"pipeline": 3}, "schedule": "gpipe"}),
    ("experts", {"policy": "pipedream", "mesh": {"pipeline": 4}}),
    ("resnet", {"policy": "metis", "mesh": {"pipeline": 2}, "schedule": "zb-v"}),
    ("resnet", {"policy": "pipedream", "mesh": {"pipeline": 3}}),
]
FAST = {0, 1, 2, 6}
"""What is tested in the fast tier; the rest with the models of the zoo."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(*case, marks=() if i in FAST else pytest.mark.zoo, id=f"{case[0]}-{i}")
        for i, case in enumerate(TRAINED)
    ],
)
def test_steps_train_as_eager_does(name, options):
    check(name, {**options, "microbatches": 2})


def test_slots_of_one_stage_share_its_rows():
    """More of them where there is more to do, and they build."""
    graph = compiled("experts", 2)
    made = plan(graph, Cluster.of(4, inside=GLOO), "pipedream", microbatches=2)
    assert sorted(map(len, made.training.slots)) == [1, 3]
    assert made.training.placement == (0, 1)
    check_file(build(graph, made))


def test_a_plan_over_a_mesh_says_so():
    made = plan(transformer(2), policy="metis", mesh={"pipeline": 2, "tensor": 2})
    assert str(made).startswith("plan for transformer: metis, pipeline 2, tensor 2, 4 slots")
    check_file(build(transformer(2), made))


def masked(layers=3, size=512):
    """Layers that all read one mask, which is made of nothing but numbers."""
    builder = Builder("masked")
    x = builder.input("x", (size, size), "f64")
    mask = builder.call("aten.ones.default", [size, size], dtype=torch.float64)
    mask = builder.call("aten.tril.default", mask)
    for i in range(layers):
        weight = builder.param(f"w{i}", torch.rand(size, size, dtype=torch.float64) / size)
        x = builder.call("aten.mul.Tensor", builder.call("aten.linear.default", x, weight), mask)
    return builder.finish(x)


def test_a_mask_is_made_again_in_each_stage_that_reads_it():
    graph = masked()
    made = plan(graph, 3, "metis")
    assert {copy.node for copy in made.copies} == {0, 1}
    assert any("does 2 nodes (ones, tril) again" in note for note in made.notes)
    pipeline = build(graph, made)
    sends = [task for task in pipeline.supertasks.values() if task.kind == "send"]
    assert len(sends) == 2
    x = torch.rand(512, 512, dtype=torch.float64)
    assert torch.equal(walk(pipeline, {"x": x})["output"], graph.run(x))
    broken = msgspec.structs.replace(made, stages=made.stages[::-1])
    with pytest.raises(PlanError, match="is not where its stages have it; plan again"):
        build(graph, broken)


def test_copies_of_a_step_stand_among_its_nodes():
    graph = compiled("llama", 2)
    made = plan(graph, 3, "memory", microbatches=2)
    assert made.copies
    step = step_of(graph, made)
    assert step.forward == len(made.nodes) == len(made.training.stages)
    check_file(build(graph, made))


def test_stages_that_go_back_are_refused():
    graph = language_model(layers=2)
    made = plan(graph, 2, "metis")
    backwards = tuple(1 - stage for stage in made.stages)
    with pytest.raises(PlanError, match="number the stages so that nothing reads what a later"):
        build(graph, msgspec.structs.replace(made, stages=backwards))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 100}, "100 stages, but the graph 'language_model' has only 40 nodes"),
        ({"mesh": {"tensor": 2}}, "policy 'metis' makes stages, but the mesh has no axis 'pipe"),
        ({"devices": 0}, "devices must be a number of slots from 1 up, found 0"),
    ],
)
def test_what_cannot_be_partitioned_is_refused(options, message):
    with pytest.raises(PlanError, match=message):
        plan(language_model(), policy="metis", **options)


def test_pipedream_takes_no_other_axes():
    with pytest.raises(PlanError, match="policy 'pipedream' decides by itself how many slots"):
        plan(transformer(1), policy="pipedream", mesh={"pipeline": 2, "tensor": 2})


def test_pipedream_has_one_stage_a_rank():
    graph = language_step(layers=2)
    with pytest.raises(PlanError, match="schedule 'interleaved' has 2; take gpipe, 1f1b or zb-h1"):
        plan(graph, 2, "pipedream", schedule="interleaved")
    assert plan(graph, 2, "pipedream", schedule="zb-h1").training.chunks == 1


def test_slots_of_a_rank_share_its_work():
    """Messages weigh more against work that is shared."""
    graph = transformer(2)
    whole, shared = (
        Task(graph, (0, 1), Cluster.of(2), Analytic(CPU_CORE), slots=slots).workload
        for slots in (1, 2)
    )
    assert sum(shared.seconds) == pytest.approx(sum(whole.seconds) / 2)
    assert sum(v.nbytes for v in shared.stored) <= sum(v.nbytes for v in whole.stored) / 2
    assert shared.sent == whole.sent
    data = whole.shared(2, 2)
    assert data.stored == whole.stored
    assert data.sent[0].seconds == whole.sent[0].seconds / 2


def test_a_clusters_links_and_memory_and_a_profile_count():
    graph = language_model(layers=6)
    small = DeviceModel("small", "cpu", memory=2000, flops=1e9, bandwidth=1e9)
    for policy in PARTITIONERS:
        with pytest.raises(PlanError, match=r"bytes.*more than a slot's 2000|in 2000 bytes a slot"):
            plan(graph, Cluster.of(2, device=small), policy)

    class First:
        """All work is in the first layer."""

        def node(self, graph, node, parts=1):
            return NodeCost(float(node.scope == "layers.0"), 0.0, 0.0)

    made = plan(graph, 2, "metis", profile=First())
    assert made.stages.index(1) < 10
    assert plan(graph, Cluster.of(2), "metis").stages.index(1) > 20


def test_what_is_computed_again_need_not_fit():
    graph = language_step(layers=6, width=32, batch=8, length=32)
    stored = sum(load.stored_bytes for load in plan(graph, 1, "metis").loads)
    device = DeviceModel("small", "cpu", memory=12 * stored, flops=1e9, bandwidth=1e9)
    cluster = Cluster.of(2, device=device)
    with pytest.raises(PlanError, match=r"compute activations again|recompute='full'"):
        plan(graph, cluster, "metis", microbatches=8, schedule="gpipe")
    assert plan(graph, cluster, "metis", microbatches=8, recompute="full", schedule="gpipe")


@pytest.mark.parametrize("policy", ["metis", "memory"])
def test_every_stage_of_a_toy_reads_parameters(policy):
    """Though messages take longer than all of its work."""
    made = plan(compiled("experts", 2), 2, policy, microbatches=2)
    assert all(load.stored_bytes for load in made.loads)
