"""capture: what the issue and the design list as pitfalls, each compared with eager."""

import dataclasses
import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwright.errors import CaptureError, InputError
from shardwright.ir import SLOT
from shardwright.tracing import CaptureWarning, capture
from tests.tracing.equality import Module, assert_same, captured


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    states: tuple[torch.Tensor, ...] | None = None
    label: str = "none"


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


# --- structure ---------------------------------------------------------------------------


def test_plain_model(x: torch.Tensor) -> None:
    graph = assert_same(lambda m, x: m.linear(x).relu(), x)
    assert [node.op for node in graph.nodes] == ["aten.linear.default", "aten.relu.default"]
    assert graph.name == "Module"


def test_keyword_arguments_keep_their_names(x: torch.Tensor) -> None:
    class Model(nn.Module):
        def forward(self, a: Any, *, mask: Any = None, scale: float = 1.0, b: Any = None) -> Any:
            return (a - 2 * b) * scale if mask is None else a * mask

    graph = assert_same(Model(), x, b=x + 1, scale=3.0)
    assert [graph.values[i].name for i in graph.inputs] == ["a", "b"]
    assert_same(Model(), x, mask=x > 0)


def test_none_nested_and_dataclass_arguments(x: torch.Tensor) -> None:
    def function(m: Any, state: Any, result: Any, pair: Any) -> Any:
        assert state["more"][1] is None
        assert pair.right is None
        return state["h"] + state["more"][0] * result.logits - pair.left

    state = {"h": x, "more": [x * 2, None]}
    assert_same(function, state, Result(x * 3), Pair(x, None))


def test_results_come_back_as_they_were(x: torch.Tensor) -> None:
    assert_same(lambda m, x: Result(x + 1, (x * 2, x * 3), "kept"), x)
    assert_same(lambda m, x: {"a": x + 1, "b": [None, (x, 5, "s")]}, x)
    assert_same(lambda m, x: Pair(x + 1, None), x)


def test_positional_and_keyword_catch_alls(x: torch.Tensor) -> None:
    def function(m: Any, first: Any, *rest: Any, **options: Any) -> Any:
        return first - 2 * rest[0] + 3 * rest[1] * options["weight"]

    assert_same(function, x, x + 1, x + 2, weight=x + 3)


def test_string_arguments(x: torch.Tensor) -> None:
    target = torch.tensor([0, 3, 1])

    def function(m: Any, x: Any, mode: str) -> Any:
        loss = F.nll_loss(F.log_softmax(m.linear(x), -1), target, reduction=mode)
        return loss, torch.div(x, 3, rounding_mode="floor")

    graph = assert_same(function, x, "sum")
    assert_same(function, x, mode="none")
    with pytest.raises(InputError, match="'sum'"):
        graph.run(x, "none")


