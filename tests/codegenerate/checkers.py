"""Generated files held against the tools that a reader's editor runs."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from ruff import find_ruff_bin

RULES = "E,F,W,I,UP,B,SIM"
"""What ruff holds generated files to, beside its format."""

_CACHE = Path(__file__).parents[2] / ".mypy_cache" / "generated"
"""What mypy knows of torch, kept for the next call: reading torch takes half a minute."""


def assert_passes_ruff(files: Iterable[Path]) -> None:
    """Files are formatted and free of findings; one at a time where names are the same."""
    options = ["--isolated", "--no-cache", "--line-length=100", "--target-version=py311"]
    _assert_passes([find_ruff_bin(), "check", f"--select={RULES}", *options], files)
    _assert_passes([find_ruff_bin(), "format", "--check", *options], files)


def assert_passes_mypy(files: Iterable[Path]) -> None:
    """Files pass ``mypy --strict`` in a process of its own: in ours it would raise the recursion
    limit for every later test.
    """
    options = ["--strict", "--config-file=", f"--cache-dir={_CACHE}"]
    _assert_passes([sys.executable, "-m", "mypy", *options], files)


def _assert_passes(command: list[str], files: Iterable[Path]) -> None:
    given = [str(path) for path in files]
    assert given
    done = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
