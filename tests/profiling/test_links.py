import subprocess
import sys
import time

import pytest
import torch

from shardwright.clusters import Cluster
from shardwright.clusters.links import KINDS, OPTIONAL
from shardwright.comm.rounds import combine
from shardwright.errors import DeviceError, ProfileError
from shardwright.profiling import machine, profile_links
from shardwright.profiling.link_process import measured, operation

FEW = {"sizes": (1 << 8, 1 << 16), "samples": 1}


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("members", [2, 3, 4])
def test_what_is_measured_is_what_prices_mean(kind, members):
    """The most that a rank holds is about the bytes that were asked for."""
    found = operation(kind, range(members), 1000, 7)
    tensors = [None if spec is None else torch.ones(spec.shape) for spec in found.inputs]
    made = combine(found, tensors)
    for one, spec in zip(made, found.outputs, strict=True):
        assert spec is None or one.shape == spec.shape
    held = max(4 * t.numel() for t in (*tensors, *made) if t is not None)
    assert 1000 - 4 * members < held <= 1000


def test_every_kind_is_measured_among_two_and_among_all():
    found = measured(3, (64, 128))
    groups = {(kind, operations[0].ranks) for kind, operations in found}
    assert groups == {("send", (0, 1))} | {(k, g) for k in KINDS[1:] for g in ((0, 1), (0, 1, 2))}
    tags = [o.tag for _, operations in found for o in operations]
    assert len(set(tags)) == len(tags)
    assert {kind: len(ops) for kind, ops in found} == dict.fromkeys(KINDS, 1) | dict.fromkeys(
        ("send", *OPTIONAL), 2
    )
    roots = {o.root for kind, operations in found for o in operations if kind in OPTIONAL}
    assert roots == {0, 1, 2}


@pytest.mark.processes
def test_links_of_this_machine(tmp_path):
    found = profile_links(2, **FEW)
    for kind in KINDS:
        assert 0 < found.seconds(kind, 2, 1 << 10) <= found.seconds(kind, 2, 1 << 20)
    path = tmp_path / "here.yaml"
    Cluster.of(2, inside=found).save(path)
    assert Cluster.load(path).inside == found
    assert found.broadcast is not None
    assert found.reduce is not None


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "npu"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(
        DeviceError, match=f"device '{device}' cannot be measured: this machine has"
    ):
        profile_links(2, device=device)


@pytest.mark.processes
def test_three_ranks_without_shared_memory_of_which_two_meet_too(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TRANSPORT", "gloo")
    large = (1 << 20, 1 << 22)  # which few operations are enough for
    times = machine.measure_links(3, "cpu", large, 1, 100.0)
    assert {time.members for time in times} == {2, 3}
    assert all(time.seconds > 0 for time in times)


@pytest.mark.processes
def test_a_process_that_fails_is_named_and_ends_the_others(monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_TRANSPORT", "pigeons")
    with pytest.raises(ProfileError, match=r"status 1 .*SHARDWRIGHT_TRANSPORT is 'pigeons'"):
        profile_links(2, **FEW)


@pytest.mark.processes
def test_too_little_time_is_an_error_and_leaves_nothing(monkeypatch):
    started = []
    start = subprocess.Popen

    def starting(*args, **kwargs):
        started.append(start(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", starting)
    with pytest.raises(ProfileError, match=r"not measured after 0\.1 s; give a longer timeout"):
        profile_links(2, timeout=0.1)
    assert [process.poll() for process in started] == [-9, -9]


@pytest.mark.processes
def test_a_process_ends_when_whoever_started_it_is_gone():
    command = [sys.executable, "-m", "shardwright.profiling.link_process"]
    process = subprocess.Popen([*command, "0", "2", "1", "cpu", "1", "8"], stdin=subprocess.PIPE)
    process.stdin.close()
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, "between 2 devices or more, found devices=1"),
        ({"sizes": (1000, 1003)}, "two numbers of bytes or more, 8 or more apart"),
        ({"sizes": (0, 8)}, "two numbers of bytes or more, 8 or more apart"),
        ({"samples": 0}, "samples must be a number from 1 up, found 0"),
    ],
)
def test_what_cannot_be_measured(options, message):
    with pytest.raises(ProfileError, match=message):
        profile_links(**options)


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_links_of_gpus():
    found = profile_links(2, device="cuda", **FEW)
    assert all(found.seconds(kind, 2, 1 << 20) > 0 for kind in KINDS)
