"""What was called is what the plan says, call by call."""

from dataclasses import replace

import pytest
import torch

from shardwright.compiler.executor import Executor, NativeSegment
from shardwright.compiler.trace import Trace, check_trace, trace_of
from shardwright.errors import ExecError
from shardwright.kernels.lowered import kind_of
from shardwright.kernels.native.library import load
from tests.compiler.running import assert_close, contents, feed_of, planned, run_nodes
from tests.graphs import language_model, tokens


def trace_run(executor: Executor) -> Trace:
    """What one run on what is bound calls."""
    with executor.logging() as log:
        executor.run(copy=False)
    return trace_of(executor.plan, log)


@pytest.fixture(params=[False, True], ids=["torch", "native"])
def executor(request):
    graph = language_model(2)
    executor = Executor(planned(graph), native=request.param)
    executor.bind_and_alloc_slots(feed_of(executor.plan, graph, [tokens()], contents(graph)))
    return executor


def test_every_call_is_made_once_and_in_order(executor):
    trace = trace_run(executor)
    check_trace(executor.plan, trace)
    assert [call.index for call in trace.calls] == list(range(len(executor.plan.calls)))
    assert trace.counts["gemm"] == 7
    assert all(call.seconds > 0 for call in trace.calls)
    natives = {call.index for call in trace.calls if call.native}
    assert natives.isdisjoint(executor.refused)
    assert len(natives) + len(executor.refused) == len(trace.calls)
    wanted = run_nodes(language_model(2), [tokens()])[0][0]
    assert_close(executor.outputs()[0], wanted, 1e-12)


def test_what_differs_from_the_plan_is_seen(executor):
    calls = trace_run(executor).calls
    left_out = Trace((*calls[:3], *calls[4:]))
    swapped = Trace((*calls[:3], calls[4], calls[3], *calls[5:]))
    other = Trace((*calls[:3], replace(calls[3], kind="relu"), *calls[4:]))
    for wrong in (left_out, swapped, other):
        with pytest.raises(ExecError, match="call 3 of plan"):
            check_trace(executor.plan, wrong)
    with pytest.raises(ExecError, match="22 calls, but 23 were made"):
        check_trace(executor.plan, Trace((*calls, calls[0])))


def rewire(executor, order):
    """Let the first segment of several calls call others: ``order`` is of its own calls."""
    executor.run()
    segment = max(executor.segments, key=lambda found: found.count)
    if isinstance(segment, NativeSegment):
        segment._program = load().program(order(segment.bounds))
    else:
        segment._calls = list(order(segment._calls))
    return segment.first


@pytest.mark.parametrize(
    "order",
    [
        lambda calls: calls[::-1],
        lambda calls: (calls[0],) * len(calls),
        lambda calls: calls[:-1],
        lambda calls: (*calls, calls[-1]),
    ],
    ids=["reversed", "one kernel for all", "one left out", "one twice"],
)
def test_a_run_that_calls_something_else_is_seen(executor, order):
    check_trace(executor.plan, trace_run(executor))
    rewire(executor, order)
    with pytest.raises(ExecError, match=r"call \d+ of plan|calls, but"):
        check_trace(executor.plan, trace_run(executor))


def test_a_kernel_of_another_kind_is_seen(executor):
    """A call's kind is that of the kernel that ran, whatever stands in the plan."""
    plan = executor.plan
    kinds = [kind_of(op.kind_id).name for op in plan.calls]
    assert [call.kind for call in trace_run(executor).calls] == kinds
    plan.__dict__["calls"] = (plan.calls[1], plan.calls[0], *plan.calls[2:])
    with pytest.raises(ExecError, match="call 0 of plan"):
        check_trace(plan, trace_run(executor))


def test_a_run_that_fails_is_traced_up_to_there():
    graph = language_model(2)
    executor = Executor(planned(graph))
    wrong = torch.full_like(tokens(), 1 << 20)
    feed = feed_of(executor.plan, graph, [wrong], contents(graph))
    with executor.logging() as log, pytest.raises(ExecError, match="index"):
        executor.run(feed)
    assert len(log) < len(executor.plan.calls)
    executor.run({graph.values[graph.inputs[0]].name: tokens()})
    assert len(log) < len(executor.plan.calls)


def test_a_trace_reads_as_a_list_of_calls(executor):
    text = str(trace_run(executor)).splitlines()
    assert text[0].startswith("22 calls, ")
    assert text[1].split()[:2] == ["0", "embedding"]
