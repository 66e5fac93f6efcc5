"""Models without weights: built without memory, captured alike, restored."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError, WeightError
from shardwright.tracing import capture
from shardwright.tracing.capture import empty_weights


class Model(nn.Module):
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
        return Model().eval()


IDS = torch.tensor([1, 5, 7])


def test_parameters_are_empty_and_buffers_are_not(empty: Model) -> None:
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers())
    assert torch.equal(empty.offsets, torch.arange(4.0))


def test_tied_parameters_stay_tied() -> None:
    with empty_weights():
        model = Model()
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


def test_the_graph_is_that_of_the_full_model(empty: Model) -> None:
    model = Model().eval()
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


def test_the_model_is_as_before(empty: Model) -> None:
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
        model = Model()
    with pytest.raises(CaptureError, match=r"buffer 'offsets'.*3 more.*empty_weights"):
        capture(model, (IDS,))


def test_a_meta_constant_is_an_error_that_names_it() -> None:
    with empty_weights():
        model = Model()
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
