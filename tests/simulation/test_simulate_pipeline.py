"""Pipelines in simulated time, against what can be reckoned otherwise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.building import build
from shardwright.clusters import Cluster, Link, Links
from shardwright.clusters.device import CPU_CORE, DEVICES
from shardwright.costs.cost import Analytic
from shardwright.costs.roofline import COMPUTING
from shardwright.costs.tasks import TaskTime, TaskTimes
from shardwright.errors import PlanError, ProfileError, WeightError
from shardwright.ir import IRGraph
from shardwright.pipeline import Pipeline
from shardwright.pipeline.check_schedule import schedule_of
from shardwright.planner import plan
from shardwright.profiling.memory import peak_bytes
from shardwright.runtime import TrainingRunner
from shardwright.runtime.memory import COUNT_TENSORS, TENSORS
from shardwright.schedules import simulate as simulate_schedule
from shardwright.simulation.simulate import simulate
from shardwright.simulation.slot import StepSimulation, Wait, added_up
from shardwright.tracing import capture, compile_ir
from shardwright.tracing.capture import empty_weights
from tests.runtime.linear_step import WIDTH, batches, linear_step
from tests.runtime.sketch import Sketch, chain, every_collective, identity

FAST = Links.of(Link(0.0, 1e18), Link(0.0, 1e18))
GPU = DEVICES["A100-80GB"]


def times(pipeline: Pipeline, **seconds: float) -> TaskTimes:
    """Seconds of supertasks by the first letter of their names; 0 where none are given."""
    return TaskTimes(
        {
            name: TaskTime(seconds.get(name[0], 0.0), 0)
            for name, task in pipeline.supertasks.items()
            if task.kind == "FX"
        }
    )


def machines(pipeline: Pipeline, links: Links = FAST, *, gpu: bool = False) -> Cluster:
    return Cluster((tuple(pipeline.devices),), inside=links, device=GPU if gpu else CPU_CORE)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-v"]),
    microbatches=st.sampled_from([1, 2, 4]),
    durations=st.tuples(*[st.integers(1, 9)] * 3),
)
def test_as_long_as_the_schedule_itself_where_only_its_work_counts(
    kind: str, microbatches: int, durations: tuple[int, int, int]
) -> None:
    """Where a backward is one action, gradients of inputs are sent before those of weights."""
    forward, backward, weight = map(float, durations)
    pipeline = linear_step(kind, microbatches=microbatches)
    assert pipeline.training is not None
    schedule = schedule_of(pipeline.training)
    weight *= schedule.splits_backward
    found = simulate(
        pipeline, times(pipeline, F=forward, B=backward, W=weight), machines(pipeline), lookahead=0
    )
    backwards = [0.0] + [backward] * (schedule.stages - 1)
    expected = simulate_schedule(schedule, forward=forward, backward=backwards, weight=weight)
    done = COMPUTING * (len(found.events) + 20)
    assert expected.step_time <= found.seconds <= expected.step_time + done
    ahead = simulate(
        pipeline, times(pipeline, F=forward, B=backward, W=weight), machines(pipeline), lookahead=1
    )
    assert sum(s.computing for s in ahead.slots) == pytest.approx(
        sum(s.computing for s in found.slots)
    )


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("data", [1, 2])
def test_each_slot_computes_moves_bytes_or_waits(gpu: bool, data: int) -> None:
    pipeline = linear_step("1f1b", microbatches=4, data=data)
    cluster = Cluster((tuple(pipeline.devices),), device=GPU if gpu else CPU_CORE)
    found = simulate(pipeline, times(pipeline, F=1.0, B=1.0, W=1.0), cluster, calls=3)
    for slot in found.slots:
        assert slot.computing + slot.moving + slot.waiting == pytest.approx(found.seconds)
        assert sum(wait.seconds for wait in slot.waits) == pytest.approx(slot.waiting)
    computed = [e for e in found.events if e.kind == "compute" and e.task == "F0.0"]
    assert [(e.call, e.microbatch) for e in computed] == [
        (c, m) for c in range(3) for m in range(4)
    ]


def test_steps_follow_one_another_without_a_pause() -> None:
    """The first slot begins the next step while the last one ends this."""
    pipeline = linear_step("gpipe", microbatches=2)
    costs = times(pipeline, F=1.0, W=1.0)
    one = simulate(pipeline, costs, machines(pipeline))
    stream = simulate(pipeline, costs, machines(pipeline), calls=5)
    alone = simulate(pipeline, costs, machines(pipeline), calls=5, in_flight=1)
    assert one.step_time == one.seconds == pytest.approx(5, rel=1e-2)
    assert stream.step_time < one.step_time
    assert alone.step_time == pytest.approx(one.step_time, rel=1e-2)


def test_messages_take_the_time_of_their_link() -> None:
    pipeline = linear_step("gpipe", microbatches=1)
    costs = times(pipeline, F=1.0)
    slow = Links.of(Link(2.0, 8 * 8 * WIDTH / 3.0), Link(0.0, 1e18))
    near = simulate(pipeline, costs, machines(pipeline)).seconds
    for gpu in (False, True):
        far = simulate(pipeline, costs, machines(pipeline, slow, gpu=gpu)).seconds
        assert far - near == pytest.approx(2 * (2.0 + 3.0), rel=1e-2), "there and back"


def test_a_core_moves_its_bytes_itself_and_a_gpu_beside_its_work() -> None:
    sketch = Sketch(2)
    sketch.input("x", (8,), "d0")
    sketch.fx("a", "d0", ["x"], ["y"], identity)
    received = sketch.send("y", "d0", "d1")
    sketch.fx("b", "d0", ["x"], ["z"], identity)
    sketch.fx("c", "d1", [received], ["u"], identity)
    pipeline = sketch.finish(["z", "u"])
    costs = times(pipeline, a=1.0, b=4.0, c=1.0)
    links = Links.of(Link(0.0, 32 / 3.0), Link(0.0, 1e18))
    core = simulate(pipeline, costs, machines(pipeline, links))
    gpu = simulate(pipeline, costs, machines(pipeline, links, gpu=True))
    assert core.seconds == pytest.approx(1 + 3 + 4, rel=1e-3)
    assert gpu.seconds == pytest.approx(1 + 4, rel=1e-3)
    assert core.slots[0].moving == pytest.approx(3, rel=1e-3)
    assert gpu.slots[1].waits[0] == Wait("recv", ("d0",), pytest.approx(4, rel=1e-3))


def test_calls_of_a_model_stream_through_the_slots() -> None:
    pipeline = chain(3)
    costs = TaskTimes({f"d{k}.0": TaskTime(1.0 + k, 0) for k in range(3)})
    found = simulate(pipeline, costs, machines(pipeline), calls=6)
    assert simulate(pipeline, costs, machines(pipeline)).seconds == pytest.approx(6.0, rel=1e-2)
    assert found.seconds == pytest.approx(6.0 + 5 * 3.0, rel=1e-2), "as the slowest slot lets them"
    one = simulate(pipeline, costs, machines(pipeline), calls=6, in_flight=1)
    assert one.step_time == pytest.approx(6.0, rel=1e-2)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_every_kind_of_communication_ends(gpu: bool, size: int) -> None:
    pipeline = every_collective(size)
    cluster = Cluster((tuple(pipeline.devices),), device=GPU if gpu else CPU_CORE)
    found = simulate(pipeline, Analytic(cluster.device), cluster, calls=3)
    noted = {e.task for e in found.events if e.kind not in ("compute", "wait")}
    assert noted == {name for name, task in pipeline.supertasks.items() if task.group}
    assert all(event.end >= event.start >= 0 for event in found.events)


def test_activations_are_held_until_their_backward() -> None:
    """Four microbatches of GPipe hold four times what one does; 1F1B's first stage holds two."""
    nbytes = {}
    for kind, microbatches in (("gpipe", 4), ("gpipe", 1), ("1f1b", 4)):
        pipeline = linear_step(kind, microbatches=microbatches)
        found = simulate(pipeline, times(pipeline, F=1.0, W=1.0), machines(pipeline))
        nbytes[kind, microbatches] = found.slots[1].memory.messages * microbatches
    assert nbytes["gpipe", 4] > nbytes["gpipe", 1]
    assert nbytes["1f1b", 4] < nbytes["gpipe", 4]


