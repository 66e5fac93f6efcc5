"""Generated stages by GPipe in one process: `python -m benchmarks.synchronous`.

A GPT of 4 layers, hidden size 256, 16 sequences of 64, cut in two stages by `sw.codegen`: forward
and backward through `SynchronousPipeline` in 4 microbatches against the plain model, each with one
thread an operator and with two, in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from benchmarks.measure import alternate, console, print_machine, print_timings
from benchmarks.models import GPT, loss_of, training_gpt

STAGES = 2
MICROBATCHES = 4


def stages_of(model: nn.Module, microbatch: Tensor) -> dict[str | int, Any]:
    """The configuration of a model in generated stages."""
    graph = sw.capture(model, (microbatch,))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "stages.py"
        sw.codegen(sw.plan(graph, devices=STAGES), path, graph=graph)
        spec = importlib.util.spec_from_file_location("stages", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.create_pipeline_configuration(model, debug=True)


def steps_of(called: nn.Module, model: GPT, ids: Tensor, labels: Tensor) -> Callable[[int], None]:
    """Forward and backward, with so many threads an operator."""

    def step(threads: int) -> None:
        torch.set_num_threads(threads)
        model.zero_grad()
        loss_of(called(ids), labels).backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    model, ids, labels = training_gpt(4, batch=16, length=64, vocabulary=1000, width=256)
    configuration = stages_of(model, ids[: len(ids) // MICROBATCHES])
    print_machine()
    with sw.SynchronousPipeline(configuration, MICROBATCHES) as pipeline:
        plain = steps_of(model, model, ids, labels)
        piped = steps_of(pipeline, model, ids, labels)
        check(plain, piped, model)
        timings = alternate(
            {
                "model, one thread": lambda: plain(1),
                "model, two threads": lambda: plain(2),
                "stages, one thread": lambda: piped(1),
                "stages, two threads": lambda: piped(2),
            },
            rounds=rounds,
            warmup=2,
        )
    title = f"forward and backward, {STAGES} stages, {MICROBATCHES} microbatches"
    print_timings(title, timings, "model, one thread")
    for threads in ("one thread", "two threads"):
        gain = 1 / timings.ratio(f"stages, {threads}", f"model, {threads}")
        console.print(f"throughput over the model, {threads}: {gain:.2f}")


def check(plain: Callable[[int], None], piped: Callable[[int], None], model: GPT) -> None:
    """Raise where the two do not compute the same gradients."""
    plain(1)
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    piped(1)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


if __name__ == "__main__":
    main()
