"""Measurements that are kept from one run to the next."""

from pathlib import Path

import pytest

from shardwright.costs.measurement import Cache, Timing, usual_path
from shardwright.errors import ProfileError

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
