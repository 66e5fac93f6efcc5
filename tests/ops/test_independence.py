"""Rows of a dimension, followed through a graph by what annotations say."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.ops.independence import Annotations, Rows, follow_rows
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
    notes = Annotations(graph)
    found = follow_rows(graph, [Rows(0, 0, 4), None], notes, graph.outputs)
    assert found == [Rows(1, 0, 4), Rows(0, 0, 4), Rows(0, 0, 4), None, Rows(0, 0, 4)]
    with pytest.raises(
        InputError, match="flatten reshapes the rows so that they cannot be followed"
    ):
        follow_rows(graph, [Rows(1, 0, 6), None], notes, graph.outputs)
