"""The commands, run in this process; processes of workers are started where a test says so."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.cli.files import schedule_text
from shardwright.pipeline import Microbatches, Pipeline, Training
from shardwright.pipeline.check_schedule import schedule_info
from shardwright.schedules import make_schedule
from shardwright.version import __version__
from tests.clean_process import printed_by
from tests.cli.commands import invoke, refused, succeed

MODEL = """
import torch

def make():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    return torch.nn.Sequential(*layers).eval(), (torch.ones(3, 8),), {}

def columns(graph, resource):
    for node in graph.nodes():
        graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=resource.ngpus)
    return graph
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cli_model.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def built(folder: Path) -> Path:
    succeed("build", "cli_model.py:make", "--devices", 2, "-o", "model.pipeline.json")
    return folder / "model.pipeline.json"


def expected_output(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])(x).detach()


def test_a_file_for_npu_slots_of_several_hosts_is_verified_where_asked(folder: Path) -> None:
    built = "build", "cli_model.py:make", "--devices", 2, "--device-kind", "npu", "-o", "npu.json"
    succeed(*built)
    document = json.loads((folder / "npu.json").read_text())
    for k, device in enumerate(document["devices"].values()):
        device["host"] = f"h{k}"
    (folder / "npu.json").write_text(json.dumps(document))
    verified = "verify", "npu.json", "cli_model.py:make", "--in-process"
    assert "--npu-as-cpu" in refused(*verified)
    said = printed_by("shardwright", *verified, "--npu-as-cpu", folder=folder)
    assert "equal" in said
    ran = "run", "npu.json", "--random", "--in-process", "--npu-as-cpu"
    assert "output" in printed_by("shardwright", *ran, folder=folder)


def test_build_writes_a_pipeline_and_says_what_is_in_it(folder: Path) -> None:
    output = succeed("build", "cli_model.py:make", "--devices", 2, "-o", "model.pipeline.json")
    assert "2 device slots" in output
    assert "cpu:1" in output
    assert list(Pipeline.load(folder / "model.pipeline.json").devices) == ["d0", "d1"]


def test_build_refers_to_weights_that_are_in_a_file(folder: Path) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    save_file(layers.state_dict(), folder / "weights.safetensors")
    succeed("build", "cli_model.py:make", "--weights", "weights.safetensors", "-o", "m.json")
    values = [info.value for info in Pipeline.load(folder / "m.json").tensors.values()]
    assert {value.path for value in values if value} == {"weights.safetensors"}


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "tensor", "--devices", 4),
        ("--mesh", "pipeline=2,tensor=2"),
        ("--policy", "cli_model.py:columns", "--devices", 4),
    ],
)
def test_build_splits_as_it_is_told(folder: Path, options: tuple[object, ...]) -> None:
    succeed("build", "cli_model.py:make", *options, "-o", "model.pipeline.json")
    assert list(Pipeline.load(folder / "model.pipeline.json").devices) == ["d0", "d1", "d2", "d3"]
    save_file({"input": torch.ones(3, 8)}, folder / "in.safetensors")
    arguments = ("--in-process", "--inputs", "in.safetensors", "--output", "out.safetensors")
    succeed("run", "model.pipeline.json", *arguments)
    found = load_file(folder / "out.safetensors")["output"]
    torch.testing.assert_close(found, expected_output(torch.ones(3, 8)))


def test_check_and_show(built: Path) -> None:
    assert "OK: " in succeed("check", built)
    shown = succeed("show", built)
    assert "send/recv" in shown
    assert "all of output" in shown


def test_check_opens_the_parameter_files_where_asked(built: Path, folder: Path) -> None:
    succeed("check", built, "--weights")
    (folder / "model.weights.safetensors").unlink()
    succeed("check", built)
    result = invoke("check", built, "--weights")
    assert result.exit_code == 1
    assert "WeightError" in result.stderr


