"""Proofs of graphs are kept for later processes, and no other graph is believed for one."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PipelineError
from shardwright.pipeline import graphs
from tests.clean_process import run_program

LOAD = """
import sys
import shardwright as sw
from shardwright.pipeline import graphs

proved, check_results = [], graphs._check_results
graphs._check_results = lambda *given: proved.append(given) or check_results(*given)
sw.check(sw.Pipeline.load(sys.argv[1]))
print(proved != [])
"""


def load(file: Path, cache: Path, keep: str) -> subprocess.CompletedProcess[str]:
    return run_program(LOAD, str(file), SHARDWRIGHT_CACHE=str(cache), SHARDWRIGHT_KEEP_PROOFS=keep)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    graph = sw.capture(model, (torch.ones(2, 4),))
    sw.build(graph, sw.plan(graph, devices=2)).save(tmp_path / "a.json")
    return tmp_path / "a.json"


def test_what_a_process_proved_the_next_one_need_not(file: Path, tmp_path: Path) -> None:
    proves = [load(file, tmp_path / "cache", keep="1").stdout.strip() for _ in range(2)]
    assert proves == ["True", "False"]
    assert load(file, tmp_path / "cache", keep="0").stdout.strip() == "True"


def test_another_graph_is_proved_though_its_like_was_before(file: Path, tmp_path: Path) -> None:
    assert load(file, tmp_path / "cache", keep="1").returncode == 0
    text = file.read_text()
    assert text.count("aten.relu.default") == 1
    file.write_text(text.replace("aten.relu.default", "aten.sum.default"))
    done = load(file, tmp_path / "cache", keep="1")
    assert done.returncode == 1
    assert PipelineError.__name__ in done.stderr


def test_a_cache_that_cannot_be_written_is_done_without(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    done = load(file, tmp_path / "cache", keep="1")
    assert done.stdout.strip() == "True", done.stderr


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("SHARDWRIGHT_KEEP_PROOFS", "1")
    for name in ("SHARDWRIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert graphs._marks.__wrapped__() is None


def test_kept_proofs_are_of_these_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A changed row of an operator, in a folder of a folder, is reason to prove anew."""
    monkeypatch.setenv("SHARDWRIGHT_KEEP_PROOFS", "1")
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    (tmp_path / "package" / "ops" / "rows").mkdir(parents=True)
    row = tmp_path / "package" / "ops" / "rows" / "views.py"
    row.write_text("# a row\n")
    monkeypatch.setattr(graphs, "__file__", str(tmp_path / "package" / "pipeline" / "graphs.py"))
    before = graphs._marks.__wrapped__()
    assert graphs._marks.__wrapped__() == before
    row.write_text("# another row\n")
    assert graphs._marks.__wrapped__() != before
