import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Cluster, Link, Links, Mesh
from shardwright.errors import PlanError
from shardwright.sharding import Layout, Transfer, transfer
from shardwright.sharding.ranges import overlap, volume
from tests.sharding.simulation import deliver, draw_terms, lay_out, layouts, meshes, shapes

FOUR = Mesh.of({"t": 4})
TWO = Mesh.of({"t": 2}, ["e0", "e1"])


def ask(source, target, shape, meshes=(FOUR, TWO)):
    return transfer(
        Layout.parse(source),
        Layout.parse(target),
        source_mesh=meshes[0],
        target_mesh=meshes[1],
        shape=shape,
    )


def test_exactly_the_overlapping_slices_are_sent():
    assert str(ask("[Shard(0)]", "[Shard(0)]", (10, 2))) == (
        "[10, 2]: 4 messages\n"
        "  e0 [0:5, 0:2]: d0 [0:3, 0:2], d1 [3:5, 0:2]\n"
        "  e1 [5:10, 0:2]: d1 [5:6, 0:2], d2 [6:8, 0:2], d3 [8:10, 0:2]"
    ).replace("4 messages", "5 messages")


def test_replicas_take_turns():
    found = ask("[Replicate]", "[Shard(1)]", (4, 4))
    assert [str(piece) for piece in found.sends] == ["d0 -> e0 [0:4, 0:2]", "d1 -> e1 [0:4, 2:4]"]


def test_what_a_slot_holds_stays_there():
    found = ask("[Shard(0)]", "[Replicate]", (4, 1), (FOUR, Mesh.of({"t": 2}, ["d3", "e0"])))
    assert [str(piece) for piece in found.sends if piece.destination == "d3"] == [
        "d0 -> d3 [0:1, 0:1]",
        "d1 -> d3 [1:2, 0:1]",
        "d2 -> d3 [2:3, 0:1]",
    ]
    assert found.assemblies[0].pieces[3].source == "d3"


def test_pieces_of_a_grid_are_joined_last_dimension_first():
    grid = Mesh.of({"x": 2, "y": 3})
    one = Mesh.of({}, ["e0"])
    (assembly,) = ask("[Shard(0), Shard(1)]", "[]", (4, 6), (grid, one)).assemblies
    assert assembly.joins == ((1, 3), (0, 2))
    assert [piece.source for piece in assembly.pieces] == ["d0", "d1", "d2", "d3", "d4", "d5"]


def test_a_scalar_is_one_piece():
    found = ask("[Replicate]", "[Replicate]", ())
    assert [str(piece) for piece in found.sends] == ["d0 -> e0 []", "d1 -> e1 []"]


def test_an_empty_slice_has_no_pieces():
    assert [len(a.pieces) for a in ask("[Shard(0)]", "[Shard(0)]", (1,)).assemblies] == [1, 0]


def test_the_busiest_slot_sets_the_time():
    links = Links.of(Link(1.0, 8.0), Link(1.0, 8.0))
    cluster = Cluster((("d0", "d1", "d2", "d3", "e0", "e1"),), links, links)
    assert ask("[Shard(0)]", "[Replicate]", (8,)).seconds(4, cluster) == pytest.approx(4 * 2.0)
    assert ask("[Replicate]", "[Replicate]", (8,)).seconds(4, cluster) == pytest.approx(5.0)


def test_a_partial_sum_is_not_sent():
    with pytest.raises(PlanError, match="partial sum along axis 't'; reduce it"):
        ask("[Partial(sum)]", "[Replicate]", (4,))


@st.composite
def questions(draw):
    shape = draw(shapes())
    source_mesh = draw(meshes())
    # Slots of the same name are the same slots.
    target_mesh = draw(meshes(names=draw(st.sampled_from("de"))))
    source = draw(layouts(source_mesh, shape, ()))
    target = draw(layouts(target_mesh, shape, ()))
    return source, target, {"source_mesh": source_mesh, "target_mesh": target_mesh, "shape": shape}


@given(questions(), st.integers(0, 1000))
@settings(max_examples=120, deadline=None)
def test_each_slot_assembles_its_slice(question, seed):
    source, target, where = question
    source_mesh, target_mesh, shape = where.values()
    found = transfer(source, target, **where)
    whole = draw_terms(source, source_mesh, shape, seed)
    tensors = lay_out(whole, source, source_mesh, shape)
    boxes = source.slices(source_mesh, shape)
    held = dict(zip(source_mesh.devices, zip(boxes, tensors, strict=True), strict=True))
    whole = whole.reshape([1] * target_mesh.ndim + list(shape))
    expected = lay_out(whole, target, target_mesh, shape)
    assert all(map(torch.equal, deliver(found, held), expected))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Transfer) == found


@given(questions())
@settings(max_examples=120, deadline=None)
def test_each_element_comes_once_and_only_where_it_is_lacking(question):
    source, target, where = question
    source_mesh, target_mesh, shape = where.values()
    found = transfer(source, target, **where)
    held = dict(zip(source_mesh.devices, source.slices(source_mesh, shape), strict=True))
    wanted = dict(zip(target_mesh.devices, target.slices(target_mesh, shape), strict=True))
    for assembly in found.assemblies:
        assert assembly.ranges == wanted[assembly.device]
        assert sum(volume(p.ranges) for p in assembly.pieces) == volume(assembly.ranges)
    for piece in found.sends:
        assert inside(piece.ranges, held[piece.source])
        assert not meet(piece.ranges, held.get(piece.destination))


@given(questions())
@settings(max_examples=120, deadline=None)
def test_replicas_send_alike(question):
    source, target, where = question
    source_mesh, _, shape = where.values()
    sends = transfer(source, target, **where).sends
    slices = source.slices(source_mesh, shape)
    for box in set(slices):
        pieces = [volume(p.ranges) for p in sends if inside(p.ranges, box)]
        replicas = [d for d, b in zip(source_mesh.devices, slices, strict=True) if b == box]
        sent = [sum(volume(p.ranges) for p in sends if p.source == d) for d in replicas]
        assert max(sent) - min(sent) <= max(pieces, default=0)


def inside(box, outer):
    return all(o[0] <= b[0] and b[1] <= o[1] for b, o in zip(box, outer, strict=True))


def meet(box, other):
    return other is not None and None not in [
        overlap(a, b) for a, b in zip(box, other, strict=True)
    ]
