"""Operators that trust how tensors lie in memory, beside kernels whose fake ones say it wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.autodiff.record import in_one_order
from shardwright.autodiff.vjp import Vjps
from tests.building.derivatives import run, with_gradients, wrong_kinds
from tests.turns import rotated

BATCHES = [torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": F.softplus,
    "log sigmoid": F.logsigmoid,
    "hard tanh": F.hardtanh,
    "hard sigmoid": F.hardsigmoid,
    "log softmax": lambda x: F.log_softmax(x, 1),
    "glu": lambda x: F.glu(torch.cat([x, x.square()], 1), 1),
    "reflection": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replication": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
}
TRUSTING: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm": lambda: nn.BatchNorm2d(4),
    "layer norm": lambda: nn.LayerNorm(6),
    "max pool": lambda: nn.MaxPool2d(2),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


class Between(nn.Module):
    """An activation on tensors that lie otherwise, between modules that trust how."""

    def __init__(self, activation: str, trusting: str, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.before, self.ahead = TRUSTING[trusting](), TRUSTING[trusting]()
        self.behind = nn.GroupNorm(2, 4) if trusting == "layer norm" else TRUSTING[trusting]()
        self.activation, self.lay = ACTIVATIONS[activation], LAYOUTS[layout]

    def forward(self, x: Tensor) -> Tensor:
        turned_gradient = self.lay(self.activation(self.before(self.one(x))))
        turned = self.behind(self.activation(self.lay(self.ahead(self.other(x)))))
        return (turned_gradient * turned_gradient.cos()).mean() + (turned * turned.cos()).mean()


def stepper(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    ("activation", "place"), rotated(list(ACTIVATIONS), [*product(TRUSTING, LAYOUTS)], 2)
)
def test_training_is_eagers_however_activations_lie(
    activation: str, place: tuple[str, str]
) -> None:
    trusting, layout = place
    eager = Between(activation, trusting, layout).double()
    split, compiled = copy.deepcopy(eager), copy.deepcopy(eager)
    batches = [batch.double() for batch in BATCHES]
    step = stepper(eager)
    for batch in batches:
        step(batch)
    mesh = {"pipeline": 2}
    sw.train(stepper(split), batches, mesh=mesh, epochs=1, quiet=True, in_process=True)
    program = sw.compile(stepper(compiled), batches[0])
    for batch in batches:
        program(batch)
    for model in (split, compiled):
        for key, expected in eager.state_dict().items():
            assert torch.allclose(model.state_dict()[key], expected, rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_behind_a_group_norm_are_eagers_however_they_arrive(
    activation: str, layout: str
) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return ACTIVATIONS[activation](self.norm(self.first(x)))

    model, x = Normed().double(), BATCHES[0].double()
    made = model(x)
    seed = LAYOUTS[layout](torch.randn(made.shape).double())
    graph = sw.capture(model, (x,))
    found = with_gradients(graph, list(graph.tensors), [(graph.outputs[0], seed)], Vjps())
    assert wrong_kinds(found.graph, [x, seed]) == []
    expected = torch.autograd.grad(made, list(model.parameters()), seed)
    for gradient, wanted in zip(run(found.graph, [x, seed])[1:], expected, strict=True):
        assert torch.allclose(gradient, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_group_norms_backward_reads_lies_as_its_input(
    layout: str, order: torch.memory_format
) -> None:
    """Whoever calls it: torch's derivatives do so no more from 2.15 on."""
    grad, x = LAYOUTS[layout](BATCHES[0]), BATCHES[1].contiguous(memory_format=order)
    backward = torch.ops.aten.native_group_norm_backward.default
    statistics = torch.native_group_norm(x, None, None, 2, 4, 36, 2, 1e-5)[1:]
    args = (grad, x, *statistics, None, 2, 4, 36, 2, [True, False, False])
    ordered = in_one_order(backward, args)
    assert ordered[0].is_contiguous(memory_format=order)
    assert torch.equal(ordered[0], grad)
    assert ordered[1] is x
    assert ordered[2:] == [*args[2:]]
    assert in_one_order(torch.ops.aten.add.Tensor, (grad, x)) == (grad, x)
