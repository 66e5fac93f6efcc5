"""Linear layers on merged rows: which are rewritten, and that no bit of a result changes."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.ir import IRGraph

BATCH, LENGTH, WIDTH = 6, 5, 8

Forward = Callable[[nn.Linear, Tensor], Tensor]


class Calls(nn.Module):
    """A function of a linear layer and an input."""

    def __init__(self, forward: Forward, bias: bool) -> None:
        super().__init__()
        self.call, self.layer = forward, nn.Linear(WIDTH, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Attention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.weights = weights
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=self.weights)[0]


def linear_ranks(graph: IRGraph) -> list[int]:
    """How many dimensions the input of each linear layer has."""
    linears = [node for node in graph.nodes if node.op == "aten.linear.default"]
    return [len(graph.values[node.inputs[0]].shape) for node in linears]


def captured(model: nn.Module, x: Tensor) -> IRGraph:
    """The graph of a model, which gives what the model gives, bit for bit, and its gradients."""
    graph = sw.capture(model, (x,))
    assert torch.equal(graph.run(x), model(x))
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).float().square().sum(), parameters)
    found = torch.autograd.grad(graph.run(x).float().square().sum(), parameters)
    assert all(map(torch.equal, found, expected))
    return graph


def under_autocast(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x.reshape(-1, WIDTH)).view(BATCH, LENGTH, 4)


def returned_too(layer: nn.Linear, x: Tensor) -> Tensor:
    made = layer(x.flatten(0, 1))
    return made.view(BATCH, LENGTH, 4) + made.sum()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("forward", "rank"),
    [
        (lambda f, x: f(x.flatten(0, 1)).unflatten(0, (BATCH, LENGTH)), 3),
        (lambda f, x: f(x.mT.mT.transpose(0, 1).reshape(-1, WIDTH)).view(LENGTH, BATCH, 4), 3),
        (lambda f, x: f(x.view(BATCH, LENGTH, 2, 4).reshape(-1, 8)).view(BATCH, LENGTH, 4), 3),
        (under_autocast, 3),
        (lambda f, x: f(x.view(-1, WIDTH)).relu().view(BATCH, LENGTH, 4), 2),
        (lambda f, x: f(x.view(-1, WIDTH)).view(LENGTH, BATCH, 4), 2),
        (lambda f, x: f(x.view(-1, WIDTH)).view(BATCH, LENGTH, 2, 2), 2),
        (lambda f, x: f(x.view(-1, WIDTH)).view(BATCH, 2 * LENGTH, 2), 2),
        (returned_too, 2),
    ],
)
def test_a_linear_layer_on_merged_rows(forward: Forward, rank: int, bias: bool) -> None:
    torch.manual_seed(0)
    graph = captured(Calls(forward, bias), torch.randn(BATCH, LENGTH, WIDTH))
    assert linear_ranks(graph) == [rank]


def test_a_chain_of_linear_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(WIDTH, 3), nn.Linear(3, 4), nn.Unflatten(0, (BATCH, LENGTH))
    )
    graph = captured(model, torch.randn(BATCH, LENGTH, WIDTH))
    assert linear_ranks(graph) == [3, 3]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(weights=False),
    "attention with weights": lambda: Attention(weights=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_attention_keeps_the_rows_of_its_batch_apart(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(BATCH, LENGTH, WIDTH)
    graph = captured(model, x)
    pipeline = sw.build(graph, sw.plan(graph, devices=2, policy="data"))
    assert {task.kind for task in pipeline.supertasks.values()} == {"FX", "input", "output"}
    found = sw.run(pipeline, x[:3], in_process=True)
    torch.testing.assert_close(found, model(x[:3]))


@pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))
def test_a_step_with_attention_is_the_same_in_microbatches(make: Callable[[], nn.Module]) -> None:
    def losses(train: Callable[[Callable[..., Tensor], Sequence[Tensor]], list[float]]):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.roll(1, 1))
            loss.backward()
            optimizer.step()
            return loss

        return train(step, list(torch.randn(3, BATCH, LENGTH, WIDTH)))

    def on_a_mesh(step: Callable[..., Tensor], data: Sequence[Tensor]) -> list[float]:
        options = {"mesh": {"data": 2}, "microbatches": 3, "epochs": 1}
        result = sw.train(step, data, in_process=True, quiet=True, **options)
        assert result.plan.notes == ()
        return result.losses

    expected = losses(lambda step, data: [step(x).item() for x in data])
    assert losses(on_a_mesh) == pytest.approx(expected, rel=1e-5)
