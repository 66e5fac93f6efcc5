"""The executor against eager and the compilers: `python -m benchmarks.executor`.

Each workload, with each number of threads, by every variant in a process of its own, in turn:
eager; eager with the fused optimizer; torch.compile; the same with frozen weights; the whole step
by inductor; frozen AOTInductor; the floor (matrix products, convolutions, attention and optimizer
alone); and shardwright. Every variant's outputs, or first losses, are compared with eager's. Said
are medians, and medians of the ratios within a round: how many times faster shardwright is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.executor.variants import variants_of
from benchmarks.executor.worker import Worker
from benchmarks.executor.workloads import WORKLOADS
from benchmarks.measure import console, print_machine

OURS, EAGER, FLOOR = "shardwright", "eager", "floor"
TOLERANCE = 1e-3
"""Of the largest number: what inductor's and our sums may differ from eager's in float32."""


def difference(found: Path, expected: Path) -> float:
    """The largest difference of two variants' results, as a part of the largest number."""
    pairs = [
        (a, b)
        for one, other in zip(torch.load(found), torch.load(expected), strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def measure(
    workers: Mapping[str, Worker], steps: int, rounds: int
) -> Mapping[str, Sequence[float]]:
    """Seconds of a step, one a round, of each variant; the order turned round each time."""
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for worker in workers.values():
        worker.run(steps)
    for number in range(rounds):
        for name in list(workers)[:: 1 if number % 2 else -1]:
            seconds[name].append(workers[name].run(steps))
    return seconds


def rows(
    name: str, threads: int, variants: Sequence[str], rounds: int, folder: Path
) -> Iterator[tuple[str, ...]]:
    """The lines of one workload: variant, start, median, how often ours is faster, difference."""
    workload = WORKLOADS[name]
    with ExitStack() as stack:
        workers, started = {}, {}
        for variant in variants:
            workers[variant] = stack.enter_context(Worker(name, variant, threads, folder))
            started[variant] = workers[variant].answer()["seconds"]
        seconds = measure(workers, workload.steps * threads, rounds)
    for variant in variants:
        ratios = [a / b for a, b in zip(seconds[variant], seconds[OURS], strict=True)]
        off = "" if variant == FLOOR else _judged(workers, variant)
        yield (
            variant,
            f"{started[variant]:.2f} s",
            f"{1e3 * statistics.median(seconds[variant]):.3f} ms",
            f"{statistics.median(ratios):.2f}",
            off,
        )


def _judged(workers: Mapping[str, Worker], variant: str) -> str:
    if EAGER not in workers:
        return ""
    off = difference(workers[variant].path, workers[EAGER].path)
    return f"{off:.0e}" if off <= TOLERANCE else f"[red]{off:.0e}: WRONG[/]"


def table_of(name: str, threads: int, lines: Sequence[tuple[str, ...]]) -> Table:
    """A workload's lines as a table."""
    title = f"{WORKLOADS[name].title}, {threads} thread{'s' * (threads > 1)}"
    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    for heading in ("start", "step", "over ours", "off eager"):
        table.add_column(heading, justify="right")
    for line in lines:
        table.add_row(*line)
    return table


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", help="all by default; shardwright is always there")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads:
            known = list(variants_of(WORKLOADS[name]))
            chosen = [
                v for v in known if v == OURS or options.variants is None or v in options.variants
            ]
            for threads in WORKLOADS[name].threads:
                if threads in options.threads:
                    lines = list(rows(name, threads, chosen, options.rounds, Path(folder)))
                    console.print(table_of(name, threads, lines))


if __name__ == "__main__":
    main()
