"""Files of training steps: what they hold, and that all of them compute what one slot does."""

from functools import cache

import pytest
import torch

from shardwright.building import build
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.pipeline import Microbatches, Pipeline, StateOrigin
from shardwright.pipeline.rules import MICROBATCH_PHASES
from shardwright.planner import plan
from tests.building.step_files import StepRun
from tests.steps import adamw, backward, finish, image_step, language_step


def batches(pipeline, steps=2):
    """Random inputs for some steps."""
    torch.manual_seed(3)
    for _ in range(steps):
        given = {}
        for name, whole in pipeline.metadata.tensors.inputs.items():
            if whole.dtype == "i64":
                given[name] = torch.randint(10, whole.shape)
            elif whole.shape:
                given[name] = torch.randn(whole.shape, dtype=torch.float64)
            else:
                given[name] = torch.tensor(1e-2, dtype=torch.float64)
        yield given


def trained(pipeline, steps=2):
    """The loss of each step, and the whole parameters and buffers afterwards."""
    run = StepRun(pipeline)
    losses = [run.step(given)["output_0"] for given in batches(pipeline, steps)]
    contents = {}
    for name, info in pipeline.tensors.items():
        if info.value is not None:
            whole = contents.setdefault(
                info.value.name, torch.zeros(info.value.shape, dtype=run.constants[name].dtype)
            )
            whole[tuple(slice(*taken) for taken in info.value.placements)] = run.constants[name]
    return torch.stack(losses), contents


@cache
def expected(tied, microbatches):
    """What one slot trains."""
    graph = language_step(layers=4, tied=tied)
    return trained(build(graph, plan(graph, 1, microbatches=microbatches)))


PLANS = {
    "1f1b": {"devices": 2, "microbatches": 4},
    "gpipe": {"devices": 3, "microbatches": 2, "schedule": "gpipe"},
    "interleaved": {"devices": 2, "microbatches": 4, "schedule": "interleaved"},
    "zb-h1": {"devices": 2, "microbatches": 4, "schedule": "zb-h1"},
    "zb-v": {"devices": 2, "microbatches": 4, "schedule": "zb-v"},
    "tensor": {"mesh": {"tensor": 2}, "microbatches": 2},
    "data with ZeRO": {"mesh": {"data": 2}, "microbatches": 2, "zero": 1},
    "pipeline and tensor": {"mesh": {"pipeline": 2, "tensor": 2}, "microbatches": 2},
    "recomputed": {"devices": 2, "microbatches": 2, "recompute": "full"},
    "recomputed, zb-v": {
        "devices": 2,
        "microbatches": 2,
        "schedule": "zb-v",
        "recompute": "full",
    },
    "within memory": {
        "devices": 2,
        "microbatches": 2,
        "recompute": "auto",
        "memory": 60_000,
    },
}


TIED = ("1f1b", "zb-v", "pipeline and tensor")
"""Both ends of the model, with the tied table, on one slot or on two."""
CASES = [(name, False) for name in PLANS] + [(name, True) for name in TIED]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_every_plan_trains_as_one_slot_does(name, tied):
    graph, options = language_step(layers=4, tied=tied), PLANS[name]
    losses, contents = trained(build(graph, plan(graph, **options)))
    expected_losses, expected_contents = expected(tied, options["microbatches"])
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=1e-10)
    assert contents.keys() == expected_contents.keys()
    for key, tensor in expected_contents.items():
        torch.testing.assert_close(contents[key], tensor, rtol=1e-7, atol=1e-8)


# --- what files hold ----------------------------------------------------------------------------


def step_file(graph=None, **options):
    graph = graph or language_step(layers=2)
    return build(graph, plan(graph, **{"devices": 2, "microbatches": 2, **options}))


def phases(pipeline):
    tasks = pipeline.supertasks.values()
    return list(dict.fromkeys(task.phase for task in tasks if task.device))


def test_phases_stand_one_after_another():
    found = [phase for phase in phases(step_file()) if phase != "backward_weight"]
    assert found == ["prepare", "forward", "backward", "update"]


def test_the_whole_batch_is_told_and_microbatch_0_is_sliced():
    pipeline = step_file()
    assert pipeline.training.microbatches == Microbatches(2, {"tokens": 0, "labels": 0})
    assert pipeline.metadata.tensors.inputs["tokens"].shape == (8, 6)
    slices = pipeline.metadata.tensor_slices.inputs
    assert slices["tokens"].placements == ((0, 4), (0, 6))
    assert slices["labels"].placements == ((0, 4), (0, 6))
    assert slices["labels__1"].placements == ((0, 8), (0, 6))
    assert slices["labels__1"].origin == "labels"


def test_the_schedule_is_told():
    pipeline = step_file(schedule="zb-v")
    info = pipeline.training.schedule
    assert (info.kind, info.ranks, info.chunks) == ("zb-v", 2, 2)
    assert (info.placement, info.slots) == ((0, 1, 1, 0), (("d0",), ("d1",)))
    stages = {task.stage for task in pipeline.supertasks.values() if task.device == "d0"}
    assert stages == {0, 3, None}


def test_state_that_does_not_exist_yet_is_named_by_its_origin():
    pipeline = step_file()
    origins = {i.origin.name: i for i in pipeline.tensors.values() if i.origin is not None}
    state = origins["optimizer.head.weight.exp_avg"]
    assert state.origin == StateOrigin("optimizer.head.weight.exp_avg", ((0, 50), (0, 8)), (50, 8))
    assert (state.init, state.value) == ("zeros", None)


