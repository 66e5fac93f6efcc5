import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.clusters import ETHERNET, GLOO, SHARED, Cluster, Link, Links, Mesh
from shardwright.clusters.links import KINDS
from shardwright.errors import PlanError

LINKS = Links.of(send=Link(1.0, 10.0), collective=Link(2.0, 5.0), start=7.0)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("slice", 0.0),
        ("send", 1.0 + 40 / 10),
        ("all_gather", 7.0 + 3 * (2.0 + 10 / 5)),
        ("reduce_scatter", 7.0 + 3 * (2.0 + 10 / 5)),
        ("all_to_all", 7.0 + 3 * (2.0 + 10 / 5)),
        ("all_reduce", 7.0 + 6 * (2.0 + 10 / 5)),
    ],
)
def test_prices_of_forty_bytes_among_four(kind, seconds):
    assert LINKS.seconds(kind, 4, 40) == pytest.approx(seconds)
    assert LINKS.seconds(kind, 1, 40) == 0.0


@given(st.sampled_from(sorted(KINDS[1:])), st.integers(1, 64), st.integers(0, 10**9))
def test_more_never_costs_less(kind, members, nbytes):
    price = GLOO.seconds(kind, members, nbytes)
    assert 0 <= price <= GLOO.seconds(kind, members, nbytes + 1)
    assert price <= GLOO.seconds(kind, members + 1, nbytes)
    assert price <= ETHERNET.seconds(kind, members, nbytes)


def test_all_reduce_costs_reduce_scatter_and_all_gather_with_one_start():
    parts = [GLOO.seconds(kind, 4, 1000) for kind in ("reduce_scatter", "all_gather")]
    assert GLOO.seconds("all_reduce", 4, 1000) == pytest.approx(sum(parts) - GLOO.start)


def test_an_axis_across_hosts_pays_for_it():
    cluster = Cluster.of(devices=4, devices_per_host=2)
    assert cluster.hosts == (("d0", "d1"), ("d2", "d3"))
    assert cluster.links(Mesh.of({"data": 2, "tensor": 2})) == (ETHERNET, SHARED)
    assert cluster.links(Mesh.of({"x": 3}, ["d0", "d1", "d2"])) == (ETHERNET,)
    assert cluster.among(("d2", "d3")) is cluster.inside
    assert Cluster.of(4).links(Mesh.of({"x": 4})) == (SHARED,)


def test_hosts_may_differ_and_the_last_may_be_smaller():
    assert Cluster.of(3, 2).hosts == (("d0", "d1"), ("d2",))
    assert Cluster((("a",), ("b", "c"))).devices == ("a", "b", "c")


def test_a_cluster_is_a_plain_value():
    cluster = Cluster.of(4, 2)
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Link(-1.0, 1.0), "latency must not be negative, found -1.0 s"),
        (lambda: Link(float("nan"), 1.0), "latency must not be negative, found nan s"),
        (lambda: Link(0.0, 0.0), "bandwidth must be positive, found 0.0 byte/s"),
        (lambda: Links.of(GLOO.send, GLOO.send, -1.0), "start of a collective .* found -1.0 s"),
        (lambda: Cluster.of(0), "1 device or more"),
        (lambda: Cluster.of(4, 0), "found 4 and 0"),
        (lambda: Cluster((("a",), ("a",))), "the device slot 'a' twice"),
        (lambda: Cluster.of(2).among(("d0", "d2")), "no device slot 'd2'; it has d0, d1"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(PlanError, match=message):
        build()


def test_the_representation_is_a_line():
    cluster = Cluster.of(64, 8)
    assert repr(cluster) == str(cluster) == "Cluster(hosts=8, slots=64, device='cpu-core')"
