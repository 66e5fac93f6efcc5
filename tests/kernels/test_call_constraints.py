"""What calls ask of the planner is carried from the emitter to the plan, and followed there."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.compiler.executor import Executor
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import ARENA, ExecPlan, make_exec_plan, optimize_plan
from shardwright.errors import ExecError
from shardwright.ir import Builder, IRGraph, IRNode
from shardwright.ir.values import Emitted
from shardwright.kernels.emitters import Emitters, emit_graph
from shardwright.kernels.files import decode, encode
from shardwright.kernels.lowered import BY_NAME, KINDS, LoweredGraph
from shardwright.kernels.row import CONSTRAINTS, HINTS


def asking(op: str, **wishes: Any) -> Any:
    """A backend whose calls for one operator ask for something."""
    emitters = Emitters()

    def emit(graph: IRGraph, node: IRNode) -> tuple[Emitted, ...]:
        calls = emitters(graph, node)
        return tuple(replace(call, **wishes) for call in calls) if node.op == op else calls

    return emit


def relus(**wishes: Any) -> LoweredGraph:
    """x → exp → relu → sum of both; the middle one asks."""
    builder = Builder("small", ctx=asking("aten.relu.default", **wishes))
    x = builder.input("x", (4, 4))
    first = builder.call("aten.exp.default", x)
    made = builder.call("aten.relu.default", first)
    out = builder.call("aten.sum.default", builder.call("aten.neg.default", made))
    return lower_graph(builder.finish(out))


def run(plan: ExecPlan, **feed: torch.Tensor) -> list[torch.Tensor]:
    return Executor(plan, native=False).run(feed)


def test_a_call_carries_what_it_asks_for_into_the_text_of_a_file_and_out_of_it() -> None:
    graph = relus(constraints=("no_alias", "ordered"), hints=("late",), saved=(0, 1))
    (op,) = [op for op in graph.ops if op.kind_id == BY_NAME["relu"].id]
    assert (op.constraints, op.hints) == (("no_alias", "ordered"), ("late",))
    assert op.saved == (*op.in_vids, *op.out_vids)
    assert str(graph).splitlines()[2] == (
        "  1 relu(%exp) -> %relu  constraints=no_alias, ordered  hints=late  saved=%exp, %relu"
    )
    text = encode(graph)
    call = json.loads(text)["calls"][1]
    assert call["constraints"] == ["no_alias", "ordered"]
    assert (call["hints"], call["saved"]) == (["late"], [1, 2])
    assert encode(decode(text)) == text
    assert decode(text).ops[1].saved == (1, 2)
    plan = make_exec_plan(decode(text))
    assert "constraints=no_alias, ordered  hints=late  saved=%v1 @" in str(plan)


def test_a_call_that_asks_for_nothing_is_written_as_before() -> None:
    text = encode(relus())
    assert all(
        not call.keys() & {"constraints", "hints", "saved"} for call in json.loads(text)["calls"]
    )


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"constraints": ("tidy",)}, "the constraint 'tidy' is unknown; this version has contig"),
        ({"hints": ("soon",)}, "the hint 'soon' is unknown; this version has early, late"),
        ({"hints": ("early", "late")}, "early or late, not both"),
        ({"saved": (7,)}, "saves operand 7, which no call has made"),
        ({"saved": (-1,)}, "saves operand -1"),
    ],
)
def test_what_the_planner_does_not_know_is_refused(wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExecError, match=said):
        relus(**wishes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"constraints": ["tidy"]}, "call 1: the constraint 'tidy' is unknown"),
        ({"hints": ["soon"]}, "call 1: the hint 'soon' is unknown"),
        ({"saved": [3]}, "call 1 saves .*3"),
        ({"saved": [-1]}, "call 1 saves"),
    ],
)
def test_and_so_it_is_in_a_file(change: dict[str, Any], said: str) -> None:
    text = json.loads(encode(relus()))
    text["calls"][1].update(change)
    with pytest.raises(ExecError, match=said):
        decode(json.dumps(text))


@pytest.mark.parametrize("constraint", ["contiguous", "alike", "no_alias"])
def test_a_view_cannot_lie_elsewhere(constraint: str) -> None:
    builder = Builder(ctx=asking("aten.t.default", constraints=(constraint,)))
    turned = builder.call("aten.t.default", builder.input("x", (2, 3)))
    with pytest.raises(ExecError, match="a view lies in what it is of"):
        lower_graph(builder.finish(turned))


def test_kinds_are_constrained_by_words_that_there_are() -> None:
    words = {word for kind in KINDS for word in kind.constrains}
    assert words == {"alike", "ordered"}
    assert words < CONSTRAINTS.keys()
    assert CONSTRAINTS.keys().isdisjoint(HINTS)
    assert [kind.name for kind in KINDS if kind.constrains] == ["generic", "sgd", "adam", "adamw"]


# --- no_alias --------------------------------------------------------------------------------


def test_a_call_that_must_not_alias_has_memory_of_its_own() -> None:
    free, bound = make_exec_plan(relus()), make_exec_plan(relus(constraints=("no_alias",)))
    (relu,) = [op for op in bound.lowered.ops if op.constraints]
    assert free.alias[relu.out_vids[0]] == relu.in_vids[0]
    assert relu.out_vids[0] not in bound.alias
    assert bound.allocations[relu.out_vids[0]] != bound.allocations[relu.in_vids[0]]


def counting(**wishes: Any) -> ExecPlan:
    builder = Builder("count", ctx=asking("aten.relu.default", **wishes))
    count = builder.buffer("count", torch.zeros(4))
    made = builder.call("aten.relu.default", count)
    return make_exec_plan(lower_graph(builder.finish([], updates={count.id: made.id})))


def test_an_update_that_must_not_alias_is_copied_to_where_it_belongs() -> None:
    assert [len(counting().calls), len(counting(constraints=("no_alias",)).calls)] == [1, 2]
    count = torch.tensor([1.0, -1.0, 2.0, -2.0])
    run(counting(constraints=("no_alias",)), count=count)
    assert count.tolist() == [1, 0, 2, 0]


# --- layouts ---------------------------------------------------------------------------------


def turned(constraints: tuple[str, ...]) -> LoweredGraph:
    """relu of a transposed matrix, which lies transposed, too."""
    builder = Builder("turned", ctx=asking("aten.relu.default", constraints=constraints))
    x = builder.input("x", (2, 3))
    return lower_graph(
        builder.finish(builder.call("aten.relu.default", builder.call("aten.t.default", x)))
    )


def test_operands_that_must_be_contiguous_are_copied_before_and_after() -> None:
    plan = make_exec_plan(turned(("contiguous",)))
    names = [BY_NAME["copy"].id, BY_NAME["relu"].id, BY_NAME["copy"].id]
    assert [op.kind_id for op in plan.calls] == names
    relu = plan.calls[1]
    for vid in (*relu.in_vids, *relu.out_vids):
        assert plan.allocations[vid].strides == (2, 1)
    assert plan.allocations[plan.lowered.outputs[0]].strides == (1, 3)
    x = torch.randn(2, 3)
    assert torch.equal(run(plan, x=x)[0], x.t().relu())
    assert len(make_exec_plan(turned(())).calls) == 1


def stepping(kind: str, **shapes: Any) -> tuple[LoweredGraph, dict[str, torch.Tensor]]:
    """A step of an optimizer on a gradient that lies transposed, and on one with gaps."""
    torch.manual_seed(0)
    builder = Builder("step")
    feed = {"g": torch.randn(6, 4), "h": torch.randn(5, 8), "lr": torch.tensor(0.1)}
    g, h, lr = (builder.input(name, tensor.shape) for name, tensor in feed.items())
    grads = [
        builder.call("aten.t.default", g),
        builder.call("aten.slice.Tensor", h, 1, 0, 8, 2),
    ]
    stored = {"w": torch.randn(4, 6), "v": torch.randn(5, 4)}
    params = [builder.param(name, tensor) for name, tensor in stored.items()]
    options: dict[str, Any] = {"lr": lr, "maximize": False, "weight_decay": 0.1}
    if kind == "sgd":
        options |= {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        made = builder.call("aten._fused_sgd.tensor_lr", params, grads, [], **options)
        updates = zip(params, made[:2], strict=True)
    else:
        lists = []
        for name in ("average", "square", "steps"):
            tensors = [torch.zeros(() if name == "steps" else p.shape) for p in params]
            lists.append([builder.state(f"{name}{k}", t) for k, t in enumerate(tensors)])
            stored |= {f"{name}{k}": t + (name == "steps") for k, t in enumerate(tensors)}
        options |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
        made = builder.call(
            f"aten._fused_{kind}.tensor_lr",
            params,
            grads,
            lists[0],
            lists[1],
            [],
            lists[2],
            **options,
        )
        updates = zip([*params, *lists[0], *lists[1]], [*made[:2], *made[4:8]], strict=True)
    graph = builder.finish([], updates={old.id: new.id for old, new in updates})
    return lower_graph(emit_graph(graph)), stored | feed


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("native", [False, True])
def test_an_optimizer_takes_gradients_that_lie_otherwise(kind: str, native: bool) -> None:
    """Torch's fused kernels go through memory as it lies, and then took one weight's gradient for
    another's."""
    graph, feed = stepping(kind)
    wanted = {name: feed[name].clone() for name in ("w", "v")}
    parameters = [torch.nn.Parameter(tensor) for tensor in wanted.values()]
    grads = [feed["g"].t().contiguous(), feed["h"][:, 0:8:2].contiguous()]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    optimizers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if kind != "sgd":
        options["betas"] = (0.9, 0.99)
    optimizers[kind](parameters, **options).step()
    Executor(optimize_plan(make_exec_plan(graph)), native=native).run(feed)
    for parameter, name in zip(parameters, wanted, strict=True):
        assert torch.allclose(feed[name], parameter, rtol=1e-5, atol=1e-6)


