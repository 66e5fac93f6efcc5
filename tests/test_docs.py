"""Runs what README.md and docs/ show: blocks of Python in order, and shardwright's own commands.

A page is one session in one empty folder. A block marked ``json NAME`` or ``python NAME`` is
written to the file NAME; other Python blocks run one after another; of ``sh`` blocks the lines that
begin with ``shardwright`` or ``torchrun`` run, each in a process of its own that has nothing of
this one's environment. A ``text`` block is what the blocks before it print, where a line of ``…``
stands for others.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.clean_process import printed_by

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {
    "shardwright": ["shardwright"],
    # Where nothing else is said torchrun takes a fixed port, which another test may have.
    "torchrun": ["torchrun", "--standalone"],
}
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


class Block(NamedTuple):
    language: str
    file: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    return (Block(*match.groups()) for match in FENCE.finditer(page.read_text()))


@pytest.mark.workers
@pytest.mark.timeout(300)
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


@pytest.mark.workers
@pytest.mark.timeout(110)
def test_slots_of_the_split_model_train(tmp_path: Path) -> None:
    shown = {block.file: block.text for block in blocks(ROOT / "docs" / "codegen.md")}
    for name in ("gpt.py", "split_train.py", "join.py"):
        (tmp_path / name).write_text(shown[name])
    for command in (
        "shardwright codegen gpt.py:make --devices 2 --policy tensor -o split.py",
        "torchrun --standalone --nproc-per-node 2 split_train.py",
        "python join.py",
    ):
        printed_by(*command.split(), folder=tmp_path)


def assert_printed(text: str, printed: str) -> None:
    """The text, without what its lines of dots stand for, is in what was printed."""
    lines = "\n".join(line.rstrip() for line in printed.splitlines())
    for part in re.split(r"^\s*…\n", text, flags=re.MULTILINE):
        assert part.rstrip("\n") in lines


def run_commands(text: str) -> str:
    """Run shardwright's own, each in a process of its own; gives what they print."""
    printed = ""
    for line in text.splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        if command in COMMANDS and arguments != ["demo"]:
            printed += printed_by(*COMMANDS[command], *arguments)
    return printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    missing = [link for link in LINK.findall(prose) if not (page.parent / link).exists()]
    assert missing == []


RUN_AS_MODULES = sorted(
    {found for page in PAGES for found in re.findall(r"`python -m ([^`]+)`", page.read_text())}
)


@pytest.mark.parametrize("command", RUN_AS_MODULES)
def test_a_module_that_a_page_says_to_run_is_there_with_its_options(command: str) -> None:
    name, *arguments = command.split()
    path = ROOT.joinpath(*name.split("."))
    source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    for option in (argument for argument in arguments if argument.startswith("-")):
        assert f'"{option}"' in source.read_text()
    assert '__name__ == "__main__"' in source.read_text()


MAKE = re.compile(r"`make ([^`]+)`|^make (\S+) +#", re.MULTILINE)
MADE = sorted({"".join(found) for page in PAGES for found in MAKE.findall(page.read_text())})


@pytest.mark.parametrize("words", MADE)
def test_a_target_that_a_page_says_to_make_is_there_with_its_variables(words: str) -> None:
    target, *variables = words.split()
    makefile = ROOT.joinpath("Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    for variable in variables:
        assert f"$({variable.partition('=')[0]})" in makefile


def test_pages_name_targets() -> None:
    assert {"demo", "test", "zoo", "bench"} <= {*MADE}


@pytest.mark.parametrize(
    "path",
    re.findall(r"`(\w+(?:/\w+)*(?:/|\.py|\.cpp))`", (ROOT / "docs/architecture.md").read_text()),
)
def test_what_the_architecture_names_is_there(path: str) -> None:
    assert ROOT.joinpath(path).exists() or ROOT.joinpath("shardwright", path).exists()
