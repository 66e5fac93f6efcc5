"""Calls beside one another: whatever order the streams allow, a plan gives the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.exec import segments
from shardwright.exec.cuda import GraphMemory
from shardwright.exec.emitters import emit_graph
from shardwright.exec.exec_plan import ExecPlan, make_exec_plan
from shardwright.exec.executor import Executor
from shardwright.exec.kinds import kind_of
from shardwright.exec.lanes import Lane, Lanes
from shardwright.exec.lowering import lower_graph
from shardwright.exec.optimize import optimize_plan
from shardwright.exec.segments import TorchSegment
from shardwright.exec.streams import WINDOW
from shardwright.ir import Builder, IRGraph
from tests.exec.running import assert_close, contents, feed_of, planned
from tests.exec.test_exec_plan import Shadow
from tests.graphs import language_model
from tests.ir.random_graphs import RandomGraph, random_graphs


class Queue:
    """A stream whose work is done when the device likes; an event is how much was put on it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.work: list[Any] = []

    def record_event(self) -> tuple[Queue, int]:
        return self, len(self.work)

    def wait_event(self, event: tuple[Queue, int]) -> None:
        self.work.append(event)


class Device:
    """Streams, whose work it does in an order of its own among those that they allow."""

    def __init__(self, count: int) -> None:
        self.queues: list[Lane] = [Queue(self) for _ in range(count)]
        self.current = self.queues[0]

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        self.current = lane
        return nullcontext()

    def do(self, choose: random.Random) -> list[int]:
        """All work; gives on which queue each call was done."""
        queues = [queue for queue in self.queues if isinstance(queue, Queue)]
        done, found = dict.fromkeys(queues, 0), []
        while any(done[queue] < len(queue.work) for queue in queues):
            ready = [
                q for q in queues if done[q] < len(q.work) and self._may(q.work[done[q]], done)
            ]
            assert ready, "streams wait for one another"
            queue = choose.choice(ready)
            item = queue.work[done[queue]]
            done[queue] += 1
            if callable(item):
                item()
                found.append(queues.index(queue))
        return found

    @staticmethod
    def _may(item: Any, done: dict[Queue, int]) -> bool:
        return callable(item) or done[item[0]] >= item[1]


