"""Laws of plans, checked without running: nothing is written over that is read later."""

import sys
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.compiler.memory.plan import ARENA, ExecPlan, make_exec_plan
from shardwright.errors import ExecError
from shardwright.ir import Builder
from shardwright.ir.tensor_meta import itemsize
from shardwright.kernels.lowered import BY_NAME, LoweredGraph, LoweredOp, ValueSpec, find_bases
from shardwright.kernels.row import ABSENT
from shardwright.kernels.strides import extent
from tests.compiler.running import planned
from tests.graphs import language_model
from tests.ir.random_graphs import RandomGraph, random_graphs


class Shadow:
    """Who wrote each byte of each buffer last: the run of a plan without contents."""

    def __init__(self, plan: ExecPlan) -> None:
        self.plan = plan
        self.owner: dict[tuple[int, int], int] = {}
        self.roots = {
            vid: view.base
            for vid, view in find_bases(plan.lowered.values, plan.lowered.ops).items()
        }
        for buffer in plan.buffers:
            if buffer.kind in ("input", "stored"):
                self.write(buffer.vid)

    def bytes_of(self, vid: int) -> range:
        home = self.plan.allocations[vid]
        size = itemsize(self.plan.lowered.values[vid].dtype)
        return range(home.offset, home.offset + extent(home.shape, home.strides) * size)

    def write(self, vid: int) -> None:
        buffer = self.plan.allocations[vid].buffer
        where = self.bytes_of(vid)
        assert where.stop <= self.plan.buffers[buffer].nbytes
        self.owner.update(((buffer, at), vid) for at in where)

    def read(self, vid: int) -> None:
        buffer = self.plan.allocations[vid].buffer
        found = {self.owner[buffer, at] for at in self.bytes_of(vid)}
        assert found <= {self.roots[vid]}, self.plan.lowered.values[vid].name

    def run(self) -> None:
        for op in self.plan.calls:
            for vid in op.in_vids:
                if vid != ABSENT:
                    self.read(vid)
            for vid in op.out_vids:
                if vid != ABSENT:
                    self.write(vid)
        for vid in (*self.plan.lowered.outputs, *self.plan.lowered.updates.values()):
            self.read(vid)


def check(plan: ExecPlan, updates: Mapping[int, int]) -> None:
    """No value is written over before its last read, and updates lie in what they update."""
    Shadow(plan).run()
    assert plan.arena_bytes >= plan.peak_bytes
    for old, new in plan.lowered.updates.items():
        if updates[old] != old:
            home = plan.allocations[new]
            assert plan.buffers[home.buffer].vid == old
            assert home.offset == 0
    for out, taken in plan.alias.items():
        assert plan.allocations[out].buffer == plan.allocations[taken].buffer
        assert plan.allocations[out].offset == plan.allocations[taken].offset


@settings(deadline=None, max_examples=100)
@given(random_graphs(), st.sampled_from(["arena", "caller"]), st.booleans())
def test_nothing_is_written_over_that_is_read_later(drawn: RandomGraph, outputs, donating):
    graph = drawn.graph
    pairs = [
        (vid, out)
        for vid, out in zip(graph.inputs, graph.outputs, strict=False)
        if graph.values[vid].dtype == graph.values[out].dtype
        and graph.values[vid].shape == graph.values[out].shape
    ]
    donated = dict(pairs) if donating else {}
    check(planned(graph, outputs=outputs, donated=donated), graph.updates)


@pytest.mark.parametrize("layers", [1, 6])
def test_the_arena_is_hardly_larger_than_what_lives_at_once(layers):
    plan = planned(language_model(layers))
    check(plan, {})
    assert plan.arena_bytes <= 1.1 * plan.peak_bytes


def test_depth_takes_no_more_memory():
    assert planned(language_model(12)).arena_bytes == planned(language_model(3)).arena_bytes


def chain_of(*ops, dtype="f32", shape=(4, 4)):
    builder = Builder("small")
    x = builder.input("x", shape, dtype)
    for op in ops:
        x = builder.call(op, x)
    return builder.finish(x)