def test_an_optimizer_whose_operands_lie_alike_needs_no_copies() -> None:
    builder = Builder()
    w, v = builder.param("w", torch.zeros(6, 4).t()), builder.param("v", torch.zeros(3))
    g, h = builder.input("g", (4, 6), strides=(1, 4)), builder.input("h", (3,))
    options = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    options |= {"lr": builder.input("lr", ()), "maximize": False, "weight_decay": 0.1}
    made = builder.call("aten._fused_sgd.tensor_lr", [w, v], [g, h], [], **options)
    graph = builder.finish([], updates={w.id: made[0].id, v.id: made[1].id})
    plan = make_exec_plan(lower_graph(emit_graph(graph)))
    assert len(plan.calls) == 1
    assert len(plan.renewed) == 2


# --- saved -----------------------------------------------------------------------------------


def test_what_is_saved_lies_there_when_the_run_has_ended() -> None:
    x = torch.randn(4, 4)
    for wishes in ({}, {"saved": (0,)}):
        plan = optimize_plan(make_exec_plan(relus(**wishes)))
        executor = Executor(plan, native=False)
        executor.run({"x": x})
        exp = plan.calls[0].out_vids[0]
        assert torch.equal(executor.memory[exp], x.exp()) is bool(wishes)


def test_what_nobody_reads_is_made_where_it_is_saved() -> None:
    builder = Builder(ctx=asking("aten.relu.default", saved=(1,)))
    x = builder.input("x", (4,))
    builder.call("aten.relu.default", x)
    graph = lower_graph(builder.finish(builder.call("aten.exp.default", x)))
    assert len(optimize_plan(make_exec_plan(graph)).calls) == 2


def test_what_is_saved_of_a_value_that_is_updated_is_what_it_was() -> None:
    builder = Builder(ctx=asking("aten.add.Tensor", saved=(0,)))
    count, one = builder.buffer("count", torch.zeros(2)), builder.input("one", (2,))
    made = builder.call("aten.add.Tensor", count, one)
    plan = make_exec_plan(lower_graph(builder.finish([], updates={count.id: made.id})))
    executor, tensor = Executor(plan, native=False), torch.ones(2)
    executor.run({"count": tensor, "one": torch.ones(2)})
    (saved,) = [vid for op in plan.lowered.ops for vid in op.saved]
    assert plan.allocations[saved].buffer == ARENA
    assert executor.memory[saved].tolist() == [1, 1]
    assert tensor.tolist() == [2, 2]
