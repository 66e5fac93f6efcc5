from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError, GraphError, WeightError
from shardwright.ir import Builder, IRValue, Scope
from shardwright.tracing import capture
from shardwright.tracing.capture import Model, empty_weights


class Scale:
    """A layer that writes its own node."""

    def emit(self, builder: Builder, x: IRValue) -> IRValue:
        weight = builder.param("weight", torch.full((x.shape[-1],), 2.0))
        return builder.call("aten.mul.Tensor", x, weight)


class Halves:
    def emit(self, builder: Builder, x: IRValue) -> list[IRValue]:
        return builder.call("aten.chunk.default", x, 2, -1)


class Attend(nn.Module):
    """Arguments of several kinds, and a dict for a result."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, pair, *, scale=1.0, mask=None):
        y = self.mix(x) * scale + pair[0] - pair[1]
        return {"y": y if mask is None else y * mask, "x": x}


def test_layers_are_added_one_after_the_other():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)]
    model = Model("mlp")
    model.input("x", (2, 8))
    for layer in layers:
        made = model.add(layer)
    assert isinstance(made, IRValue)
    graph = model.finish()
    reference = nn.Sequential(*layers)
    x = torch.randn(2, 8)
    assert torch.equal(graph.run(x), reference(x))
    stored = {name: graph.tensors[value.id] for value in graph.stored() for name in value.names}
    assert stored.keys() == reference.state_dict().keys()
    assert all(stored[name] is tensor for name, tensor in reference.named_parameters())
    linear = "torch.nn.modules.linear.Linear"
    assert [node.scopes for node in graph.nodes] == [
        (Scope("0", linear, (("in_features", 8), ("out_features", 16), ("bias", True))),),
        (Scope("1", "torch.nn.modules.activation.GELU", (("approximate", "none"),)),),
        (Scope("2", linear, (("in_features", 16), ("out_features", 4), ("bias", True))),),
    ]


def test_layers_that_write_their_own_nodes():
    model = Model()
    x = model.input("x", (2, 8))
    first, second = model.add(Halves(), x)
    total = model.builder.call("aten.add.Tensor", model.add(Scale(), first), second)
    model.add(Scale(), total, name="last")
    graph = model.finish()
    assert [node.scope for node in graph.nodes] == ["0", "1", "", "last"]
    assert [value.names for value in graph.stored()] == [("weight",), ("weight__1",)]
    tensor = torch.randn(2, 8)
    left, right = tensor.chunk(2, -1)
    assert torch.equal(graph.run(tensor), (left * 2 + right) * 2)


def test_several_values_feed_the_next_layer_and_are_returned_as_a_tuple():
    model = Model()
    model.input("a", (2, 4))
    model.input("b", (2, 4))
    model.add(nn.Bilinear(4, 4, 6))
    model.add(Halves())
    left, right = model.finish().run(torch.zeros(2, 4), torch.zeros(2, 4))
    assert left.shape == right.shape == (2, 3)


def test_arguments_and_results_keep_their_structure():
    torch.manual_seed(0)
    layer = Attend()
    model = Model()
    x, y = model.input("x", (2, 4)), model.input("y", (2, 4))
    made = model.add(layer, x, (y, x), scale=0.5, mask=y)
    assert made.keys() == {"y", "x"}
    assert isinstance(made["y"], IRValue)
    graph = model.finish()
    one, two = torch.randn(2, 4), torch.randn(2, 4)
    found, expected = graph.run(one, two), layer(one, (two, one), scale=0.5, mask=two)
    assert torch.equal(found["y"], expected["y"])
    assert found["x"] is one
    assert graph.output_names == ["y", "x"]


def test_a_layer_added_twice_and_tied_weights_are_one_value():
    embed, head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
    head.weight = embed.weight
    mix = nn.Linear(4, 4)
    model = Model()
    model.input("tokens", (3,), "i64")
    for name, layer in [("embed", embed), ("a", mix), ("b", mix), ("head", head)]:
        model.add(layer, name=name)
    graph = model.finish()
    assert [value.names for value in graph.stored()] == [
        ("embed.weight", "head.weight"),
        ("a.weight", "b.weight"),
        ("a.bias", "b.bias"),
    ]
    tokens = torch.tensor([1, 5, 9])
    assert torch.equal(graph.run(tokens), head(mix(mix(embed(tokens)))))


def test_buffers_that_a_layer_changes_twice_hold_the_last_contents():
    norm = nn.BatchNorm1d(4)
    model = Model()
    model.input("x", (8, 4))
    model.add(norm)
    model.add(norm)
    graph = model.finish()
    updated = [graph.values[value_id].names[0] for value_id in graph.updates]
    assert sorted(updated) == ["0.num_batches_tracked", "0.running_mean", "0.running_var"]
    reads = [graph.values[value_id].users for value_id in graph.updates]
    assert all(len(users) == 1 for users in reads), "the second call reads what the first wrote"
    x = torch.randn(8, 4)
    torch.testing.assert_close(graph.run(x), norm(norm(x)))


def test_the_outputs_can_be_chosen():
    model = Model()
    x = model.input("x", (2, 4))
    y = model.add(nn.ReLU())
    graph = model.finish([y, x])
    tensor = torch.randn(2, 4)
    assert torch.equal(graph.run(tensor)[0], tensor.relu())


def test_what_is_no_layer_is_refused():
    model = Model()
    model.input("x", (2, 4))
    model.add(nn.ReLU(), name="act")
    with pytest.raises(GraphError, match="a layer 'act' was added before"):
        model.add(nn.ReLU(), name="act")
    with pytest.raises(GraphError, match=r"layer '1' is a function; a layer is an nn\.Module or"):
        model.add(test_what_is_no_layer_is_refused)
    with pytest.raises(CaptureError):
        model.add(nn.Linear(5, 5))


def test_an_empty_model_has_no_result():
    assert Model().finish().run() is None


# --- models without weights: built without memory, captured alike, restored -----------------------


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offsets", torch.arange(4.0), persistent=False)
        self.weight_of_a_list = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids)) * self.scale + self.offsets + self.weight_of_a_list[0]
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.fixture
def empty() -> nn.Module:
    with empty_weights():
        return Embedded().eval()


IDS = torch.tensor([1, 5, 7])


def test_parameters_are_empty_and_buffers_are_not(empty: Embedded) -> None:
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers())
    assert torch.equal(empty.offsets, torch.arange(4.0))


def test_tied_parameters_stay_tied() -> None:
    with empty_weights():
        model = Embedded()
        shared = nn.Parameter(torch.ones(2), requires_grad=False)
        model.a = shared
        model.b = shared
    assert model.head.weight is model.embed.weight
    assert model.a is model.b
    assert not model.a.requires_grad


def test_outside_of_the_block_all_is_as_before() -> None:
    register = nn.Module.register_parameter
    with pytest.raises(KeyError), empty_weights():
        raise KeyError
    assert nn.Module.register_parameter is register
    assert not nn.Linear(2, 2).weight.is_meta


def test_the_graph_is_that_of_the_full_model(empty: Embedded) -> None:
    model = Embedded().eval()
    graph, expected = capture(empty, (IDS,)), capture(model, (IDS,))
    assert graph == expected
    assert all(graph.tensors[v.id].is_meta for v in graph.stored() if v.role == "param")
    assert all(not graph.tensors[v.id].is_meta for v in graph.stored() if v.role == "buffer")
    with pytest.raises(WeightError, match="scale"):
        graph.run(IDS)
    by_name = dict(model.named_parameters())
    for value in graph.stored():
        if value.role == "param":
            graph.tensors[value.id] = by_name[value.names[0]]
    assert torch.equal(graph.run(IDS), model(IDS))


def test_the_model_is_as_before(empty: Embedded) -> None:
    before = list(empty.parameters())
    capture(empty, (IDS,))
    with pytest.raises(CaptureError):
        capture(empty, (IDS[None, None],))  # the norm takes two or three dimensions
    for found, kept in zip(empty.parameters(), before, strict=True):
        assert found is kept
        assert found.is_meta
        assert isinstance(found, nn.Parameter)


def test_a_meta_buffer_is_an_error_that_names_it() -> None:
    with torch.device("meta"):
        model = Embedded()
    with pytest.raises(CaptureError, match=r"buffer 'offsets'.*3 more.*empty_weights"):
        capture(model, (IDS,))


def test_a_meta_constant_is_an_error_that_names_it() -> None:
    with empty_weights():
        model = Embedded()
    model.scale = None
    del model._parameters["scale"]
    model.scale = torch.ones(4, device="meta")
    with pytest.raises(CaptureError, match="scale"):
        capture(model.eval(), (IDS,))


def test_lazy_parameters_are_left_alone() -> None:
    with empty_weights():
        model = nn.LazyLinear(3)
    assert model.has_uninitialized_params()


def test_memory_is_not_touched() -> None:
    """Eight gigabytes of weights, of which none is ever there."""

    def layers() -> Iterator[nn.Module]:
        for _ in range(8):
            layer = nn.Linear(1, 1, bias=False)
            layer.weight = nn.Parameter(torch.empty(1 << 14, 1 << 14, device="meta"))
            yield layer

    with empty_weights():
        model = nn.Sequential(*layers())
    graph = capture(model, (torch.ones(1, 1 << 14),))
    assert sum(value.nbytes for value in graph.stored()) == 8 << 30
