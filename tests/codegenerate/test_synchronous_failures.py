"""How a call of `SynchronousPipeline` fails: what it says, and that the next call works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.codegenerate.synchronous import SynchronousPipeline
from shardwright.errors import RunError, WorkerError
from tests.codegenerate.staged import (
    Stage,
    assert_equal,
    chain,
    configured,
    gradients,
    met,
    nothing,
    perceptron,
)


class Boom(Exception):
    pass


def failing(at: tuple[int, int]) -> Any:
    def fail(*place: int) -> None:
        if place == at:
            raise Boom("no luck")

    return fail


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_failures_name_stage_and_microbatch(phase: str, stage: int, microbatches: int) -> None:
    row = 2 if microbatches == 4 else 0
    fail = failing((stage, row))
    hooks = (fail, nothing) if phase == "forward" else (nothing, fail)
    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with SynchronousPipeline(met(model, *hooks), microbatches) as pipeline:
        for _ in range(2):
            with pytest.raises(
                WorkerError, match=f"stage {stage}, microbatch {row}: {phase}: Boom: no luck"
            ) as caught:
                pipeline(x, torch.arange(4)).sum().backward()
            assert isinstance(caught.value.__cause__, Boom)
            assert (caught.value.stage, caught.value.microbatch) == (stage, row)
        with torch.no_grad():
            ended = pipeline(x, torch.arange(10, 14))
        assert torch.equal(ended, torch.cat([model(part) for part in x.split(4 // microbatches)]))
    assert all(parameter in set(model.parameters()) for parameter in pipeline.parameters())


def test_an_interrupt_ends_the_call() -> None:
    def interrupt(stage: int, row: int) -> None:
        if (stage, row) == (1, 2):
            raise KeyboardInterrupt

    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64)
    pipeline = SynchronousPipeline(met(model, interrupt, nothing), 4)
    with pytest.raises(KeyboardInterrupt):
        pipeline(x, torch.arange(4))
    assert torch.equal(pipeline(x, torch.arange(10, 14))[:1], model(x[:1]))


def test_a_stage_that_returns_something_else() -> None:
    stage = Stage({}, lambda stage, x: (x, x))
    with pytest.raises(WorkerError, match=r"returned Tensor, Tensor; .* its outputs: output"):
        SynchronousPipeline(configured([(["x"], ["output"], stage)]), 1)(torch.ones(2))


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    with (
        SynchronousPipeline(chain(perceptron(), 4), 2) as pipeline,
        pytest.raises(RunError, match="cannot be differentiated again"),
    ):
        torch.autograd.grad(pipeline(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_graph_is_kept_where_that_is_asked_for(microbatches: int, checkpoint: bool) -> None:
    model = perceptron()
    x = torch.randn(4, 6, dtype=torch.float64)
    with SynchronousPipeline(chain(model, 4), microbatches, checkpoint=checkpoint) as pipeline:
        loss = pipeline(x).sum()
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        assert_equal(gradients(model), first)
        with pytest.raises(RunError, match="what it needed is freed; give retain_graph=True"):
            loss.backward()


def test_parameters_that_were_changed_before_the_backward_are_noticed() -> None:
    model = perceptron()
    with SynchronousPipeline(chain(model, 4), 2) as pipeline:
        loss = pipeline(torch.randn(4, 6, dtype=torch.float64, requires_grad=True)).sum()
        with torch.no_grad():
            model[2].weight.mul_(2)
        with pytest.raises(WorkerError, match="modified by an inplace operation"):
            loss.backward()
