"""Runs what README.md and docs/ show: blocks of Python in order, and shardwright's own commands.

A page is one session in one empty folder. A block marked ``json NAME`` or ``python NAME`` is
written to the file NAME; other Python blocks run one after another; of ``sh`` blocks the lines that
begin with ``shardwright`` run. A ``text`` block is what the blocks before it print, where a line of
``…`` stands for others.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from shardwright.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


class Block(NamedTuple):
    language: str
    file: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    return (Block(*match.groups()) for match in FENCE.finditer(page.read_text()))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # by dcp.load
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict[str, object] = {"__name__": page.stem}
    printed = ""
    for block in blocks(page):
        if block.file:
            Path(block.file).write_text(block.text)
            monkeypatch.delitem(sys.modules, Path(block.file).stem, raising=False)
        elif block.language == "python":
            exec(compile(block.text, str(page), "exec"), names)
        elif block.language == "sh":
            printed += run_commands(block.text)
        elif block.language == "text":
            printed += capsys.readouterr().out
            assert_printed(block.text, printed)


@pytest.mark.processes
@pytest.mark.timeout(110)
def test_slots_of_the_split_model_train(tmp_path: Path) -> None:
    shown = {block.file: block.text for block in blocks(ROOT / "docs" / "codegen.md")}
    for name in ("gpt.py", "split_train.py", "join.py"):
        (tmp_path / name).write_text(shown[name])
    command = "-m shardwright codegen gpt.py:make --devices 2 --policy tensor -o split.py"
    started(tmp_path, *command.split()).check_returncode()
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 split_train.py"
    for arguments in (torchrun.split(), ["join.py"]):
        done = started(tmp_path, *arguments)
        assert done.returncode == 0, done.stderr


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )


def assert_printed(text: str, printed: str) -> None:
    """The text, without what its lines of dots stand for, is in what was printed."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    for part in re.split(r"^\s*…\n", text, flags=re.MULTILINE):
        assert part.rstrip("\n") in lines


def run_commands(text: str) -> str:
    """Run shardwright's own; gives what they print."""
    printed = ""
    for line in text.splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        if command == "shardwright" and arguments != ["demo"]:
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"{line}\n{result.output}"
            printed += result.output
    return printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    missing = [link for link in LINK.findall(prose) if not (page.parent / link).exists()]
    assert missing == []
