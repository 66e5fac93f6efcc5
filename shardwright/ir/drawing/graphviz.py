"""Graphviz: from a digraph's text to an image.

The layout is Graphviz's, from the wheels of ``pygraphviz``, which bring it along, or else from the
program ``dot`` where the system has it. The text itself needs neither. What always holds: either
runs in a process of its own, which ends after a time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from shardwright.atomic import replacing
from shardwright.errors import DrawError

TEXT = "dot"
IMAGES = ("svg", "png", "pdf")
SECONDS = 120
"""How long a layout may take."""
BY_WHEELS = Path(__file__).with_name("layout.py")


def check_format(path: Path) -> str:
    """The format of a drawing by its file's name. Raises DrawError."""
    form = path.suffix.removeprefix(".").lower()
    if form not in (TEXT, *IMAGES):
        raise DrawError(
            f"a graph cannot be drawn as {path.name!r}; its name ends in "
            f"{', '.join(f'.{known}' for known in (*IMAGES, TEXT))}"
        )
    return form


def write(text: str, path: Path) -> None:
    """Write a digraph, or its image, by the file's name. Raises DrawError, WriteError."""
    form = check_format(path)
    content = text.encode() if form == TEXT else render(text, form)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def render(text: str, form: str) -> bytes:
    """The image of a digraph. Raises DrawError where there is no Graphviz, or where it fails."""
    name, command = _program(form)
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise DrawError(
            f"{name} has not finished in {SECONDS} s; draw less with depth=, or write a .dot file"
        ) from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise DrawError(f"{name} failed with status {done.returncode}: {said}")
    return done.stdout


def _program(form: str) -> tuple[str, list[str]]:
    """What lays out a digraph: its name, and its command. Raises DrawError where there is none."""
    if find_spec("pygraphviz") is not None:
        return "pygraphviz", [sys.executable, "-P", str(BY_WHEELS), form]
    program = shutil.which("dot")
    if program is None:
        raise DrawError(
            "Graphviz, which lays out pictures, is not installed: pip install "
            "'shardwright[drawing]', or give the system its package graphviz; a .dot file can be "
            "written without it"
        )
    return program, [program, f"-T{form}"]
