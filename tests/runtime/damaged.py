"""Damage to the other files that are read as data: plans, clusters, profiles, checkpoints, logs.

    python -m tests.runtime.damaged --count 300 --seed 0

Each subject is a good file and what reads it and uses what it said. A damaged one is refused in one
error of this package, or used as what it says: a plan that is used makes a pipeline that computes
what the model does. Anything else is told with its seed, and what it was.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.costs.measurement import Cache, Timing
from shardwright.costs.tasks import TaskTimes
from shardwright.errors import ShardwrightError
from shardwright.pipeline.paramfiles import find_weights, open_paramfile, write_paramfile
from shardwright.training.logs import JsonLines
from tests.pipeline.damage import spoil, spoil_bytes, spoil_zip

X = torch.arange(24.0).reshape(4, 6).sin()
STEPS = 2
MEMORY = 8 << 30
Use = Callable[[Path], None]


class Subject(NamedTuple):
    """A good file, in a folder that is copied, and what reads it."""

    file: str
    use: Use


@cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 6)).eval()


@cache
def graph() -> sw.IRGraph:
    return sw.capture(model(), (X,))


def program() -> Callable[[Tensor], Tensor]:
    torch.manual_seed(1)
    trained = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(trained.parameters(), 1e-2)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = trained(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


@cache
def step_graph() -> sw.IRGraph:
    return sw.compile_ir(program(), X[:2])


def train(folder: Path, steps: int, *, resume: bool) -> list[float]:
    return sw.train(
        program(),
        [(X,)] * 4,
        devices=1,
        steps=steps,
        checkpoint=folder / "kept",
        log=folder / "log.jsonl",
        resume=resume,
        in_process=True,
        quiet=True,
    ).losses


# --- what reads -------------------------------------------------------------------------------


def use_plan(path: Path) -> None:
    plan = sw.Plan.load(path)
    assert str(plan)
    assert plan.explain()
    pipeline = sw.build(graph(), plan)
    with sw.Runner(pipeline, in_process=True) as runner:
        torch.testing.assert_close(runner(X), model()(X), rtol=1e-4, atol=1e-5)


def use_training_plan(path: Path) -> None:
    pipeline = sw.build(step_graph(), sw.Plan.load(path))
    rate = torch.tensor(1e-2, dtype=torch.float64)
    step = program()
    with sw.TrainingRunner(pipeline, in_process=True) as session:
        for _ in range(2):
            loss = session.step(X, lr=rate)
            torch.testing.assert_close(loss, step(X), rtol=1e-3, atol=1e-5)


def use_cluster(path: Path) -> None:
    cluster = sw.Cluster.load(path)
    again = path.with_name("again.yaml")
    cluster.save(again)
    assert sw.Cluster.load(again) == cluster
    if len(cluster.devices) <= 16:
        plan = sw.plan(graph(), devices=cluster)
        assert str(plan)
        assert str(sw.simulate(graph(), plan, cluster))


def use_profile(path: Path) -> None:
    profile = sw.Profile.load(path)
    assert str(profile)
    assert profile.forward_time + profile.backward_time is not None
    assert str(profile.device_model())
    assert str(sw.plan(graph(), devices=2, policy="metis", profile=profile))


def use_times(path: Path) -> None:
    times = TaskTimes.load(path)
    pipeline = sw.Pipeline.load(path.with_name("stages.json"))
    assert str(sw.simulate(pipeline, times))


def use_cache(path: Path) -> None:
    found = Cache(path, "machine")
    found.find("key", 1)
    found.add("other", Timing(1.0, samples=3))
    found.save()


def use_index(path: Path) -> None:
    for name, file in find_weights(path).items():
        open_paramfile(file, "safetensors").read(name)


def use_checkpoint(path: Path) -> None:
    """The model's tensors, and the run goes on from it, or from none where it is seen damaged."""
    kept = next(parent for parent in path.parents if parent.name == "kept")
    assert {tuple(t.shape) for t in sw.state_dict(path.parent).values()} <= {(2, 6), (2,)}
    assert sw.state_dict(kept) is not None
    train(kept.parent, STEPS + 1, resume=True)


def use_log(path: Path) -> None:
    train(path.parent, STEPS + 1, resume=True)
    JsonLines(path, after=1).close()


# --- good files -------------------------------------------------------------------------------


