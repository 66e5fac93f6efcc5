"""Lines of the program, noted while a model is traced."""

from typing import Any

import torch

from shardwright.ir import Source
from shardwright.tracing import capture
from tests.tracing.equality import captured


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_deepest_line_of_the_program_is_noted() -> None:
    def function(m: Any, x: Any) -> Any:
        with torch.no_grad():
            y = doubled(x)
        return m.linear(y)

    first = doubled.__code__.co_firstlineno + 1
    here = function.__code__.co_firstlineno + 3
    graph = captured(function, torch.ones(2, 4))
    sources = [node.source for node in graph.nodes]
    assert (sources[0], sources[-1]) == (Source(__file__, first), Source(__file__, here))


def test_modules_of_torch_alone_have_no_line() -> None:
    graph = capture(torch.nn.Sequential(torch.nn.ReLU()), (torch.ones(2),))
    assert graph.nodes[0].source is None


class Twice(torch.nn.Module):
    """Holds one module in two others."""

    def __init__(self) -> None:
        super().__init__()
        shared = torch.nn.Linear(4, 4)
        self.first = torch.nn.Sequential(shared)
        self.second = torch.nn.Sequential(shared)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


def test_a_module_in_two_others_is_named_by_the_one_that_calls_it() -> None:
    graph = capture(Twice(), (torch.ones(2, 4),))
    paths = [tuple(scope.path for scope in node.scopes) for node in graph.nodes]
    assert paths == [("first", "first.0"), ("second", "second.0")]
