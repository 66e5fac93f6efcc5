"""The gradient of each operator is held against autograd's, to the last places of float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.autodiff import vjp as module
from shardwright.autodiff.vjp import VjpCall, Vjps
from shardwright.ir import IRGraph
from shardwright.ir.execute import compile_graph
from shardwright.ops import register_op
from shardwright.tracing import capture
from tests.building.derivatives import distance, run, with_gradients, wrong_kinds
from tests.ops.calls import CASES
from tests.ops.case import B, Case, F, I, K, T, case, distinct, sizes_of

VJPS = Vjps()


def laid(dims: str, way: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Normal numbers, a view of what is made."""
    return T(dims, lambda shape, sizes: way(F(dims).fill(shape, sizes)))


def transposed(dims: str) -> T:
    return laid(dims, lambda x: x.transpose(0, 1))


def fixed(*numbers: float) -> T:
    return T(f"{len(numbers)}", lambda *_: torch.tensor(numbers))


def square(dims: str) -> T:
    """A positive definite matrix."""
    return T(dims, lambda shape, _: torch.eye(*shape, dtype=torch.float64) * 2 + 0.1)


TWICE = F("a b")
IMAGE = "2 4 6 6"
ATTENTION = "scaled_dot_product_attention.default"

BEYOND = [
    case("add.Tensor", F("b"), F("a b"), alpha=-0.5),
    case("mul.Tensor", TWICE, TWICE),
    case("mul.Tensor", F("a b"), 2.5),
    case("pow.Tensor_Scalar", F("a b"), 2),
    case("fill.Tensor", F("a b"), F("")),
    case("dropout.default", F("a b"), 0.0, True),
    *(case("to.dtype", F("a b"), dtype) for dtype in (torch.bfloat16, torch.int64)),
    case("_to_copy.default", F("a b"), dtype=torch.float32),
    case("type_as.default", F("a b"), T("2", lambda shape, _: torch.ones(shape))),
    # views and layouts
    case("reshape.default", transposed("a b*2"), sizes_of("a*2 b")),
    case("select.int", F("a b"), 1, -1),
    case("cat.default", [TWICE, TWICE], 1),
    case("stack.default", [F("a b"), F("a b")], -1),
    case("constant_pad_nd.default", F("a b"), [1, 2, 0, 1], 0.5),
    case("pad.default", F(IMAGE), [1, 1, 2, 2], "reflect"),
    case("select_scatter.default", F("a b"), F("b"), 0, 1),
    case("slice_scatter.default", F("a 4"), F("a 2"), 1, 0, 4, 2),
    case("diagonal_scatter.default", F("3 4"), F("3")),
    # contractions
    case("linear.default", transposed("a b k"), F("n k")),
    case("linear.default", F("a k"), transposed("k n")),
    case("linear.default", F("k"), F("n k"), F("n")),
    case("mm.default", transposed("k m"), transposed("n k")),
    case("cdist.default", F("3 4"), F("2 4")),
    # reductions
    case("norm.ScalarOpt_dim", F("a b"), 2.0, [1], True),
    case("sort.default", F("a b"), 1, True),
    case("softmax.int", T("a b", lambda shape, _: torch.randn(shape)), -1, torch.float64),
    # indexing
    case("scatter_reduce.two", F("3 4"), 1, I("3 2", 4), F("3 2"), "amax"),
    case("index_put.default", F("a 4"), [None, distinct("2", 4)], F("a 2")),
    case("masked_scatter.default", F("a b"), B("a b"), F("a*b")),
    case("take_along_dim.default", F("a v"), I("a j", "v"), 1),
    # convolutions and norms
    case("conv2d.default", laid("2 6 6 4", lambda x: x.permute(0, 3, 1, 2)), F("6 4 3 3"), F("6")),
    case("im2col.default", F(IMAGE), [2, 2], [1, 1], [0, 0], [2, 2]),
    case("layer_norm.default", transposed("4 3"), [4], F("4"), F("4")),
    case("batch_norm.default", F(IMAGE), F("4"), F("4"), None, None, True, 0.1, 1e-5, False),
    case("renorm.default", F("a b"), 2.0, 0, 1.0),
    # losses
    case("cross_entropy_loss.default", F("3 4"), fixed(1, -100, 3)),
    case("cross_entropy_loss.default", F("3 4"), I("3", 4), K("4"), 2, -100, 0.1),
    case("nll_loss.default", F("3 4"), fixed(1, -100, 3), None, 0),
    case("cosine_embedding_loss.default", F("3 4"), F("3 4"), fixed(1.0, -1.0, 1.0)),
    case("triplet_margin_loss.default", F("a b"), F("a b"), F("a b")),
    case("hinge_embedding_loss.default", F("3 1"), fixed(1.0, -1.0, 1.0)),
    # attention
    case(ATTENTION, F("2 4 5 8"), F("2 4 5 8"), F("2 4 5 8"), F("2 1 5 5")),
    case(ATTENTION, *(laid("2 5 4 8", lambda x: x.transpose(1, 2)) for _ in "qkv")),
    # recurrence
    *(
        case(
            f"{name}.input",
            F("5 2 3"),
            [F("1 2 4"), F("1 2 4")] if name == "lstm" else F("1 2 4"),
            [F(f"{gates * 4} 3"), F(f"{gates * 4} 4"), F(f"{gates * 4}"), F(f"{gates * 4}")],
            *(True, 1, 0.0, True, False, False),
        )
        for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1))
    ),
    case(
        "lstm_cell.default", F("2 3"), [F("2 4"), F("2 4")], F("16 3"), F("16 4"), F("16"), F("16")
    ),
    case("gru_cell.default", F("2 3"), F("2 4"), F("12 3"), F("12 4"), F("12"), F("12")),
    # matrices
    case("linalg_inv_ex.default", F("4 4")),
    case("logdet.default", square("4 4")),
    case("linalg_cholesky_ex.default", square("4 4")),
]
"""Forms of calls, and operators without a row, that the catalog's cases leave out."""

