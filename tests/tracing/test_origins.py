"""Lines of the program, noted while torch.export traces."""

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from shardwright.ir import Source
from shardwright.tracing import capture
from shardwright.tracing.origins import takes_notes
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


def test_torch_is_as_before() -> None:
    create_node = _ModuleStackTracer.create_node
    with takes_notes():
        assert _ModuleStackTracer.create_node is not create_node
    assert _ModuleStackTracer.create_node is create_node
    assert not torch.fx.config.do_not_emit_stack_traces
