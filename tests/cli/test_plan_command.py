"""``shardwright plan``, and ``--plan`` of the commands that take one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_command

from shardwright.cli.app import app
from shardwright.pipeline import Pipeline
from shardwright.planner import AUTO
from shardwright.planning import Plan
from shardwright.planning.partitioners import PARTITIONERS
from tests.cli.commands import refused, succeed
from tests.cli.program import SOURCE

pytestmark = pytest.mark.usefixtures("program_folder")


def planned(file: str, *options: object, function: str = "train") -> Plan:
    succeed("plan", f"user_program.py:{function}", *options, "-o", file)
    return Plan.load(file)


def test_plan_prints_and_writes_a_plan() -> None:
    options = ("--policy", "tensor", "--devices", 4, "-o", "plan.json")
    printed = succeed("plan", "user_program.py:make", *options)
    made = Plan.load("plan.json")
    assert printed == f"{made}\n"
    assert printed.startswith("plan for Sequential: tensor, 4 slots\n  d0: 4 nodes")


def test_build_follows_a_plan() -> None:
    planned("plan.json", "--mesh", "pipeline=2,tensor=2", function="make")
    succeed("build", "user_program.py:make", "--plan", "plan.json", "-o", "model.json")
    assert list(Pipeline.load("model.json").devices) == ["d0", "d1", "d2", "d3"]
    x = torch.randn(4, 8)
    save_file({"input": x}, "in.safetensors")
    succeed("run", "model.json", "--in-process", "--inputs", "in.safetensors", "--output", "out")
    torch.manual_seed(0)
    expected = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])(x)
    torch.testing.assert_close(load_file("out")["output"], expected.detach())


def test_build_writes_the_pipeline_of_a_training_step() -> None:
    options = ("--mesh", "pipeline=2", "--microbatches", 2)
    succeed("build", "user_program.py:train", *options, "-o", "asked.json")
    planned("plan.json", *options)
    succeed("build", "user_program.py:train", "--plan", "plan.json", "-o", "planned.json")
    asked, by_plan = map(Pipeline.load, ("asked.json", "planned.json"))
    assert asked.training == by_plan.training
    assert by_plan.training is not None
    assert by_plan.training.microbatches.n == 2
    assert "1f1b: ranks 2" in succeed("show", "planned.json", "--schedule")


def losses(file: str, *options: object) -> list[float]:
    words = ("--in-process", "--epochs", 2, "--quiet", "--log", file)
    succeed("train", "user_program.py:train", *words, *options)
    return [json.loads(line)["loss"] for line in Path(file).read_text().splitlines()]


def test_train_follows_a_plan() -> None:
    planned("plan.json", "--mesh", "pipeline=2,data=2", "--microbatches", 2, "--zero", 1)
    found = losses("planned.jsonl", "--plan", "plan.json")
    assert found == losses("asked.jsonl", "--mesh", "pipeline=2,data=2", "--microbatches", 2)
    assert found == pytest.approx(losses("one.jsonl"), rel=1e-5)


def test_a_plan_of_another_program_is_refused() -> None:
    planned("plan.json", "--devices", 2, "--microbatches", 2)
    words = ("--plan", "plan.json", "-o", "model.json")
    assert "plan again for this graph" in refused("build", "user_program.py:make", *words)
    source = SOURCE.replace("range(4)])\n\ndef make", "range(5)])\n\ndef make")
    Path("another_program.py").write_text(source)
    train = ("train", "another_program.py:train", "--in-process", "--steps", 1)
    assert "plan again for this graph" in refused(*train, "--plan", "plan.json")
    assert list(Path().glob("model*")) == []


def test_what_is_asked_for_beside_a_plan_is_refused() -> None:
    planned("plan.json", "--devices", 2)
    train = ("train", "user_program.py:train", "--in-process", "--steps", 1)
    found = refused(*train, "--plan", "plan.json", "--zero", 1, "--mesh", "data=2")
    assert "a plan is given, which settles what mesh, zero would" in found


def test_two_plans_are_compared() -> None:
    planned("a.json", "--mesh", "pipeline=2", "--microbatches", 2)
    planned("b.json", "--mesh", "pipeline=2", "--microbatches", 2, "--schedule", "gpipe")
    assert "  schedule: 1f1b -> gpipe\n" in succeed("plan", "--diff", "a.json", "b.json")
    assert succeed("plan", "--diff", "a.json", "a.json") == "the plans are equal\n"


def test_a_plan_is_explained_now_and_later() -> None:
    options = ("--devices", 2, "--policy", "auto", "--microbatches", 2, "-o", "plan.json")
    printed = succeed("plan", "user_program.py:train", *options, "--explain")
    assert printed.startswith("chosen: ")
    assert printed == succeed("plan", "plan.json", "--explain")
    assert succeed("plan", "plan.json") == f"{Plan.load('plan.json')}\n"
    assert "settles what --devices would" in refused("plan", "plan.json", "--devices", 2)


def test_what_plan_needs_is_told() -> None:
    assert "name a program, FILE.py:FUNCTION" in refused("plan")
    assert "leave the other options out" in refused("plan", "--diff", "a", "b", "--devices", 2)
    assert "leave the other options out" in refused("plan", "--diff", "a", "b", "--explain")
    assert "no plan can be read from a" in refused("plan", "--diff", "a", "b")


def test_a_partitioner_stands_beside_a_mesh() -> None:
    words = ("plan", "user_program.py:make", "--mesh", "pipeline=2", "--policy")
    assert "metis" in succeed(*words, "metis")
    assert "give either --policy or --mesh" in refused(*words, "tensor")


def test_devices_and_clusters_exclude_each_other() -> None:
    Path("c.yaml").write_text(TINY)
    words = ("user_program.py:train", "--cluster", "c.yaml", "--devices", 3)
    for command in (("plan",), ("train", "--steps", 1)):
        assert "give either --devices or --cluster" in refused(*command, *words)
    assert "give either a cluster file or --devices" in refused("cluster", "c.yaml", "--devices", 3)


TINY = """
hosts: 1
devices_per_host: 2
device: {name: tiny, kind: cpu, memory: 1 kB, flops: 1 GFLOP/s, bandwidth: 1 GB/s, overhead: 1 us}
links: {inside: gloo}
"""
LACKING = TINY.replace("hosts: 1", "hosts: 2")


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        (LACKING, (), "c.yaml, line 5, links: there is no link 'between', but there are 2 hosts"),
        (TINY, ("--policy", "auto"), "fits: the nearest"),
        ("hosts: [", (), "c.yaml"),
    ],
)
def test_clusters_that_will_not_do(cluster: str, options: tuple[str, ...], message: str) -> None:
    Path("c.yaml").write_text(cluster)
    words = ("plan", "user_program.py:train", "--cluster", "c.yaml", *options)
    assert message in refused(*words)


def test_more_stages_than_nodes() -> None:
    for policy in ("pipeline", "metis", "memory"):
        found = refused("plan", "user_program.py:make", "--devices", 99, "--policy", policy)
        assert "99" in found
        assert "4 nodes" in found


def test_a_plan_is_searched_for_on_a_cluster() -> None:
    Path("c.yaml").write_text(TINY.replace("1 kB", "1 GB"))
    printed = succeed("plan", "user_program.py:train", "--cluster", "c.yaml", "--policy", "auto")
    assert "predicted: " in printed
    losses("auto.jsonl", "--cluster", "c.yaml", "--policy", "auto")
    assert "--policy" in succeed("train", "--help")


@pytest.mark.parametrize("command", ["plan", "build", "train"])
def test_the_help_names_every_policy_that_a_profile_is_for(command: str) -> None:
    (option,) = (
        option for option in get_command(app).commands[command].params if option.name == "profile"
    )
    for policy in (AUTO, *PARTITIONERS):
        assert policy in option.help


def test_a_profile_is_what_auto_goes_by() -> None:
    words = ("user_program.py:train", "--n-iter", 1, "--no-cache", "-o", "profile.json")
    succeed("profile", *words)
    options = ("--devices", 2, "--microbatches", 1, "--policy", "auto")
    by_shapes = planned("a.json", *options)
    measured = planned("b.json", *options, "--profile", "profile.json")
    assert measured.prediction.step_time != by_shapes.prediction.step_time
    assert "a step: " in succeed("plan", "--diff", "a.json", "b.json")
    found = refused("plan", words[0], "--devices", 2, "--profile", "profile.json")
    assert "a profile is for policy='auto'" in found


def test_what_a_search_cannot_be_asked_for() -> None:
    words = ("plan", "user_program.py:train", "--policy", "auto", "--devices", 1)
    assert "zero=1 needs a mesh axis 'data'" in refused(*words, "--zero", 1)


def test_a_plan_is_not_run_as_a_pipeline() -> None:
    planned("plan.json", "--devices", 2, function="make")
    message = "this is a plan, no pipeline; see shardwright build --plan"
    assert message in refused("run", "plan.json", "--random", "--in-process")


def test_a_missing_folder_is_named_as_it_was_written() -> None:
    options = ("--devices", 2, "-o", "nowhere/plan.json")
    message = refused("plan", "user_program.py:make", *options)
    assert "nowhere/plan.json cannot be written: No such file or directory" in message
