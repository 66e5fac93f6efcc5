"""Steps in which activations are computed again give the same bits, and keep less."""

from functools import cache
from itertools import chain, combinations

import msgspec
import pytest
import torch

from shardwright.building import build
from shardwright.building.recompute import (
    LayerActivations,
    demand,
    kept_at,
    recompute,
    saved_bytes,
    stages_of,
)
from shardwright.building.segments import ComputeSegment, tasks
from shardwright.building.update import localize_step
from shardwright.clusters.device import CPU_CORE
from shardwright.costs.cost import Analytic
from shardwright.errors import PlanError
from shardwright.ir import Builder
from shardwright.planner import plan
from shardwright.planning.assemble import step_of
from shardwright.planning.pipeline import node_work
from shardwright.schedules import make_schedule
from shardwright.schedules.run import HeldMicrobatches, held_at_once
from shardwright.simulation.simulate import simulate
from tests.building.step_files import StepRun
from tests.building.written_slots import B0, F0, Slots
from tests.steps import image_step, language_step

STREAM = 4 * 6 * 8 * 8
"""Bytes of what goes from layer to layer in `language_step`."""


def localized(graph, how, memory=None, **options):
    made = plan(graph, **options)
    training = msgspec.structs.replace(made.training, recompute=how, memory=memory)
    return recompute(localize_step(step_of(graph, made), made), training), made


@cache
def trained(make, how, memory, mesh):
    """The losses of two steps, and all constants afterwards by name."""
    graph = make()
    pipeline = build(graph, plan(graph, recompute=how, memory=memory, **MESHES[mesh]))
    run = StepRun(pipeline)
    torch.manual_seed(5)
    wholes = pipeline.metadata.tensors.inputs
    losses = [run.step({n: _random(whole) for n, whole in wholes.items()}) for _ in range(2)]
    return {"losses": torch.stack([loss["output_0"] for loss in losses]), **run.constants}


def _random(whole):
    if whole.dtype == "i64":
        return torch.randint(10, whole.shape)
    if not whole.shape:
        return torch.tensor(1e-3, dtype=torch.float64)
    return torch.randn(whole.shape, dtype=torch.float64)


