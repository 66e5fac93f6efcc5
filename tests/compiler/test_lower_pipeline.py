"""Lowered pipelines compute what they did, task by task, in the memory that they were given."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import InputError, PipelineError
from shardwright.kernels.lowered import BY_NAME
from shardwright.pipeline import Pipeline
from tests.runtime.linear_step import LinearModel, batches, linear_step
from tests.runtime.programs import Trained, gpt, perceptron, rows, tokens

TOLERANCE = 1e-5


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(16, 5)).eval()


def forward(devices: int = 2) -> Pipeline:
    graph = sw.capture(model(), (torch.randn(8, 16),))
    return sw.build(graph, sw.plan(graph, devices=devices))


def test_a_file_is_lowered_as_its_pipeline_is(tmp_path: Path) -> None:
    pipeline = forward()
    pipeline.save(tmp_path / "model.pipeline.json")
    wanted = sw.lower(pipeline).supertasks
    for path in (tmp_path / "model.pipeline.json", str(tmp_path / "model.pipeline.json")):
        assert sw.lower(path).supertasks == wanted
    with pytest.raises(PipelineError, match="nothing cannot be read"):
        sw.lower(tmp_path / "nothing")


@pytest.mark.parametrize("other", [None, nn.Linear(2, 2), 3])
def test_what_is_no_pipeline_is_refused(other: Any) -> None:
    with pytest.raises(InputError, match=f"found {type(other).__name__}.*by compile"):
        sw.lower(other)


def training(made: Trained, data: Any, microbatches: int, **asked: Any) -> Pipeline:
    part = [tensor[: len(tensor) // microbatches] for tensor in data[0]]
    graph = sw.compile_ir(made.step, *part)
    return sw.build(graph, sw.plan(graph, microbatches=microbatches, **asked))


def computing(pipeline: Pipeline) -> list[str]:
    return [t.kind for t in pipeline.supertasks.values() if t.kind in ("FX", "dfg")]


def close(found: Tensor, expected: Tensor) -> bool:
    difference = (found.double() - expected.double()).abs().max().item()
    return difference <= TOLERANCE * max(expected.double().abs().max().item(), 1e-30)


# --- what a lowered pipeline is ------------------------------------------------------------------


def test_only_the_tasks_are_others() -> None:
    pipeline = forward()
    lowered = sw.lower(pipeline)
    assert set(computing(lowered)) == {"dfg"}
    assert set(computing(pipeline)) == {"FX"}, "the original stays as it is"
    for field in ("devices", "training", "name"):
        assert getattr(lowered, field) == getattr(pipeline, field)
    for field in ("tensors", "tensor_slices", "structure"):
        assert getattr(lowered.metadata, field) == getattr(pipeline.metadata, field)
    assert list(lowered.tensors) == list(pipeline.tensors)
    for name, task in lowered.supertasks.items():
        before = pipeline.supertasks[name]
        assert (task.inputs, task.outputs, task.device) == (
            before.inputs,
            before.outputs,
            before.device,
        )
    again = sw.lower(lowered)
    assert again.to_json() == lowered.to_json()


def test_equal_tasks_share_a_text() -> None:
    lowered = sw.lower(training(gpt(), tokens(1), 1, mesh={"tensor": 2}))
    blobs = [task.data_blob for task in lowered.supertasks.values() if task.data_blob]
    assert len(blobs) > len(set(blobs))
    assert set(blobs) == set(lowered.blobs or {})


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    lowered = sw.lower(forward())
    lowered.save(tmp_path / "a.pipeline.json")
    loaded = Pipeline.load(tmp_path / "a.pipeline.json")
    report = sw.verify(loaded, model(), (torch.randn(8, 16),), tolerance=TOLERANCE)
    assert report.equal


@pytest.mark.processes
def test_it_runs_in_processes() -> None:
    x = torch.randn(8, 16)
    with sw.Runner(sw.lower(forward())) as runner:
        for _ in range(3):
            assert close(runner(x), model()(x).detach())


def test_results_of_several_calls_are_memory_of_their_own() -> None:
    xs = [torch.randn(8, 16) for _ in range(4)]
    with sw.Runner(sw.lower(forward()), in_process=True, in_flight=4) as runner:
        found = [future.result() for future in [runner.submit(x) for x in xs]]
    assert all(close(y, model()(x).detach()) for x, y in zip(xs, found, strict=True))


def test_an_input_that_is_returned() -> None:
    class Same(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x.t(), x[0]

    graph = sw.capture(Same(), (torch.randn(3, 4),))
    lowered = sw.lower(sw.build(graph, sw.plan(graph, devices=1)))
    x = torch.randn(3, 4)
    same, turned, first = sw.run(lowered, x, in_process=True)
    assert torch.equal(same, x)
    assert torch.equal(turned, x.t())
    assert torch.equal(first, x[0])


# --- training ------------------------------------------------------------------------------------

MESHES: dict[str, dict[str, Any]] = {
    "one slot": {"devices": 1, "microbatches": 1},
    "1f1b": {"devices": 2, "microbatches": 4},
    "zb-h1": {"devices": 2, "microbatches": 4, "schedule": "zb-h1"},
    "recompute": {"devices": 2, "microbatches": 2, "recompute": "full"},
    "zero": {"mesh": {"data": 2}, "microbatches": 2, "zero": 1},
    "tensor": {"mesh": {"tensor": 2}, "microbatches": 1},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("make", "data"),
    [(lambda: gpt(0.0), tokens), (lambda: perceptron(0.2), rows)],
    ids=["gpt", "perceptron with dropout"],
)
def test_steps_are_those_of_the_operators(
    make: Callable[[], Trained], data: Callable[[int], Any], mesh: str
) -> None:
    made, given = make(), data(4)
    pipeline = training(made, given, **MESHES[mesh])
    states, losses = [], []
    for chosen in (pipeline, sw.lower(pipeline)):
        with sw.Session(chosen, in_process=True) as session:
            options = {"lr": 0.01} | draws(chosen, MESHES[mesh]["microbatches"])
            losses.append([session.step(x, y, **options) for x, y in given])
            states.append(session.state())
    assert all(close(b, a) for a, b in zip(*losses, strict=True))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert close(states[1][name], tensor), name


def draws(pipeline: Pipeline, microbatches: int) -> dict[str, Tensor]:
    inputs = pipeline.metadata.tensors.inputs
    return {"rng": torch.arange(microbatches)} if "rng" in inputs else {}


def test_momenta_and_accumulators_change_in_place() -> None:
    reference = LinearModel(2)
    with sw.Session(sw.lower(linear_step()), in_process=True) as session:
        for x, target in batches(3):
            loss, _ = session.step(x, target, lr=0.01).values()
            expected, _ = reference.step(x, target, 0.01).values()
            assert close(loss, expected)
        found = session.state()
    for name, tensor in reference.state().items():
        assert close(found[name], tensor), name


@pytest.mark.processes
def test_a_step_runs_in_processes_and_state_may_be_loaded() -> None:
    reference = LinearModel(2)
    with sw.Session(sw.lower(linear_step())) as session:
        before = session.state()
        for _ in range(2):
            session.load_state(before)
            loss, _ = session.step(*batches(1)[0], lr=0.01).values()
        expected, _ = reference.step(*batches(1)[0], 0.01).values()
        assert close(loss, expected)


# --- what is refused -----------------------------------------------------------------------------


def changed(change: Callable[[Any], Any]) -> Pipeline:
    """A lowered pipeline with another text in its first task."""
    lowered = sw.lower(forward(1))
    name = next(n for n, task in lowered.supertasks.items() if task.kind == "dfg")
    data = json.loads(lowered.data_of(name))
    data = change(data) or data
    task = msgspec.structs.replace(lowered.supertasks[name], data=json.dumps(data), data_blob=None)
    lowered.supertasks[name] = task
    used = {t.data_blob for t in lowered.supertasks.values()}
    lowered.blobs = {k: v for k, v in (lowered.blobs or {}).items() if k in used} or None
    return lowered


def generic(op: str) -> dict[str, Any]:
    attrs = {"op": op, "call": '{"args":[{"input":0}],"kwargs":{}}'}
    schema, blob = BY_NAME["generic"].pack(attrs)
    return {"kind": 0, "schema": schema, "blob": base64.b64encode(blob).decode()}


def with_batch(data: dict[str, Any], size: int) -> None:
    """Let every value of eight rows have so many."""
    for value in data["values"]:
        if value["shape"][0] == 8:
            value["shape"][0] = size


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no text": (lambda d: [1], r"'d0\.0'.*not the text of a lowered graph.*\[rule graph\]"),
    "another version": (lambda d: d.update(version=2), r"'d0\.0'.*\[rule graph\]"),
    "an unknown kind": (lambda d: d["calls"][0].update(kind=999), r"call 0.*999.*\[rule graph\]"),
    "an unknown schema": (lambda d: d["calls"][0].update(schema=9), r"call 0.*\[rule graph\]"),
    "a short blob": (
        lambda d: d["calls"][0].update(schema=1, blob="AA=="),
        r"call 0.*\[rule graph\]",
    ),
    "no base64": (lambda d: d["calls"][0].update(blob="?"), r"'d0\.0'.*\[rule graph\]"),
    "a value that is not made": (
        lambda d: d["calls"][0].update(inputs=[99, *d["calls"][0]["inputs"][1:]]),
        r"call 0.*\[rule graph\]",
    ),
    "an operator that writes": (
        lambda d: d["calls"][0].update(generic("aten.relu_.default"), inputs=[0]),
        r"relu_.*\[rule operators\]",
    ),
    "an operator that is not listed": (
        lambda d: d["calls"][0].update(generic("mine.op.default"), inputs=[0]),
        r"mine\.op\.default.*\[rule requires\]",
    ),
    "another shape of an input": (
        lambda d: with_batch(d, 4),
        r"tensor 'input'.*takes f32\[4, 16\].*\[rule graph-tensors\]",
    ),
    "a shape that no call makes": (
        lambda d: d["values"][0].update(shape=[4, 16]),
        r"'d0\.0': call 0, gemm: y is f32.* makes f32\[4, 16\].*\[rule graph\]",
    ),
    "one output more": (
        lambda d: d["outputs"].append(0),
        r"'d0\.0'.*gives 2 tensors.*\[rule graph-tensors\]",
    ),
    "an output that is an input": (
        lambda d: d.update(outputs=[1]),
        r"'d0\.0'.*the graph makes f32\[16, 16\].*\[rule graph-tensors\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_text_is_refused_with_its_rule_and_place(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(PipelineError, match=message):
        sw.check(changed(change))


class Attends(nn.Module):
    """Attention, and elementwise operators."""

    def forward(self, q: Tensor) -> Tensor:
        made = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return torch.sigmoid(made) * made + q * 0.5


def test_what_is_lowered_depends_on_the_kind_of_the_slot_alone() -> None:
    """On a GPU attention is one call as well, but no chain is: it has no kernel there."""
    graph = sw.capture(Attends(), (torch.randn(2, 4, 16, 8, dtype=torch.bfloat16),))
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    found = {}
    for kind in ("cpu", "cuda"):
        devices = {
            name: msgspec.structs.replace(device, kind=kind)
            for name, device in pipeline.devices.items()
        }
        lowered = sw.lower(msgspec.structs.replace(pipeline, devices=devices))
        (task,) = [name for name, task in lowered.supertasks.items() if task.kind == "dfg"]
        calls = json.loads(lowered.data_of(task))["calls"]
        numbers = {kind.id: kind.name for kind in BY_NAME.values()}
        found[kind] = [numbers[call["kind"]] for call in calls]
    assert found["cpu"][:2] == ["attention", "chain"]
    assert found["cuda"][0] == "attention"
    assert "chain" not in found["cuda"]
    assert "bmm" not in found["cuda"]
