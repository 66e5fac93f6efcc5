"""``shardwright cluster``."""

import pytest
from typer.testing import CliRunner

from shardwright.cli.app import app
from shardwright.clusters import Cluster
from shardwright.profiling import machine

FILE = """\
hosts: 2
devices_per_host: 8
device: A100-80GB
links: {inside: nvlink3, between: infiniband-hdr}
"""


def invoke(*arguments):
    return CliRunner().invoke(app, ["cluster", *map(str, arguments)])


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(machine, "WIDTHS", (16, 64))
    monkeypatch.setattr(machine, "ELEMENTS", (64, 1 << 14))


def test_this_machine_is_printed(small, tmp_path):
    result = invoke("--devices", 1, "--n-iter", 1)
    assert result.exit_code == 0, result.output
    path = tmp_path / "printed.yaml"
    path.write_text(result.stdout)
    assert Cluster.load(path).device.kind == "cpu"


def test_this_machine_is_written(small, tmp_path):
    result = invoke("--devices", 1, "--n-iter", 1, "-o", tmp_path / "here.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert Cluster.load(tmp_path / "here.yaml").devices == ("d0",)


def test_a_file_is_checked_and_printed(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    result = invoke(path)
    assert result.exit_code == 0, result.output
    assert "device: A100-80GB" in result.stdout
    assert "hosts: 2" in result.stdout


def test_a_file_that_is_wrong_is_one_line(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.replace(", between: infiniband-hdr", ""))
    result = invoke(path)
    assert result.exit_code == 1
    assert "line 4, links: there is no link 'between', but there are 2 hosts" in result.output


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--devices", 2), "--devices"),
        (("--device", "cpu"), "--device"),
        (("--threads", 2), "--threads"),
        (("--n-iter", 3, "--threads", 1), "--threads, --n-iter"),
    ],
)
def test_a_file_is_not_measured(tmp_path, options, names):
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    result = invoke(path, *options)
    assert result.exit_code == 1
    assert f"give either a cluster file or {names}, to measure this machine by" in result.output
