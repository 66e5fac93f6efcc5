"""Runs of nodes are differentiated as autograd does, whatever they share, hide or replace."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwright as sw
from shardwright.autodiff.differentiate import Differentiator, add_into
from shardwright.autodiff.vjp import Vjps
from shardwright.errors import GraphError
from shardwright.ir import Builder, IRGraph, IRValue, validate
from shardwright.ir.execute import compile_graph
from shardwright.ops import register_op
from tests.building.derivatives import distance, run, with_gradients, wrong_kinds
from tests.tracing.equality import operators

VJPS = Vjps()


def model_gradients(
    model: nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[IRGraph, dict[str, float]]:
    """The graph of a model's loss with its backward, and how far each gradient is from eager's."""
    graph = sw.capture(model, args)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wants = [value.id for value in graph.stored() if value.names[0] in named]
    before = {key: tensor.clone() for key, tensor in graph.tensors.items()}
    loss = model(*args)
    seed = torch.ones_like(loss)
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    expected = dict(zip(named, gradients, strict=True))
    for key, tensor in before.items():
        graph.tensors[key].data.copy_(tensor)  # running statistics have moved
    found = with_gradients(graph, wants, [(graph.outputs[0], seed)], VJPS)
    inputs = [*args, seed]
    result, *rest = run(found.graph, inputs)
    assert distance(result, loss.detach()) <= 1e-12
    assert wrong_kinds(found.graph, inputs) == []
    names = [graph.values[v].names[0] for v in wants]
    present = [name for name, there in zip(names, found.present, strict=True) if there]
    assert set(present) == {name for name, gradient in expected.items() if gradient is not None}
    return found.graph, {
        name: distance(gradient, expected[name])
        for name, gradient in zip(present, rest[: len(present)], strict=True)
    }


def assert_equal_gradients(model: nn.Module, *args: torch.Tensor) -> IRGraph:
    torch.manual_seed(0)
    graph, distances = model_gradients(model.double(), args)
    assert distances
    assert max(distances.values()) <= 1e-12, distances
    return graph


# --- what reaches a value ---------------------------------------------------------------------


def test_uses_are_added_the_last_first():
    builder = Builder()
    x = builder.input("x", (3,), "f64")
    first = builder.call("aten.sin.default", x)
    second = builder.call("aten.mul.Tensor", first, x)
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", (3,), "f64")
    found = Differentiator(builder, VJPS).backward(nodes, {second.id: seed}, [x.id])
    added = builder.graph.nodes[-1]
    through_mul = next(node for node in builder.graph.nodes if node.op == "aten.mul.Tensor")
    assert added.op == "aten.add.Tensor"
    assert found[x.id].id == added.outputs[0]
    terms = [builder.graph.values[v] for v in added.inputs]
    assert [term.producer for term in terms] == sorted(term.producer for term in terms)
    assert through_mul in nodes


def test_a_gradient_from_outside_is_added_to():
    builder = Builder()
    x = builder.input("x", (3,), "f64")
    middle = builder.call("aten.sin.default", x)
    end = builder.call("aten.cos.default", middle)
    nodes = list(builder.graph.nodes)
    seeds = {v.id: builder.input("seed", (3,), "f64") for v in (end, middle)}
    found = Differentiator(builder, VJPS).backward(nodes, seeds, [x.id, middle.id])
    graph = builder.finish([found[x.id], found[middle.id]])
    a, g_end, g_middle = torch.randn(3, 3, dtype=torch.float64)
    of_middle = g_middle - a.sin().sin() * g_end
    results = run(graph, [a, g_end, g_middle])
    assert distance(results[1], of_middle) <= 1e-15
    assert distance(results[0], of_middle * a.cos()) <= 1e-15


def test_what_does_not_depend_on_the_wanted_is_left_alone():
    builder = Builder()
    x, y = builder.input("x", (3,), "f64"), builder.input("y", (3,), "f64")
    hidden = builder.call("aten.detach.default", builder.call("aten.sin.default", x))
    whole = builder.call("aten.argmax.default", builder.call("aten.mul.Tensor", hidden, y), 0)
    picked = builder.call("aten.index.Tensor", y, [whole])
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", (), "f64")
    found = Differentiator(builder, VJPS).backward(nodes, {picked.id: seed}, [x.id, y.id])
    assert set(found) == {y.id}
    written = [node.op for node in builder.graph.nodes[len(nodes) :]]
    assert not any("mul" in op or "cos" in op for op in written)


def test_an_operator_without_a_derivative_is_named():
    builder = Builder()
    x, y = builder.input("x", (3,), "f64"), builder.input("y", (3,), "f64")
    with builder.scope("layers.0", "tests.Layer"):
        made = builder.call("aten.copy.default", x, y)
    seed = builder.input("seed", (3,), "f64")
    with pytest.raises(
        GraphError, match=r"in layers\.0 \(tests\.Layer\): aten\.copy\.default cannot be d"
    ):
        Differentiator(builder, VJPS).backward(list(builder.graph.nodes), {made.id: seed}, [y.id])


# --- what is saved ----------------------------------------------------------------------------


def layers(builder: Builder) -> tuple[list[IRValue], IRValue]:
    x = builder.input("x", (2, 4), "f64")
    weight = builder.input("weight", (4,), "f64")
    y = builder.call("aten.layer_norm.default", x, [4], weight)
    y = builder.call("aten.gelu.default", y)
    return [x, weight], builder.call("aten.layer_norm.default", y, [4], weight)


def test_nodes_are_replaced_where_the_backward_reads_more_than_they_make():
    builder = Builder()
    wants, y = layers(builder)
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", (2, 4), "f64")
    differentiator = Differentiator(builder, VJPS)
    found = differentiator.backward(nodes, {y.id: seed}, [v.id for v in wants])
    assert set(differentiator.replaced) == {nodes[0].id, nodes[2].id}
    differentiator.exchange()
    graph = builder.graph
    assert operators(graph)[:3] == ["native_layer_norm", "gelu", "native_layer_norm"]
    assert graph.nodes[0].outputs[0] == nodes[0].outputs[0]
    assert all(v.users for v in (graph.values[i] for i in graph.nodes[0].outputs))
    finished = builder.finish([y, *found.values()])
    validate(finished)


def test_what_a_replaced_node_makes_lies_as_was_thought_of():
    """Attention whose mask wants a gradient is computed by another kernel, in another order."""
    torch.manual_seed(0)
    builder = Builder("attention")
    x = builder.call("aten.transpose.int", builder.input("x", (2, 4, 3, 5), "f64"), 1, 2)
    mask = builder.param("mask", torch.randn(4, 4, dtype=torch.float64))
    y = builder.call("aten.scaled_dot_product_attention.default", x, x, x, mask)
    assert y.strides == x.strides, "the kernel without a gradient keeps the order of queries"
    y = builder.call("aten.transpose.int", y, 1, 2)
    y = builder.call("aten.view.default", y, [2, 4, 15])  # a view of that order only
    graph = builder.finish([y])
    inputs = [torch.randn(2, 4, 3, 5, dtype=torch.float64), torch.randn(2, 4, 15).double()]
    (wanted,) = (value.id for value in graph.stored())
    found = with_gradients(graph, [wanted], [(graph.outputs[0], inputs[1])], VJPS)
    assert wrong_kinds(found.graph, inputs) == []
    result, gradient, *_ = run(found.graph, inputs)
    leaf = graph.tensors[wanted].clone().requires_grad_()
    expected = nn.functional.scaled_dot_product_attention(*[inputs[0].transpose(1, 2)] * 3, leaf)
    expected = expected.transpose(1, 2).reshape(2, 4, 15)
    expected.backward(inputs[1])
    assert distance(result, expected.detach()) <= 1e-12
    assert distance(gradient, leaf.grad) <= 1e-12


def test_a_node_may_be_differentiated_again():
    builder = Builder()
    wants, y = layers(builder)
    nodes = list(builder.graph.nodes)
    differentiator = Differentiator(builder, VJPS)
    results = []
    for _ in range(2):
        seed = builder.input("seed", (2, 4), "f64")
        found = differentiator.backward(nodes, {y.id: seed}, [v.id for v in wants])
        results += found.values()
    differentiator.exchange()
    graph = builder.finish([y, *results])
    assert operators(graph).count("native_layer_norm") == 2
    x, weight = torch.randn(2, 4, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    seeds = [torch.randn(2, 4, dtype=torch.float64) for _ in range(2)]
    _, *found = run(graph, [x, weight, *seeds])
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    builder = Builder()
    _, y = layers(builder)
    (made,) = compile_graph(builder.finish([y]))(leaves)
    expected = [
        g for seed in seeds for g in torch.autograd.grad(made, leaves, seed, retain_graph=True)
    ]
    for a, b in zip(found, expected, strict=True):
        assert distance(a, b) <= 1e-14


def test_equal_layers_are_recorded_once():
    vjps = Vjps()
    builder = Builder()
    x = builder.input("x", (2, 4), "f64")
    y = x
    for i in range(6):
        y = builder.call("aten.linear.default", y, builder.input(f"w{i}", (4, 4), "f64"))
        y = builder.call("aten.tanh.default", y)
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", (2, 4), "f64")
    Differentiator(builder, vjps).backward(nodes, {y.id: seed}, [x.id])
    assert vjps.recorded == 2


# --- accumulated gradients are products and sums in one, and the numbers stay --------------------


def inputs(builder: Builder, *shapes: tuple[int, ...]) -> list[IRValue]:
    return [builder.input(f"x{i}", shape, "f64") for i, shape in enumerate(shapes)]


def tensors(graph: IRGraph) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [graph.values[value_id].shape for value_id in graph.inputs]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def live(graph: IRGraph, value: IRValue) -> list[str]:
    """The operators that a value depends on."""
    needed, found = {value.id}, []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            found.append(node.op.split(".")[1])
    return found[::-1]


def product(builder: Builder, a: IRValue, b: IRValue) -> IRValue:
    return builder.call("aten.mm.default", a, b)


def of_transposed(op: str, which: int) -> Callable[[Builder, IRValue, IRValue], IRValue]:
    """The transposition of a product of which one factor is transposed."""

    def write(builder: Builder, *factors: IRValue) -> IRValue:
        listed = list(factors)
        listed[which] = builder.call("aten.t.default", listed[which])
        return builder.call(op, product(builder, *listed))

    return write


def turned_twice(builder: Builder, a: IRValue, b: IRValue) -> IRValue:
    turned = builder.call("aten.t.default", product(builder, a, b))
    return builder.call("aten.transpose.int", turned, 1, 0)


@pytest.mark.parametrize(
    ("write", "shapes", "expected", "ops"),
    [
        (product, [(3, 5), (3, 4), (4, 5)], torch.mm, ["addmm"]),
        (turned_twice, [(3, 5), (3, 4), (4, 5)], torch.mm, ["addmm"]),
        *(
            (of_transposed(op, which), shapes, expected, ["t", "addmm"])
            for op in ("aten.t.default", "aten.numpy_T.default")
            for which, shapes, expected in (
                (0, [(5, 3), (4, 3), (4, 5)], lambda x, y: (x.t() @ y).t()),
                (1, [(5, 3), (3, 4), (5, 4)], lambda x, y: (x @ y.t()).t()),
            )
        ),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_product_and_sum_are_one(
    write: Callable[..., IRValue],
    shapes: list[tuple[int, int]],
    expected: Callable[..., torch.Tensor],
    ops: list[str],
    times: int,
):
    builder = Builder()
    total, *factors = inputs(builder, *shapes)
    for _ in range(times):
        total = add_into(builder, total, write(builder, *factors))
    assert live(builder.graph, total) == ops * times
    graph = builder.finish(total)
    acc, x, y = tensors(graph)
    assert distance(run(graph, [acc, x, y])[0], acc + times * expected(x, y)) < 1e-15


def test_the_gradient_stays_what_it_was():
    """It may be that of another value as well, and be read only later."""
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    product = builder.call("aten.mm.default", a, b)
    total = add_into(builder, total, product)
    graph = builder.finish([total, builder.call("aten.neg.default", product)])
    acc, x, y = tensors(graph)
    added, negated = run(graph, [acc, x, y])
    assert distance(added, acc + x @ y) < 1e-15
    assert torch.equal(negated, -(x @ y))


def test_what_is_read_elsewhere_stays():
    builder = Builder()
    total, a, b = inputs(builder, (3, 5), (3, 4), (4, 5))
    product = builder.call("aten.mm.default", a, b)
    read = builder.call("aten.relu.default", product)
    total = add_into(builder, total, product)
    assert operators(builder.graph) == ["mm", "relu", "add"]
    builder.finish([total, read])


def test_sums_keep_the_dtype_of_the_accumulator():
    builder = Builder()
    a, b = builder.input("a", (3, 4), "bf16"), builder.input("b", (4, 5), "bf16")
    product = builder.call("aten.mm.default", a, b)
    wide = add_into(builder, builder.input("wide", (3, 5), "f32"), product)
    narrow = add_into(builder, builder.input("narrow", (3, 5), "bf16"), wide)
    assert (wide.dtype, narrow.dtype) == ("f32", "bf16")
    assert operators(builder.graph) == ["mm", "add", "add", "to"]


def test_a_linear_layers_weight_gradient_is_one_addmm():
    builder = Builder()
    x, weight = inputs(builder, (2, 3, 4), (5, 4))
    y = builder.call("aten.linear.default", x, weight)
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", y.shape, "f64")
    gradient = Differentiator(builder).backward(nodes, {y.id: seed}, [weight.id])[weight.id]
    total = add_into(builder, builder.input("total", (5, 4), "f64"), gradient)
    assert live(builder.graph, total) == ["reshape", "reshape", "t", "addmm"]
    graph = builder.finish(total)
    given = tensors(graph)
    expected = given[3] + torch.einsum("bto,bti->oi", given[2], given[0])
    assert distance(run(graph, given)[0], expected) < 1e-14


# --- laws -------------------------------------------------------------------------------------

VIEWS = {
    "t": lambda b, x: b.call("aten.t.default", x),
    "flip": lambda b, x: b.call("aten.flip.default", x, [0]),
    "reshape": lambda b, x: b.call(
        "aten.reshape.default", b.call("aten.reshape.default", x, [2, 8]), [4, 4]
    ),
    "rows": lambda b, x: b.call(
        "aten.expand.default", b.call("aten.slice.Tensor", x, 0, 1, 2), [4, 4]
    ),
    "column": lambda b, x: b.call("aten.mul.Tensor", x, b.call("aten.slice.Tensor", x, 1, 0, 1)),
    "row": lambda b, x: b.call("aten.add.Tensor", b.call("aten.select.int", x, 0, 2), x),
    "squares": lambda b, x: b.call("aten.mul.Tensor", x, x),
    "halves": lambda b, x: b.call(
        "aten.cat.default", b.call("aten.split.Tensor", x, 2, 1)[::-1], 1
    ),
    "twice": lambda b, x: b.call(
        "aten.sub.Tensor", *[b.call("aten.permute.default", x, [1, 0])] * 2
    ),
    "sum": lambda b, x: b.call("aten.sub.Tensor", x, b.call("aten.sum.dim_IntList", x, [1], True)),
    "mm": lambda b, x: b.call("aten.mm.default", x, b.call("aten.t.default", x)),
    "linear": lambda b, x: b.call("aten.linear.default", b.call("aten.t.default", x), x),
    "norm": lambda b, x: b.call("aten.layer_norm.default", x, [4]),
    "tanh": lambda b, x: b.call("aten.tanh.default", x),
    "detached": lambda b, x: b.call("aten.mul.Tensor", x, b.call("aten.detach.default", x)),
}


@settings(deadline=None, max_examples=40)
@given(
    steps=st.lists(st.sampled_from(list(VIEWS)), min_size=1, max_size=6),
    uses=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    turned=st.booleans(),
)
def test_any_chain_of_views_and_sums(steps: list[str], uses: list[int], turned: bool):
    builder = Builder()
    strides = (1, 4) if turned else (4, 1)
    x = builder.input("x", (4, 4), "f64", strides=strides)
    pool = [x]
    for step, use in zip(steps, uses, strict=False):
        pool.append(VIEWS[step](builder, pool[-1 - use % len(pool)]))
    graph = builder.finish([pool[-1], pool[len(pool) // 2]])
    generator = torch.Generator().manual_seed(0)
    a = torch.empty_strided((4, 4), strides, dtype=torch.float64).normal_(generator=generator)
    leaf = a.clone(memory_format=torch.preserve_format).requires_grad_()
    made = compile_graph(graph)([leaf])
    seeds = [torch.empty_like(y).normal_(generator=generator) for y in made]
    pairs = [(y, seed) for y, seed in zip(made, seeds, strict=True) if y.requires_grad]
    outputs, given_seeds = zip(*pairs, strict=True)
    (expected,) = torch.autograd.grad(outputs, leaf, given_seeds)
    distinct = dict(zip(graph.outputs, seeds, strict=True))
    if len(distinct) == 1:
        seeds = [seeds[0] + seeds[1]]
        distinct = dict.fromkeys(graph.outputs, seeds[0])
    found = with_gradients(graph, graph.inputs, list(distinct.items()), VJPS)
    *_, gradient = run(found.graph, [a, *distinct.values()])
    assert distance(gradient, expected) <= 1e-12
    assert wrong_kinds(found.graph, [a, *distinct.values()]) == []


@settings(deadline=None, max_examples=30)
@given(order=st.permutations([0, 1, 2]), expanded=st.sets(st.integers(0, 2)))
def test_gradients_of_any_strides_come_in(order: list[int], expanded: set[int]):
    """What is added up, expanded or transposed is no gradient of the output's strides."""
    builder = Builder()
    x = builder.input("x", (2, 3, 4), "f64")
    y = builder.call("aten.reshape.default", builder.call("aten.sin.default", x), [6, 4])
    y = builder.call("aten.view.default", y, [2, 3, 4])
    graph = builder.finish([y])
    sizes = [(2, 3, 4)[i] for i in order]
    seed = torch.randn(sizes, dtype=torch.float64).permute([order.index(i) for i in range(3)])
    for dim in expanded:
        seed = seed.narrow(dim, 0, 1).expand(2, 3, 4)
    found = with_gradients(graph, graph.inputs, [(graph.outputs[0], seed)], VJPS)
    a = torch.randn(2, 3, 4, dtype=torch.float64)
    assert distance(run(found.graph, [a, seed])[1], seed * a.cos()) <= 1e-14
    assert wrong_kinds(found.graph, [a, seed]) == []