def subjects(folder: Path) -> Mapping[str, Subject]:
    """Write good files, each subject's in a folder of its own."""
    for name in ("plan", "cluster", "profile", "times", "cache", "index"):
        (folder / name).mkdir()
    plan = sw.plan(graph(), devices=2)
    plan.save(folder / "plan" / "stages.json")
    sw.plan(graph(), mesh={"tensor": 2}).save(folder / "plan" / "split.json")
    sw.plan(graph(), devices=2, policy="auto").save(folder / "plan" / "auto.json")
    sw.plan(step_graph(), mesh={"pipeline": 1, "data": 2}, microbatches=2).save(
        folder / "plan" / "training.json"
    )
    (folder / "cluster" / "c.yaml").write_text(
        "hosts: 2\ndevices_per_host: 2\nlinks:\n  inside: {latency: 5 us, bandwidth: 25 GB/s}\n"
        "  between: {send: {latency: 9 us, bandwidth: 2 GB/s}, collective: "
        "{latency: 20 us, bandwidth: 1 GB/s}, start: 3 us}\ndevice: {name: mine, kind: cpu, "
        "memory: 8 GB, flops: 20 GFLOP/s, bandwidth: 10 GB/s, overhead: 2 us}\n"
    )
    sw.profile(graph(), n_iter=2, cache=False).save(folder / "profile" / "p.json")
    pipeline = sw.build(graph(), plan)
    pipeline.save(folder / "times" / "stages.json")
    sw.profile_tasks(pipeline, n_iter=2, in_process=True).save(folder / "times" / "t.json")
    cache_file = Cache(folder / "cache" / "c.json", "machine")
    cache_file.add("key", Timing(1.0, samples=3))
    cache_file.save()
    write_paramfile(folder / "index" / "one.safetensors", {"w": X})
    index = {"metadata": {"total_size": 96}, "weight_map": {"w": "one.safetensors"}}
    (folder / "index" / "m.safetensors.index.json").write_text(json.dumps(index))
    (folder / "training").mkdir()
    train(folder / "training", STEPS, resume=False)
    step = f"training/kept/{max((folder / 'training' / 'kept').iterdir()).name}"
    pieces = sorted(path.name for path in (folder / step).glob("*.distcp"))
    return {
        "plan of stages": Subject("plan/stages.json", use_plan),
        "plan of splits": Subject("plan/split.json", use_plan),
        "plan by search": Subject("plan/auto.json", use_plan),
        "plan of training": Subject("plan/training.json", use_training_plan),
        "cluster": Subject("cluster/c.yaml", use_cluster),
        "profile": Subject("profile/p.json", use_profile),
        "tasks' times": Subject("times/t.json", use_times),
        "cache of timings": Subject("cache/c.json", use_cache),
        "index of weights": Subject("index/m.safetensors.index.json", use_index),
        "checkpoint's index": Subject(f"{step}/.metadata", use_checkpoint),
        "checkpoint's pieces": Subject(f"{step}/{pieces[0]}", use_checkpoint),
        "checkpoint's manifest": Subject(f"{step}/training.json", use_checkpoint),
        "checkpoint's rates": Subject(f"{step}/rates.pt", use_checkpoint),
        "log of training": Subject("training/log.jsonl", use_log),
    }


# --- damage ------------------------------------------------------------------------------------


def damaged(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """The file with one thing changed, or some bytes."""
    if data[:2] == b"PK" and draw.random() < 0.6:
        return spoil_zip(data, draw, ("data.pkl",))
    if data[:1] == b"{" and draw.random() < 0.8:
        try:
            tree = json.loads(data)
        except ValueError:  # lines of JSON
            lines = data.splitlines(keepends=True)
            at = draw.randrange(len(lines))
            tree = json.loads(lines[at])
            what = spoil(tree, draw)
            lines[at] = json.dumps(tree).encode() + b"\n"
            return what, b"".join(lines)
        return spoil(tree, draw), json.dumps(tree).encode()
    return spoil_bytes(data, draw)


def attempt(good: Path, subject: Subject, seed: int, folder: Path) -> tuple[str, str]:
    """What becomes of a mutant, and what it was."""
    top = Path(subject.file).parts[0]
    shutil.rmtree(folder / top, ignore_errors=True)
    shutil.copytree(good / top, folder / top)
    path = folder / subject.file
    what, data = damaged(path.read_bytes(), random.Random(f"{subject.file} {seed}"))
    path.write_bytes(data)
    try:
        subject.use(path)
    except ShardwrightError as error:
        return f"refused: {type(error).__name__}", what
    except BaseException:
        return f"raw error\n{traceback.format_exc()[-1800:]}", what
    return "used", what


def survey(first: int, count: int, only: str = "") -> dict[str, Counter[str]]:
    """So many mutants of each subject; those that are not as they must be are printed."""
    tallies: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        good, folder = Path(name) / "good", Path(name) / "damaged"
        good.mkdir()
        folder.mkdir()
        for title, subject in subjects(good).items():
            if only and only not in title:
                continue
            tally = tallies[title] = Counter()
            shutil.rmtree(folder)
            shutil.copytree(good, folder)
            subject.use(folder / subject.file)
            for seed in range(first, first + count):
                found, what = attempt(good, subject, seed, folder)
                tally[found.partition("\n")[0]] += 1
                if found.startswith("raw"):
                    print(f"{title}, seed {seed}, {what}: {found}", flush=True)
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description="Damaged plans, profiles, checkpoints and logs.")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="subjects whose name has this in it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tallies: Mapping[str, Counter[Any]] = survey(asked.seed, asked.count, asked.only)
    for title, tally in tallies.items():
        print(f"{title}: {', '.join(f'{n} {what}' for what, n in tally.most_common())}")
    return int(any("raw error" in tally for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
