"""What reads and writes by strides counts from a tensor's own first element, wherever that lies.

torch counts from where memory begins; slots of an arena share one, and so do microbatches' rows.
"""

import pytest
import torch
from torch import nn

import shardwright as sw


def read(x):
    y = x + 1
    return torch.as_strided(y, (4, 4), (8, 1), 2), torch.as_strided_copy(y, (4, 4), (8, 2), 1)


def read_of_a_view(x):
    y = (x + 1)[1:]
    return torch.as_strided(y, (2, 4), (8, 1), 2), torch.as_strided_copy(y, (2, 4), (8, 1), 10)


def read_where_a_view_begins(x):
    y = (x + 1)[1:]
    return torch.as_strided(y, (2, 4), (8, 1)), torch.as_strided_copy(y, (2, 4), (8, 1))


def scattered(x):
    ones = torch.ones(2, 4)
    y = x + 1
    return (
        torch.as_strided_scatter(y, ones, (2, 4), (8, 1), 3),
        torch.as_strided_scatter(y[1:], ones, (2, 4), (8, 1), 10),
        torch.as_strided_scatter(y[1:], ones, (2, 4), (8, 1)),
    )


def written(x):
    y = x + 1
    torch.as_strided(y[1:], (2, 4), (8, 1), 11).mul_(3)
    return y


def of_the_input(x):
    return (torch.as_strided(x, (2, 4), (8, 1), 3) * 2, *scattered(x))


FUNCTIONS = [
    read,
    read_of_a_view,
    read_where_a_view_begins,
    scattered,
    written,
    of_the_input,
]


class Strided(nn.Module):
    """A layer before, so that what is read is no input, and its sum behind."""

    def __init__(self, function, *, layer):
        super().__init__()
        self.function = function
        self.layer = nn.Linear(8, 8) if layer else nn.Identity()

    def forward(self, x):
        hidden = self.layer(x)
        made = self.function(hidden)
        return tuple(y + hidden.sum() for y in (made if isinstance(made, tuple) else (made,)))


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_in_eager(function, layer):
    model = Strided(function, layer=layer)
    rows = torch.randn(9, 8)
    graph = sw.capture(model, (rows[:4].clone(),))
    compiled = sw.compile(model, rows[:4].clone())
    for start in (0, 3):
        x = rows[start : start + 4]
        wanted = model(x.clone())
        torch.testing.assert_close(graph.run(x), wanted)
        torch.testing.assert_close(compiled(x), wanted)


def test_captured_on_rows_of_another_tensor():
    model, rows = Strided(read, layer=False), torch.randn(9, 8)
    graph = sw.capture(model, (rows[3:7],))
    torch.testing.assert_close(graph.run(rows[2:6]), model(rows[2:6].clone()))


def written_twice(x):
    y = x + 1
    torch.as_strided(y, (2, 4), (8, 1), 3).mul_(3)
    torch.as_strided(y, (3, 3), (4, 1), 6).copy_(x[1:, 2:5] * x[:3, :3])
    return y


# Of views that read before their first element, and of as_strided_scatter, autograd in eager mode
# loses gradients: what is written in place it knows.
@pytest.mark.parametrize("function", [read, read_where_a_view_begins, written, written_twice])
def test_gradients_as_in_eager(function):
    def trained():
        torch.manual_seed(0)
        model = Strided(function, layer=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(x):
            loss = sum(y.square().mean() for y in model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, step

    x = torch.randn(4, 8)
    (model, step), (alone, eager) = trained(), trained()
    compiled = sw.compile(step, x)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(model.state_dict(), alone.state_dict())
