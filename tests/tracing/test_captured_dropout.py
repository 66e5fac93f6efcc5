import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.errors import CaptureError
from shardwright.ir import DROPOUT, Builder, IRGraph, IRValue, resolve
from shardwright.ir.dropout import dropout
from shardwright.ir.operators import operator_name, split_call
from shardwright.tracing import capture
from shardwright.tracing.dropout import philox_dropout, write_attention
from shardwright.tracing.emitter import GraphEmitter

SDPA = "aten.scaled_dot_product_attention.default"


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, **others):
        return self.function(x, **others)


def graph_of(function, x: torch.Tensor, seed: int = 5, **others) -> IRGraph:
    return philox_dropout(capture(Calls(function), (x,), others), seed)


def run(graph: IRGraph, *args, step: int = 3, **kwargs):
    return graph.run(*args, rng=torch.tensor([step]), **kwargs)


def sites(graph: IRGraph) -> list[int]:
    return [node.attrs["site"] for node in graph.nodes if node.op == DROPOUT]


def test_elements_are_dropped_by_seed_step_and_site() -> None:
    x = torch.ones(40, 40)

    def twice(x):
        return F.dropout(x, 0.3), F.dropout(x, 0.3)

    graph = graph_of(twice, x)
    assert sites(graph) == [0, 1]
    one, other = run(graph, x)
    assert one.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert not torch.equal(one, other)
    assert torch.equal(one, run(graph, x)[0])
    assert not torch.equal(one, run(graph, x, step=4)[0])
    assert not torch.equal(one, run(graph_of(twice, x, seed=6), x)[0])


def test_a_graph_that_drops_nothing_comes_out_as_it_is() -> None:
    def nothing(x):
        y = F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0)
        return F.scaled_dot_product_attention(y, y, y)

    graph = capture(Calls(nothing), (torch.randn(2, 3, 4),))
    assert philox_dropout(graph, 0) is graph


def test_native_dropout_gives_its_mask() -> None:
    x = torch.randn(30, 30)
    graph = graph_of(lambda x: torch.native_dropout(x, 0.4, True), x)
    result, mask = run(graph, x)
    assert mask.dtype == torch.bool
    torch.testing.assert_close(result, torch.where(mask, x / 0.6, 0))
    assert 0.5 < mask.double().mean() < 0.7


