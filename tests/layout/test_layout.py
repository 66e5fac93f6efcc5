import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import PlanError
from shardwright.layout import Layout, Mesh, Partial, Replicate, Shard
from shardwright.layout.layout import largest_shape, leaves_none_empty
from shardwright.layout.ranges import shape_of, volume
from tests.layout.simulation import cut, layouts, meshes, shapes


@st.composite
def cases(draw):
    mesh, shape = draw(meshes()), draw(shapes)
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
        ("[Shard(0), Split(1)]", r"'Split\(1\)' in the layout"),
        ("[Shard(-1)]", r"'Shard\(-1\)' in the layout"),
        ("[Replicate,]", "'' in the layout"),
        ("[Partial(product)]", "found 'product'"),
        ("[Partial(sum), Partial(max)]", "mixes reductions whose order matters"),
    ],
)
def test_what_is_no_layout_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Layout.parse(text)


def test_a_negative_dimension_is_refused():
    with pytest.raises(PlanError, match="from 0 up, found -1"):
        Shard(-1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Replicate]", "has 1 placements, but the mesh .* has 2 axes"),
        ("[Replicate, Shard(2)]", r"splits dimension 2 over axis 'y', .* shape \[4, 4\]"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text, message):
    with pytest.raises(PlanError, match=message):
        Layout.parse(text).slices(Mesh.of({"x": 2, "y": 2}), (4, 4))


@pytest.mark.parametrize(
    ("sizes", "text", "shape", "expected"),
    [
        ((4,), "[Shard(0)]", (10,), [3, 3, 2, 2]),
        ((2, 2), "[Shard(0), Shard(0)]", (10,), [3, 2, 3, 2]),
        ((3, 2), "[Shard(0), Shard(0)]", (11,), [2, 2, 2, 2, 2, 1]),
        ((2, 2), "[Replicate, Shard(0)]", (3,), [2, 1, 2, 1]),
        ((2, 2), "[Shard(0), Partial(sum)]", (3,), [2, 2, 1, 1]),
        ((4,), "[Shard(0)]", (2,), [1, 1, 0, 0]),
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
        cut(count, box).add_(1)
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
def test_sizes_differ_by_at_most_one_and_the_first_slot_holds_the_most(case):
    mesh, shape, layout = case
    slices = layout.slices(mesh, shape)
    for dim in range(len(shape)):
        sizes = [shape_of(box)[dim] for box in slices]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) == sizes[0]
    assert largest_shape(layout.placements, mesh.sizes, shape) == shape_of(slices[0])
    if all(shape):
        none_empty = all(volume(box) for box in slices)
        assert leaves_none_empty(layout.placements, mesh.sizes, shape) == none_empty


def test_parts_of_a_layout():
    mesh = Mesh.of({"x": 2, "y": 1, "z": 2})
    layout = Layout.of(Shard(1), Partial(), Shard(1))
    assert layout.axes_of(1) == (0, 2)
    assert layout.axes_of(0) == ()
    assert layout.partial_axes(mesh) == ()
    assert layout.replace(2, Partial()).partial_axes(mesh) == (2,)
    assert Layout.replicated(mesh) == Layout.of(Replicate(), Replicate(), Replicate())
