from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.clusters import CPU_CORE, DEVICES, GLOO, LINKS, Cluster, DeviceModel, Link, Links
from shardwright.errors import PlanError

TWO_HOSTS = """\
hosts: 2
devices_per_host: 8
device: A100-80GB
links:
  inside: nvlink3
  between: {latency: 5 us, bandwidth: 200 Gbit/s}
"""
POSITIVE = st.floats(min_value=1e-3, max_value=1e20)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
LINK = st.builds(Link, st.floats(0, 10), POSITIVE)
ANY_LINKS = st.sampled_from(sorted(LINKS)).map(LINKS.__getitem__) | st.one_of(
    st.builds(Links.of, LINK, LINK, st.floats(0, 1)),
    st.builds(Links, LINK, LINK, LINK, LINK, LINK, st.floats(0, 1), st.none() | LINK, LINK),
    LINK.map(lambda link: Links.of(link, link)),
)
DEVICE = st.sampled_from(sorted(DEVICES)).map(DEVICES.__getitem__) | st.builds(
    DeviceModel,
    name=NAMES,
    kind=st.sampled_from(["cpu", "cuda", "npu"]),
    memory=st.integers(1, 10**15),
    flops=POSITIVE,
    bandwidth=POSITIVE,
    overhead=st.floats(0, 1),
    half_flops=st.none() | POSITIVE,
)
SLOTS = st.lists(NAMES, min_size=1, unique=True)


@st.composite
def clusters(draw):
    links = {"inside": draw(ANY_LINKS), "between": draw(ANY_LINKS), "device": draw(DEVICE)}
    if draw(st.booleans()):
        return Cluster.of(draw(st.integers(1, 40)), draw(st.integers(1, 9)), **links)
    slots = draw(SLOTS)
    cuts = sorted(draw(st.sets(st.integers(1, len(slots)), max_size=3)) | {0, len(slots)})
    hosts = tuple(tuple(slots[a:b]) for a, b in pairwise(cuts))
    return Cluster(hosts, **links)


@given(clusters())
def test_what_is_written_is_read_as_the_same(tmp_path_factory, cluster):
    path = tmp_path_factory.getbasetemp() / "cluster.yaml"
    cluster.save(path)
    assert Cluster.load(path) == cluster


