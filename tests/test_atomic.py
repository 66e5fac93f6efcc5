"""A file is there whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from shardwright.atomic import replacing
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
