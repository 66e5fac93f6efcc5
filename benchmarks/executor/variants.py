"""Ways to run a workload: each makes a function that does one step, or one forward.

A step gives its loss. What a variant needs of torch's settings it sets for its whole process; so
each has a process of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor

import shardwright as sw
from benchmarks.executor.floor import floor_of
from benchmarks.executor.workloads import RATE, Task, Workload

Step = Callable[[], Any]


def eager_step(workload: Workload, task: Task, **options: Any) -> Callable[..., Tensor]:
    """The training step as a program writes it; ``options`` are the optimizer's."""
    assert workload.optimizer is not None
    assert task.loss is not None
    loss_of = task.loss
    optimizer = workload.optimizer(task.model.parameters(), lr=RATE, **options)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def forward(task: Task, call: Callable[..., Any]) -> Step:
    """A forward without gradients."""

    def run() -> Any:
        with torch.inference_mode():
            return call(*task.batch)

    return run


def eager(workload: Workload, task: Task) -> Step:
    """torch as it comes."""
    if workload.optimizer is None:
        return forward(task, task.model)
    step = eager_step(workload, task)
    return lambda: step(*task.batch)


def eager_fused(workload: Workload, task: Task) -> Step:
    """With the optimizer of one kernel."""
    step = eager_step(workload, task, fused=True)
    return lambda: step(*task.batch)


def compiled(workload: Workload, task: Task) -> Step:
    """`torch.compile` of the forward, or of the loss, beside the fused optimizer."""
    if workload.optimizer is None:
        return forward(task, torch.compile(task.model))
    assert task.loss is not None
    step = eager_step(workload, task._replace(loss=torch.compile(task.loss)), fused=True)
    return lambda: step(*task.batch)


def frozen(workload: Workload, task: Task) -> Step:
    """`torch.compile` with weights as constants, packed."""
    inductor.freezing = True
    return forward(task, torch.compile(task.model))


def reduced(workload: Workload, task: Task) -> Step:
    """`torch.compile` with CUDA graphs, beside the fused optimizer."""
    mode = "reduce-overhead"
    if workload.optimizer is None:
        step: Callable[..., Any] = forward(task, torch.compile(task.model, mode=mode))
    else:
        assert task.loss is not None
        loss = torch.compile(task.loss, mode=mode)
        trained = eager_step(workload, task._replace(loss=loss), fused=True)
        step = partial(trained, *task.batch)

    def run() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return step()

    return run


def whole_step(workload: Workload, task: Task) -> Step:
    """Forward, backward and Adam as one function, compiled by inductor; written for it by hand."""
    assert workload.optimizer is not None
    assert task.loss is not None
    loss_of, model = task.loss, task.model
    decay = 1e-2 if workload.optimizer is torch.optim.AdamW else 0.0
    names = [name for name, _ in model.named_parameters()]

    def loss(parameters: list[Tensor], *batch: Tensor) -> Tensor:
        holder = {f"model.{name}": p for name, p in zip(names, parameters, strict=True)}
        return torch.func.functional_call(wrapper, holder, batch)

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *batch: Tensor) -> Tensor:
            return loss_of(*batch)

    wrapper = Wrapper()

    def step(state: list[list[Tensor]], count: Tensor, *batch: Tensor) -> tuple[Tensor, Tensor]:
        parameters, averages, squares = state
        gradients, value = torch.func.grad_and_value(loss)(parameters, *batch)
        count = count + 1
        first, second = 1 - 0.9**count, 1 - 0.999**count
        for p, g, m, v in zip(parameters, gradients, averages, squares, strict=True):
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            p.mul_(1 - RATE * decay)
            p.sub_(RATE / first * m / ((v / second).sqrt() + 1e-8))
        return value, count

    parameters = [p.detach().clone() for p in model.parameters()]
    state = [parameters, *([torch.zeros_like(p) for p in parameters] for _ in range(2))]
    count = torch.zeros(())
    call = torch.compile(step)

    def run() -> Tensor:
        nonlocal count
        value, count = call(state, count, *task.batch)
        return value

    return run


def packaged(workload: Workload, task: Task) -> Step:
    """AOTInductor: exported, frozen, compiled to a library, called without Python."""
    inductor.freezing = True
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(task.model, task.batch, strict=False)
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(Path(folder, "model.pt2"))
        )
        return forward(task, torch._inductor.aoti_load_package(path))


def ours(workload: Workload, task: Task) -> Step:
    """`shardwright.compile`."""
    target = task.model if workload.optimizer is None else eager_step(workload, task)
    program = sw.compile(target, *task.batch)
    return lambda: program(*task.batch)


def floor(workload: Workload, task: Task) -> Step:
    """Matrix products, convolutions, attention and optimizer alone, as torch does each."""
    training = workload.optimizer is not None
    target = eager_step(workload, task, fused=True) if training else task.model
    return floor_of(target, task.batch, training=training)


TRAINING: Mapping[str, Callable[[Workload, Task], Step]] = {
    "eager": eager,
    "eager, fused": eager_fused,
    "compile": compiled,
    "whole-step inductor": whole_step,
    "floor": floor,
    "shardwright": ours,
}
FORWARD: Mapping[str, Callable[[Workload, Task], Step]] = {
    "eager": eager,
    "compile": compiled,
    "compile, frozen": frozen,
    "AOTInductor, frozen": packaged,
    "floor": floor,
    "shardwright": ours,
}


ON_CUDA: Mapping[str, Callable[[Workload, Task], Step]] = {
    "eager": eager,
    "eager, fused": eager_fused,
    "compile, reduce-overhead": reduced,
    "shardwright": ours,
}


def variants_of(
    workload: Workload, device: str = "cpu"
) -> Mapping[str, Callable[[Workload, Task], Step]]:
    """The ways to run a workload."""
    training = workload.optimizer is not None
    if device == "cuda":
        return {k: v for k, v in ON_CUDA.items() if training or v is not eager_fused}
    return TRAINING if training else FORWARD