# --- models -----------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.group = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(x + self.group(self.second(x)), 2)
        return nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)


def test_batch_norm_in_training_saves_nothing_and_leaves_the_statistics_out():
    images, labels = torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.tensor([0, 3, 1, 2])
    graph = assert_equal_gradients(Residual().train(), images, labels)
    (backward,) = (node for node in graph.nodes if "native_batch_norm_backward" in node.op)
    names = [graph.values[v].name for v in backward.inputs]
    assert not any("running" in name for name in names)
    assert len(graph.updates) == 3


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.up = nn.Parameter(torch.randn(4, 6, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for expert in range(4):
            mask = (chosen == expert).to(x.dtype) * weights
            hidden = torch.nn.functional.silu(x @ self.up[expert])
            out = out + mask.sum(-1, keepdim=True) * (hidden @ self.down[expert])
        return (out * out).mean()


def test_a_mixture_of_experts():
    assert_equal_gradients(Experts(), torch.randn(5, 6, dtype=torch.float64))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=1)
        self.cell = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.RMSNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.cell(self.table(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        logits = self.norm(x) @ self.table.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_tied_weights_recurrence_and_attention():
    assert_equal_gradients(Tied(), torch.arange(12).reshape(3, 4) % 11)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        return (y.float() * x).sum()


def test_casts_of_autocast_are_differentiated():
    x = torch.randn(4, 6)
    _, distances = model_gradients(Mixed(), (x,))
    assert max(distances.values()) == 0.0


@register_op("a n^, n^ -> a n^", name="scaled_twice")
def scaled_twice(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = x * scale
    out[:, 1:] += scale[1:] ** 2
    return out.mul_(2)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_twice(x, self.scale).sin().sum()


def test_registered_operators_are_differentiated_to_operators_of_torch():
    """Their function writes in place; the backward that comes of it does not."""
    graph = assert_equal_gradients(Custom(), torch.randn(3, 5, dtype=torch.float64))
    assert [op for op in operators(graph) if "scaled_twice" in op] == ["scaled_twice"]


def test_dropout_draws_the_same_mask_in_the_backward():
    builder = Builder()
    x, step = builder.input("x", (4, 6), "f64"), builder.input("rng", (1,), "i64")
    drop = ("shardwright.dropout.default", x, 0.5, 7, step, 3, [0, 0], [4, 6])
    y = builder.call(*drop)
    nodes = list(builder.graph.nodes)
    seed = builder.input("seed", (4, 6), "f64")
    differentiator = Differentiator(builder, VJPS)
    found = differentiator.backward(nodes, {y.id: seed}, [x.id])
    assert differentiator.replaced == {}
    graph = builder.finish([y, found[x.id]])
    assert operators(graph) == ["dropout", "dropout"]
    ones = torch.ones(4, 6, dtype=torch.float64)
    kept, gradient = run(graph, [ones, torch.tensor([5]), ones])
    assert torch.equal(kept, gradient)
    assert 0 < (kept == 0).sum() < 24


# --- time -------------------------------------------------------------------------------------


def transformer(count: int, width: int = 32) -> tuple[Builder, IRValue]:
    builder = Builder()
    x = builder.input("x", (2, 8, width))

    def weight(*shape: int) -> IRValue:
        return builder.param("w", torch.zeros(shape))

    for _ in range(count):
        y = builder.call("aten.layer_norm.default", x, [width], weight(width), weight(width))
        y = builder.call("aten.linear.default", y, weight(3 * width, width), weight(3 * width))
        parts = builder.call("aten.split.Tensor", y, width, 2)
        heads = [builder.call("aten.view.default", part, [2, 8, 4, width // 4]) for part in parts]
        heads = [builder.call("aten.transpose.int", head, 1, 2) for head in heads]
        y = builder.call("aten.scaled_dot_product_attention.default", *heads, is_causal=True)
        y = builder.call(
            "aten.reshape.default", builder.call("aten.transpose.int", y, 1, 2), [2, 8, width]
        )
        x = builder.call(
            "aten.add.Tensor", x, builder.call("aten.linear.default", y, weight(width, width))
        )
        y = builder.call("aten.layer_norm.default", x, [width], weight(width), weight(width))
        y = builder.call(
            "aten.gelu.default", builder.call("aten.linear.default", y, weight(4 * width, width))
        )
        x = builder.call(
            "aten.add.Tensor", x, builder.call("aten.linear.default", y, weight(width, 4 * width))
        )
    return builder, builder.call("aten.sum.default", x)


def recorded(layers: int) -> int:
    """How many rules are recorded to differentiate so many equal layers."""
    builder, loss = transformer(layers)
    nodes = list(builder.graph.nodes)
    wants = [value.id for value in builder.graph.stored()]
    seed = builder.call("aten.ones_like.default", loss)
    vjps = Vjps()
    differentiator = Differentiator(builder, vjps)
    found = differentiator.backward(nodes, {loss.id: seed}, wants)
    differentiator.exchange()
    assert len(found) == len(wants)
    return vjps.recorded


def test_equal_layers_share_their_rules() -> None:
    assert recorded(64) == recorded(2) > 0
