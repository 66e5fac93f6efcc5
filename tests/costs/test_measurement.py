"""Measurements that are kept from one run to the next."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwright.autodiff.needed import needing_gradients, trained_parameters
from shardwright.costs.granularity import unit_graph, units
from shardwright.costs.measurement import (
    Cache,
    Timing,
    call_key,
    forward_key,
    unit_key,
    usual_path,
    wants_gradients,
)
from shardwright.errors import ProfileError
from shardwright.ir import Builder, IRGraph, IRValue
from tests.graphs import language_model

TIMING = Timing(1.0, 2.0, 3.0, 4, 5, 6, 7, samples=10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "timings.json"


def kept(path: Path, machine: str = "here", **timings: Timing) -> Cache:
    cache = Cache.of(path, machine)
    for key, timing in timings.items():
        cache.add(key, timing)
    cache.save()
    return cache


def test_what_was_kept_is_found_on_the_same_machine_only(path: Path) -> None:
    kept(path, a=TIMING)
    assert Cache.of(path, "here").find("a", 10) == TIMING
    assert Cache.of(path, "here").find("b", 10) is None
    assert Cache.of(path, "there").find("a", 10) is None


def test_more_samples_than_there_are_ask_for_another_measurement(path: Path) -> None:
    kept(path, a=TIMING)
    assert Cache.of(path, "here").find("a", 5) == TIMING
    assert Cache.of(path, "here").find("a", 11) is None


def test_what_others_have_added_meanwhile_stays(path: Path) -> None:
    mine = Cache.of(path, "here")
    kept(path, b=TIMING)
    kept(path, "there", c=TIMING)
    mine.add("a", TIMING)
    mine.save()
    found = Cache.of(path, "here")
    assert [found.find(key, 1) for key in "abc"] == [TIMING, TIMING, None]
    assert Cache.of(path, "there").find("c", 1) == TIMING
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_nothing_new_writes_nothing(path: Path) -> None:
    kept(path)
    assert not path.exists()


def test_without_a_cache_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = Cache.of(False, "here")
    cache.add("a", TIMING)
    cache.save()
    assert cache.find("a", 1) == TIMING
    assert list(tmp_path.iterdir()) == []


def test_the_usual_place_is_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Cache.of(True, "here").path == tmp_path / "shardwright" / "timings.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usual_path() == tmp_path / ".cache" / "shardwright" / "timings.json"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b'{"version":1,"timings":{"\xff":{}}}',
        b"[]",
        b'{"version": 2, "timings": {}}',
        b'{"version": 1, "timings": 3}',
    ],
)
def test_a_broken_file_is_an_error_that_says_which_to_delete(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=rf"{path} is broken \(.*\); delete this file"):
        Cache.of(path, "here")
    assert path.read_bytes() == content


def test_a_place_that_is_none_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot be read: .*cache=path.*cache=False"):
        Cache.of(tmp_path, "here")


def test_a_place_that_cannot_be_written_to_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardwright.costs.measurement.replacing", full)
    with pytest.raises(ProfileError, match=r"timings.json cannot be written: No space left"):
        kept(path, a=TIMING)


Make = Callable[[Builder], IRValue]


def graph_of(make: Make) -> IRGraph:
    builder = Builder("graph")
    return builder.finish(make(builder))


def key_of(make: Make) -> str:
    """The key of the last node that is made."""
    graph = graph_of(make)
    return call_key(graph, graph.nodes[-1], needing_gradients(graph, trained_parameters(graph)))


def linear(rows: int = 3, dtype: str = "f32", name: str = "w") -> Make:
    def make(builder: Builder) -> IRValue:
        x = builder.input(f"x{name}", (rows, 4), dtype)
        weight = torch.empty(2, 4, dtype={"f32": torch.float32, "f64": torch.float64}[dtype])
        return builder.call("aten.linear.default", x, builder.param(name, weight))

    return make


def softmax(dim: int) -> Make:
    return lambda b: b.call("aten.softmax.int", b.input("x", (2, 2), "f32"), dim)


def product(*, same: bool) -> Make:
    def make(builder: Builder) -> IRValue:
        x, y = builder.input("x", (3,), "f32"), builder.input("y", (3,), "f32")
        return builder.call("aten.mul.Tensor", x, x if same else y)

    return make


def test_names_and_contents_do_not_count() -> None:
    assert key_of(linear(name="w")) == key_of(linear(name="v"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (linear(), linear(rows=4)),
        (linear(), linear(dtype="f64")),
        (softmax(0), softmax(1)),
        (product(same=True), product(same=False)),
    ],
    ids=["shape", "dtype", "attributes", "wiring"],
)
def test_what_decides_how_long_a_call_takes_counts(one: Make, other: Make) -> None:
    assert key_of(one) != key_of(other)


def test_whose_gradients_are_wanted_counts_for_the_backward_alone() -> None:
    def second(builder: Builder) -> IRValue:
        weight = builder.param("v", torch.empty(2, 2))
        return builder.call("aten.linear.default", linear()(builder), weight)

    def first(builder: Builder) -> IRValue:
        x = builder.input("x", (3, 2), "f32")
        return builder.call("aten.linear.default", x, builder.param("v", torch.empty(2, 2)))

    assert key_of(first) != key_of(second)
    assert forward_key(key_of(first)) == forward_key(key_of(second))
    assert key_of(second).endswith(":ms")
    assert key_of(first).endswith(":-s")
    assert wants_gradients(key_of(first))
    assert not wants_gradients(key_of(softmax(0)))


def test_equal_blocks_are_one_unit_and_their_order_counts() -> None:
    graph = language_model(layers=3)
    wanted = needing_gradients(graph, trained_parameters(graph))
    blocks = [unit for unit in units(graph, graph.nodes, depth=1) if len(unit.nodes) > 1]
    assert len(blocks) == 3
    assert len({unit_key(unit_graph(graph, unit), wanted) for unit in blocks}) == 1
    assert unit_key(unit_graph(graph, blocks[0]), ()) != unit_key(
        unit_graph(graph, blocks[0]), wanted
    )