def load(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return Cluster.load(path)


def test_a_file_of_names_and_units(tmp_path):
    cluster = load(tmp_path, TWO_HOSTS)
    assert [len(host) for host in cluster.hosts] == [8, 8]
    assert cluster.device is DEVICES["A100-80GB"]
    assert cluster.inside is LINKS["nvlink3"]
    assert cluster.between == Links.of(Link(5e-6, 25e9), Link(5e-6, 25e9))


def test_kinds_of_communication_told_apart(tmp_path):
    cluster = load(
        tmp_path,
        """
hosts: [[a, b], [c]]
device: {name: x, kind: cpu, memory: 2 GiB, flops: 1 TFLOP/s, bandwidth: 10 GB/s}
links:
  inside:
    start: 1 ms
    send: {latency: 1 us, bandwidth: 1 GB/s}
    collective: {latency: 2 us, bandwidth: 2 GB/s}
    all_to_all: {latency: 3 us, bandwidth: 3 GB/s}
  between:
    {latency: 9 us, bandwidth: 9 GB/s, all_reduce: {latency: 8 us, bandwidth: 8 GB/s}}
""",
    )
    assert cluster.hosts == (("a", "b"), ("c",))
    assert cluster.device == DeviceModel("x", "cpu", 2 * 2**30, 1e12, 10e9)
    assert cluster.inside.start == 1e-3
    assert cluster.inside.send == Link(1e-6, 1e9)
    assert cluster.inside.all_reduce == cluster.inside.all_gather == Link(2e-6, 2e9)
    assert cluster.inside.all_to_all == Link(3e-6, 3e9)
    assert cluster.between.all_reduce == Link(8e-6, 8e9)
    assert cluster.between.send == cluster.between.all_gather == Link(9e-6, 9e9)


def test_the_text_reads_well():
    cluster = Cluster.of(
        4,
        2,
        device=DeviceModel("mine", "cuda", 40 * 10**9, 15e12, 1.3e12, 5e-6, 0.2e15),
        between=Links.of(Link(5e-6, 25e9), Link(5e-6, 25e9)),
    )
    assert cluster.to_yaml() == (
        "hosts: 2\n"
        "devices_per_host: 2\n"
        "links:\n"
        "  inside: shared-memory\n"
        "  between: {latency: 5 us, bandwidth: 25 GB/s}\n"
        "device:\n"
        "  name: mine\n"
        "  kind: cuda\n"
        "  memory: 40 GB\n"
        "  flops: 15 TFLOP/s\n"
        "  half_flops: 200 TFLOP/s\n"
        "  bandwidth: 1.3 TB/s\n"
        "  overhead: 5 us\n"
    )


def test_links_that_no_slot_needs_may_be_left_out(tmp_path):
    one = load(tmp_path, "hosts: 1\ndevices_per_host: 2\ndevice: cpu-core\nlinks: {inside: gloo}")
    assert one == Cluster.of(2, inside=GLOO, device=CPU_CORE)
    alone = load(tmp_path, "hosts: 1\ndevices_per_host: 1\ndevice: cpu-core")
    assert alone.devices == ("d0",)


def test_links_that_no_slot_needs_are_not_written():
    assert Cluster.of(1).to_yaml() == "hosts: 1\ndevices_per_host: 1\ndevice: cpu-core\n"
    assert "between" not in Cluster.of(2).to_yaml()
    assert "inside" not in Cluster.of(2, 1).to_yaml()
    assert "between: gloo" in Cluster.of(2, between=GLOO).to_yaml()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  between: {latency: 5 us, bandwidth: 200 Gbit/s}\n",
            "",
            r"line 5, links: there is no link 'between', but there are 2 hosts; give links.between",
        ),
        ("  inside: nvlink3\n", "", "no link 'inside', but a host has several slots"),
        ("200 Gbit/s", "200 Gbps", r"line 6, links.between.bandwidth: found the unit 'Gbps'"),
        (", bandwidth: 200 Gbit/s", "", "line 6, links.between: send lacks a bandwidth; give"),
        ("latency: 5 us", "latency: -5 us", "line 6, links.between: a link's latency must not be"),
        ("5 us,", "5 us, start: -1 s,", "links.between.start: the start of a collective must not"),
        (
            "nvlink3",
            "nvlink9",
            "line 5, links.inside: found 'nvlink9', expected one of shared-memory, gloo, ether",
        ),
        ("A100-80GB", "A100", "line 3, device: found 'A100', expected one of cpu-core, V100-32GB"),
        ("device: A100-80GB\n", "", "line 1: the key 'device' is missing: what each slot is"),
        ("A100-80GB", "[1]", "line 3, device: found a list, expected name, kind, memory"),
        ("A100-80GB", "{name: x}", "line 3, device: the key 'kind' is missing: cpu, npu, cuda"),
        ("A100-80GB", "{name: x, kind: tpu}", "line 3, device.kind: found 'tpu', expected one of"),
        ("A100-80GB", "{name: x, kind: cpu}", "device: the key 'memory' is missing: a device has"),
        ("devices_per_host: 8\n", "", "the key 'devices_per_host' is missing: how many slots"),
        ("hosts: 2", "hosts: 0", "line 1, hosts: found '0', expected a number from 1 up"),
        ("hosts: 2", "hosts: 2.5", "line 1, hosts: found '2.5', expected a number from 1 up"),
        ("hosts: 2", "hosts: 200000000", "hosts: found 1600000000 slots, expected 1000000 at most"),
        ("hosts: 2", "hosts: [[a], []]", "devices_per_host: hosts names the slots already"),
        ("hosts: 2\ndevices_per_host: 8", "hosts: [[a], []]", "hosts: found a host without slots"),
        ("hosts: 2\ndevices_per_host: 8", "hosts: [[a], [a]]", "yaml: .* device slot 'a' twice"),
        ("hosts: 2\n", "hosts: 2\nhosts: 3\n", "line 2, hosts: the key stands here twice"),
        ("hosts: 2\n", "host: 2\n", "line 1, host: unknown key; known here are hosts, devices_per"),
        ("links:\n", "links: x\n", r"line 5: not YAML"),
        ("hosts: 2\n", "- hosts\n", "not YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, old, new, message):
    assert old in TWO_HOSTS
    with pytest.raises(PlanError, match=message):
        load(tmp_path, TWO_HOSTS.replace(old, new, 1))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("memory: 0.5 B", "device.memory: found '0.5 B', expected whole bytes"),
        ("memory: 1e99 GB", "expected whole bytes, 1e[+]18 at most"),
        ("memory: inf", "expected whole bytes"),
        ("memory: 0", "line 1, device: device 'x': memory must be positive, found 0"),
        ("flops: 1 TB/s", "device.flops: found the unit 'TB/s'"),
        ("flops: {}", "device.flops: found keys with values, expected a value"),
        ("overhead: -1 us", "overhead must not be negative"),
    ],
)
def test_a_device_that_cannot_be(tmp_path, field, message):
    numbers = {"memory": "1 GB", "flops": "1 TFLOP/s", "bandwidth": "1 GB/s"}
    key, _, value = field.partition(": ")
    written = ", ".join(f"{k}: {v}" for k, v in (numbers | {key: value}).items())
    text = f"device: {{name: x, kind: cpu, {written}}}\nhosts: 1\ndevices_per_host: 1\n"
    with pytest.raises(PlanError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\xff\xfe", "no text in UTF-8"), (b"2", "line 1: found '2', expected")],
)
def test_what_is_no_cluster_file(tmp_path, content, message):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message):
        Cluster.load(path)
    with pytest.raises(PlanError, match=r"no cluster can be read from .*absent.yaml: No such file"):
        Cluster.load(tmp_path / "absent.yaml")


def test_links_of_a_broadcast_and_a_reduce_are_known_only_where_a_file_names_them(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        TWO_HOSTS.replace("200 Gbit/s}", "1 GB/s, reduce: {latency: 1 us, bandwidth: 2 GB/s}}")
    )
    between = Cluster.load(path).between
    assert (between.broadcast, between.reduce) == (None, Link(1e-6, 2e9))
    assert between.seconds("broadcast", 4, 10**6) == between.seconds("send", 2, 10**6)
    assert between.seconds("reduce", 2, 10**6) == pytest.approx(2 * (1e-6 + 5e5 / 2e9))