@pytest.mark.parametrize("shape", [(20, 30, 4, 5), (20, 30, 4), (20, 30)])
def test_feature_dropout_drops_whole_channels(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    y = run(graph_of(lambda x: torch.feature_dropout(x, 0.5, True), x), x)
    channels = y.reshape(20, 30, -1)
    assert set(y.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(channels.amin(-1), channels.amax(-1))


@pytest.mark.parametrize("drop", [torch.alpha_dropout, torch.feature_alpha_dropout])
@pytest.mark.parametrize("p", [0.2, 0.7, 1.0])
def test_alpha_dropout_has_the_values_of_torch(drop, p: float) -> None:
    x = torch.full((30, 40, 3), 0.8, dtype=torch.float64)
    y = run(graph_of(lambda x: drop(x, p, True), x), x)
    torch.testing.assert_close(y.unique(), drop(x, p, True).unique())
    whole_channels = torch.equal(y.amin(-1), y.amax(-1))
    assert whole_channels == (drop is torch.feature_alpha_dropout or p == 1)


def test_attention_drops_weights() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    v = torch.eye(9).expand(2, 4, 9, 9)  # so that the result is the weights
    others = {"k": k, "v": v}

    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

    graph = graph_of(attention, q, **others)
    assert sites(graph) == [0]
    weights = run(graph, q, **others)
    kept = weights != 0
    expected = F.scaled_dot_product_attention(q, k, v) / 0.6
    torch.testing.assert_close(weights, expected * kept)
    assert 0.45 < kept.double().mean() < 0.75


def test_strides_stay_what_they_were() -> None:
    """Kernels of attention lay out their result as they like, and the program may count on it."""
    x = torch.randn(2, 4, 6, 8)
    builder = Builder("attention")
    values = [builder.input(name, x.shape) for name in "qkv"]
    attrs = {"attn_mask": None, "dropout_p": 0.4, "is_causal": False, "scale": None}
    laid_out = torch.empty(2, 6, 4, 8, device="meta").transpose(1, 2)
    y = builder.emit(SDPA, values, attrs | {"enable_gqa": False}, outputs=[laid_out])
    flat = builder.call(
        "aten.view.default", builder.call("aten.transpose.int", y, 1, 2), [2, 6, 32]
    )
    graph = philox_dropout(builder.finish([y, flat]), 0)
    attention = graph.values[graph.outputs[0]]
    assert attention.strides == laid_out.stride()
    made, flat = run(graph, x, x, x)
    assert made.stride() == laid_out.stride()
    assert torch.equal(made.transpose(1, 2).flatten(2), flat)


def test_nodes_keep_their_scopes_and_lines() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = capture(model, (torch.randn(2, 4),))
    after = philox_dropout(before, 0)
    assert [(n.scope, n.source) for n in after.nodes] == [(n.scope, n.source) for n in before.nodes]


def test_the_rest_of_a_graph_stays() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = capture(model, (torch.randn(6, 4),))
    after = philox_dropout(before, 0)
    names = [[g.values[old].name for old in g.updates] for g in (before, after)]
    assert names[0] == names[1] != []
    assert after.out_structure == before.out_structure


def test_rng_stands_before_further_keywords() -> None:
    x = torch.randn(3, 3)
    graph = graph_of(lambda x, y, z: F.dropout(x, 0.5) * y - z, x, z=x + 1, y=x)
    assert [graph.values[i].name for i in graph.inputs] == ["x", "rng", "z", "y"]
    dropped = run(graph_of(lambda x: F.dropout(x, 0.5), x), x)
    assert torch.equal(run(graph, x, y=x, z=x + 1), dropped * x - (x + 1))


def test_a_recurrent_layer_that_drops_is_refused() -> None:
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    graph = capture(model, (torch.randn(3, 2, 4),))
    with pytest.raises(CaptureError, match=r"lstm.input drops elements between its layers"):
        philox_dropout(graph, 0)
    plain = capture(nn.LSTM(4, 4, num_layers=2), (torch.randn(3, 2, 4),))
    assert philox_dropout(plain, 0) is plain


def test_an_argument_of_the_counters_name_is_refused() -> None:
    class Taken(nn.Module):
        def forward(self, rng):
            return F.dropout(rng)

    with pytest.raises(CaptureError, match="named 'rng', which is the name of the input"):
        philox_dropout(capture(Taken(), (torch.randn(2),)), 0)


def test_the_operator_itself_can_be_captured() -> None:
    def dropped(x, step):
        return dropout(x, 0.5, 1, step, 0, [0, 0], [4, 6])

    x, step = torch.randn(4, 6), torch.tensor([2])
    graph = capture(Calls(dropped), (x,), {"step": step})
    assert [node.op for node in graph.nodes] == [DROPOUT]
    assert torch.equal(graph.run(x, step=step), dropped(x, step))


def test_gradients_are_those_of_the_dropped_elements() -> None:
    x = torch.randn(30, 30, requires_grad=True)
    y = run(graph_of(lambda x: F.dropout(x, 0.5), x), x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(y != 0, 2.0, 0.0))


# --- attention written out against torch's own ----------------------------------------------------


ATTENTION = resolve("aten.scaled_dot_product_attention.default")
BOOLS = torch.rand(5, 7) > 0.3
BOOLS[2] = False  # a row without keys


def written(query, key, value, mask=None, **options):
    """What the nodes of a call give, without dropout."""
    builder = Builder("attention")
    tensors = [item for item in (query, key, value, mask) if item is not None]
    dtypes = {torch.float64: "f64", torch.bool: "bool"}
    values = [builder.input(f"x{i}", t.shape, dtypes[t.dtype]) for i, t in enumerate(tensors)]
    inputs, attrs = split_call(
        ATTENTION, values, options, is_tensor=lambda item: isinstance(item, IRValue)
    )
    made = write_attention(GraphEmitter(builder), inputs, attrs, lambda weights: weights)
    graph = builder.finish(made)
    assert operator_name(ATTENTION) not in {node.op for node in graph.nodes}
    return graph.run(*tensors)


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (None, {"is_causal": True}),
        (None, {"scale": 0.3}),
        (BOOLS, {}),
        (BOOLS[:, :1], {}),
        (torch.randn(3, 1, 5, 7, dtype=torch.float64), {}),
        (torch.zeros(5, 7, dtype=torch.float64).masked_fill(~BOOLS, -torch.inf), {}),
    ],
)
def test_it_computes_what_torch_does(mask, options) -> None:
    q, k, v = heads(3, 2, 5, 8), heads(3, 2, 7, 8), heads(3, 2, 7, 6)
    expected = F.scaled_dot_product_attention(q, k, v, mask, **options)
    torch.testing.assert_close(written(q, k, v, mask, **options), expected)


def test_heads_may_share_keys() -> None:
    q, k, v = heads(3, 6, 5, 8), heads(3, 2, 7, 8), heads(3, 2, 7, 8)
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(written(q, k, v, enable_gqa=True), expected)


def test_without_batch_and_heads() -> None:
    q, k, v = heads(5, 8), heads(7, 8), heads(7, 8)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(written(q, k, v, is_causal=True), expected)
