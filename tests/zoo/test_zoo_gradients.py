"""Models of the zoo with its loss: the gradients of all parameters are autograd's."""

import pytest
import torch
from torch import nn

from shardwright.autodiff.vjp import Vjps
from shardwright.tracing import capture
from tests.building.derivatives import distance, run, with_gradients

pytest.importorskip("transformers")

from tests.rounding import BITS
from tests.turns import sampled
from tests.zoo.captures import SHALLOW
from zoo.models import BY_NAME
from zoo.training import trained

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::Warning:transformers"),
]

VJPS = Vjps()


class Loss(nn.Module):
    """A model's loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return self.model(**batch).loss


@pytest.mark.parametrize("name", sampled(list(BY_NAME), 3))
def test_gradients_are_those_of_eager(name: str) -> None:
    dtype = torch.float32 if BY_NAME[name].single_only else torch.float64
    # In float32 there is only room for calls that round alike.
    tolerance = 1e-12 if dtype == torch.float64 else max(BITS, 1e-12)
    entry = trained(name, dtype, layers=SHALLOW)
    (batch,) = entry.microbatches(1)
    model = Loss(entry.model)
    graph = capture(model, (), batch)
    graph.tensors = {key: tensor.detach().clone() for key, tensor in graph.tensors.items()}
    loss = model(**batch)
    named = {key: p for key, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    expected = {key: g for key, g in zip(named, gradients, strict=True) if g is not None}

    wants = {value.names[0]: value.id for value in graph.stored() if value.names[0] in named}
    seed = torch.ones_like(loss)
    found = with_gradients(graph, list(wants.values()), [(graph.outputs[0], seed)], VJPS)
    tensors = [batch[graph.values[value_id].name] for value_id in graph.inputs]
    result, *rest = run(found.graph, [*tensors, seed])
    present = [key for key, there in zip(wants, found.present, strict=True) if there]
    assert set(present) == set(expected)
    assert distance(result, loss.detach()) <= tolerance
    for key, gradient in zip(present, rest[: len(present)], strict=True):
        assert distance(gradient, expected[key]) <= tolerance, key
