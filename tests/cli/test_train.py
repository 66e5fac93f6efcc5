import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from click.testing import Result
from safetensors.torch import load_file
from typer.testing import CliRunner

from shardwright.cli.app import app
from tests.clean_process import ranks

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def evaluate(x, y):
        return torch.nn.functional.mse_loss(model(x), y)

    x, y = torch.randn(2, 8, 8).repeat(1, 4, 1)
    data = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    return {"step_fn": step, "data": data, "evaluate": evaluate, "eval_data": data}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cli_training.py").write_text(PROGRAM)
    return tmp_path


def invoke(*arguments: object) -> Result:
    words = ["train", "cli_training.py:make", "--in-process", *map(str, arguments)]
    return CliRunner().invoke(app, words)


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def test_train_runs_a_program_and_says_how_it_went(folder: Path) -> None:
    options = ("--mesh", "pipeline=2,data=2", "--microbatches", 2, "--zero", 1)
    result = invoke(*options, "--epochs", 2, "--log", "log.jsonl", "--output", "model.safetensors")
    assert result.exit_code == 0, result.output
    assert re.search(r"^steps +8 *$", result.stdout, re.MULTILINE)
    assert "evaluation, evaluate" in result.stdout
    assert "step 1  epoch 0  loss" in result.stderr
    found = losses(folder / "log.jsonl")
    assert len(found) == 8
    assert found[-1] < found[0]
    assert load_file(folder / "model.safetensors").keys() == {
        f"{i}.{name}" for i in range(4) for name in ("weight", "bias")
    }


def test_a_trace_of_steps_lies_beside_what_is_simulated(folder: Path) -> None:
    split = ("--mesh", "pipeline=2", "--microbatches", "2")
    assert invoke("--steps", 2, *split, "--trace", "real.json", "--quiet").exit_code == 0
    for words in (
        ("build", "cli_training.py:make", *split, "-o", "step.json"),
        ("simulate", "step.json", "--calls", "2", "--trace", "predicted.json"),
    ):
        assert CliRunner().invoke(app, words).exit_code == 0

    def done(name: str) -> Counter[tuple[str, int]]:
        events = json.loads((folder / name).read_text())["traceEvents"]
        return Counter((e["name"], e["pid"]) for e in events if e.get("cat") == "compute")

    evaluation = {("d0.0", 0): 4, ("d1.0", 1): 4}
    assert done("real.json") == done("predicted.json") + Counter(evaluation)
    assert done("predicted.json").total() > 8


def test_train_goes_on_where_it_stopped(folder: Path) -> None:
    assert invoke("--steps", 6, "--log", "whole.jsonl", "--quiet").exit_code == 0
    kept = ("--checkpoint", "kept", "--log", "log.jsonl", "--quiet")
    assert invoke("--steps", 4, *kept).exit_code == 0
    again = invoke("--steps", 6, *kept)
    assert again.exit_code == 1
    assert "go on from it with resume=True" in again.stderr
    result = invoke("--steps", 6, *kept, "--resume", "--mesh", "pipeline=2")
    assert result.exit_code == 0, result.output
    found, expected = losses(folder / "log.jsonl"), losses(folder / "whole.jsonl")
    assert found == pytest.approx(expected, rel=1e-6)


def test_train_says_what_is_wrong_in_one_line(folder: Path) -> None:
    result = invoke()
    assert result.exit_code == 1
    assert "say how long to train: --epochs or --steps" in result.stderr
    result = invoke("--steps", 1, "--mesh", "pipeline=2", "--schedule", "slow")
    assert result.exit_code == 1
    assert "slow" in result.stderr


@pytest.mark.processes
def test_train_under_torchrun(folder: Path) -> None:
    """Each rank reads its own rows of the batches."""
    assert invoke("--steps", 3, "--log", "one.jsonl", "--quiet").exit_code == 0
    words = "train cli_training.py:make --steps 3 --mesh data=2 --log-file two.jsonl --quiet"
    command = "from shardwright.__main__ import main\nmain()\n"
    done = ranks(command, folder, *words.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Training") == 1, "rank 0 alone says how it went"
    assert losses(folder / "two.jsonl") == pytest.approx(losses(folder / "one.jsonl"), rel=1e-6)


def test_the_example_is_a_training_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    log = tmp_path / "log.jsonl"
    words = ["train", str(ROOT / "examples/train_gpt.py:make"), "--in-process", "--steps", "2"]
    words += ["--mesh", "pipeline=2", "--log", str(log), "--quiet"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found = losses(log)
    assert 3 < found[-1] < found[0] < 6


# --- stopped by Ctrl-C or SIGTERM -------------------------------------------------------------

SLOW = """
import time, torch

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def data(epoch):
        for k in range(%d):
            time.sleep(%f)
            yield torch.full((4, 8), 1.0 + k)

    return step, data
"""
WORDS = ("train", "slow.py:make", "--mesh", "pipeline=2", "--epochs", "1")


def stopped(folder: Path, number: int, *options: str) -> tuple[int, str]:
    """The status and the error stream of a run that gets a signal after some steps."""
    (folder / "slow.py").write_text(SLOW % (3000, 0.05))
    log = folder / "log.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "shardwright", *WORDS, "--log", "log.jsonl", *options],
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        process_group=0,
        # What a shell starts in the background ignores SIGINT, and so would the run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as run:
        deadline = time.monotonic() + 60
        while not log.exists() or len(losses(log)) < 3:
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.05)
        os.killpg(run.pid, number)
        said = run.communicate(timeout=60)[1]
        return run.returncode, said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--in-process",))]
)
def test_a_stopped_run_keeps_a_checkpoint_and_says_so(
    number: int, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is gone on with in this process: another one than the one that was stopped."""
    code, said = stopped(tmp_path, number, "--checkpoint", "kept", "--quiet", *options)
    done = len(losses(tmp_path / "log.jsonl"))
    assert (code, said) == (
        128 + number,
        f"stopped; --resume goes on from kept/step_{done:06d}\n",
    )
    (tmp_path / "slow.py").write_text(SLOW % (done + 2, 0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    again = ("--log", "log.jsonl", "--checkpoint", "kept", "--resume", *options)
    for end in (again, ("--log", "whole.jsonl", "--in-process")):
        result = CliRunner().invoke(app, [*WORDS, *end])
        assert result.exit_code == 0, result.output
    assert len(losses(tmp_path / "log.jsonl")) == done + 2
    assert losses(tmp_path / "log.jsonl") == losses(tmp_path / "whole.jsonl")


@pytest.mark.processes
def test_a_run_that_is_stopped_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    code, said = stopped(tmp_path, signal.SIGINT, "--quiet")
    assert code == 128 + signal.SIGINT
    assert said == "stopped; nothing is kept without --checkpoint DIRECTORY\n"


def test_what_is_missing_is_named_as_an_option(folder: Path) -> None:
    assert "say how long to train: --epochs or --steps" in invoke().stderr
    assert "need --checkpoint DIRECTORY" in invoke("--epochs", 1, "--resume").stderr
