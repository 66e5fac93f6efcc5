import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Mesh
from shardwright.errors import PlanError
from shardwright.sharding import Layout, Partial, Replicate, Shard
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
