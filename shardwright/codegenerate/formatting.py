"""Formatting by ruff, as a person's editor would.

Comes in: Python. Goes out: the same, formatted at 100 columns, its imports in order and
those that nothing uses left out.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from ruff.__main__ import find_ruff_bin

from shardwright.codegenerate.writing.origins import WIDTH
from shardwright.errors import CodegenError

_OPTIONS = ("--isolated", "--target-version", "py311", "--line-length", str(WIDTH))
_FIXES = ("check", "--select", "I,F401", "--fix-only", "--quiet")
_SECONDS = 120


def formatted(text: str) -> str:
    """The text as ruff formats it. Raises CodegenError where it is no Python or cannot be run."""
    _check(text)
    for command in (_FIXES, ("format", "--quiet")):
        text = _run(command, text)
    return text


def _check(text: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip() if error.lineno and lines[error.lineno - 1 :] else ""
        raise CodegenError(
            f"the generated code is no Python ({error.msg}) at line {error.lineno}: {line!r}; "
            "this is a mistake of shardwright's, please report it with the model"
        ) from error


def _run(command: tuple[str, ...], text: str) -> str:
    try:
        done = subprocess.run(
            [_ruff(), *command, *_OPTIONS, "--no-cache", "-"],
            input=text,
            capture_output=True,
            encoding="utf-8",
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise CodegenError(
            f"the generated code could not be formatted: {said.strip()}; it is written with ruff "
            "0.11 or later, which is installed with shardwright (pip install 'ruff>=0.11')"
        ) from error
    return done.stdout


def _ruff() -> str:
    try:
        return str(Path(find_ruff_bin()))
    except FileNotFoundError as error:
        raise OSError(f"ruff is not to be found ({error})") from None