def run_beside(plan: ExecPlan, feed: dict[str, torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Run a plan as a GPU may: every stream at its own pace."""
    executor = Executor(plan, native=False)
    executor.bind_and_alloc_slots(feed)
    device = Device(1 + max(plan.streams, default=0))
    lanes = Lanes(device.queues[1:], lambda: device.queues[0], device.on)
    calls = [
        call
        for segment in executor.segments
        if isinstance(segment, TorchSegment)
        for call in segment._bound(executor.memory)
    ]

    def put(call: Any) -> Any:
        def later() -> None:
            assert isinstance(device.current, Queue)
            device.current.work.append(call)

        return later

    lanes.run([put(call) for call in calls], plan.streams, plan.waits)
    with torch.inference_mode():
        done = device.do(random.Random(seed))
    assert len(done) == len(plan.calls)
    return executor.outputs()


@settings(deadline=None, max_examples=120)
@given(random_graphs(), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_streams_at_any_pace_give_the_same(
    drawn: RandomGraph, count: int, donating: bool, seed: int
) -> None:
    graph, stored = drawn.graph, contents(drawn.graph)
    pairs = {
        vid: out
        for vid, out in zip(graph.inputs, graph.outputs, strict=False)
        if graph.values[vid].dtype == graph.values[out].dtype
        and graph.values[vid].shape == graph.values[out].shape
    }
    plan = planned(graph, streams=count, donated=pairs if donating else {})
    Shadow(plan).run()
    inputs = [tensor.clone() for tensor in drawn.inputs]
    found = run_beside(plan, feed_of(plan, graph, inputs, stored), seed)
    found += [stored[vid] for vid in graph.updates]
    for a, b in zip(found, [*drawn.outputs, *drawn.updates], strict=True):
        assert_close(a, b.contiguous(), 1e-12)


def heads(count: int = 3) -> IRGraph:
    """Products of one input that are concatenated: each may run beside the others."""
    builder = Builder("heads")
    x = builder.input("x", (16, 16))
    made = []
    for k in range(count):
        w = builder.param(f"w{k}", torch.randn(16, 16))
        made.append(builder.call("aten.relu.default", builder.call("aten.mm.default", x, w)))
    return builder.finish(builder.call("aten.cat.default", made))


def test_what_is_not_read_by_the_next_call_runs_beside_it() -> None:
    plan = planned(heads(), streams=2)
    assert [kind_of(op.kind_id).name for op in plan.calls] == ["gemm", "relu"] * 3 + ["concat"]
    assert plan.streams == (0, 1, 0, 1, 0, 0, 0)
    assert plan.waits == ((), (0,), (), (2,), (), (), (3,))
    lines = str(plan).splitlines()
    assert lines[0].startswith("plan heads: 7 calls on 2 streams, arena")
    assert lines[4].endswith("  stream=1  waits=2")


def test_what_is_read_beside_keeps_its_memory_until_it_was_waited_for() -> None:
    one, two = planned(heads()), planned(heads(), streams=2)
    assert two.arena_bytes > one.arena_bytes
    assert len(two.alias) < len(one.alias)


def test_without_streams_all_calls_are_on_the_first() -> None:
    plan = planned(language_model(2))
    assert set(plan.streams) == {0}
    assert set(plan.waits) == {()}
    assert str(plan).splitlines()[0].count("on 1 stream,") == 1


def test_a_parameter_is_not_written_beside_a_call_that_reads_it() -> None:
    builder = Builder("beside")
    x, w = builder.input("x", (4, 4)), builder.param("w", torch.eye(4))
    row = builder.call("aten.relu.default", builder.call("aten.mm.default", x, w))
    new = builder.call("aten.softmax.int", x, -1)
    graph = builder.finish(builder.call("aten.mm.default", row, x), updates={w.id: new.id})
    assert len(planned(graph).calls) == 4
    plan, x_now = planned(graph, streams=3), torch.randn(4, 4)
    assert plan.streams == (0, 1, 2, 0, 0)
    assert [kind_of(op.kind_id).name for op in plan.calls][-1] == "copy"
    for seed in range(10):
        stored = contents(graph)
        feed = feed_of(plan, graph, [x_now], stored)
        (found,) = run_beside(plan, feed, seed)
        assert torch.allclose(found, x_now.relu() @ x_now, atol=1e-6)
        assert torch.equal(next(iter(stored.values())), x_now.softmax(-1))


def test_what_is_made_beside_lies_where_nothing_lay_meanwhile() -> None:
    feed = {"x": torch.randn(4, 4), "w": torch.randn(4, 4), "wide": torch.randn(4, 32)}
    builder = Builder("beside")
    x, w, wide = (builder.input(name, tensor.shape) for name, tensor in feed.items())
    first = builder.call("aten.mm.default", x, w)
    third = builder.call("aten.mm.default", builder.call("aten.mm.default", first, w), wide)
    aside = builder.call("aten.mm.default", x, x)
    last = builder.call("aten.mm.default", third, builder.call("aten.t.default", wide))
    plan = planned(builder.finish(builder.call("aten.mm.default", last, aside)), streams=3)
    assert plan.streams == (0, 0, 1, 2, 0, 0)
    (wanted,) = Executor(plan, native=False).run(feed)
    assert all(torch.equal(run_beside(plan, feed, seed)[0], wanted) for seed in range(20))


def test_the_first_stream_waits_before_long() -> None:
    builder = Builder()
    x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4))
    aside = builder.call("aten.mm.default", x, w)
    y = x
    for _ in range(2 * WINDOW):
        y = builder.call("aten.mm.default", y, w)
    plan = planned(builder.finish(builder.call("aten.add.Tensor", y, aside)), streams=2)
    assert plan.streams == (1, *[0] * (2 * WINDOW + 1))
    assert plan.waits[WINDOW] == (0,)


def test_ordered_calls_are_on_one_stream() -> None:
    graph = lower_graph(emit_graph(heads()))
    ops = tuple(replace(op, constraints=("ordered",)) for op in graph.ops)
    assert set(make_exec_plan(replace(graph, ops=ops), streams=2).streams) == {0}


def test_nothing_is_left_out_of_a_plan_that_waits() -> None:
    plan = planned(heads(), streams=2)
    assert optimize_plan(plan) is plan


@pytest.mark.parametrize("logged", [False, True])
def test_an_executor_on_a_gpu_puts_calls_on_their_streams(
    monkeypatch: pytest.MonkeyPatch, logged: bool
) -> None:
    plan, seen = planned(heads(), streams=2), list[Any]()

    class Seen(Lanes):
        def run(self, calls: Any, streams: Any, waits: Any) -> None:
            seen.append((len(calls), streams, waits))
            for call in calls:
                call()

    def lanes(device: torch.device, count: int) -> Lanes:
        return Seen([], lambda: Queue(Device(count)), Device(count).on)

    monkeypatch.setattr(segments, "cuda_lanes", lanes)
    monkeypatch.setattr(segments, "_timed", lambda call, device: call() or 0.0)
    executor = Executor(plan, native=False)
    feed = feed_of(plan, heads(), [torch.randn(16, 16)], contents(heads()))
    executor.bind_and_alloc_slots(feed)
    executor.memory.device = torch.device("cuda")
    with executor.logging() if logged else nullcontext([]) as log:
        executor.run_bound()
    assert seen == [(7, plan.streams, plan.waits)]
    assert [entry.number for entry in log] == list(range(7)) * logged


def test_a_run_that_fails_waits_for_what_was_begun() -> None:
    device = Device(2)
    lanes = Lanes(device.queues[1:], lambda: device.queues[0], device.on)

    def fail() -> None:
        raise ValueError("no")

    calls: Sequence[Any] = [lambda: None, fail]
    with pytest.raises(ValueError, match="no"):
        lanes.run(calls, (1, 0), ((), ()))
    first = device.queues[0]
    assert isinstance(first, Queue)
    assert first.work == [(device.queues[1], 1)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device")
def test_streams_of_a_gpu_give_the_same_in_a_recorded_run() -> None:
    device = torch.device("cuda", 0)
    graph = heads(6)
    plan, stored = planned(graph, streams=3), contents(graph)
    x = torch.randn(16, 16)
    feed = {name: t.to(device) for name, t in feed_of(plan, graph, [x], stored).items()}
    executor = Executor(plan, device=device)
    (eager,) = executor.run(feed)
    replay = GraphMemory(device).record(executor.run_bound, [])
    executor.memory[plan.lowered.outputs[0]].zero_()
    replay()
    wanted = torch.cat([torch.relu(x @ w) for w in stored.values()])
    for found in (eager, executor.outputs()[0]):
        assert torch.allclose(found.cpu(), wanted, atol=1e-4)
