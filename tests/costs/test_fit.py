import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.clusters import GLOO, DeviceModel, Link, Links
from shardwright.clusters.links import KINDS, OPTIONAL
from shardwright.costs.fit import FitPoint, LinkTime, fit, fit_links
from shardwright.costs.roofline import Work, seconds
from shardwright.errors import ProfileError
from shardwright.ir import Builder

GUESS = DeviceModel("guess", "cuda", 10**9, 1e12, 1e11, 1e-6, half_flops=4e12)
WORKS = [
    *(Work(operations=10.0**k, nbytes=100, calls=1) for k in range(6, 12)),
    *(Work(operations=10.0**k, nbytes=100, calls=1, half=True) for k in range(6, 12)),
    *(Work(nbytes=10.0**k, calls=1) for k in range(2, 10)),
]
RATES = ("flops", "bandwidth", "overhead", "half_flops")


def measured(device, works=WORKS, spread=lambda i: 1.0):
    return [FitPoint(work, spread(i) * seconds(device, work)) for i, work in enumerate(works)]


@settings(max_examples=20)  # the first imports SciPy
@given(st.floats(1e11, 1e14), st.floats(1e10, 1e13), st.floats(1e-7, 1e-4), st.floats(1e11, 1e14))
def test_rates_are_found_again(flops, bandwidth, overhead, half):
    true = DeviceModel("guess", "cuda", 10**9, flops, bandwidth, overhead, half)
    found = fit(GUESS, measured(true))
    for rate in RATES:
        assert getattr(found, rate) == pytest.approx(getattr(true, rate), rel=1e-2), rate
    assert (found.name, found.kind, found.memory) == ("guess", "cuda", 10**9)


def test_times_far_off_weigh_little():
    true = DeviceModel("guess", "cuda", 10**9, 3e12, 5e11, 4e-6, 9e12)
    found = fit(GUESS, measured(true, spread=lambda i: 20.0 if i == 3 else 1.05 ** (i % 3 - 1)))
    for rate in RATES:
        assert getattr(found, rate) == pytest.approx(getattr(true, rate), rel=0.2), rate


def test_what_nothing_depends_on_stays():
    true = msgspec.structs.replace(GUESS, bandwidth=3e11, overhead=5e-6, flops=1e9)
    found = fit(GUESS, measured(true, [Work(nbytes=10.0**k, calls=1) for k in range(2, 10)]))
    assert (found.flops, found.half_flops) == (GUESS.flops, GUESS.half_flops)
    assert found.bandwidth == pytest.approx(3e11, rel=1e-2)
    assert fit(GUESS, []) == GUESS
    assert fit(GUESS, [FitPoint(Work(), 1.0)]) == GUESS


def test_the_work_of_a_node():
    builder = Builder("relu")
    builder.call("aten.relu.default", builder.input("x", (1000,), "f32"))
    graph = builder.graph
    found = FitPoint.of_forward(graph, graph.nodes[0], 1e-3)
    assert (found.work.nbytes, found.work.calls, found.seconds) == (8000, 1, 1e-3)


def link_times(links, members=(2, 4)):
    sizes = (1 << 10, 1 << 15, 1 << 20, 1 << 23)
    return [
        LinkTime(kind, n, size, links.seconds(kind, n, size))
        for kind in KINDS
        for size in sizes
        for n in ((2,) if kind == "send" else members)
    ]


def test_links_are_found_again():
    rooted = {"broadcast": Link(3e-5, 2e9), "reduce": Link(4e-5, 3e9)}
    links = msgspec.structs.replace(GLOO, **rooted)
    found = fit_links(link_times(links))
    assert found.start == pytest.approx(GLOO.start, rel=0.02)
    for kind in KINDS:
        link, true = getattr(found, kind), getattr(links, kind)
        assert link.latency == pytest.approx(true.latency, rel=0.02)
        assert link.bandwidth == pytest.approx(true.bandwidth, rel=0.02)


def test_broadcast_and_reduce_may_be_missing():
    found = fit_links([time for time in link_times(GLOO) if time.kind not in OPTIONAL])
    assert (found.broadcast, found.reduce) == (None, None)
    assert found.seconds("broadcast", 4, 1 << 20) == found.seconds("send", 4, 1 << 20)
    assert found.seconds("reduce", 4, 1 << 20) == found.seconds("all_reduce", 4, 1 << 20)


def test_of_two_members_the_start_is_left_to_the_rounds():
    found = fit_links(link_times(Links.of(Link(1e-5, 1e9), Link(2e-5, 1e9), 5e-5), members=(2,)))
    assert found.start < 1e-6
    assert found.all_gather.latency == pytest.approx(7e-5, rel=0.02)
    assert found.seconds("all_gather", 2, 1 << 20) == pytest.approx(
        7e-5 + (1 << 19) / 1e9, rel=0.01
    )


def test_what_takes_no_longer_for_more_bytes_has_a_bandwidth_still():
    times = [LinkTime(kind, 2, size, 1e-3) for kind in KINDS for size in (8, 16)]
    assert fit_links(times).send.bandwidth > 1e6


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be(wrong):
    with pytest.raises(ProfileError, match="expected a positive time; measure it again"):
        fit(GUESS, [FitPoint(WORKS[0], wrong)])
    with pytest.raises(ProfileError, match="send of 8 bytes took"):
        fit_links([LinkTime("send", 2, 8, wrong)])


def test_kinds_that_were_not_measured():
    times = [time for time in link_times(GLOO) if time.kind != "all_to_all"]
    with pytest.raises(ProfileError, match="all_to_all was not measured with two sizes"):
        fit_links(times)
