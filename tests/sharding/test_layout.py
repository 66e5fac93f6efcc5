"""Layouts and placements: text, normal forms, slices."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.sharding import Layout, Partial, Replicate, Shard
from shardwright.sharding.layout import (
    REDUCE_OPS,
    LayoutCut,
    largest_shape,
    leaves_none_empty,
    parse_placement,
)
from shardwright.sharding.ranges import shape_of, volume
from tests.sharding.simulation import cut as cut_out
from tests.sharding.simulation import layouts, meshes, shapes


@st.composite
def cases(draw):
    mesh, shape = draw(meshes()), draw(shapes())
    return mesh, shape, draw(layouts(mesh, shape, ("sum", "avg")))


@given(cases())
def test_text_and_json_round_trip(case):
    layout = case[-1]
    assert Layout.parse(str(layout)) == layout
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Layout) == layout


def test_text():
    layout = Layout.of(Shard(0), Replicate(), Partial("max"))
    assert str(layout) == "[Shard(0), Replicate, Partial(max)]"
    assert Layout.parse(" [ Partial ] ") == Layout.of(Partial("sum"))
    assert Layout.parse("[]") == Layout.of()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Shard(0)", r"looks like \[Shard\(0\), Replicate\], found 'Shard\(0\)'"),
        ("[Shard(0), Split(1)]", r"'Split\(1\)' is no placement; there are Replicate"),
        ("[Shard(-1)]", r"'Shard\(-1\)' is no placement"),
        ("[Replicate,]", "'' is no placement"),
        ("[Partial(product)]", "found 'product'"),
        ("[Partial(sum), Partial(max)]", "mixes reductions whose order matters"),
    ],
)
def test_what_is_no_layout_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Replicate]", "has 1 placements, but the mesh .* has 2 axes"),
        ("[Replicate, Shard(2)]", r"splits dimension 2 over axis 'y', .* shape \[4, 4\]"),
        ("[Shard(0 by 3), Replicate]", "over axis 'x' at multiples of 3, .* the length 4"),
        ("[Shard(0), Shard(1 by 8)]", "over axis 'y' at multiples of 8, .* the length 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Layout.parse(text).slices(Mesh.of({"x": 2, "y": 2}), (4, 4))


@given(cases(), st.data())
@settings(deadline=None)
def test_layouts_that_give_every_slot_the_same_have_one_normal_form(case, data):
    mesh, shape, layout = case
    other = data.draw(layouts(mesh, shape, ("sum", "avg")))
    normal = layout.normal(mesh, shape)
    assert normal.normal(mesh, shape) == normal
    assert normal.slices(mesh, shape) == layout.slices(mesh, shape)
    if all(shape) and layout.partial_axes(mesh) == other.partial_axes(mesh) == ():
        same = layout.slices(mesh, shape) == other.slices(mesh, shape)
        assert same == (normal == other.normal(mesh, shape))


def test_a_unit_that_makes_no_difference_goes():
    mesh = Mesh.of({"x": 1, "y": 4})
    layout = Layout.of(Shard(1), Shard(0, 64))
    assert str(layout.normal(mesh, (8 * 64, 2))) == "[Replicate, Shard(0)]"
    assert str(layout.normal(mesh, (10 * 64, 2))) == "[Replicate, Shard(0 by 64)]"


def test_parts_of_a_layout():
    mesh = Mesh.of({"x": 2, "y": 1, "z": 2})
    layout = Layout.of(Shard(1), Partial(), Shard(1))
    assert layout.partial_axes(mesh) == ()
    assert layout.replace(2, Partial()).partial_axes(mesh) == (2,)
    assert Layout.replicated(mesh) == Layout.of(Replicate(), Replicate(), Replicate())


# --- placements -----------------------------------------------------------------------------------


placements = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 20), st.integers(1, 20)),
    st.builds(Partial, st.sampled_from(REDUCE_OPS)),
)


@given(placements)
def test_placement_text_round_trips(placement):
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("placement", "text"),
    [(Shard(2), "Shard(2)"), (Shard(2, 64), "Shard(2 by 64)"), (Partial(), "Partial(sum)")],
)
def test_placement_text(placement, text):
    assert str(placement) == text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Shard(-1), "found -1 and 1"),
        (lambda: Shard(0, 0), "found 0 and 0"),
        (lambda: Partial("product"), "knows sum, avg, max, min, found 'product'"),
        (lambda: parse_placement("Shard"), "'Shard' is no placement; there are Replicate"),
    ],
)
def test_what_is_no_placement_is_refused(build, message):
    with pytest.raises(PlanError, match=message):
        build()


# --- cuts of dimensions ---------------------------------------------------------------------------


@st.composite
def cut_cases(draw):
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


@given(cut_cases())
@settings(deadline=None)
def test_distinct_slices_tile_the_whole(case):
    mesh, shape, layout = case
    count = torch.zeros(shape)
    for box in set(layout.slices(mesh, shape)):
        cut_out(count, box).add_(1)
    assert bool((count == 1).all())


@given(cut_cases())
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


@given(cut_cases())
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
