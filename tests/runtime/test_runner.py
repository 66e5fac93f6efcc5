from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwright.devices import DeviceKind
from shardwright.errors import (
    DeviceError,
    InputError,
    LaunchError,
    PipelineError,
    RunError,
    WeightError,
)
from shardwright.pipeline import Device, Pipeline
from shardwright.runtime import Runner, run, verify
from tests.runtime import operators  # noqa: F401  registers what the sketches call
from tests.runtime.sketch import chain, chain_result

X = torch.ones(3, 4)
Y = chain_result(X)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "chain.pipeline.json"
    chain().save(path)
    return path


def test_a_file_runs(saved: Path) -> None:
    assert torch.equal(run(saved, X, in_process=True), Y)
    assert torch.equal(run(str(saved), x=X, in_process=True), Y)


def test_map_takes_tuples_dicts_and_single_arguments() -> None:
    with Runner(chain(), in_process=True) as runner:
        assert all(torch.equal(y, Y) for y in runner.map([(X,), {"x": X}, X]))


def test_map_takes_calls_only_some_way_ahead() -> None:
    taken = []

    def calls():
        for i in range(10):
            taken.append(i)
            yield X

    with Runner(chain(), in_process=True, in_flight=3) as runner:
        results = runner.map(calls())
        next(results)
        assert len(taken) == 3


def test_submit_waits_for_the_oldest_call_when_the_window_is_full() -> None:
    with Runner(chain(), in_process=True, in_flight=2) as runner:
        futures = [runner.submit(X) for _ in range(5)]
        assert [future.done() for future in futures] == [True, True, True, False, False]
    assert all(torch.equal(future.result(), Y) for future in futures), "closing finishes calls"


def test_wrong_input_leaves_the_runner_usable() -> None:
    with Runner(chain(), in_process=True) as runner:
        with pytest.raises(InputError, match="the inputs are: x"):
            runner(input=X)
        with pytest.raises(InputError, match=r"'x' is torch.float32\[3, 2\]"):
            runner(X[:, :2])
        assert torch.equal(runner(X), Y)


def test_a_closed_runner_says_so() -> None:
    with Runner(chain(), in_process=True) as runner:
        runner(X)
    runner.close()
    with pytest.raises(RunError, match="the runner is closed"):
        runner(X)


@pytest.mark.parametrize("in_process", [True, False])
class TestBeforeAnythingStarts:
    """What is wrong with the pipeline or the machine is said before a process is started."""

    def test_a_missing_weight_file(self, saved: Path, in_process: bool) -> None:
        (saved.parent / "chain.weights.safetensors").unlink()
        with pytest.raises(WeightError, match=r"constant 'w0'.*chain\.weights\.safetensors"):
            Runner(saved, in_process=in_process)

    def test_a_missing_file(self, tmp_path: Path, in_process: bool) -> None:
        with pytest.raises(PipelineError, match=r"nothing\.json cannot be read"):
            Runner(tmp_path / "nothing.json", in_process=in_process)

    def test_a_broken_rule(self, in_process: bool) -> None:
        pipeline = chain()
        del pipeline.supertasks["recv.y0@d1"]
        with pytest.raises(PipelineError):
            Runner(pipeline, in_process=in_process)

    @pytest.mark.parametrize(
        ("device", "message"),
        [
            (Device("npu", 0), "'d1' is of kind 'npu'"),
            (Device("cuda", 99), "'d1' is cuda 99, but this machine has"),
        ],
    )
    def test_a_device_that_is_not_here(
        self, in_process: bool, device: Device, message: str
    ) -> None:
        pipeline = chain()
        pipeline.devices["d1"] = device
        with pytest.raises(DeviceError, match=message):
            Runner(pipeline, in_process=in_process)

    def test_an_operator_that_nobody_registered(self, in_process: bool) -> None:
        pipeline = chain(op="runtime_tests.refuse_nan.default")
        pipeline.requires = ("runtime_tests.unheard_of.default",)
        for task in ("d0.0", "d1.0"):
            data = pipeline.supertasks[task].data
            pipeline.supertasks[task].data = data.replace("refuse_nan", "unheard_of")
        with pytest.raises(RunError, match=r"'runtime_tests\.unheard_of\.default'.*modules="):
            Runner(pipeline, in_process=in_process)

    def test_a_module_that_is_not_there(self, in_process: bool) -> None:
        with pytest.raises(RunError, match="the module 'unheard_of' cannot be imported"):
            Runner(chain(), in_process=in_process, modules=["unheard_of"])


def elsewhere(*, kind: DeviceKind = "cpu") -> Pipeline:
    """A pipeline for two hosts."""
    pipeline = chain()
    for k, name in enumerate(pipeline.devices):
        pipeline.devices[name] = Device(kind, 0, host=f"h{k}")
    return pipeline


def test_several_hosts_are_refused_where_each_slot_is_a_process() -> None:
    message = "spans the hosts h0, h1; start it with torchrun on each.*in_process=True"
    with pytest.raises(LaunchError, match=message):
        Runner(elsewhere())


def test_a_file_for_several_hosts_runs_in_process() -> None:
    assert torch.equal(run(elsewhere(), X, in_process=True), Y)
    assert verify(elsewhere(), chain_result, (X,)).equal


def test_npu_slots_run_on_the_cpu_where_asked(tmp_path: Path) -> None:
    elsewhere(kind="npu").save(tmp_path / "a.json")
    with pytest.raises(DeviceError, match=r"'d0' is of kind 'npu'.*npu_as_cpu=True"):
        run(tmp_path / "a.json", X, in_process=True)
    assert torch.equal(run(tmp_path / "a.json", X, in_process=True, npu_as_cpu=True), Y)
    assert verify(tmp_path / "a.json", chain_result, (X,), npu_as_cpu=True).equal


def test_npu_slots_beside_cpu_slots_run_in_processes_where_asked() -> None:
    pipeline = chain()
    pipeline.devices["d1"] = Device("npu", 0)
    assert torch.equal(run(pipeline, X, npu_as_cpu=True), Y)
    assert pipeline.devices["d1"] == Device("npu", 0), "the pipeline is left as it was"


def test_a_runner_may_be_used_without_with() -> None:
    runner = Runner(chain(), in_process=True)
    assert torch.equal(runner(X), Y)
    runner.close()


def test_the_pipeline_is_left_as_it_was() -> None:
    pipeline: Pipeline = chain()
    before = pipeline.to_json()
    run(pipeline, X, in_process=True)
    assert pipeline.to_json() == before