def test_as_much_memory_as_a_run_takes() -> None:
    pipeline = linear_step("gpipe", ranks=1, microbatches=4)
    found = simulate(pipeline, Analytic(CPU_CORE), machines(pipeline)).slots[0].memory
    x, target = batches(1)[0]
    with TrainingRunner(pipeline, in_process=True) as session:
        session.step(x, target, lr=0.1)
        peak = peak_bytes(lambda: session.step(x, target, lr=0.1), torch.device("cpu"))
    given = x.nbytes + target.nbytes + 8
    assert found.activations + found.temporaries == pytest.approx(peak.most + given, abs=16)
    assert found.messages == 0


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_as_much_memory_as_each_process_takes(schedule: str) -> None:
    pipeline, x, y = trained(schedule)
    found = simulate(pipeline, Analytic(CPU_CORE), calls=2)
    with TrainingRunner(pipeline) as session:
        session.step(x, y, lr=0.1)
        session.call_workers(COUNT_TENSORS)
        for call in [session.submit(x, y, lr=0.1) for _ in range(2)]:
            call.result()
        held = session.call_workers(TENSORS)
    given = 2 * x.nbytes  # of both steps, by another thread, which nobody counts
    for slot in found.slots:
        assert slot.memory.messages > 0
        needed = slot.memory.total - slot.memory.messages
        assert needed == pytest.approx(held[slot.slot] + given, rel=0.02)


