from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import Cluster, Link, Links, Mesh
from shardwright.errors import PlanError
from shardwright.sharding import Layout, Partial, Replicate, Shard, convert, cross, transfer
from shardwright.sharding.layout import leaves_none_empty
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

HERE = Mesh.of({"t": 2})
THERE = Mesh.of({"t": 2}, ["e0", "e1"])
FAST = Links.of(Link(0.0, 1e9), Link(0.0, 1e9))
SLOW = Links.of(Link(0.0, 1e6), Link(0.0, 1e6))
TWO_HOSTS = Cluster((HERE.devices, THERE.devices), FAST, SLOW)


def ask(source, target, shape=(512, 512), cluster=TWO_HOSTS):
    source, target = Layout.parse(source), Layout.parse(target)
    return cross(source, target, source_mesh=HERE, target_mesh=THERE, shape=shape, cluster=cluster)


def kinds(conversion):
    return [step.kind for step in conversion.steps]


def test_over_a_slow_link_a_sum_goes_in_slices_and_is_gathered_there():
    found = ask("[Partial(sum)]", "[Replicate]")
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
    found = ask("[Replicate]", "[Replicate]", cluster=flat)
    assert (kinds(found.before), kinds(found.after)) == ([], [])
    assert len(found.transfer.sends) == 2


def test_layouts_that_agree_need_messages_only():
    found = ask("[Shard(0)]", "[Shard(0)]")
    assert (kinds(found.before), kinds(found.after)) == ([], [])
    assert [len(a.pieces) for a in found.transfer.assemblies] == [1, 1]


def test_a_crossing_prints_its_three_parts():
    found = ask("[Shard(0)]", "[Shard(0)]")
    assert str(found) == f"{found.before}\n{found.transfer}\n{found.after}"


def test_a_partial_sum_cannot_be_the_target():
    with pytest.raises(PlanError, match="partial sum"):
        ask("[Partial(sum)]", "[Partial(sum)]")


@st.composite
def questions(draw):
    shape = draw(shapes(2))
    source_mesh, target_mesh = draw(meshes(max_axes=2)), draw(meshes("e", max_axes=2))
    source = draw(layouts(source_mesh, shape))
    target = draw(layouts(target_mesh, shape, ()))
    return source, target, {"source_mesh": source_mesh, "target_mesh": target_mesh, "shape": shape}


@given(questions(), st.integers(0, 1000))
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


@given(questions())
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
