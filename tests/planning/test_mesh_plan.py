"""Plans over a mesh: training steps, and stages by partitioners."""

import msgspec
import pytest
import torch
from torch import nn

from shardwright.building import build
from shardwright.clusters import CPU_CORE, GLOO, Cluster, DeviceModel
from shardwright.costs import Analytic, NodeCost
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.pipeline import check as check_file
from shardwright.planner import plan
from shardwright.planning import Plan, Split, as_step
from shardwright.planning.assemble import planned, step_of
from shardwright.planning.partition import Task
from shardwright.planning.partitioners import PARTITIONERS
from shardwright.planning.pipeline import measure_training
from shardwright.planning.plan import assignments
from shardwright.planning.step_graph import forward_view
from shardwright.tracing import compile_ir
from tests.building.test_training_steps import check, compiled
from tests.graphs import language_model, tokens
from tests.planning.projections import transformer
from tests.steps import finish, image_step, language_step, trained
from tests.walk import walk

# --- plans of training steps: stages, schedules, what is split, and what is said of it ------------


@pytest.fixture(scope="module")
def step():
    return language_step(layers=6, width=16, vocabulary=20)


def test_a_plan_of_a_step_reads_at_a_glance(step):
    made = plan(step, mesh={"pipeline": 2}, microbatches=4, schedule="zb-h1")
    lines = str(made).splitlines()
    assert lines[0] == "plan for train_step: pipeline 2, 2 slots"
    assert lines[3] == (
        "  4 microbatches, zb-h1, 2 pipeline ranks of 1 stage, bubble 8.5%, recompute none, zero 0"
    )
    assert [line.split(":")[0] for line in lines[4:]] == ["  stage 0 on d0", "  stage 1 on d1"]


def test_a_plan_of_a_step_can_be_written_down(step):
    made = plan(step, mesh={"pipeline": 2, "data": 2}, microbatches=2, zero=1)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made


@pytest.mark.parametrize(
    ("schedule", "chunks", "placement"),
    [
        ("gpipe", None, (0, 1)),
        ("1f1b", None, (0, 1)),
        ("zb-h1", 1, (0, 1)),
        ("interleaved", None, (0, 1, 0, 1)),
        ("interleaved", 3, (0, 1, 0, 1, 0, 1)),
        ("zb-v", None, (0, 1, 1, 0)),
    ],
)
def test_stages_are_contiguous_and_lie_on_the_ranks_of_the_schedule(
    step, schedule, chunks, placement
):
    made = plan(step, mesh={"pipeline": 2}, microbatches=4, schedule=schedule, chunks=chunks)
    training = made.training
    assert training.placement == placement
    forward = [s for i, s in enumerate(training.stages) if i not in step_of(step, made).prepare]
    assert forward == sorted(forward)
    assert set(forward) == set(range(len(placement)))
    for stage, assignment in zip(
        training.stages, assignments(made, len(training.stages)), strict=True
    ):
        assert assignment.mesh.devices == training.slots[placement[stage]]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_stages_have_equal_work_and_the_head_counts(microbatches):
    """The output layer of a large vocabulary is worth several layers."""
    graph = language_step(layers=8, width=16, vocabulary=500, batch=2, length=32)
    made = plan(graph, 2, microbatches=microbatches)
    share = made.training.work[0] / sum(made.training.work)
    assert 0.47 < share < 0.53
    scopes = [node.scope for node in step_of(graph, made).graph.nodes]
    first = {s for s, stage in zip(scopes, made.training.stages, strict=False) if stage == 0}
    assert len([scope for scope in first if scope.startswith("layers")]) > 4


def test_what_is_done_once_a_step_is_in_the_stage_that_reads_it(step):
    made = plan(step, 2, microbatches=2)
    prepare = step_of(step, made).prepare
    assert prepare
    assert {made.training.stages[position] for position in prepare} == {1}


def test_along_data_only_inputs_of_the_whole_batch_are_whole(step):
    """Each slot counts all labels by itself; everything else is split."""
    made = plan(step, mesh={"data": 2}, microbatches=2)
    prepared = step_of(step, made)
    whole = {
        node.op
        for i, (node, assignment) in enumerate(
            zip(prepared.graph.nodes, assignments(made, prepared.forward), strict=False)
        )
        if i not in prepared.prepare and not any(assignment.splits)
    }
    assert whole == set()


def test_the_sum_of_losses_stays_in_terms_along_data(step):
    made = plan(step, mesh={"data": 2}, microbatches=2)
    *_, quotient = assignments(made, len(made.nodes))
    assert not isinstance(quotient.splits[0], Split | None)


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"pipeline": 2, "tensor": 2}])
def test_layers_are_split_by_columns_and_rows_and_fused_products_taken_apart(mesh):
    graph = trained(transformer(2))
    made = plan(graph, mesh=mesh, microbatches=2)
    assert len(made.unfused) == 2
    prepared = step_of(graph, made).graph
    products = [
        any(isinstance(split, Split) for split in assignment.splits)
        for node, assignment in zip(
            prepared.nodes, assignments(made, len(made.nodes)), strict=False
        )
        if node.op == "aten.addmm.default"
    ]
    assert products == [True] * 12