def test_repeated_outputs_inputs_and_parameters_returned(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = x + 1
        return y, y, x, m.linear.weight, m.average

    graph = assert_same(function, x)
    assert graph.outputs[0] == graph.outputs[1]
    assert graph.outputs[2] == graph.inputs[0]
    assert graph.values[graph.outputs[3]].role == "param"


def test_views_of_one_tensor_returned(x: torch.Tensor) -> None:
    assert_same(lambda m, x: (x.t(), x[1:], x.view(-1)[3], x.expand(2, 3, 4)), x)


def test_unused_input_stays_in_the_signature(x: torch.Tensor) -> None:
    graph = assert_same(lambda m, x, unused: x + 1, x, torch.zeros(2))
    assert len(graph.inputs) == 2


def test_no_tensor_inputs() -> None:
    graph = assert_same(lambda m: m.linear(torch.arange(4.0)) + torch.ones(4, device="cpu"))
    factories = [node for node in graph.nodes if "device" in node.attrs]
    assert len(factories) == 2
    assert all(node.attrs["device"] is SLOT for node in factories)


def test_non_contiguous_input(x: torch.Tensor) -> None:
    graph = assert_same(lambda m, x: x.reshape(-1) + x.t().reshape(-1), torch.randn(4, 3).t())
    assert graph.values[graph.inputs[0]].strides == (1, 3)


def test_another_shape_is_one_error(x: torch.Tensor) -> None:
    graph = captured(lambda m, x: x + 1, x)
    with pytest.raises(InputError, match=r"f32\[2, 4\].*f32\[3, 4\]"):
        graph.run(x[:2])


# --- stored values -----------------------------------------------------------------------


def test_tied_parameters_are_one_value() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(self.embed(ids))
            return logits

    graph = assert_same(Tied(), torch.tensor([1, 5]))
    (weight,) = graph.stored()
    assert weight.names == ("embed.weight", "head.weight")
    assert weight.name == "embed.weight"


def test_non_persistent_buffer_keeps_its_contents(x: torch.Tensor) -> None:
    model = Module(lambda m, x: x * m.frequencies)
    model.register_buffer("frequencies", torch.arange(4.0), persistent=False)
    graph = assert_same(model, x)
    (value,) = graph.stored()
    assert value.role == "buffer"
    assert torch.equal(graph.tensors[value.id], torch.arange(4.0))


def test_large_constants_are_values(x: torch.Tensor) -> None:
    table = torch.randn(3, 4)

    def function(m: Any, x: Any) -> Any:
        return x * torch.tensor([[1.0, 2.0, 3.0, 4.0]]) + table + m.attribute

    model = Module(function)
    model.attribute = torch.randn(4)
    graph = assert_same(model, x)
    assert sorted(value.numel for value in graph.stored()) == [4, 4, 12]
    assert {value.role for value in graph.stored()} == {"constant"}


def test_unused_stored_values_are_left_out(x: torch.Tensor) -> None:
    graph = captured(lambda m, x: x + 1, x)
    assert list(graph.stored()) == []


def test_parametrized_weight(x: torch.Tensor) -> None:
    model = Module(lambda m, x: m.linear(x))
    nn.utils.parametrizations.weight_norm(model.linear)
    graph = assert_same(model, x)
    names = {value.name for value in graph.stored()}
    assert "linear.parametrizations.weight.original0" in names


def test_graph_shares_the_models_weights(x: torch.Tensor) -> None:
    model = Module(lambda m, x: m.linear(x))
    graph = capture(model, (x,))
    with torch.no_grad():
        model.linear.weight.mul_(2)
    assert torch.equal(graph.run(x), model(x))


# --- randomness --------------------------------------------------------------------------


def test_random_operators_draw_the_same_numbers(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        torch.rand(5)  # unused, but it moves the generator
        noise = torch.empty(3, 4).uniform_(-1, 1) + torch.randn(3, 4)
        return F.dropout(m.linear(x), 0.3, True) + noise + torch.zeros(4).bernoulli_(0.5)

    assert_same(function, x)


def test_generators_from_outside_are_refused(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        return x + torch.rand(3, 4, generator=torch.Generator())

    with pytest.raises(CaptureError, match=r"torch\.Generator.*manual_seed"):
        captured(function, x)


# --- origins -----------------------------------------------------------------------------


def test_scopes_and_sources(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    graph = capture(model, (x,))
    assert [node.scope for node in graph.nodes] == ["0", "1.0", "1.1"]
    assert graph.nodes[2].scope_class == "torch.nn.modules.activation.ReLU"
    assert [scope.path for scope in graph.nodes[1].scopes] == ["1", "1.0"]
    graph = captured(lambda m, x: m.linear(x), x)
    assert graph.nodes[0].source is not None
    assert graph.nodes[0].source.file == __file__


def test_a_module_called_twice_has_one_scope(x: torch.Tensor) -> None:
    graph = captured(lambda m, x: m.linear(m.linear(x)), x)
    assert [node.scope for node in graph.nodes] == ["linear", "linear"]


# --- what the caller gets wrong ----------------------------------------------------------


def test_wrong_calls_are_one_error_each(x: torch.Tensor) -> None:
    model = Module(lambda m, x: x)
    with pytest.raises(CaptureError, match="as in capture"):
        capture(model, x)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"nn\.Module"):
        capture(lambda x: x, (x,))  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match="signature"):
        capture(nn.Linear(4, 4), (x, x))
    with pytest.raises(CaptureError, match="object"):
        capture(model, (object(),))
    with pytest.raises(CaptureError, match="without any tensor"):
        captured(lambda m, x: 5, x)
    with pytest.raises(CaptureError, match="script module"):
        capture(nn.Sequential(torch.jit.ScriptModule()), (x,))
    with pytest.raises(CaptureError, match="layout"):
        capture(model, (x.to_sparse(),))


# --- writes to what is not the graph's ---------------------------------------------------


def test_writing_to_an_input_warns_and_leaves_it_alone(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        x.add_(1)
        return x * 2

    before = x.clone()
    with pytest.warns(CaptureWarning, match=r"test_capture.py:\d+ `x.add_\(1\)`.*input 'args_0'"):
        graph = captured(function, x)
    assert torch.equal(graph.run(x), (before + 1) * 2)
    assert torch.equal(x, before)


def test_writing_to_an_input_for_the_caller_alone_is_refused(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        y = x * 2
        x.zero_()
        return y

    with pytest.raises(CaptureError, match=r"`x.zero_\(\)`.*only its caller"):
        captured(function, x)


def test_writing_to_a_parameter_is_refused(x: torch.Tensor) -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            m.linear.weight.mul_(2)
        return m.linear(x)

    with pytest.raises(CaptureError, match=r"`m.linear.weight.mul_\(2\)`.*'linear.weight'"):
        captured(function, x)
    with pytest.raises(CaptureError, match="parameter 'weight'"):
        capture(nn.Embedding(5, 4, max_norm=1.0), (torch.tensor([1]),))


def test_writing_to_a_closed_over_tensor_is_refused(x: torch.Tensor) -> None:
    cache = torch.zeros(4)
    with pytest.raises(CaptureError, match="register_buffer"):
        captured(lambda m, x: cache.add_(x.sum(0)), x)


@functools.lru_cache
def table(size: int) -> torch.Tensor:
    return torch.arange(size).float()


def test_a_cache_of_a_function_keeps_nothing_of_a_capture() -> None:
    class Cached(nn.Module):
        @functools.cache  # noqa: B019 (the model lives as long as the test)
        def scale(self, size: int) -> torch.Tensor:
            return torch.full((size,), 2.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale(x.shape[1]) + table(x.shape[1])

    model, x = Cached(), torch.randn(3, 4)
    graph = capture(model, (x,))
    assert type(model(x)) is torch.Tensor
    assert torch.equal(graph.run(x), model(x))
    table.cache_clear()