LEFT_OUT = {
    *("aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default"),
    "aten._native_batch_norm_legit_functional.default",  # of its first output alone
    "aten.index_fill.int_Tensor",
}
"""Operators without defined contents, or without a derivative here."""
if torch.__version__ < "2.13":
    LEFT_OUT |= {"aten.nextafter.default", "aten.aminmax.default"}  # torch 2.9 has none of these
ROWS = [*BEYOND, *(case for case in CASES if case.op not in LEFT_OUT)]
each_row = pytest.mark.parametrize("case", ROWS, ids=lambda case: case.op)


def seeds_for(made: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Random gradients of the outputs that can have one, by number of the output."""
    generator = torch.Generator().manual_seed(1)
    return {
        i: torch.empty_like(x).normal_(generator=generator)
        for i, x in enumerate(made)
        if x.is_floating_point() or x.is_complex()
    }


def compare(
    graph: IRGraph,
    tensors: list[torch.Tensor],
    seeds: dict[int, torch.Tensor] | None = None,
) -> IRGraph:
    """Hold the gradients of a graph against autograd's; gives the graph with its backward."""
    wants = [i for i, x in enumerate(tensors) if x.requires_grad]
    tensors = [x.detach() for x in tensors]
    leaves = [x.detach().requires_grad_(i in wants) for i, x in enumerate(tensors)]
    made = compile_graph(graph)(leaves)
    seeds = seeds_for(made) if seeds is None else seeds
    pairs = [(made[i], seed) for i, seed in seeds.items() if made[i].requires_grad]
    expected: list[torch.Tensor | None] = [None] * len(wants)
    if pairs:
        outputs, given = zip(*pairs, strict=True)
        sources = [leaves[i] for i in wants]
        expected = list(torch.autograd.grad(outputs, sources, given, allow_unused=True))
    found = with_gradients(
        graph,
        [graph.inputs[i] for i in wants],
        [(graph.outputs[i], seed) for i, seed in seeds.items()],
        VJPS,
    )
    assert found.present == [gradient is not None for gradient in expected]
    inputs = [*tensors, *seeds.values()]
    results = run(found.graph, inputs)
    wanted = [x.detach() for x in made] + [x for x in expected if x is not None]
    for result, expectation in zip(results, wanted, strict=True):
        if expectation.is_floating_point():
            assert distance(result, expectation) <= 1e-12
        else:
            assert torch.equal(result, expectation)
    assert wrong_kinds(found.graph, inputs) == []
    return found.graph


@each_row
def test_gradients_are_those_of_autograd(case: Case):
    compare(*case.make())


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, its first dimension the innermost in memory."""
    dims = list(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


def expanded(x: torch.Tensor) -> torch.Tensor:
    """Like the tensor, but all that it has along its first dimension is one and the same."""
    return x[:1].expand(x.shape) if x.shape[0] else x


def last(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, channels last where it is an image."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else turned(x)


NOT_OTHERWISE = {
    *("aten.view.default", "aten.view_as_complex.default", "aten.nll_loss2d.default"),
    *("aten.linalg_inv_ex.default", "aten.logdet.default"),
    "aten._native_batch_norm_legit_no_training.default",
    *("aten.div.Tensor_mode", "aten.floor_divide.default", "aten.remainder.Tensor"),
    "aten.copysign.Tensor",
}
"""Operators that take no tensors that lie otherwise, or have no result for equal rows; and those of
which fake kernels order what is broadcast otherwise than the CPU's."""
OTHERWISE = {row.op: row for row in reversed(ROWS) if row.op not in NOT_OTHERWISE}.values()


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [turned, expanded, last], ids=lambda way: way.__name__)
@pytest.mark.parametrize("case", OTHERWISE, ids=lambda case: case.op)
def test_gradients_are_those_of_autograd_however_tensors_lie(
    case: Case, way: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    graph, tensors = case.make(
        lay=lambda x: way(x) if x.dim() > 1 and x.dtype.is_floating_point else x
    )
    seeds = seeds_for(compile_graph(graph)(tensors))
    turned_seeds = {i: turned(seed) for i, seed in seeds.items()}
    compare(graph, tensors, turned_seeds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks the kernels of the device")
@pytest.mark.parametrize(
    "case",
    [case for case in ROWS if "attention" in case.op or "linear" in case.op],
    ids=lambda case: case.op,
)
def test_a_device_that_is_not_here_gets_what_every_device_has(case: Case):
    graph, tensors = case.make()
    made = [x.detach() for x in compile_graph(graph)(tensors)]
    seeds = seeds_for(made)
    pairs = [(graph.outputs[i], seed) for i, seed in seeds.items()]
    wants = [v for v in graph.inputs if graph.values[v].dtype == "f64"]
    here = with_gradients(graph, wants, pairs, VJPS)
    there = with_gradients(graph, wants, pairs, Vjps("cuda"))
    assert not any("cpu" in node.op for node in there.graph.nodes)
    inputs = [*tensors, *seeds.values()]
    for found, expected in zip(run(there.graph, inputs), run(here.graph, inputs), strict=True):
        assert distance(found, expected) <= 1e-12


SAVED = [
    (case("linear.default", F("3 4"), F("5 4")), []),
    (case("linear.default", transposed("3 2 4"), F("5 4")), []),
    (case("mul.Tensor", F("3 4"), F("4")), []),
    (case("gelu.default", F("3 4")), []),
    (case("softmax.int", F("3 4"), -1), []),
    (case("expand.default", F("3 1"), [3, 4]), []),
    (case("pow.Tensor_Scalar", F("3 4"), 3), []),
    (case("layer_norm.default", F("3 4"), [4], F("4")), [(3, 1), (3, 1)]),
    (case("max_pool2d.default", F(IMAGE), [2, 2]), [(2, 4, 3, 3)]),
    (case("cross_entropy_loss.default", F("3 4"), I("3", 4)), [(3, 4), ()]),
    (case("dropout.default", F("3 4"), 0.5, True), [(3, 4)]),
]


@pytest.mark.parametrize(("case", "shapes"), SAVED)
def test_what_is_saved(case: Case, shapes: list[tuple[int, ...]]):
    graph, _ = case.make()
    (node,) = graph.nodes
    wants = [i for i, v in enumerate(node.inputs) if graph.values[v].dtype == "f64"]
    call = VjpCall.of(graph, node, wants, {0: graph.values[node.outputs[0]]})
    vjp = VJPS.of(call)
    assert (vjp.forward is None) == (not shapes)
    if vjp.forward is not None:
        made = vjp.forward.outputs[len(node.outputs) :]
        assert [vjp.forward.values[v].shape for v in made] == shapes
        assert {read.number for read in vjp.reads if read.what == "saved"} == set(range(len(made)))


def test_output_masks_follow_what_is_wanted():
    graph, _ = case("layer_norm.default", F("3 4"), [4], F("4"), F("4")).make()
    (node,) = graph.nodes
    for wants, mask in (([0], [True, False, False]), ([1, 2], [False, True, True])):
        call = VjpCall.of(graph, node, wants, {0: graph.values[node.outputs[0]]})
        (backward,) = VJPS.of(call).backward.nodes
        assert backward.attrs["output_mask"] == mask
        assert backward.absent == tuple(i for i, kept in enumerate(mask) if not kept)


def test_a_kind_of_call_is_recorded_once():
    vjps = Vjps()
    graph, _ = case("mul.Tensor", F("3 4"), F("4")).make()
    (node,) = graph.nodes
    gradient = graph.values[node.outputs[0]]
    first = vjps.of(VjpCall.of(graph, node, [0], {0: gradient}))
    assert vjps.of(VjpCall.of(graph, node, [0], {0: gradient})) is first
    assert vjps.of(VjpCall.of(graph, node, [1], {0: gradient})) is not first
    assert vjps.recorded == 2


def call_of(op: str, *args: Any) -> VjpCall:
    """A call of an operator, whose first input wants a gradient."""
    graph, _ = case(op, *args).make()
    (node,) = graph.nodes
    return VjpCall.of(graph, node, [0], {0: graph.values[node.outputs[0]]})


def test_a_process_records_a_kind_of_call_once() -> None:
    call = call_of("mul.Tensor", F("5 7"), F("7"))
    assert Vjps().of(call) is Vjps().of(call)


def test_settings_of_torch_are_no_part_of_a_call_but_of_what_is_kept() -> None:
    call = call_of(ATTENTION, *[F("1 2 3 4")] * 3)
    fused = Vjps().of(call)
    with sdpa_kernel(SDPBackend.MATH):
        written_out = Vjps().of(call)
    assert len(written_out.backward.nodes) > len(fused.backward.nodes)
    assert Vjps().of(call) is fused


@register_op("n^ -> n^", name="cubed_of_users")
def cubed_of_users(x: torch.Tensor) -> torch.Tensor:
    return x**3


class Cubed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cubed_of_users(x)


def test_users_own_operators_are_recorded_by_each() -> None:
    """They can be registered anew, with another backward."""
    graph = capture(Cubed(), (torch.randn(3),))
    (node,) = graph.nodes
    call = VjpCall.of(graph, node, [0], {0: graph.values[node.outputs[0]]})
    assert Vjps().of(call) is not Vjps().of(call)


def test_what_is_kept_of_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kept", {})
    monkeypatch.setattr(module, "_MOST_KEPT", 2)
    calls = [call_of("mul.Tensor", F(f"1 {length}"), F("1")) for length in (2, 3, 4)]
    first, second, third = (Vjps().of(call) for call in calls)
    assert len(module._kept) == 2
    assert Vjps().of(calls[1]) is second
    assert Vjps().of(calls[2]) is third
    assert Vjps().of(calls[0]) is not first
