"""What a task makes is what the file says; its failures name the place, both ways of running."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.compiler import tasks
from shardwright.errors import WorkerError


class Solves(nn.Module):
    """A model that fails on what cannot be factored."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x)


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.workers)])
def test_a_failure_names_supertask_and_node(in_process: bool) -> None:
    graph = sw.capture(Solves().eval(), (torch.eye(2),))
    with pytest.raises(WorkerError, match=r"not positive-definite.*in node 'n0' \(aten") as caught:
        sw.run(sw.build(graph, sw.plan(graph, devices=1)), -torch.eye(2), in_process=in_process)
    assert (caught.value.rank, caught.value.task) == (0, "d0.0")


@pytest.mark.parametrize(
    ("made", "said"),
    [(torch.ones(3), r"f32\[3\], the file says f32\[2\]"), (torch.ones(2).int(), r"i32\[2\]")],
)
def test_another_result_than_the_file_says_is_an_error(made: Tensor, said: str) -> None:
    builder = sw.Builder("held")
    x = builder.input("x", (2,))
    graph = builder.finish([builder.call("aten.neg.default", x)])
    held = tasks._held(lambda _: [made], graph, frozenset())
    with pytest.raises(ValueError, match=rf"node 'n0' \(aten.neg.default\) made {said}"):
        held([torch.ones(2)])


def test_results_lie_as_the_file_says() -> None:
    builder = sw.Builder("held")
    x = builder.input("x", (2, 3))
    graph = builder.finish([builder.call("aten.neg.default", x)])
    held = tasks._held(lambda tensors: [tensors[0].t().contiguous().t()], graph, frozenset())
    (found,) = held([torch.rand(2, 3)])
    assert found.stride() == (3, 1)
