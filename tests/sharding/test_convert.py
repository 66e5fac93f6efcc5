"""The list of right moves is held against trying every collective on real numbers."""

import itertools
import math
from itertools import permutations

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.clusters import ETHERNET, GLOO, Cluster, Link, Links, Mesh
from shardwright.errors import PlanError
from shardwright.sharding import (
    Layout,
    Partial,
    Redistribution,
    RedistributionStep,
    Replicate,
    Shard,
    convert,
)
from shardwright.sharding.convert import KINDS, moves
from shardwright.sharding.layout import leaves_none_empty
from shardwright.sharding.ranges import volume
from tests.sharding.simulation import (
    draw_terms,
    fits,
    lay_out,
    layouts,
    meshes,
    reduce_terms,
    run,
    shapes,
    take,
)

OPS = [("sum",), ("avg",), ("max",), ("min",), ("sum", "avg")]
# Latency, bandwidth, and both decide.
PRICES = [(1.0, 1e12), (0.0, 1.0), (60e-6, 1e6)]


def ask(source, target, sizes, shape, **rest):
    mesh = Mesh.of(dict(zip("xyz", sizes, strict=False)))
    sockets = Cluster((mesh.devices,), inside=GLOO)
    return convert(
        Layout.parse(source),
        Layout.parse(target),
        **{"mesh": mesh, "shape": shape, "cluster": sockets, **rest},
    )


@pytest.mark.parametrize(
    ("source", "target", "sizes", "kinds"),
    [
        ("[Replicate]", "[Replicate]", (4,), []),
        ("[Partial(sum)]", "[Replicate]", (4,), ["all_reduce"]),
        ("[Partial(sum)]", "[Shard(0)]", (4,), ["reduce_scatter"]),
        ("[Shard(0)]", "[Replicate]", (4,), ["all_gather"]),
        ("[Shard(0)]", "[Shard(1)]", (4,), ["all_to_all"]),
        ("[Replicate]", "[Shard(1)]", (4,), ["slice"]),
        ("[Partial(sum)]", "[Replicate]", (1,), []),
        ("[Replicate]", "[Partial(sum)]", (1,), []),
        # A dimension cannot be cut along an outer axis while an inner one cuts it.
        (
            "[Replicate, Shard(0)]",
            "[Shard(0), Shard(0)]",
            (2, 2),
            ["all_to_all", "slice", "all_to_all"],
        ),
        (
            "[Shard(0), Shard(0)]",
            "[Replicate, Shard(0)]",
            (2, 2),
            ["all_to_all", "all_gather", "all_to_all"],
        ),
        # What is cut along one axis first is cheaper to move along the other.
        ("[Replicate, Shard(0)]", "[Shard(1), Replicate]", (2, 2), ["slice", "all_gather"]),
    ],
)
def test_kinds_of_the_cheapest_steps(source, target, sizes, kinds):
    assert [step.kind for step in ask(source, target, sizes, (512, 512)).steps] == kinds


def test_a_large_sum_over_two_axes_is_scattered_before_it_is_reduced_again():
    found = ask("[Partial(sum), Partial(sum)]", "[Replicate, Replicate]", (2, 2), (512, 512))
    assert [step.kind for step in found.steps] == ["reduce_scatter", "all_reduce", "all_gather"]
    small = ask("[Partial(sum), Partial(sum)]", "[Replicate, Replicate]", (2, 2), (4, 4))
    assert [step.kind for step in small.steps] == ["all_reduce", "all_reduce"]


def test_communication_keeps_off_the_slow_axis_what_the_fast_one_can_do():
    slow = Cluster.of(4, 2)
    mesh = Mesh.of({"host": 2, "slot": 2})
    source, target = Layout.parse("[Partial, Partial]"), Layout.parse("[Replicate, Replicate]")
    found = convert(source, target, mesh=mesh, shape=(512, 512), cluster=slow)
    assert [(s.kind, s.axis) for s in found.steps] == [
        ("reduce_scatter", 1),
        ("all_reduce", 0),
        ("all_gather", 1),
    ]


def test_a_conversion_prints_its_steps():
    found = ask("[Partial(sum), Shard(1)]", "[Shard(0), Replicate]", (2, 2), (8, 6))
    assert str(found) == (
        "[8, 6] on x 2 × y 2: d0 d1 d2 d3: [Partial(sum), Shard(1)] -> [Shard(0), Replicate], "
        "2 steps, 420.2 µs\n"
        "  reduce_scatter along axis 0 (reduce_op sum, dim 0): "
        "[Partial(sum), Shard(1)] -> [Shard(0), Shard(1)]\n"
        "  all_gather along axis 1 (dim 1): [Shard(0), Shard(1)] -> [Shard(0), Replicate]"
    )
    assert found.groups(found.steps[0]) == (("d0", "d2"), ("d1", "d3"))
    assert found.layouts == (found.source, found.steps[0].after, found.target)
    assert found.slices(found.target) == (((0, 4), (0, 6)),) * 2 + (((4, 8), (0, 6)),) * 2
    assert msgspec.json.decode(msgspec.json.encode(found), type=Redistribution) == found


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("[Replicate]", "[Partial(sum)]", "along axis 'x' the target is Partial"),
        ("[Partial(max)]", "[Partial(sum)]", "no communication turns"),
        ("[Shard(2)]", "[Replicate]", "splits dimension 2"),
        ("[Replicate]", "[Replicate, Replicate]", "give one placement an axis"),
    ],
)
def test_what_cannot_be_converted_is_refused(source, target, message):
    with pytest.raises(PlanError, match=message):
        ask(source, target, (2,), (4, 4))


