"""In how many microbatches a batch is cut where nobody says: as many as its step can be cut in."""

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError, PlanError
from shardwright.training.data import Loading
from shardwright.training.program import program_with

ROWS = 4


def first(*tensors):
    return Loading([tensors], seed=0).first()


def trained(model, loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def in_one_piece(made, y):
    return nn.functional.mse_loss(made.view(ROWS, 2, 2).sum(1), y)


def without_a_dimension(made, y):
    return nn.functional.binary_cross_entropy_with_logits(made.squeeze(), y)


def test_a_step_that_names_its_rows_is_trained_in_one_piece():
    step = trained(nn.Linear(4, 4), in_one_piece)
    batch = first(torch.randn(ROWS, 4), torch.randn(ROWS, 2))
    _, made = program_with(step, batch, {"devices": 2, "policy": "auto"})
    assert made.training.microbatches == 1


def test_a_step_that_wants_several_rows_is_given_several():
    step = trained(nn.Linear(4, 1), without_a_dimension)
    batch = first(torch.randn(ROWS, 4), torch.rand(ROWS))
    _, made = program_with(step, batch, {"devices": 2, "policy": "auto"})
    assert made.training.microbatches in (1, 2)


def test_a_step_that_cannot_be_captured_at_all_is_refused():
    step = trained(nn.Linear(4, 4), lambda made, y: made.view(ROWS + 1, -1).sum())
    batch = first(torch.randn(ROWS, 4), torch.randn(ROWS, 2))
    with pytest.raises(CaptureError):
        program_with(step, batch, {"devices": 2, "policy": "auto"})


def test_the_first_refusal_is_raised(monkeypatch):
    def refuse(graph, *, microbatches, **asked):
        raise PlanError(f"not with {microbatches}")

    monkeypatch.setattr("shardwright.training.program.make_plan", refuse)
    step = trained(nn.Linear(4, 2), nn.functional.mse_loss)
    batch = first(torch.randn(ROWS, 4), torch.randn(ROWS, 2))
    with pytest.raises(PlanError, match="not with 1"):
        program_with(step, batch, {"devices": 2, "policy": "auto"})