def test_the_text_of_a_plan():
    builder = Builder("small")
    x = builder.input("x", (2, 3))
    w, count = builder.param("w", torch.zeros(4, 3)), builder.buffer("count", torch.zeros(2, 4))
    y = builder.call("aten.relu.default", builder.call("aten.linear.default", x, w))
    new = builder.call("aten.add.Tensor", count, y)
    turned = builder.call("aten.t.default", builder.call("aten.slice.Tensor", y, 1, 1, 3))
    plan = planned(builder.finish([turned], updates={count.id: new.id}))
    assert str(plan).splitlines() == [
        "plan small: 3 calls, arena 64 B (peak 64 B), 1 input, 2 stored",
        "  0 gemm(%x @x, %w @w, -, -) -> %linear @0 f32[2, 4]  transpose_b=1",
        "  1 relu(%linear @0) -> %relu @0 f32[2, 4] in %linear",
        "  2 add(%count @count, %relu @0) -> %add @count f32[2, 4] in %count",
        "  return %t @4",
    ]


def test_elementwise_calls_work_in_place():
    plan = planned(chain_of("aten.relu.default", "aten.relu.default", "aten.relu.default"))
    assert plan.arena_bytes == 64
    assert len(plan.alias) == 2


def test_what_a_view_still_shows_is_not_taken():
    builder = Builder()
    a = builder.call("aten.relu.default", builder.input("x", (4, 4)))
    view = builder.call("aten.select.int", a, 0, 1)
    b = builder.call("aten.relu.default", a)
    plan = planned(builder.finish([b, builder.call("aten.relu.default", view)]))
    assert a.id not in plan.alias.values()
    check(plan, {})


def test_a_residual_is_added_where_it_lies():
    builder = Builder()
    x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4))
    h = builder.call("aten.relu.default", x)
    args = (None, h, False, False, 0, 1.0)
    fine = builder.call("shardwright.gemm.default", x, w, *args)
    plan = planned(builder.finish(fine))
    assert len(plan.alias) == 1
    builder = Builder()
    x, w = builder.input("x", (4, 4)), builder.input("w", (4, 4))
    h = builder.call("aten.relu.default", x)
    own = builder.call("shardwright.gemm.default", h, w, None, h, False, False, 0, 1.0)
    assert planned(builder.finish(own)).alias == {}


def test_external_memory_has_buffers_of_its_own():
    plan = planned(language_model(1), outputs="caller")
    kinds = [buffer.kind for buffer in plan.buffers]
    assert kinds[ARENA] == "arena"
    assert set(kinds[1:]) == {"input", "stored", "output"}
    (output,) = plan.lowered.outputs
    assert plan.buffers[plan.allocations[output].buffer].kind == "output"


def test_promises_that_do_not_fit_are_refused():
    graph = chain_of("aten.relu.default")
    x, y = graph.inputs[0], graph.outputs[0]
    with pytest.raises(ExecError, match=f"value {y} is to be static"):
        planned(graph, static=[y])
    with pytest.raises(ExecError, match=f"value {y} is donated to {x}"):
        planned(graph, donated={y: x})
    with pytest.raises(ExecError, match="static"):
        planned(graph, static=[x], donated={x: y})


def test_a_call_that_reads_what_is_not_made_is_refused():
    specs = {k: ValueSpec(k, f"v{k}", (2,), "f32", "tmp") for k in range(3)}
    relu = BY_NAME["relu"].id
    ops = (LoweredOp(relu, 0, b"", (1,), (2,)), LoweredOp(relu, 0, b"", (0,), (1,)))
    with pytest.raises(ExecError, match="reads value 1 early"):
        make_exec_plan(LoweredGraph("wrong", specs, ops, (0,), (2,)))


def test_every_call_of_many_layers_is_planned_in_moderate_time():
    """Work grows with the calls, not with their square: counted in steps of the planner."""

    def steps(layers):
        graph = language_model(layers)
        planned(graph)
        count = 0

        def trace(frame, event, arg):
            nonlocal count
            count += 1

        sys.setprofile(trace)
        try:
            planned(graph)
        finally:
            sys.setprofile(None)
        return count

    assert steps(24) <= 4.6 * steps(6)