def test_with_zero_a_state_is_a_part_of_its_whole():
    pipeline = step_file(devices=None, mesh={"data": 2}, zero=1)
    infos = pipeline.tensors.values()
    parts = [i.origin for i in infos if i.origin and i.origin.name.endswith("head.weight.exp_avg")]
    assert sorted(part.placements[0] for part in parts) == [(0, 25), (25, 50)]
    assert {part.shape for part in parts} == {(50, 8)}


def test_gradients_are_sums_without_a_name():
    pipeline = step_file()
    sums = {n: i for n, i in pipeline.tensors.items() if i.init and i.origin is None}
    assert "grad.head.weight" in sums
    replaced = set(pipeline.training.replaces.values())
    assert sums.keys() <= replaced


def test_a_frozen_parameter_is_a_constant():
    builder = Builder("step")
    x = builder.input("x", (4, 8), "f64")
    frozen = builder.buffer("frozen", torch.ones(8, 8, dtype=torch.float64))
    weight = builder.param("weight", torch.ones(8, 8, dtype=torch.float64))
    y = builder.call("aten.linear.default", x, frozen)
    y = builder.call("aten.relu.default", builder.call("aten.linear.default", y, weight))
    pipeline = step_file(finish(builder, builder.call("aten.mean.default", y)), devices=1)
    replaced = set(pipeline.training.replaces.values())
    assert "weight" in replaced
    assert "frozen" not in replaced
    assert "grad.frozen" not in pipeline.tensors


def test_state_that_exists_is_carried():
    builder = Builder("step")
    x = builder.input("x", (4, 8), "f64")
    weight = builder.param("weight", torch.ones(8, 8, dtype=torch.float64))
    name = "optimizer.weight.momentum"
    momentum = builder.stored("state", name, torch.full((8, 8), 2.0).double())
    loss = builder.call("aten.mean.default", builder.call("aten.linear.default", x, weight))
    (gradient,) = backward(builder, loss, [weight])
    new = builder.call("aten.add.Tensor", momentum, gradient)
    renewed = builder.call("aten.sub.Tensor", weight, new)
    updates = {weight.id: renewed.id, momentum.id: new.id}
    pipeline = step_file(builder.finish([loss], updates=updates), devices=1)
    info = pipeline.tensors[name]
    assert pipeline.weights.read(info.value, info).eq(2).all()


def test_running_statistics_are_replaced_by_the_forward():
    pipeline = step_file(image_step())
    replaced = {old: new for new, old in pipeline.training.replaces.items()}
    maker = pipeline.connections.producers[replaced["norm.mean"]][0]
    assert pipeline.supertasks[maker].phase == "forward"


def test_what_the_plan_notes_stands_in_the_file():
    pipeline = step_file(image_step(), devices=1)
    assert any("batch_norm" in note for note in pipeline.training.notes)


def test_outputs_with_a_batch_are_of_microbatch_0():
    builder = Builder("step")
    x = builder.input("x", (4, 8), "f64")
    labels = builder.input("labels", (4,), "i64")
    weight = builder.param("weight", torch.rand(10, 8, dtype=torch.float64))
    scores = builder.call("aten.linear.default", x, weight)
    loss = builder.call("aten.cross_entropy_loss.default", scores, labels)
    parameters = [weight]
    updates = adamw(builder, parameters, backward(builder, loss, parameters))
    pipeline = step_file(builder.finish([loss, scores, x, loss], updates=updates), devices=1)
    dims = pipeline.training.microbatches.dim
    assert (dims["output_1"], dims["output_2"]) == (0, 0)
    assert pipeline.metadata.tensors.outputs["output_1"].shape == (8, 10)
    run = StepRun(pipeline)
    (given,) = batches(pipeline, 1)
    made = run.step(given)
    weights = builder.graph.tensors[weight.id]
    assert torch.equal(made["output_2"], given["x"])
    torch.testing.assert_close(made["output_1"], given["x"] @ weights.T)
    expected = torch.nn.functional.cross_entropy(made["output_1"], given["labels"])
    torch.testing.assert_close(made["output_0"], expected)
    assert torch.equal(made["output_0"], made["output_3"])


def test_an_output_that_each_microbatch_makes_anew_is_refused():
    builder = Builder("step")
    x = builder.input("x", (4, 8), "f64")
    weight = builder.param("weight", torch.rand(8, 8, dtype=torch.float64))
    y = builder.call("aten.linear.default", x, weight)
    loss = builder.call("aten.mean.default", y)
    gradients = backward(builder, loss, [weight])
    columns = builder.call("aten.sum.dim_IntList", y, [0])
    updates = adamw(builder, [weight], gradients)
    graph = builder.finish([loss, columns], updates=updates)
    assert step_file(graph, devices=1, microbatches=1)
    with pytest.raises(PlanError, match=r"'output_1', f64\[8\], which each microbatch makes anew"):
        step_file(graph, devices=1)


def test_a_saved_step_is_the_same_step(tmp_path):
    pipeline = step_file()
    expected, _ = trained(pipeline)
    pipeline.save(tmp_path / "step.pipeline.json")
    found, _ = trained(Pipeline.load(tmp_path / "step.pipeline.json"))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("axis", ["pipeline", "tensor"])
def test_equal_layers_share_their_graphs_in_all_phases(axis):
    size = {"pipeline": 1, "tensor": 2}[axis]
    few, many = (
        step_file(language_step(layers=n), devices=None, mesh={axis: size}) for n in (8, 24)
    )

    def texts(pipeline):
        """The distinct graphs of what is done for each microbatch."""
        tasks = pipeline.supertasks.items()
        each = [name for name, t in tasks if t.kind == "FX" and t.phase in MICROBATCH_PHASES]
        return {pipeline.data_of(name) for name in each}

    assert len(texts(many)) < len(texts(few)) + 4
