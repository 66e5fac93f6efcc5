"""None"""

from itertools import product

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Cluster, Link, Links, Mesh
from shardwright.errors import PlanError
from shardwright.sharding import (
    Layout,
    Partial,
    Replicate,
    Shard,
    Transfer,
    convert,
    cross,
    transfer,
)
from shardwright.sharding.layout import leaves_none_empty
from shardwright.sharding.ranges import overlap, volume
from tests.sharding.simulation import (
    deliver,
    draw_terms,
    fits,
    lay_out,
    layouts,
    meshes,
    reduce_terms,
    run,
    shapes,
)

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


HERE = Mesh.of({"t": 2})
THERE = Mesh.of({"t": 2}, ["e0", "e1"])
FAST = Links.of(Link(0.0, 1e9), Link(0.0, 1e9))
SLOW = Links.of(Link(0.0, 1e6), Link(0.0, 1e6))
TWO_HOSTS = Cluster((HERE.devices, THERE.devices), FAST, SLOW)


def ask_crossing(source, target, shape=(512, 512), cluster=TWO_HOSTS):
    source, target = Layout.parse(source), Layout.parse(target)
    return cross(source, target, source_mesh=HERE, target_mesh=THERE, shape=shape, cluster=cluster)


def kinds(conversion):
    return [step.kind for step in conversion.steps]


def test_over_a_slow_link_a_sum_goes_in_slices_and_is_gathered_there():
    found = ask_crossing("[Partial(sum)]", "[Replicate]")
    assert kinds(found.before) == ["reduce_scatter"]
    assert [str(piece) for piece in found.transfer.sends] == [
        "d0 -> e0 [0:256, 0:512]",
        "d1 -> e1 [256:512, 0:512]",
    ]
    assert kinds(found.after) == ["all_gather"]
    assert found.seconds == pytest.approx(
        found.before.seconds + 0.524288 + found.after.seconds, rel=1e-6
    )


def test_over_a_fast_link_each_slot_is_sent_all_it_wants():
    flat = Cluster(((*HERE.devices, *THERE.devices),), FAST, SLOW)
    found = ask_crossing("[Replicate]", "[Replicate]", cluster=flat)
    assert (kinds(found.before), kinds(found.after)) == ([], [])
    assert len(found.transfer.sends) == 2


def test_layouts_that_agree_need_messages_only():
    found = ask_crossing("[Shard(0)]", "[Shard(0)]")
    assert (kinds(found.before), kinds(found.after)) == ([], [])
    assert [len(a.pieces) for a in found.transfer.assemblies] == [1, 1]


def test_a_crossing_prints_its_three_parts():
    found = ask_crossing("[Shard(0)]", "[Shard(0)]")
    assert str(found) == f"{found.before}\n{found.transfer}\n{found.after}"


def test_a_partial_sum_cannot_be_the_target():
    with pytest.raises(PlanError, match="partial sum"):
        ask_crossing("[Partial(sum)]", "[Partial(sum)]")


@st.composite
def crossings(draw):
    shape = draw(shapes(2))
    source_mesh, target_mesh = draw(meshes(max_axes=2)), draw(meshes("e", max_axes=2))
    source = draw(layouts(source_mesh, shape))
    target = draw(layouts(target_mesh, shape, ()))
    return source, target, {"source_mesh": source_mesh, "target_mesh": target_mesh, "shape": shape}


@given(crossings(), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_each_slot_ends_with_its_slice(question, seed):
    source, target, where = question
    source_mesh, target_mesh, shape = where.values()
    hosts = (source_mesh.devices, target_mesh.devices)
    found = cross(source, target, **where, cluster=Cluster(hosts, FAST, SLOW))
    terms = draw_terms(source, source_mesh, shape, seed)
    sent = found.before.target
    tensors = run(found.before, lay_out(terms, source, source_mesh, shape))
    boxes = sent.slices(source_mesh, shape)
    held = dict(zip(source_mesh.devices, zip(boxes, tensors, strict=True), strict=True))
    got = run(found.after, deliver(found.transfer, held))
    whole = reduce_terms(terms, source, sent, source_mesh)
    whole = whole.reshape([1] * target_mesh.ndim + list(shape))
    assert all(map(torch.equal, got, lay_out(whole, target, target_mesh, shape)))


@given(crossings())
@settings(max_examples=50, deadline=None)
def test_no_other_place_to_leave_or_arrive_is_cheaper(question):
    source, target, where = question
    source_mesh, target_mesh, shape = where.values()
    cluster = Cluster((source_mesh.devices, target_mesh.devices), FAST, SLOW)

    def price(leave, arrive):
        before = convert(source, leave, mesh=source_mesh, shape=shape, cluster=cluster).seconds
        after = convert(arrive, target, mesh=target_mesh, shape=shape, cluster=cluster).seconds
        sent = transfer(leave, arrive, **where)
        return before + sent.seconds(4, cluster) + after

    expected = min(
        price(leave, arrive)
        for leave in instead_of(Partial, source, source_mesh, shape)
        for arrive in instead_of(Replicate, target, target_mesh, shape)
    )
    assert cross(source, target, **where, cluster=cluster).seconds == pytest.approx(expected)


def instead_of(freed, layout, mesh, shape):
    """Layouts that split one dimension in place of some placements, and the one without."""
    layout = layout.normal(mesh, shape)
    yield refill(layout, mesh, freed, [Replicate()] * mesh.ndim)
    for dim in range(len(shape)):
        units = {1, *(p.unit for p in layout.placements if getattr(p, "dim", None) == dim)}
        choices = [Replicate(), *(Shard(dim, unit) for unit in units)]
        for chosen in product(choices, repeat=mesh.ndim):
            at = refill(layout, mesh, freed, chosen)
            none_empty = leaves_none_empty(at.placements, mesh.sizes, shape)
            if none_empty and fits(at, mesh, shape):
                yield at


def refill(layout, mesh, freed, chosen):
    return Layout(
        tuple(
            new if isinstance(old, freed) and size > 1 else old
            for old, new, size in zip(layout.placements, chosen, mesh.sizes, strict=True)
        )
    )
