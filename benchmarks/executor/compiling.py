"""What compiling takes beside capture: `python -m benchmarks.executor.compiling`.

Seconds of CPU, each workload in a process of its own, as a program's first compilation is: capture
(tracing, and for a step its backward), then all that `shardwright.compile` does with the graph.
Beside that stand passes, lowering and planning done once more, when nothing is new to the process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, TypeVar

import torch
from rich.table import Table

from benchmarks.executor.variants import eager_step
from benchmarks.executor.workloads import ADAMW, WORKLOADS, Workload, trained_gpt
from benchmarks.measure import console, print_machine
from shardwright.compiler.bind import Binder
from shardwright.compiler.lowering import lower_graph
from shardwright.compiler.memory.plan import make_exec_plan
from shardwright.compiler.passes.pipeline import prepare
from shardwright.compiler.replay import Replaying
from shardwright.compiler.sources import source_of
from shardwright.kernels.emitters import emit_graph

COMPILED: Mapping[str, Workload] = {
    **WORKLOADS,
    "gpt-deep": Workload(
        "GPT 64x128, length 64, batch 2, train",
        lambda: trained_gpt(64, 128, 4, 64, 2),
        (1,),
        1,
        ADAMW,
    ),
}
CPU = torch.device("cpu")
T = TypeVar("T")


class Seconds(NamedTuple):
    """Of CPU; ``passes``, ``lower`` and ``plan`` are those of a second time."""

    capture: float
    compile: float
    passes: float
    lower: float
    plan: float


def compiling(name: str) -> tuple[Seconds, int]:
    """The seconds of a workload, and how many calls its plan has."""
    torch.set_num_threads(1)
    workload = COMPILED[name]
    task = workload.make()
    source = source_of(task.model if workload.optimizer is None else eager_step(workload, task))
    inference = source.mode == "inference"
    captured, prepared = timed(lambda: source.prepare(task.batch, {}, CPU))
    compiled, bound = timed(lambda: Binder(CPU)(prepared, Replaying(source.mode)))
    passes, graph = timed(lambda: prepare(prepared.graph, inference=inference))
    lower, lowered = timed(lambda: lower_graph(emit_graph(graph)))
    plan, _ = timed(lambda: make_exec_plan(lowered, outputs="caller"))
    return Seconds(captured, compiled, passes, lower, plan), len(bound.plan.calls)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """The seconds of CPU that ``work`` takes, and what it gives."""
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(COMPILED), default=list(COMPILED))
    options = parser.parse_args()
    print_machine()
    table = Table(title="seconds of CPU", title_justify="left")
    table.add_column("workload")
    for heading in ("calls", *Seconds._fields):
        table.add_column(heading, justify="right")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for name, found in zip(
            options.workloads, pool.map(compiling, options.workloads), strict=True
        ):
            seconds, calls = found
            shown = [f"{value:.3f}" for value in seconds]
            table.add_row(COMPILED[name].title, str(calls), *shown)
    console.print(table)


if __name__ == "__main__":
    main()