def test_show_prints_the_graph_of_a_supertask(built: Path) -> None:
    assert succeed("show", built, "--task", "d0.0").count("aten.linear.default") >= 1
    assert "'input' has no graph" in invoke("show", built, "--task", "input").output


def test_show_prints_a_schedule_with_the_slots_of_each_rank(built: Path) -> None:
    pipeline = Pipeline.load(built)
    schedule = schedule_info(make_schedule("1f1b", ranks=2, microbatches=3), [["d0"], ["d1"]])
    pipeline.training = Training(microbatches=Microbatches(3), schedule=schedule)
    lines = schedule_text(pipeline, 80).splitlines()
    assert lines[0] == "1f1b: ranks 2, stages a rank 1, microbatches 3"
    assert lines[3] == "d0 F0 F1  .  . B0 -- F2 B1 --  . B2 --"


def test_show_refuses_the_schedule_of_a_file_without_one(built: Path) -> None:
    assert "training.schedule is missing" in invoke("show", built, "--schedule").output


def test_run_in_process_with_inputs_from_a_file(built: Path, folder: Path) -> None:
    x = torch.randn(3, 8)
    save_file({"input": x}, folder / "in.safetensors")
    arguments = ("--in-process", "--inputs", "in.safetensors", "--output", "out.safetensors")
    table = succeed("run", built, *arguments)
    assert "f32[3, 8]" in table
    assert torch.equal(load_file(folder / "out.safetensors")["output"], expected_output(x))


def test_run_draws_and_writes_the_timeline(built: Path, folder: Path) -> None:
    options = ("--random", "--in-process", "--repeat", 3, "--timeline", "--trace", "trace.json")
    output = succeed("run", built, *options)
    assert "3 calls in" in output
    assert "Who did what for how long" in output
    names = {event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]}
    assert set(Pipeline.load(built).tasks_of("d0")) <= names


@pytest.mark.processes
def test_run_on_processes_as_a_program(built: Path, folder: Path) -> None:
    save_file({"input": torch.ones(3, 8)}, folder / "in.safetensors")
    options = ["--inputs", "in.safetensors", "--output", "out.safetensors"]
    printed_by("shardwright", "run", str(built), *options, folder=folder)
    found = load_file(folder / "out.safetensors")["output"]
    assert torch.equal(found, expected_output(torch.ones(3, 8)))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("shardwright ver", "verify"), ("shardwright run --see", "--seed")],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    """As what --install-completion writes asks it."""
    asked = (f"COMP_WORDS={typed}", f"COMP_CWORD={typed.count(' ')}")
    command = ("env", "_SHARDWRIGHT_COMPLETE=complete_bash", *asked, "shardwright")
    assert printed_by(*command).split() == [offered]
    assert "--install-completion" in succeed("--help")


def test_schema_is_the_one_in_the_repository(folder: Path) -> None:
    assert json.loads(succeed("schema"))["$ref"]
    succeed("schema", "-o", "schema.json")
    assert Path("schema.json").read_text() == succeed("schema")