def test_no_way_leaves_a_slot_without_data_unless_asked():
    found = ask("[Shard(0)]", "[Replicate]", (4,), (8, 2))
    assert all(leaves_none_empty(at.placements, (4,), (8, 2)) for at in found.layouts)
    asked = ask("[Replicate]", "[Shard(1)]", (4,), (8, 2))
    assert [step.kind for step in asked.steps] == ["slice"]


def test_a_unit_costs_nothing_where_it_makes_no_difference():
    assert ask("[Shard(0)]", "[Shard(0 by 64)]", (4,), (512,)).steps == ()
    found = ask("[Shard(0)]", "[Shard(0 by 64)]", (4,), (640,))
    assert [step.kind for step in found.steps] == ["all_gather", "slice"]
    found = ask("[Partial(sum)]", "[Shard(0 by 64)]", (4,), (640,))
    assert [step.kind for step in found.steps] == ["reduce_scatter"]


@given(st.integers(2, 8), st.tuples(*[st.integers(8, 5000)] * 2), st.sampled_from([GLOO, ETHERNET]))
@settings(max_examples=50, deadline=None)
def test_along_one_axis_each_conversion_is_one_collective(size, shape, links):
    mesh = Mesh.of({"x": size})
    cluster = Cluster((mesh.devices,), inside=links)
    for one, other in permutations([Replicate(), Shard(0), Shard(1), Partial()], 2):
        if (type(one), type(other)) in KINDS:
            found = convert(
                Layout.of(one), Layout.of(other), mesh=mesh, shape=shape, cluster=cluster
            )
            assert [step.kind for step in found.steps] == [KINDS[type(one), type(other)]]


@st.composite
def questions(draw, max_axes=3, max_dims=3):
    mesh, shape = draw(meshes(max_axes=max_axes)), draw(shapes(max_dims))
    ops = draw(st.sampled_from(OPS))
    source = draw(layouts(mesh, shape, ops))
    drawn = draw(layouts(mesh, shape, ops).filter(lambda at: at != source or not mesh.ndim))

    def reachable(have, want):
        keeps = isinstance(want, Partial) or (isinstance(have, Partial) and draw(st.booleans()))
        return have if keeps else want

    target = Layout(tuple(map(reachable, source.placements, drawn.placements)))
    assume(fits(target, mesh, shape))
    return mesh, shape, source, target


@given(questions(), st.integers(0, 1000))
@settings(max_examples=300, deadline=None)
def test_steps_give_each_slot_its_slice(question, seed):
    mesh, shape, source, target = question
    found = convert(source, target, mesh=mesh, shape=shape)
    terms = draw_terms(source, mesh, shape, seed)
    expected = lay_out(reduce_terms(terms, source, target, mesh), target, mesh, shape)
    for got, want in zip(run(found, lay_out(terms, source, mesh, shape)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@given(questions())
@settings(max_examples=120, deadline=None)
def test_pieces_of_a_group_are_larger_first_as_the_format_wants(question):
    mesh, shape, source, target = question
    for step in convert(source, target, mesh=mesh, shape=shape).steps:
        for layout in (step.before, step.after):
            held = dict(zip(mesh.devices, layout.slices(mesh, shape), strict=True))
            for group in mesh.groups(step.axis):
                sizes = [volume(held[device]) for device in group]
                assert sizes == sorted(sizes, reverse=True)


@given(questions(max_axes=2, max_dims=2), st.sampled_from(PRICES), st.sampled_from(PRICES))
@settings(max_examples=150, deadline=None)
def test_no_sequence_of_moves_is_cheaper(question, inside, between):
    mesh, shape, source, target = question
    links = [Links.of(Link(*price), Link(*price)) for price in (inside, between)]
    half = len(mesh.devices) // 2
    hosts = (mesh.devices[:half], mesh.devices[half:])
    cluster = Cluster(hosts, *links)
    found = convert(source, target, mesh=mesh, shape=shape, cluster=cluster)
    expected = exhaustive(source, target, mesh, shape, cluster.links(mesh))
    assert found.seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)


def exhaustive(source, target, mesh, shape, links):
    """The least price over all ways without a cycle."""
    start = source.normal(mesh, shape).placements
    goal = target.normal(mesh, shape).placements
    best = math.inf
    units = [
        sorted({1, *(p.unit for p in goal if getattr(p, "dim", None) == dim)})
        for dim in range(len(shape))
    ]

    def price(axis, here, there):
        held = [max(map(volume, Layout(at).slices(mesh, shape))) for at in (here, there)]
        kind = KINDS[type(here[axis]), type(there[axis])]
        return links[axis].seconds(kind, mesh.sizes[axis], 4 * max(held))

    def walk(here, seen, spent):
        nonlocal best
        if here == goal:
            best = min(best, spent)
            return
        for axis, there in moves(here, mesh.sizes, shape, units):
            want = goal[axis]
            fits = all(map(volume, Layout(there).slices(mesh, shape)))
            allowed = fits or there[axis] in (want, Replicate())
            if there in seen or isinstance(want, Partial) or not allowed:
                continue
            onward = spent + price(axis, here, there)
            if onward < best or not math.isfinite(best):
                walk(there, {*seen, there}, onward)

    walk(start, {start}, 0.0)
    return best


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
