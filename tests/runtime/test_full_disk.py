"""Where nothing more can be written: one error with path and reason, and nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clean_process import run_program

LIMITED = """
import os, resource, signal, torch
import shardwright as sw
from pathlib import Path
from torch import nn

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # With a limit for files, as where a disk is full.
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
optimizer = torch.optim.SGD(model.parameters(), 1.0)

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

x = torch.randn(4, 128)
graph = sw.capture(model, (x,))
plan = sw.plan(graph, devices=2)
pipeline = sw.build(graph, plan)
train = lambda **options: sw.train(
    step, [x] * 40, mesh={"pipeline": 2}, in_process=True, quiet=True, **options
)
acts = {
    "checkpoint": lambda: train(steps=2, checkpoint="kept", checkpoint_every=1),
    "log": lambda: train(epochs=1, log="log.jsonl"),
    "save": lambda: pipeline.save("model.pipeline.json"),
    "plan": lambda: plan.save("plan.json"),
    "trace": lambda: train(steps=1, trace="trace.json"),
}
for name, act in acts.items():
    resource.setrlimit(resource.RLIMIT_FSIZE, ({"plan": 100, "log": 3000}.get(name, 50000), most))
    try:
        act()
    except sw.ShardwrightError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing"
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    print(name, said.replace(chr(10), " "), sep="|")
print("left", sorted(str(p) for p in Path().rglob("*")), sep="|")
"""


def test_a_file_that_has_no_room(tmp_path: Path) -> None:
    done = run_program(LIMITED, folder=tmp_path)
    said = dict(line.split("|", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert "kept/step_000001.tmp cannot be written: " in said["checkpoint"]
    assert "is the disk full?" in said["checkpoint"]
    assert said["log"] == "WriteError: log.jsonl cannot be written: File too large"
    assert said["save"].startswith("WeightError: ")
    assert "model.weights.safetensors cannot be written" in said["save"]
    assert said["plan"] == "WriteError: plan.json cannot be written: File too large"
    assert said["trace"] == "nothing", "it is small enough"
    assert said["left"] == "['kept', 'log.jsonl', 'trace.json']"


IN_WORKERS = """
import os, torch
from shardwright.errors import WriteError
from shardwright.training import train
from tests.runtime.programs import perceptron, rows
from tests.runtime.own_workers import workers

try:
    train(
        perceptron().step, rows(4), epochs=1, mesh={"pipeline": 2}, quiet=True, restarts=2,
        checkpoint="kept", checkpoint_every=2, modules=["tests.runtime.full_disk"],
    )
except WriteError as error:
    print(error)
print(os.listdir("kept"), workers())
"""


@pytest.mark.processes
def test_a_worker_that_has_no_room(tmp_path: Path) -> None:
    done = run_program(IN_WORKERS, folder=tmp_path)
    error, left = done.stdout.splitlines()
    assert "rank " in error
    assert error.endswith("kept/step_000002.tmp cannot be written: No space left on device")
    assert left == "[] {}"
