"""Rows of a dimension, followed through a graph by what annotations say."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.ops.independence import RowFlow
from shardwright.tracing import capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 12)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = self.fc(x)
        return made.transpose(0, 1), made.flatten(0, 1), made.sum(-1), y * 2, made.sum(1)


def test_along_either_dimension() -> None:
    graph = capture(Net(), (torch.randn(4, 6, 8), torch.randn(3)))
    x = graph.inputs[0]
    found = RowFlow(graph, 4).follow({x: 0}, graph.outputs)
    assert [*found.values()] == [1, 0, 0, None, 0]
    with pytest.raises(
        InputError, match="flatten reshapes the rows so that they cannot be followed"
    ):
        RowFlow(graph, 6).follow({x: 1}, graph.outputs)


class Beside(nn.Module):
    """Rows, and something that is made from their number."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        numbers = torch.arange(rows)[:, None]
        made = {
            "zeros": lambda: torch.zeros(rows, 1) + 1,
            "expanded": lambda: torch.arange(3).expand(rows, -1),
            "table": lambda: torch.arange(3).expand(rows, -1).cumsum(-1)[numbers[:, 0]],
            "numbers": lambda: numbers * 2,
            "from the end": lambda: numbers.flip(0),
            "table of numbers": lambda: (rows - 1 - numbers)[numbers[:, 0]],
            "count": lambda: torch.ones(rows).sum(),
            "shares": lambda: torch.ones(rows, 1).softmax(0),
            "pairs": lambda: (numbers < numbers.t()).sum(1, keepdim=True),
            "random": lambda: torch.rand(rows, 1),
        }
        return x + made[self.how]()


@pytest.mark.parametrize("how", ["zeros", "expanded", "table", "numbers"])
def test_what_is_the_same_for_every_number_of_rows_lies_beside_them(how: str) -> None:
    assert followed(how) == [0]


@pytest.mark.parametrize(
    "how", ["from the end", "table of numbers", "count", "shares", "pairs", "random"]
)
def test_what_depends_on_the_number_of_rows_does_not(how: str) -> None:
    with pytest.raises(InputError, match=r"computes with the number of rows|may mix"):
        followed(how)


def followed(how: str) -> list[int | None]:
    graph = capture(Beside(how), (torch.randn(4, 3),))
    ends = {node.source: {"made": frozenset({0, 1})} for node in graph.nodes}
    found = RowFlow(graph, 4, ends).follow({graph.inputs[0]: 0}, graph.outputs)
    return [*found.values()]
