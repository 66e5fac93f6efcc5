"""The executor against eager and the compilers: `python -m benchmarks.executor`.

Each workload, with each number of threads, by every variant in a process of its own, in turn:
eager; eager with the fused optimizer; torch.compile; the same with frozen weights; the whole step
by inductor; frozen AOTInductor; the floor (matrix products, convolutions, attention and optimizer
alone); and shardwright. Every variant's outputs, or first losses, are compared with eager's. Said
are medians, and medians of the ratios within a round: how many times faster shardwright is. With
`--device cuda` the variants are eager, eager with the fused optimizer, torch.compile with CUDA
graphs, and shardwright with them. `--save FILE` writes what is found. The exit code is 1 where a
variant does not compute what eager does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.executor.report import Line, markdown, table_of, words_of
from benchmarks.executor.variants import variants_of
from benchmarks.executor.worker import Worker
from benchmarks.executor.workloads import WORKLOADS
from benchmarks.measure import console, print_machine

OURS, EAGER, FLOOR = "shardwright", "eager", "floor"
CUDA_STEPS = 50
"""How many steps are timed at once on a GPU, whose kernels run on while Python is ahead."""


def difference(found: Path, expected: Path) -> float:
    """The largest difference of two variants' results, as a part of the largest number."""
    pairs = [
        (a, b)
        for one, other in zip(torch.load(found), torch.load(expected), strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return float(torch.stack([(a - b).abs().max() / b.abs().max() for a, b in pairs]).max())


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
    name: str, threads: int, variants: Sequence[str], rounds: int, folder: Path, device: str
) -> Iterator[Line]:
    """The lines of one workload."""
    workload = WORKLOADS[name]
    steps = workload.steps * threads if device == "cpu" else CUDA_STEPS
    with ExitStack() as stack:
        workers, started = {}, {}
        for variant in variants:
            workers[variant] = stack.enter_context(Worker(name, variant, threads, folder, device))
            started[variant] = workers[variant].answer()["seconds"]
        seconds = measure(workers, steps, rounds)
    for variant in variants:
        ratios = [a / b for a, b in zip(seconds[variant], seconds[OURS], strict=True)]
        compared = variant != FLOOR and EAGER in workers
        yield Line(
            variant,
            started[variant],
            statistics.median(seconds[variant]),
            statistics.median(ratios),
            difference(workers[variant].path, workers[EAGER].path) if compared else None,
        )


def measured(options: argparse.Namespace) -> Iterator[tuple[str, list[Line]]]:
    """Titles and lines of all that is asked for."""
    on_cpu = options.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workloads:
            known = variants_of(WORKLOADS[name], options.device)
            chosen = [
                v for v in known if v == OURS or options.variants is None or v in options.variants
            ]
            for threads in WORKLOADS[name].threads if on_cpu else [1]:
                if on_cpu and threads not in options.threads:
                    continue
                place = f"{threads} thread{'s' * (threads > 1)}" if on_cpu else options.device
                lines = rows(name, threads, chosen, options.rounds, Path(folder), options.device)
                yield f"{WORKLOADS[name].title}, {place}", list(lines)


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for; 1 where a variant computes something else than eager."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--variants", nargs="+", help="all by default; shardwright is always there")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on the CPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", type=Path, help="a file of Markdown to write")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this machine has no CUDA device; leave out --device cuda")
    print_machine()
    found: dict[str, list[Line]] = {}
    start = time.monotonic()
    for title, lines in measured(options):
        found[title] = lines
        console.print(table_of(title, lines))
    if options.save is not None:
        seconds = time.monotonic() - start
        words = words_of(
            arguments=[a for a in arguments if a not in ("--save", str(options.save))],
            device=options.device,
            seconds=seconds,
            rounds=options.rounds,
        )
        options.save.write_text(markdown(words, found))
    return int(any(line.wrong for lines in found.values() for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
