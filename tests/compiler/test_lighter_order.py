"""The order of calls: the graph's, but where another takes less memory or a hint asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.executor import Executor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ExecPlan, make_exec_plan, optimize_plan
from shardwright.errors import ExecError
from shardwright.ir import Builder
from shardwright.kernels.emitters import emit_graph
from shardwright.kernels.lowered import LoweredGraph, kind_of
from tests.compiler.running import assert_close, contents, feed_of
from tests.compiler.test_exec_plan import Shadow
from tests.graphs import language_model
from tests.ir.random_graphs import RandomGraph, random_graphs


def waiting(hint: str = "", constraint: str = "") -> LoweredGraph:
    """A softmax that is made first, and read when what takes most memory has come and gone."""
    builder = Builder("waiting")
    x, y = builder.input("x", (64, 64)), builder.input("y", (8, 256))
    early = builder.call("aten.softmax.int", x, -1)
    wide = builder.call("aten.mm.default", builder.call("aten.t.default", y), y)
    row = builder.call("aten.sum.dim_IntList", wide, [0])
    out = builder.call("aten.mm.default", early, builder.call("aten.mm.default", x, x))
    graph = lower_graph(emit_graph(builder.finish([out, row])))
    (index,) = [k for k, op in enumerate(graph.ops) if kind_of(op.kind_id).name == "softmax"]
    ops = list(graph.ops)
    ops[index] = replace(
        ops[index], hints=(hint,) * bool(hint), constraints=(constraint,) * bool(constraint)
    )
    return replace(graph, ops=tuple(ops))


def names(plan: ExecPlan) -> list[str]:
    return [kind_of(op.kind_id).name for op in plan.calls]


def test_what_waits_through_the_peak_is_made_after_it() -> None:
    plan = make_exec_plan(waiting())
    given = make_exec_plan(waiting(hint="early"))
    assert names(given) == ["softmax", "gemm", "reduce_sum", "gemm", "gemm"]
    assert names(plan) == ["gemm", "reduce_sum", "gemm", "softmax", "gemm"]
    assert plan.arena_bytes < given.arena_bytes
    assert [len(plan.moved), len(given.moved)] == [1, 0]


def test_a_plan_says_what_is_made_later_and_when() -> None:
    lines = str(make_exec_plan(waiting())).splitlines()
    assert [line.endswith("  later") for line in lines[1:6]] == [False, False, False, True, False]
    assert lines[0].startswith("plan waiting: 5 calls, 1 later")
    assert "later" not in str(make_exec_plan(waiting(hint="early")))


def test_calls_that_are_ordered_stay_where_they_are() -> None:
    assert not make_exec_plan(waiting(constraint="ordered")).moved


def test_a_small_thing_that_waits_moves_only_where_it_is_hinted_to() -> None:
    builder = Builder()
    x = builder.input("x", (8, 8))
    first = builder.call("aten.softmax.int", x, -1)
    second = builder.call("aten.softmax.int", x, 0)
    graph = lower_graph(emit_graph(builder.finish(builder.call("aten.mm.default", first, second))))
    assert not make_exec_plan(graph).moved
    ops = (replace(graph.ops[0], hints=("late",)), *graph.ops[1:])
    assert make_exec_plan(replace(graph, ops=ops)).order == (1, 0, 2)
    ops = (replace(ops[0], constraints=("ordered",)), *graph.ops[1:])
    assert make_exec_plan(replace(graph, ops=ops)).order == (0, 1, 2)


def test_what_reads_a_parameter_stays_before_its_update() -> None:
    builder = Builder()
    w, x = builder.param("w", torch.ones(8, 8)), builder.input("x", (8, 8))
    read = builder.call("aten.softmax.int", w, -1)
    new = builder.call("aten.relu.default", w)
    out = builder.call("aten.mm.default", read, x)
    graph = lower_graph(emit_graph(builder.finish(out, updates={w.id: new.id})))
    ops = (replace(graph.ops[0], hints=("late",)), *graph.ops[1:])
    plan = make_exec_plan(replace(graph, ops=ops))
    assert plan.order == (0, 1, 2)
    ((old, made),) = plan.lowered.updates.items()
    assert plan.alias[made] == old


@pytest.mark.parametrize("layers", [1, 4])
def test_a_model_whose_order_is_as_good_as_any_keeps_it(layers: int) -> None:
    graph = lower_graph(emit_graph(language_model(layers)))
    assert not make_exec_plan(graph).moved


@settings(deadline=None, max_examples=60)
@given(random_graphs(), st.data())
def test_any_order_gives_the_same(drawn: RandomGraph, data: st.DataObject) -> None:
    """Hinted or not, a plan's calls read nothing before it is made, nor after it is gone."""
    graph, stored = drawn.graph, contents(drawn.graph)
    lowered = lower_graph(emit_graph(graph))
    hints = st.sampled_from([(), (), ("late",), ("early",)])
    ops = tuple(replace(op, hints=data.draw(hints)) for op in lowered.ops)
    plan = make_exec_plan(replace(lowered, ops=ops))
    Shadow(plan).run()
    plan = optimize_plan(plan)
    found = Executor(plan, native=False).run(feed_of(plan, graph, drawn.inputs, stored))
    found += [stored[vid] for vid in graph.updates]
    for a, b in zip(found, [*drawn.outputs, *drawn.updates], strict=True):
        assert_close(a, b.contiguous(), 1e-12)


def test_an_order_that_reads_before_it_writes_is_refused() -> None:
    graph = waiting()
    with pytest.raises(ExecError, match=r"reads value \d+ early"):
        make_exec_plan(replace(graph, ops=graph.ops[::-1]))
