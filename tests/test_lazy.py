"""Names that are imported when they are first asked for, and what is not imported before."""

import importlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import shardwright
from tests.clean_process import printed_by

ROOT = Path(__file__).parents[1]
# What neither `import shardwright` nor the start of a worker pays for.
HEAVY = {
    *("scipy", "networkx", "pymetis", "yaml", "rich", "typer", "ruff", "matplotlib"),
    *("transformers", "hypothesis", "sympy", "torch.export._trace", "torch._dynamo"),
    *("torch._inductor", "torch.distributed.checkpoint", "torch.utils.data.dataloader"),
    *("shardwright.planning.plan", "shardwright.building", "shardwright.codegenerate"),
    *("shardwright.tracing.tracer", "shardwright.cli"),
}
LOADED = """
import json, sys, torch
torchs = {*sys.modules}
import shardwright.launch.worker_main
print(json.dumps(sorted({*sys.modules} - torchs)))
"""


def test_what_a_worker_does_not_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert HEAVY & {*json.loads(done.stdout)} == set()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "Commands"),
        (["--version"], 0, shardwright.__version__),
        (["plan", "--help"], 0, "--policy"),
        (["train", "--help"], 0, "zb-v"),
        (["plam"], 2, "No such command 'plam'"),
        (["build", "model.py:make"], 2, "Missing option '--output'"),
        (["run", "a.json", "--repeat", "0"], 2, "'--repeat'"),
        (["plan"], 1, "name a program"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_says_how_it_is_called_without_torch(
    arguments: list[str], status: int, said: str
) -> None:
    """It comes in a third of a second where importing torch takes more than one."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shardwright", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
        check=False,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == status, done.stderr[-2000:]
    assert said in done.stdout + done.stderr
    assert "shardwright.cli.app" in imported
    assert imported & {"torch", "numpy", "msgspec", "scipy", "shardwright.ir"} == set()


def test_operators_of_this_package_are_there_when_asked_for() -> None:
    """Whoever reads a file of kernel calls has imported nothing of what writes them."""
    code = (
        "from shardwright.ir.operators import is_built_in, resolve\n"
        "assert is_built_in('shardwright.gemm.default')\n"
        "assert not is_built_in('shardwright.nothing.default')\n"
        "print(resolve('shardwright.chain.default'))\n"
    )
    for lines in (code, "".join(code.splitlines(keepends=True)[::3])):
        assert printed_by("python", "-c", lines) == "shardwright.chain.default\n"


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package with a function that is called as its module is, and another module."""
    folder = tmp_path / "lazy_example"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from shardwright.lazy import import_lazily\n"
        "if TYPE_CHECKING:\n"
        "    from lazy_example.draw import draw, line as stroke\n"
        "import_lazily(__name__)\n"
    )
    (folder / "draw.py").write_text("def draw(): pass\ndef line(): pass\n")
    (folder / "other.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("lazy_example")
    for name in [name for name in sys.modules if name.startswith("lazy_example")]:
        del sys.modules[name]


def test_a_name_is_imported_when_asked_for(lazy: ModuleType) -> None:
    assert "lazy_example.draw" not in sys.modules
    assert {"draw", "stroke"} <= {*dir(lazy)}
    stroke = lazy.stroke
    assert stroke is sys.modules["lazy_example.draw"].line
    assert pickle.loads(pickle.dumps(stroke)) is stroke


def test_a_submodule_does_not_hide_a_name(lazy: ModuleType) -> None:
    module = importlib.import_module("lazy_example.draw")
    assert lazy.draw is module.draw
    lazy.draw = other = object()
    assert lazy.draw is other, "as a test that replaces it needs"


def test_submodules_are_attributes(lazy: ModuleType) -> None:
    assert lazy.other is sys.modules["lazy_example.other"]
    with pytest.raises(AttributeError, match="module 'lazy_example' has no attribute 'nothing'"):
        lazy.nothing  # noqa: B018


def test_every_public_name_of_every_package() -> None:
    for path in sorted((ROOT / "shardwright").rglob("__init__.py")):
        package = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
        for name in getattr(package, "__all__", ()):
            assert getattr(package, name) is not None
            assert name in dir(package)
    assert shardwright.tracing.capture is shardwright.capture