def trained(schedule: str) -> tuple[Pipeline, torch.Tensor, torch.Tensor]:
    """A step of a small network on two slots, and a batch."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    x, y = torch.randn(2, 128, 64)
    graph = compile_ir(step, x[:32], y[:32])
    return build(graph, plan(graph, 2, microbatches=4, schedule=schedule)), x, y


def test_the_trace_is_that_of_a_run(tmp_path: Path) -> None:
    pipeline = linear_step(microbatches=2)
    found = simulate(pipeline, Analytic(CPU_CORE))
    found.save_chrome_trace(tmp_path / "simulated.json")
    x, target = batches(1)[0]
    with TrainingRunner(pipeline, in_process=True, trace=True) as session:
        session.step(x, target, lr=0.1)
        session.timeline.save_chrome_trace(tmp_path / "run.json")
    simulated, run = (
        json.loads((tmp_path / name).read_text())["traceEvents"]
        for name in ("simulated.json", "run.json")
    )

    def told(events: list[dict[str, object]]) -> set[tuple[object, ...]]:
        return {
            (e["name"], e.get("cat"), e["pid"], e["tid"]) for e in events if e.get("cat") != "wait"
        }

    assert told(simulated) == told(run)


def test_it_prints() -> None:
    pipeline = linear_step(microbatches=2)
    text = str(simulate(pipeline, times(pipeline, F=1.0, W=2.0), machines(pipeline), calls=2))
    assert "ms for 2" in text
    assert "d0: computes 1200" in text
    assert "waits for recv with d1" in text
    assert "memory 0.00 MB" in text


def test_waits_for_the_same_are_added() -> None:
    waits = [Wait("recv", ("a",), 1.0), Wait("end", (), 1.5), Wait("recv", ("a",), 2.0)]
    assert added_up(waits) == (Wait("recv", ("a",), 3.0), Wait("end", (), 1.5))


def test_nothing_to_divide_by() -> None:
    assert StepSimulation(0.0, 1, ()).idle == ()


def test_what_is_refused() -> None:
    pipeline = linear_step()
    with pytest.raises(PlanError, match="calls=0"):
        simulate(pipeline, Analytic(CPU_CORE), calls=0)
    with pytest.raises(PlanError, match="no device slot 'd1'"):
        simulate(pipeline, Analytic(CPU_CORE), Cluster.of(1))
    with pytest.raises(ProfileError, match="no time was measured"):
        simulate(pipeline, TaskTimes({}))


def test_what_cannot_run() -> None:
    sketch = Sketch(2)
    sketch.input("x", (2,), "d0")
    there = sketch.send("x", "d0", "d1")
    sketch.fx("d1.0", "d1", [there], ["y"], identity)
    back = sketch.send("y", "d1", "d0")
    sketch.fx("d0.0", "d0", [back], ["z"], identity)
    pipeline = sketch.finish(["z"])
    assert simulate(pipeline, Analytic(CPU_CORE)).seconds > 0
    pipeline.supertasks["send.x@d1"] = pipeline.supertasks.pop("send.x@d1")
    waits = r"waits for ever: slot 'd0' for 'recv\.y@d0', slot 'd1' for 'recv\.x@d1'"
    with pytest.raises(PlanError, match=waits):
        simulate(pipeline, Analytic(CPU_CORE))
    pipeline.supertasks["d0.0"].kind = "dfg"
    with pytest.raises(PlanError, match=r"'d0\.0' is lowered"):
        simulate(pipeline, Analytic(CPU_CORE))


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).eval()


def sgd_step(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def with_contents(*, training: bool) -> IRGraph:
    x = torch.ones(4, 8)
    return compile_ir(sgd_step(layers()), x) if training else capture(layers(), (x,))


def without_contents(*, training: bool) -> IRGraph:
    with empty_weights():
        model = layers()
    x = torch.empty(4, 8, device="meta")
    return compile_ir(sgd_step(model), x) if training else capture(model, (x,))


@pytest.mark.parametrize(
    ("training", "told"),
    [
        (False, {"devices": 2}),
        (False, {"mesh": {"pipeline": 2, "tensor": 2}}),
        (True, {"devices": 2, "microbatches": 2}),
        (True, {"mesh": {"data": 2}, "microbatches": 2}),
    ],
)
def test_a_plan_of_a_model_on_the_meta_device_takes_what_its_built_file_does(
    training: bool, told: dict[str, Any]
) -> None:
    graph = with_contents(training=training)
    made = plan(graph, **told)
    cluster = Cluster((made.devices,), inside=FAST, device=GPU)
    built = simulate(build(graph, made), Analytic(GPU), cluster, calls=3)
    assert simulate(graph, made, cluster, calls=3) == built
    assert simulate(graph, made, cluster, Analytic(GPU), calls=3) == built
    empty = without_contents(training=training)
    assert simulate(empty, plan(empty, **told), cluster, calls=3) == built
    assert simulate(empty, plan(empty, **told)).step_time > 0
    with pytest.raises(WeightError, match="meta device"):
        build(empty, plan(empty, **told))


def test_what_cannot_be_simulated_is_said() -> None:
    graph = with_contents(training=False)
    made = plan(graph, devices=2)
    with pytest.raises(PlanError, match=r"found a NoneType; give simulate\(graph, plan\)"):
        simulate(graph, None)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match=r"a plan is given with its graph"):
        simulate(build(graph, made), made)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="a graph is planned, found a Sequential"):
        simulate(layers(), made)  # type: ignore[call-overload]
    with pytest.raises(PlanError):
        simulate(capture(nn.Linear(8, 8), (torch.ones(4, 8),)), made)
