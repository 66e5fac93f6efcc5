"""A run of a bound plan makes no tensor: what it gives, and what torch's kernels make, is all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.compiler.executor import Executor, NativeSegment
from shardwright.compiler.program import CompiledProgram
from shardwright.ir import Builder
from shardwright.kernels.lowered import kind_of
from tests.compiler.allocated import allocations
from tests.compiler.running import assert_same, planned
from tests.trainable import TASKS

MADE_BY_TORCH = {"resnet": {"aten.convolution.default", "aten.convolution_backward.default"}}
"""Operators of torch in these tasks that make their results, or memory to work in, themselves."""

Compiled = tuple[CompiledProgram, tuple[Tensor, ...], int]
"""A program, the arguments of a call, and the bytes of what it gives."""


def step_of(name: str) -> Compiled:
    task = TASKS[name]
    torch.manual_seed(0)
    model, batch = task.model(), task.batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(*batch: Tensor) -> Tensor:
        *args, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(*args).flatten(0, -2), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return sw.compile(step, *batch), batch, 4


def forward_of(name: str) -> Compiled:
    task = TASKS[name]
    torch.manual_seed(0)
    model, args = task.model().eval(), task.batch()[:-1]
    with torch.no_grad():
        return sw.compile(model, *args), args, model(*args).nbytes


def executor_of(program: CompiledProgram) -> Executor:
    executor: Any = program._latest.bound.executor  # type: ignore[union-attr]
    assert isinstance(executor, Executor)
    return executor


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("made", [step_of, forward_of], ids=["step", "forward"])
def test_a_call_makes_its_results_alone(made: Callable[[str], Compiled], name: str) -> None:
    program, args, given = made(name)
    program(*args)
    executor = executor_of(program)
    if made is step_of and name in MADE_BY_TORCH:
        assert makers(executor) == MADE_BY_TORCH[name]
        return
    found = allocations(lambda: program(*args))
    assert sum(size for size in found if size > 0) == given
    assert allocations(executor.run_bound) == []


def makers(executor: Executor) -> set[str]:
    """The operators whose calls make tensors, each segment or call of torch tried by itself."""
    found = set()
    with torch.inference_mode():
        for segment in executor.segments:
            run = partial(segment.run, executor.memory, 1)
            if isinstance(segment, NativeSegment):
                assert allocations(run) == []
                continue
            for number, call in enumerate(segment._bound(executor.memory), segment.first):
                if any(size > 0 for size in allocations(call)):
                    found.add(executor.plan.calls[number].where.split()[0])
    return found


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_a_count_of_batches_is_no_operator_of_torch(native: bool) -> None:
    builder = Builder()
    count = builder.buffer("count", torch.tensor(3))
    graph = builder.finish([], updates={count.id: builder.call("aten.add.Tensor", count, 2).id})
    assert [kind_of(call.kind_id).name for call in planned(graph).calls] == ["step_inc"]
    assert_same(graph, [], native=native)
