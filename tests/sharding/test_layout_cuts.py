import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Mesh
from shardwright.sharding import Layout, Shard
from shardwright.sharding.layout import LayoutCut, largest_shape, leaves_none_empty
from shardwright.sharding.ranges import shape_of, volume
from tests.sharding.simulation import cut as cut_out
from tests.sharding.simulation import layouts, meshes, shapes


@st.composite
def cases(draw):
    mesh, shape = draw(meshes()), draw(shapes())
    return mesh, shape, draw(layouts(mesh, shape))


def test_a_cut_knows_what_it_leaves():
    cut = LayoutCut(axis=0, shard=Shard(0, 2), parts=3, lengths=(10, 12))
    assert cut.left == (2, 4)
    assert cut.fits
    assert not cut.is_even
    assert not LayoutCut(0, Shard(0, 4), 3, (10, 12)).fits
    assert LayoutCut(0, Shard(0, 2), 3, (6, 12)).is_even


@pytest.mark.parametrize(
    ("sizes", "text", "shape", "expected"),
    [
        ((4,), "[Shard(0)]", (10,), [3, 3, 2, 2]),
        ((2, 2), "[Shard(0), Shard(0)]", (10,), [3, 2, 3, 2]),
        ((3, 2), "[Shard(0), Shard(0)]", (11,), [2, 2, 2, 2, 2, 1]),
        ((2, 2), "[Replicate, Shard(0)]", (3,), [2, 1, 2, 1]),
        ((2, 2), "[Shard(0), Partial(sum)]", (3,), [2, 2, 1, 1]),
        ((4,), "[Shard(0)]", (2,), [1, 1, 0, 0]),
        ((4,), "[Shard(0 by 64)]", (640,), [192, 192, 128, 128]),
        ((2, 2), "[Shard(0 by 4), Shard(0 by 2)]", (20,), [6, 6, 4, 4]),
        ((2, 2), "[Shard(0), Shard(0 by 2)]", (12,), [4, 2, 4, 2]),
    ],
)
def test_sizes_of_slices(sizes, text, shape, expected):
    mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
    slices = Layout.parse(text).slices(mesh, shape)
    assert [shape_of(box)[0] for box in slices] == expected


@given(cases())
@settings(deadline=None)
def test_distinct_slices_tile_the_whole(case):
    mesh, shape, layout = case
    count = torch.zeros(shape)
    for box in set(layout.slices(mesh, shape)):
        cut_out(count, box).add_(1)
    assert bool((count == 1).all())


@given(cases())
@settings(deadline=None)
def test_slots_that_differ_along_unsplit_axes_hold_the_same_and_others_do_not(case):
    mesh, shape, layout = case
    slices = layout.slices(mesh, shape)
    split = [axis for axis, p in enumerate(layout.placements) if isinstance(p, Shard)]
    keys = [tuple(c[axis] for axis in split) for c in mesh.coordinates()]
    by_key = dict(zip(keys, slices, strict=True))
    assert [by_key[key] for key in keys] == list(slices)
    held = [box for box in by_key.values() if volume(box)]
    assert len(set(held)) == len(held)


@given(cases())
@settings(deadline=None)
def test_sizes_differ_by_at_most_the_largest_unit_and_the_first_slot_holds_the_most(case):
    mesh, shape, layout = case
    slices = layout.slices(mesh, shape)
    for dim in range(len(shape)):
        sizes = [shape_of(box)[dim] for box in slices]
        units = [p.unit for p in layout.placements if isinstance(p, Shard) and p.dim == dim]
        assert max(sizes) - min(sizes) <= max(units, default=1)
        assert max(sizes) == sizes[0]
    assert largest_shape(layout.placements, mesh.sizes, shape) == shape_of(slices[0])
    if all(shape):
        none_empty = all(volume(box) for box in slices)
        assert leaves_none_empty(layout.placements, mesh.sizes, shape) == none_empty
