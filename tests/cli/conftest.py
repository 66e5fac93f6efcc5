"""A folder with a user's file, for the tests of several commands."""

from pathlib import Path

import pytest

from tests.cli.program import FILE, SOURCE


@pytest.fixture
def program_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run and find the file, and keep what they measure."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / FILE).write_text(SOURCE)
    return tmp_path