def test_a_lookup_table_stays_in_one_stage():
    """Where a model's pipeline would cut it over all slots."""
    graph = language_step(layers=1, width=8, vocabulary=2000, tied=False)
    made = plan(graph, 2)
    assert {assignment.mesh.axes for assignment in made.assignments} == {()}


def test_operators_that_mix_the_batch_are_named():
    made = plan(image_step(), 2, microbatches=2)
    assert made.notes == ("mix the rows of a batch, so have each microbatch's alone: batch_norm",)
    assert plan(image_step(), 2).notes == ()


def test_a_reshape_through_which_no_batch_is_followed_is_named():
    class Merging(nn.Module):
        def forward(self, x):
            rows = x.transpose(0, 1).reshape(-1, 8).relu()
            return rows.view(6, 4, 8).transpose(0, 1)

    model = nn.Sequential(nn.Linear(8, 8), Merging(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    made = plan(compile_ir(step, torch.randn(4, 6, 8)), 2, microbatches=2)
    assert made.notes == ("reshape a batch so that its rows cannot be followed: reshape in 1",)


def test_batch_norm_is_split_along_data_with_statistics_of_its_own():
    made = plan(image_step(), mesh={"data": 2})
    assert made.notes == (
        "have the statistics of each data shard's rows, and the mean of the shards' running "
        "statistics: batch_norm",
    )
    prepared = step_of(image_step(), made)
    norms = [
        assignment.splits
        for node, assignment in zip(
            prepared.graph.nodes, assignments(made, prepared.forward), strict=False
        )
        if "batch_norm" in node.op
    ]
    assert [isinstance(split, Split) for (split,) in norms] == [True]
    uneven = plan(image_step(batch=5), mesh={"data": 2})
    assert uneven.notes == ()


def test_loads_count_forward_and_backward(step):
    made = plan(step, 2, microbatches=2)
    assert [load.work for load in made.loads] == list(made.training.work)
    forward = plan(language_model(layers=6, width=16, vocabulary=20), 2)
    assert sum(load.work for load in made.loads) > 2 * sum(load.work for load in forward.loads)


def test_a_view_of_the_forward_is_planned(step):
    made = plan(step, 2)
    assert len(made.nodes) == len(forward_view(step).nodes) + 3  # a count, and two nodes around it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches must be a number from 1 up, found 0"),
        ({"microbatches": True}, "found True"),
        ({"schedule": "magic"}, "no schedule is called 'magic'; there are gpipe, 1f1b"),
        ({"chunks": 2}, "1f1b has 1 stages a rank, not 2; leave chunks out, or take interleaved"),
        ({"recompute": "some"}, "recompute is one of none, full, auto, found 'some'"),
        ({"recompute": "auto"}, "give both, or neither"),
        ({"memory": 1000}, "give both, or neither"),
        ({"zero": 2}, "zero is 0 or 1, found 2"),
        ({"zero": 1}, "the mesh axis 'data', which the mesh lacks; add the axis"),
        ({"schedule": "interleaved", "chunks": 100}, "200 stages, but the graph 'train_step' has"),
    ],
)
def test_what_cannot_be_planned_is_refused(step, options, message):
    with pytest.raises(PlanError, match=message):
        plan(step, 2, **options)


def test_options_of_a_step_are_refused_for_a_model():
    with pytest.raises(PlanError, match="is no training step, but microbatches=2 is for one"):
        plan(language_model(), 2, microbatches=2)
    with pytest.raises(PlanError, match="but zero=1 is for one"):
        plan(language_model(), mesh={"data": 2}, zero=1)


def test_a_policy_function_is_refused_for_a_step(step):
    with pytest.raises(PlanError, match="plan a training step over a mesh="):
        plan(step, 2, lambda graph, resource: graph)


def test_a_product_of_sums_over_the_batch_is_named_and_their_sum_is_not():
    """As experts are balanced: how often each is chosen, times how likely it was."""

    def noted(op):
        builder = Builder("step")
        x = builder.input("x", (4, 3), "f64")
        with builder.scope("router", "tests.Router"):
            weight = builder.param("weight", torch.rand(2, 3, dtype=torch.float64))
            y = builder.call("aten.linear.default", x, weight)
            means = [builder.call("aten.mean.dim", y, [0]) for _ in range(2)]
            loss = builder.call("aten.sum.default", builder.call(op, *means))
        return plan(finish(builder, loss), 1, microbatches=2).notes

    assert noted("aten.add.Tensor") == ()
    assert noted("aten.mul.Tensor") == (
        "mix the rows of a batch, so have each microbatch's alone: mul in router",
    )


def test_what_is_trained_counts_with_its_gradient_and_state():
    """With AdamW four times as much: itself, a gradient, two states."""
    graph = language_step(layers=2)
    loads = measure_training(as_step(graph, 1), forward_view(graph), 1)
    stored = sum(value.nbytes for value in graph.stored() if value.role == "param")
    counts = sum(4 for value in graph.stored() if value.name.endswith(".step"))
    assert loads.total_bytes == 4 * stored + counts


# --- plans by partitioners build, compute what the graph does, and train as eager does ------------


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
