"""Operators that are registered in the script that runs, with a main guard or without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clean_process import ROOT, run_cleanly

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HEAD = """
from __future__ import annotations
import os, sys, torch, shardwright as sw
from torch import nn

with open("reads", "a") as file:
    print(__name__, sys.argv[1:], file=file)
torch.set_num_threads(3)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(twice_it(self.a(x)))

x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))

def run():
    model = Model().eval()
    graph = sw.capture(model, (x,))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    print(torch.equal(sw.run(pipeline, x), model(x)), flush=True)
"""
REGISTERED = """
@sw.register_op("a b -> a b", name="twice_it")
def twice_it(x: torch.Tensor) -> torch.Tensor:
    return x * 2
"""
OF_TORCH = """
@torch.library.custom_op("scripts::twice_it", mutates_args=())
def twice_it(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@twice_it.register_fake
def _(x):
    return torch.empty_like(x)
"""
WITHIN = """
def main():
    global twice_it

    @sw.register_op("a b -> a b", name="twice_it")
    def twice_it(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    run()
    run()

main()
"""
GUARDED = 'if __name__ == "__main__":\n    run()\n'

SCRIPTS = {
    "an operator of torch, without a guard": OF_TORCH + "run()\nrun()\n",
    "several, with a guard": REGISTERED
    + REGISTERED.replace("twice_it", "thrice_it")
    + "twice_it = lambda x, f=twice_it: thrice_it(f(x)) / 2\n"
    + GUARDED,
    "registered where it is run": WITHIN,
}


def run(folder: Path, *command: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        input=script,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_workers_know_the_operators_of_the_script(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HEAD + SCRIPTS[name])
    done = run_cleanly("python", "script.py", "--fast", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = 1 if "with a guard" in name else 2
    assert done.stdout.split() == ["True"] * runs
    reads = (tmp_path / "reads").read_text().splitlines()
    assert reads[0] == "__main__ ['--fast']"
    assert set(reads[1:]) == {"__mp_main__ ['--fast']"}
    assert len(reads) - 1 == 2 * runs, "once for each worker"


def test_a_module_that_runs_as_a_script(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "scale.py").write_text("SCALE = 2\n")
    registered = REGISTERED.replace("x * 2", "x * SCALE")
    script = HEAD + "from .scale import SCALE\n" + registered + "run()\n"
    (tmp_path / "package" / "program.py").write_text(script)
    done = run(tmp_path, "-m", "package.program", script="")
    assert done.stdout.split() == ["True"], done.stderr


def test_what_is_no_file_is_one_clear_error(tmp_path: Path) -> None:
    done = run(tmp_path, "-", script=HEAD + REGISTERED + "run()\n")
    assert "RunError: the operator 'shardwright.twice_it.default' is registered in what runs" in (
        done.stderr
    )


def test_a_script_that_a_worker_cannot_read_is_one_clear_error(tmp_path: Path) -> None:
    broken = 'if __name__ != "__main__":\n    raise KeyError("no")\n'
    (tmp_path / "script.py").write_text(HEAD + broken + REGISTERED + "run()\n")
    done = run_cleanly("python", "script.py", folder=tmp_path)
    said = done.stderr.splitlines()[-1]
    assert "script.py registers operators, and cannot be read by a worker: KeyError: 'no'" in said