MESHES = {
    "one": {"devices": 1, "microbatches": 2},
    "pipeline": {"devices": 2, "microbatches": 2},
    "interleaved": {"devices": 2, "microbatches": 2, "schedule": "interleaved"},
    "tensor": {"devices": 2, "policy": "tensor", "microbatches": 2},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(("how", "memory"), [("full", None), ("auto", 40_000)])
def test_every_number_keeps_its_bits(how, memory, mesh):
    assert_same_bits(language_step, how, memory, mesh)


@pytest.mark.parametrize(("how", "memory"), [("full", None), ("auto", 40_000)])
def test_running_statistics_are_counted_once(how, memory):
    assert_same_bits(image_step, how, memory, "one")


def assert_same_bits(make, how, memory, mesh):
    expected, found = trained(make, "none", None, mesh), trained(make, how, memory, mesh)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_full_keeps_only_what_goes_from_layer_to_layer():
    slots, _ = localized(language_step(layers=6), "full", devices=1, microbatches=2)
    tokens_and_labels, layers = 2 * 4 * 6 * 8, 7
    assert saved_bytes(slots)["d0", 0] <= tokens_and_labels + layers * STREAM + 16


def test_what_is_received_is_not_received_twice():
    graph = language_step(layers=4)
    options = {"devices": 2, "policy": "tensor", "microbatches": 2}
    kept, _ = localized(graph, "none", **options)
    again, _ = localized(graph, "full", **options)
    assert len(again.communications) == len(kept.communications)
    assert saved_bytes(again)["d0", 0] < saved_bytes(kept)["d0", 0]


def test_layers_are_done_again_one_by_one():
    """Each in the task of its own backward, and all by the same graph."""
    slots, _ = localized(language_step(layers=6), "full", devices=1, microbatches=2)
    backward = [
        [node.op for node in task.nodes]
        for task in tasks(slots, weights_apart=False)
        if isinstance(task, ComputeSegment) and task.place.phase == "backward"
    ]
    layers = [ops for ops in backward if "aten.gelu.default" in ops]
    assert len(layers) == 6
    assert layers[1:] == layers[1:2] * 5
    assert {ops.count("aten.gelu.default") for ops in layers} == {1}


@pytest.mark.parametrize("memory", [70_000, 100_000])
def test_auto_keeps_within_the_memory_of_a_slot(memory):
    graph = language_step(layers=6)
    slots, made = localized(graph, "auto", memory, devices=2, microbatches=4)
    schedule = make_schedule("1f1b", ranks=2, microbatches=4)
    peaks = []
    for rank, device in enumerate(made.devices):
        sizes = {s: n for (d, s), n in saved_bytes(slots).items() if d == device}
        assert list(sizes) == [rank]
        peaks.append(HeldMicrobatches(held_at_once(schedule, rank)).most([sizes[rank]]))
    assert max(peaks) <= memory


def test_memory_enough_for_all_gives_up_nothing():
    graph = language_step(layers=4)
    kept, _ = localized(graph, "none", devices=1, microbatches=2)
    chosen, _ = localized(graph, "auto", 10**9, devices=1, microbatches=2)
    assert saved_bytes(chosen) == saved_bytes(kept)


def test_too_little_memory_is_refused_with_what_it_takes():
    with pytest.raises(PlanError, match=r"take [0-9]+ bytes even if all that can be is computed"):
        localized(language_step(layers=4), "auto", 1000, devices=1, microbatches=2)


@pytest.mark.parametrize(("schedule", "devices"), [("1f1b", 2), ("1f1b", 3), ("interleaved", 2)])
def test_auto_counts_the_forward_that_a_waiting_worker_begins(schedule, devices):
    """The simulator's slots do begin it: what they hold stays within the memory."""
    graph = language_step(layers=4, width=16, vocabulary=20, length=12)
    options = {"devices": devices, "microbatches": 6, "schedule": schedule}
    slots, _ = localized(graph, "none", **options)
    memory = int(2.5 * max(saved_bytes(slots).values()))
    pipeline = build(graph, plan(graph, recompute="auto", memory=memory, **options))
    found = simulate(pipeline, Analytic(CPU_CORE))
    assert max(slot.memory.activations for slot in found.slots) <= memory
    kept = simulate(build(graph, plan(graph, **options)), Analytic(CPU_CORE))
    assert max(slot.memory.activations for slot in kept.slots) > memory


# --- what a stage keeps of its forward, block by block ------------------------------------------


def two_layers():
    """Two layers of exp and neg, whose backward reads what both make; and a scale for both."""
    made = Slots(1)
    x = made.input("d0")
    scale = made.call("d0", F0, "sigmoid.default", x)
    inside = []
    for _ in range(2):
        made.border("d0", F0)
        inside.append(made.call("d0", F0, "exp.default", x))
        x = made.call("d0", F0, "mul.Tensor", inside[-1], scale)
    for value in (x, *reversed(inside)):
        made.call("d0", B0, "mul.Tensor", value, scale)
    return made


def names(stage, value_ids):
    return sorted(stage.graph.values[value_id].name for value_id in value_ids)


def test_a_stage_is_seen_in_blocks():
    (stage,) = stages_of(two_layers().localized())
    assert [len(block.nodes) for block in stage.blocks] == [1, 2, 2]
    assert [names(stage, block.needed) for block in stage.blocks] == [
        ["sigmoid"],
        ["exp"],
        ["exp__1", "mul__1"],
    ]


def test_what_crosses_from_block_to_block_is_kept():
    (stage,) = stages_of(two_layers().localized())
    assert [names(stage, block.fixed) for block in stage.blocks] == [["sigmoid"], ["mul"], []]
    found = [demand(block, ()) for block in stage.blocks]
    assert [names(stage, one.kept) for one in found] == [["sigmoid"], ["x"], ["mul", "sigmoid"]]
    assert [len(one.again) for one in found] == [0, 1, 2]


def test_what_is_kept_needs_nothing_done_again():
    (stage,) = stages_of(two_layers().localized())
    found = demand(stage.blocks[1], stage.blocks[1].needed)
    assert (names(stage, found.kept), found.again) == (["exp"], ())


def test_what_depends_on_a_renewed_constant_is_kept():
    made = Slots(1)
    count = made.stored("d0", "count")
    y = made.call("d0", F0, "mul.Tensor", made.input("d0"), count)
    z = made.call("d0", F0, "exp.default", y)
    made.update("d0", count, made.call("d0", F0, "neg.default", count))
    made.call("d0", B0, "neg.default", z)
    (stage,) = stages_of(made.localized())
    found = demand(stage.blocks[0], ())
    assert names(stage, found.kept) == ["mul"]


def test_bytes_count_views_of_one_tensor_once():
    made = Slots(1)
    y = made.call("d0", F0, "exp.default", made.input("d0"))
    view = made.call("d0", F0, "view.default", y, [2, 8])
    for value in (y, view):
        made.call("d0", B0, "neg.default", value)
    (stage,) = stages_of(made.localized())
    assert stage.kept_bytes(demand(block, block.needed) for block in stage.blocks) == 64


# --- the minimum cut against every choice there is ----------------------------------------------


def layer(width):
    """Two products with cheap operators around them, and all that their backward reads."""
    builder = Builder("layer")
    x = builder.input("x", (16, width))
    weights = [builder.input(f"w{i}", (width, width)) for i in range(2)]
    made = [builder.call("aten.mm.default", x, weights[0])]
    made.append(builder.call("aten.relu.default", made[-1]))
    made.append(builder.call("aten.view.default", made[-1], [4, 4, width]))
    made.append(builder.call("aten.view.default", made[-1], [16, width]))
    made.append(builder.call("aten.mm.default", made[-1], weights[1]))
    made.append(builder.call("aten.tanh.default", made[-1]))
    made.append(builder.call("aten.add.Tensor", made[-1], x))
    needed = dict.fromkeys(value.id for value in (made[1], made[3], made[4], made[5]))
    return builder.graph, LayerActivations(list(builder.graph.nodes), {made[6].id}, needed)


def cost(graph, block, kept, price):
    found = demand(block, kept)
    own = {v for node in block.nodes for v in node.outputs} - block.fixed
    bytes_kept = sum(graph.values[v].nbytes for v in found.kept & own)
    return price * bytes_kept + sum(node_work(graph, node) for node in found.again)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("price", [0.5, 4, 16, 64, 1024])
def test_it_costs_as_little_as_any_choice(width, price):
    graph, block = layer(width)
    own = [v for node in block.nodes for v in node.outputs if v not in block.fixed]
    choices = chain.from_iterable(combinations(own, n) for n in range(len(own) + 1))
    best = min(cost(graph, block, choice, price) for choice in choices)
    assert cost(graph, block, kept_at(graph, block, price), price) == best


def test_cheap_operators_are_done_again_before_products():
    """Of a product and what a cheap operator makes of it, the one is kept that is read."""
    graph, block = layer(512)
    names = {v: graph.values[v].name for v in graph.values}
    kept = {names[v] for v in kept_at(graph, block, 64)}
    assert kept == {"relu", "mm__1"}
    assert kept_at(graph, block, 2.0**30) == frozenset()
