"""A file is there whole or not at all."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardwright.atomic import check_writable, read_whole, replacing
from shardwright.errors import WriteError
from shardwright.pipeline.paramfiles import write_paramfile


def test_the_file_appears_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_umask_says_who_may_read_whatever_the_writer_does(
    tmp_path: Path, umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        write_paramfile(tmp_path / "a.safetensors", {"x": torch.ones(2)})
        with replacing(tmp_path / "b") as temporary:
            temporary.unlink()
            temporary.touch(0o600)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"a.safetensors": mode, "b": mode}


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(tmp_path: Path, failure: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(failure):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "reason"), [("folder", "Is a directory"), ("absent/a", "No such file or directory")]
)
def test_where_no_file_can_be_the_error_names_it_and_nothing_is_left(
    tmp_path: Path, place: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / place
    with pytest.raises(WriteError, match=reason) as found, replacing(path):
        pytest.fail("there is something to write to")
    assert (found.value.filename, found.value.filename2) == (str(path), None)
    with pytest.raises(WriteError, match=reason):
        check_writable(path)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("old", "new"):
        check_writable(tmp_path / name)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_device_or_pipe_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(WriteError, match="device or pipe") as refused, replacing(path):
        pass
    assert refused.value.filename == str(path)
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)])
def test_only_regular_files_are_read(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=r"no regular file|Is a directory"):
        read_whole(tmp_path / "a")


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_whole(tmp_path / "a", most=5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_whole(tmp_path / "a", most=4)
