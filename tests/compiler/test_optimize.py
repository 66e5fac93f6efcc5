"""What is left out of a plan changes nothing."""

import torch
from hypothesis import given, settings

from shardwright.compiler.executor import Executor
from shardwright.compiler.memory.plan import make_exec_plan, optimize_plan
from shardwright.kernels.lowered import BY_NAME, LoweredGraph, LoweredOp, ValueSpec
from tests.compiler.running import assert_close, contents, feed_of, planned
from tests.ir.random_graphs import RandomGraph, random_graphs


@settings(deadline=None, max_examples=30)
@given(random_graphs())
def test_an_optimized_plan_gives_the_same(drawn: RandomGraph):
    graph, stored = drawn.graph, contents(drawn.graph)
    plan = optimize_plan(planned(graph))
    found = Executor(plan, native=False).run(feed_of(plan, graph, drawn.inputs, stored))
    found += [stored[vid] for vid in graph.updates]
    for a, b in zip(found, [*drawn.outputs, *drawn.updates], strict=True):
        assert_close(a, b.contiguous(), 1e-12)


def lowered(*ops, outputs=(3,)):
    specs = {k: ValueSpec(k, f"v{k}", (4,), "f32", "tmp") for k in range(4)}
    calls = [LoweredOp(BY_NAME[name].id, 0, b"", ins, outs) for name, ins, outs in ops]
    return LoweredGraph("small", specs, tuple(calls), (0,), outputs)


def test_copies_onto_themselves_are_left_out():
    graph = lowered(("relu", (0,), (1,)), ("copy", (1,), (2,)), ("relu", (2,), (3,)))
    plan = make_exec_plan(graph)
    found = optimize_plan(plan)
    assert [len(plan.calls), len(found.calls)] == [3, 2]
    x = torch.tensor([1.0, -1.0, 0.0, 2.0])
    assert torch.equal(Executor(found).run({"v0": x})[0], x.relu())


def test_a_copy_of_what_is_read_later_stays():
    graph = lowered(
        ("relu", (0,), (1,)), ("copy", (1,), (2,)), ("relu", (2,), (3,)), outputs=(1, 3)
    )
    assert len(optimize_plan(make_exec_plan(graph)).calls) == 3


def test_calls_whose_results_nobody_reads_are_left_out():
    graph = lowered(("relu", (0,), (1,)), ("relu", (1,), (2,)), ("relu", (0,), (3,)))
    assert len(optimize_plan(make_exec_plan(graph)).calls) == 1


def test_a_plan_with_nothing_to_leave_out_stays_as_it_is():
    plan = make_exec_plan(lowered(("relu", (0,), (3,))))
    assert optimize_plan(plan) is plan
