"""What a walk foresees against what `build` writes, on models and on training steps."""

from collections import Counter

import msgspec
import pytest
import torch

from shardwright.building.localize import localize
from shardwright.building.update import localize_step
from shardwright.clusters import Cluster
from shardwright.costs.cost import Analytic
from shardwright.ir.tensor_meta import itemsize
from shardwright.planner import plan
from shardwright.planning import Assignment
from shardwright.planning.assemble import make_plan, step_of
from shardwright.planning.splits import best_splits
from shardwright.planning.step_graph import forward_view
from shardwright.planning.unfuse import unfuse
from shardwright.sharding.place import communications, outline_of, place
from shardwright.sharding.ranges import volume
from tests.building.step_runs import StepRun
from tests.planning.projections import linear, stacked, transformer
from tests.steps import image_step, language_step, trained


def nbytes(slot, value_id):
    return 0 if value_id is None else slot.value(value_id).nbytes


def written(graph, made):
    """The communication of a built plan: kind, slots, the most bytes that one of them holds."""
    if made.training is None:
        localized = localize(unfuse(graph, made.unfused), made)
    else:
        localized = localize_step(step_of(graph, made), made)
    return Counter(
        (
            c.kind,
            tuple(m.device for m in c.members),
            max(
                nbytes(localized.slots[member.device], value_id)
                for member in c.members
                for value_id in (member.gives, member.gets)
            ),
        )
        for c in localized.communications
    )


def foreseen(graph, made):
    """The same, as a walk finds it."""
    apart = step_of(graph, made).graph if made.training else unfuse(graph, made.unfused)
    view = forward_view(apart)
    splits = [made.assignments[index].splits for index in made.nodes]
    mesh = made.assignments[0].mesh
    found = place(
        outline_of(view),
        splits,
        mesh=mesh,
        cluster=Cluster((tuple(made.devices),)),
        training=made.training is not None,
        microbatches=made.training.microbatches if made.training else 1,
    )
    counts = Counter()
    for move in communications(found.moves):
        value = view.values[move.value]
        size = itemsize(value.dtype)
        held = [
            dict(zip(mesh.devices, layout.slices(mesh, value.shape), strict=True))
            for layout in (move.step.before, move.step.after)
        ]
        for group in mesh.groups(move.step.axis):
            most = max(volume(boxes[device]) * size for boxes in held for device in group)
            counts[move.step.kind, group, most] += 1
    return counts


def best_plan(graph, axes, *, microbatches=2):
    """The plan of a step whose nodes are split in the best way."""
    like = plan(graph, mesh=axes, microbatches=microbatches)
    view = forward_view(step_of(graph, like).graph)
    cluster = Cluster((tuple(like.devices),))
    best = best_splits(
        view,
        axes,
        cluster=cluster,
        costs=Analytic(cluster.device),
        training=True,
        microbatches=microbatches,
    )
    mesh = like.assignments[0].mesh
    made = make_plan(view, "best", like.devices, [Assignment(mesh, s) for s in best.splits])
    return msgspec.structs.replace(
        made, fingerprint=like.fingerprint, unfused=like.unfused, training=like.training
    )


MESHES = [
    {"tensor": 2},
    {"tensor": 4},
    {"sequence": 2},
    {"data": 2},
    {"data": 2, "tensor": 2},
    {"data": 2, "sequence": 2},
    {"tensor": 2, "data": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_model_takes_what_is_foreseen(mesh):
    graph = transformer(2, batch=4, product=linear, taken=stacked)
    made = plan(graph, mesh=mesh)
    assert foreseen(graph, made) == written(graph, made)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_training_step_takes_what_is_foreseen(mesh, microbatches):
    graph = trained(transformer(2, batch=4))
    made = plan(graph, mesh=mesh, microbatches=microbatches)
    assert foreseen(graph, made) == written(graph, made)


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"data": 2}, {"sequence": 2}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_foreseen(mesh, tied):
    graph = language_step(2, tied=tied)
    made = plan(graph, mesh=mesh, microbatches=2)
    assert foreseen(graph, made) == written(graph, made)


def test_batch_norms_are_foreseen():
    graph = image_step()
    made = plan(graph, mesh={"data": 2})
    assert foreseen(graph, made) == written(graph, made)


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_a_step_split_in_the_best_way_takes_what_is_foreseen_and_computes_the_same(axes):
    graph = language_step(1, batch=4)
    made = best_plan(graph, axes)
    assert foreseen(graph, made) == written(graph, made)
    torch.manual_seed(0)
    tokens, labels = torch.randint(50, (2, 8, 6))
    inputs = {"tokens": tokens, "labels": labels, "lr": torch.tensor(1e-3, dtype=torch.float64)}
    runs = [
        StepRun(graph, found) for found in (plan(graph, mesh={"pipeline": 1}, microbatches=2), made)
    ]
    for _ in range(2):
        losses = [run.step(inputs) for run in runs]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    whole, split = (run.stored() for run in runs)
    for name, expected in whole.items():
        torch.testing.assert_close(split[name], expected, rtol=1e-9, atol=1e-9)
