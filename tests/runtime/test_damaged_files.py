"""Damaged plans, clusters, profiles, checkpoints and logs are refused, or used as what they say."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shardwright as sw
from shardwright.errors import PlanError, RunError, ShardwrightError, WeightError
from shardwright.pipeline.paramfiles import find_weights
from shardwright.tracing.rates import Rates
from shardwright.tracing.step import Rate
from shardwright.training.checkpoint import RATES
from shardwright.training.dcp import INDEX
from shardwright.training.logs import JsonLines
from tests.runtime.damaged import STEPS, graph, survey, train

COUNT = 12


@pytest.fixture(scope="module")
def tallies() -> dict[str, dict[str, int]]:
    """What became of some mutants of every kind of file."""
    return {title: dict(tally) for title, tally in survey(0, COUNT).items()}


def test_damaged_files_are_refused_or_used(tallies: dict[str, dict[str, int]]) -> None:
    assert len(tallies) == 14
    for title, tally in tallies.items():
        assert sum(tally.values()) == COUNT
        assert all(word == "used" or word.startswith("refused: ") for word in tally), title
    refused = [title for title, tally in tallies.items() if tally.keys() - {"used"}]
    assert {*tallies} - {*refused} <= {"log of training"}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A checkpoint."""
    train(tmp_path, STEPS, resume=False)
    return max((tmp_path / "kept").iterdir())


Change = Callable[[Any], None]


def elsewhere(index: Any) -> None:
    """A piece lies in a file outside of the checkpoint."""
    for place in index.storage_data.values():
        place.relative_path = f"../{place.relative_path}"


def at_the_same_place(index: Any) -> None:
    """Two halves are one half twice, so that the other half is nowhere."""
    entry = index.state_dict_metadata["weight"]
    half = type(entry.chunks[0])(torch.Size([0, 0]), torch.Size([1, 6]))
    longer = type(half)(torch.Size([0, 0]), torch.Size([1, 5]))
    rest = type(half)(torch.Size([0, 5]), torch.Size([1, 1]))
    entry.chunks[:] = [half, longer, rest]


def negative(index: Any) -> None:
    next(iter(index.storage_data.values())).offset = -8


def no_dtype(index: Any) -> None:
    index.state_dict_metadata["weight"].properties.dtype = torch.Size([1])


@pytest.mark.parametrize(
    "change", [elsewhere, at_the_same_place, negative, no_dtype], ids=lambda f: f.__name__
)
def test_a_checkpoints_index_is_held_to_what_it_says(kept: Path, change: Change) -> None:
    index = pickle.loads((kept / INDEX).read_bytes())
    change(index)
    (kept / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(WeightError, match="checkpoint"):
        sw.state_dict(kept)


def test_an_index_that_asks_for_all_memory(kept: Path) -> None:
    (kept / INDEX).write_bytes(b"\x80\x04\x8e" + (2**62).to_bytes(8, "little"))
    with pytest.raises(WeightError, match="no index to read"):
        sw.state_dict(kept)


def test_pieces_that_are_cut_short(kept: Path) -> None:
    for file in kept.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(WeightError, match="damaged"):
        sw.state_dict(kept)


@pytest.mark.parametrize("content", [b'{"\xe3\x28": 1}', b'{"a": ' + b"[" * 10**5])
def test_a_manifest_that_is_no_text(kept: Path, content: bytes) -> None:
    (kept / "training.json").write_bytes(content)
    with pytest.raises(WeightError, match="cannot be read"):
        sw.state_dict(kept)


@pytest.mark.parametrize("content", [b'{"\xe3\x28": 1}', b'{"a": ' + b"[" * 10**5])
def test_an_index_of_weights_that_is_no_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors.index.json").write_bytes(content)
    with pytest.raises(WeightError, match="is no index"):
        find_weights(tmp_path / "m.safetensors.index.json")


def test_a_manifest_that_names_what_is_not_there(kept: Path) -> None:
    manifest = json.loads((kept / "training.json").read_text())
    manifest["model"].append("other")
    (kept / "training.json").write_text(json.dumps(manifest))
    with pytest.raises(WeightError, match=r"has no 'other'"):
        sw.state_dict(kept)


@pytest.mark.parametrize(
    "state", [5, {"step": "x"}, {"step": 1, "first": {}, "rates": {"lr": "a"}, "schedulers": []}]
)
def test_rates_of_another_kind(kept: Path, state: Any) -> None:
    torch.save(state, kept / RATES)
    with pytest.raises(ShardwrightError, match=r"rates|checkpoint"):
        train(kept.parent.parent, STEPS + 1, resume=True)


def test_a_scheduler_of_another_state() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    rates = Rates([Rate("lr", optimizer, 0, "sgd_step", {})], scheduler)
    state = rates.state_dict()
    rates.load_state_dict(state)
    state["schedulers"][0]["gamma"] = "much"
    with pytest.raises(WeightError, match="another 'gamma'"):
        rates.load_state_dict(state)


def test_a_log_whose_steps_are_no_numbers(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": [1]}\n{"step": 1}\n{"step": 2, "a": "\xff"}\n{"step": 3}\n')
    JsonLines(log, after=2).close()
    assert b'{"step": 1}\n' in log.read_bytes()
    assert b"[1]" not in log.read_bytes()
    assert b"3" not in log.read_bytes()


def test_a_damaged_checkpoint_does_not_begin_a_run_anew(kept: Path) -> None:
    (kept / RATES).write_bytes(b"")
    with pytest.raises(RunError, match=rf"no checkpoint that can be read: {kept.name}"):
        train(kept.parent.parent, STEPS + 1, resume=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("latency: 5 us", "latency: 1e300 s"),
        ("latency: 5 us", "latency: 1e999999999 s"),
        ("bandwidth: 25 GB/s", "bandwidth: 1e-300 B/s"),
        ("hosts: 2", f"hosts: {'9' * 5000}"),
        ("hosts: 2", f"hosts: {'[' * 5000}"),
    ],
    ids=["seconds", "overflow", "bytes", "digits", "depth"],
)
def test_a_cluster_with_numbers_of_no_machine(old: str, new: str, tmp_path: Path) -> None:
    text = "hosts: 2\ndevices_per_host: 2\ndevice: cpu-core\nlinks:\n"
    text += "  inside: {latency: 5 us, bandwidth: 25 GB/s}\n  between: ethernet\n"
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert len(sw.Cluster.load(path).devices) == 4
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=r"c\.yaml"):
        sw.Cluster.load(path)


def test_a_plan_with_a_latency_of_no_machine(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sw.plan(graph(), mesh={"tensor": 2}).save(path)
    plan = json.loads(path.read_text())
    plan["cluster"]["inside"]["send"]["latency"] = 1e300
    path.write_bytes(msgspec.json.encode(plan))
    with pytest.raises(PlanError, match=r"latency is 1e\+300 s"):
        sw.Plan.load(path)
