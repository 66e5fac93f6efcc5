import pytest
import torch

from shardwright.clusters import Cluster, Links
from shardwright.errors import DeviceError, ProfileError
from shardwright.profiling import machine, profile_cluster, profile_device


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(machine, "WIDTHS", (16, 64))
    monkeypatch.setattr(machine, "ELEMENTS", (64, 1 << 14))


def test_a_device_of_this_machine(small):
    found = profile_device(n_iter=2)
    assert found.kind == "cpu"
    assert found.name
    assert found.flops > 1e8
    assert found.bandwidth > 1e8, "of probes so small that it hardly shows in their times"
    assert 1e-8 < found.overhead < 1e-2
    memory = machine.device_memory(torch.device("cpu"))
    assert 0 <= memory - found.memory < 10**6
    assert 0 <= memory // 4 - profile_device(n_iter=1, slots=4).memory < 10**6


def test_a_cluster_of_one_slot_needs_no_links(small, tmp_path):
    found = profile_cluster(1, n_iter=1)
    assert found.devices == ("d0",)
    found.save(tmp_path / "here.yaml")
    assert Cluster.load(tmp_path / "here.yaml") == found


def test_links_are_measured_between_as_many_slots(small, monkeypatch):
    asked = []

    def measured(devices, *, device):
        asked.append((devices, device))
        return Links.of(*2 * [found_link])

    found_link = Cluster.of(1).inside.send
    monkeypatch.setattr(machine, "profile_links", measured)
    found = profile_cluster(3, n_iter=1)
    assert asked == [(3, "cpu")]
    assert found.inside == Links.of(found_link, found_link)
    assert len(found.devices) == 3


def test_as_many_slots_as_cores_by_default(small, monkeypatch):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(machine, "profile_links", lambda *_, **__: Cluster.of(1).inside)
    assert len(profile_cluster(n_iter=1).devices) == 6
    assert len(profile_cluster(n_iter=1, threads=2).devices) == 3


@pytest.mark.parametrize("count", ["devices", "threads", "n_iter"])
def test_counts_begin_at_one(count):
    with pytest.raises(ProfileError, match=f"{count} is a number from 1 up, found 0"):
        profile_cluster(**{count: 0})


def test_a_device_that_is_not_there():
    with pytest.raises(DeviceError, match="'cuda:99' cannot be measured"):
        profile_device("cuda:99")
