import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shardwright.errors import InputError
from shardwright.training.data import Batch, as_batch
from shardwright.training.program import TrainingProgram, batch_size, first_microbatch


class Tied(nn.Module):
    """An embedding that is also the head, a buffer, and a part that the step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("positions", torch.arange(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def make(kind: type[Optimizer], **options: float) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    return model, kind(model.parameters(), lr=0.1, **options)


def step_of(model: nn.Module, optimizer: Optimizer):
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


BATCH = as_batch((torch.arange(6) % 7, (torch.arange(6) + 1) % 7))


def test_what_the_graph_holds_and_what_it_does_not() -> None:
    program = TrainingProgram(step_of(*make(SGD)), BATCH, microbatches=2, seed=0)
    graph = program.graph
    assert [graph.values[i].shape for i in graph.inputs] == [(3,), (3,), ()]
    assert list(program.model) == list(make(SGD)[0].state_dict())
    assert set(program.rest) == {"unused.weight", "unused.bias"}
    assert program.aliases() == {"head.weight": "embed.weight"}
    assert not program.draws


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {}), (SGD, {"momentum": 0.9}), (AdamW, {}), (AdamW, {"amsgrad": True})],
    ids=["sgd", "momentum", "adamw", "amsgrad"],
)
@pytest.mark.parametrize("warm", [False, True])
def test_trained_values_go_back_as_a_loop_would_leave_them(kind, options, warm: bool) -> None:
    model, optimizer = make(kind, **options)
    if warm:
        step_of(model, optimizer)(*BATCH.args)
    program = TrainingProgram(step_of(model, optimizer), BATCH, microbatches=1, seed=0)
    reference, other = copy.deepcopy((model, optimizer))
    for _ in range(2):
        step_of(reference, other)(*BATCH.args)
    names = {id(parameter): name for name, parameter in reference.named_parameters()}
    state = {
        f"optimizer.{names[id(parameter)]}.{key}": tensor
        for parameter, entries in other.state.items()
        for key, tensor in entries.items()
        if tensor is not None
    }
    program.write_back({**reference.state_dict(), **state})
    found = model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.state_dict().items())
    torch.testing.assert_close(optimizer.state_dict(), other.state_dict(), rtol=0, atol=0)
    one, two = step_of(model, optimizer)(*BATCH.args), step_of(reference, other)(*BATCH.args)
    assert torch.equal(one, two), "both go on alike"


def test_the_first_microbatch_is_cut_from_what_has_the_batchs_size() -> None:
    def step(x: torch.Tensor, *, mask: torch.Tensor, table: torch.Tensor, p: float) -> None:
        """Nothing is asked of it here."""

    kwargs = {"mask": torch.ones(8, 2), "table": torch.ones(5, 2), "p": 0.5}
    call = first_microbatch(step, Batch((torch.arange(8),), kwargs, 0, 0), 4)
    assert call.args[0].tolist() == [0, 1]
    assert call.kwargs["mask"].shape == (2, 2)
    assert call.kwargs["table"].shape == (5, 2)
    assert call.kwargs["p"] == 0.5
    with pytest.raises(InputError, match="a batch of 8 cannot be cut in 3 equal microbatches"):
        first_microbatch(step, Batch((torch.arange(8),), kwargs, 0, 0), 3)


def test_inputs_of_which_either_may_be_the_batch_are_refused() -> None:
    """The most frequent first size is the batch's; scales of features are none, however many."""

    def step(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (x * scale + shift).sum()

    for rows in (8, 7):
        batch = Batch((torch.rand(rows, 2), torch.rand(2), torch.rand(2)), {}, 0, 0)
        with pytest.raises(InputError, match=f"the first has {rows} rows, most have 2"):
            first_microbatch(step, batch, 2)
        first_microbatch(step, batch, 1)
    assert batch_size([torch.ones(4), torch.ones(4), torch.ones(9)]) == 4
    assert batch_size([torch.ones(4), torch.ones(9)]) == 9