def test_version_and_help() -> None:
    assert __version__ in succeed("--version")
    for command in ("build", "check", "show", "run", "schema", "demo"):
        assert command in succeed("--help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "missing.json"), "PipelineError: .*missing.json cannot be read"),
        (("build", "cli_model.py:other", "-o", "x.json"), "CaptureError: .*defines no function"),
        (("run", "{built}"), "InputError: give either --inputs FILE or --random"),
        (("run", "{built}", "--inputs", "none"), "InputError: inputs cannot be read from none"),
        (("show", "{built}", "--schedule", "--task", "d0.0"), "InputError: --schedule shows the"),
        (("build", "cli_model.py:make", "--devices", 0, "-o", "x.json"), "PlanError: "),
        (("build", "cli_model.py:make", "--policy", "odd", "-o", "x.json"), "PlanError: .*odd"),
        (("build", "cli_model.py:make", "--policy", "a.py:b", "-o", "x.json"), "PlanError: .*a.py"),
        (("build", "cli_model.py:make", "--mesh", "tensor", "-o", "x.json"), "PlanError: .*mesh"),
        (("build", "cli_model.py:make", "--mesh", "odd=2", "-o", "x.json"), "PlanError: .*odd"),
    ],
)
def test_an_error_is_one_line_and_exit_status_1(
    built: Path, arguments: tuple[object, ...], message: str
) -> None:
    result = invoke(*(str(argument).format(built=built) for argument in arguments))
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if "Error" in line]
    assert re.match(message, line)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            (command, "absent.py:make", "--output")
            for command in ("build", "codegen", "draw", "plan", "profile", "train")
        ),
        ("profile", "absent.py:make", "--plot"),
        ("train", "absent.py:make", "--trace"),
        *((command, "absent.json", "--trace") for command in ("run", "simulate")),
        *((command, "absent.json", "--output") for command in ("lower", "run")),
        ("simulate", "absent.json", "--measure", "--save-times"),
        ("cluster", "--output"),
    ],
    ids=" ".join,
)
def test_a_place_where_nothing_can_be_written_is_refused_before_any_work(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    for place, reason in (("none/x.svg", "No such file or directory"), (".", "Is a directory")):
        result = invoke(*arguments, place)
        assert result.exit_code == 1
        assert f"InputError: {place} cannot be written: {reason}; give" in result.stderr


def test_a_damaged_file_is_named(built: Path) -> None:
    built.write_text(built.read_text()[:100])
    result = invoke("check", built)
    assert result.exit_code == 1
    assert "PipelineError" in result.stderr
    assert f"in {built}" in result.stderr


def test_debug_lets_the_error_through(folder: Path) -> None:
    result = invoke("--debug", "check", "missing.json")
    assert type(result.exception).__name__ == "PipelineError"


def test_a_run_of_another_seed_and_another_folder(built: Path, folder: Path) -> None:
    outputs = []
    for seed in (0, 0, 1):
        output = folder / "outputs.safetensors"
        options = ["--random", "--seed", seed, "--threads", 2, "--in-process", "--output", output]
        succeed("run", built, *options)
        outputs.append(next(iter(load_file(output).values())))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    (folder / "elsewhere").mkdir()
    weights = folder / "model.weights.safetensors"
    weights.rename(folder / "elsewhere" / weights.name)
    built.write_text(built.read_text().replace(weights.name, f"elsewhere/{weights.name}"))
    (folder / "moved").mkdir()
    moved = folder / "moved" / built.name
    moved.write_text(built.read_text().replace("elsewhere/", "../elsewhere/"))
    run = ["run", moved, "--random", "--in-process"]
    assert invoke(*run).exit_code == 1
    succeed(*run, "--weights", folder / "elsewhere")


def test_a_file_is_verified_with_its_model(built: Path, folder: Path) -> None:
    assert "equal" in succeed("verify", built, "cli_model.py:make", "--in-process")
    other = MODEL.replace("*layers)", "*layers, torch.nn.ReLU())")
    (folder / "other_model.py").write_text(other)
    result = invoke("verify", built, "other_model.py:make", "--in-process")
    assert result.exit_code == 1
    assert "VerifyError: the pipeline's outputs are not the model's" in result.stderr
    assert "given the file's weights" not in result.stderr


def test_a_model_that_is_made_at_random_is_verified_with_the_weights_of_the_file(
    folder: Path,
) -> None:
    """Also where these are split, and where only some of them are other ones."""
    unseeded = MODEL.replace("torch.manual_seed(0)", "torch.seed()")
    (folder / "cli_model.py").write_text(unseeded)
    for split in (("--devices", 2), ("--mesh", "tensor=2")):
        succeed("build", "cli_model.py:make", *split, "-o", "model.json")
        words = ("verify", "model.json", "cli_model.py:make", "--in-process", "--tolerance", "1e-6")
        result = invoke(*words)
        assert result.exit_code == 0, result.output
        assert "the model is given the file's weights: '0.weight' and 7 more" in result.stderr
