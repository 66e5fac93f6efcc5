"""The list of right moves is held against trying every collective on real numbers."""

import itertools

import pytest
import torch

from shardwright.clusters import Mesh
from shardwright.sharding import Layout, Partial, RedistributionStep, Replicate, Shard
from shardwright.sharding.convert import KINDS, moves
from tests.sharding.simulation import draw_terms, fits, lay_out, reduce_terms, take

ROWS = [
    ("[Partial(sum)]", "[Replicate]", "all_reduce", {"reduce_op": "sum"}),
    ("[Partial(max)]", "[Shard(1)]", "reduce_scatter", {"reduce_op": "max", "dim": 1}),
    ("[Shard(2)]", "[Replicate]", "all_gather", {"dim": 2}),
    ("[Shard(0)]", "[Shard(1)]", "all_to_all", {"src_dim": 1, "dst_dim": 0}),
    ("[Replicate]", "[Shard(0)]", "slice", {"dim": 0}),
]


@pytest.mark.parametrize(("source", "target", "kind", "metadata"), ROWS, ids=[r[2] for r in ROWS])
def test_a_step_says_its_kind_and_the_formats_metadata(source, target, kind, metadata):
    step = RedistributionStep(0, Layout.parse(source), Layout.parse(target))
    assert step.kind == kind
    assert step.metadata == metadata


def test_a_step_prints_on_one_line():
    step = RedistributionStep(
        1, Layout.parse("[Shard(0), Partial(sum)]"), Layout.parse("[Shard(0), Shard(0)]")
    )
    assert str(step) == (
        "reduce_scatter along axis 1 (reduce_op sum, dim 0): "
        "[Shard(0), Partial(sum)] -> [Shard(0), Shard(0)]"
    )


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (3, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(13, 19), (12, 24)], ids=str)
def test_moves_are_exactly_the_collectives_that_give_each_slot_its_slice(sizes, shape):
    mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
    placements = (Replicate(), Shard(0), Shard(1), Partial())
    for here in itertools.product(placements, repeat=len(sizes)):
        listed = {there for _, there in moves(here, sizes, shape, [[1], [1]])}
        for axis, placement in itertools.product(range(len(sizes)), placements):
            there = Layout(here).replace(axis, placement)
            if (type(here[axis]), type(placement)) in KINDS and here[axis] != placement:
                step = RedistributionStep(axis, Layout(here), there)
                right = sizes[axis] > 1 and is_right(step, mesh, shape)
                assert (there.placements in listed) == right, str(step)


@pytest.mark.parametrize("sizes", [(3,), (2, 3), (2, 2, 2)], ids=str)
def test_moves_with_units_are_right_and_lead_to_normal_forms(sizes):
    mesh, shape, units = Mesh.of(dict(zip("xyz", sizes, strict=False))), (20, 12), [[1, 4], [1, 2]]
    placements = (Replicate(), Shard(0), Shard(0, 4), Shard(1), Shard(1, 2), Partial())
    for here in map(Layout, itertools.product(placements, repeat=len(sizes))):
        if fits(here, mesh, shape) and here.normal(mesh, shape) == here:
            for axis, there in moves(here.placements, sizes, shape, units):
                assert Layout(there).normal(mesh, shape) == Layout(there)
                assert is_right(RedistributionStep(axis, here, Layout(there)), mesh, shape)


def is_right(step, mesh, shape):
    """Whether the collective leaves each slot with what the layout after it says."""
    terms = draw_terms(step.before, mesh, shape, seed=0)
    expected = lay_out(reduce_terms(terms, step.before, step.after, mesh), step.after, mesh, shape)
    try:
        found = take(step, mesh, shape, lay_out(terms, step.before, mesh, shape))
    except (RuntimeError, IndexError):
        return False  # the pieces do not even fit together
    return all(map(torch.equal, found, expected))
