"""What splitting layers over two processes gains, and what it takes: `python -m benchmarks.tensor`.

A GPT of 8 layers, hidden size 512, 16 sequences of 64 tokens, forward: one process of one thread
against two, by this package and by PyTorch's DTensor, in turn. Then the time to plan and build a
GPT of up to 64 layers for up to 8 slots.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from rich.table import Table

import shardwright as sw
from benchmarks.build import best
from benchmarks.dtensor import DTensorGPT
from benchmarks.measure import alternate, console, print_machine, print_timings
from benchmarks.models import gpt

SIZES = {"layers": 8, "width": 512, "heads": 8, "batch": 16, "length": 64}
CALLS = 4
"""Calls a round, of which a mean is taken."""
ONE = "eager, one process"


def two_processes(rounds: int) -> None:
    """Seconds a round of calls, by variant."""
    model, args = gpt(**SIZES, fused=False, tied=False)
    graph = sw.capture(model, args)
    pipeline = sw.build(graph, sw.plan(graph, devices=2, policy="tensor"))
    groups = Counter(t.kind for t in pipeline.supertasks.values() if t.group and not t.device_idx)
    console.print(f"communication a call: {', '.join(f'{n} {k}' for k, n in groups.items())}")
    with (
        sw.Runner(pipeline, threads=1) as runner,
        DTensorGPT(2, **SIZES) as dtensor,
        torch.no_grad(),
    ):
        expected = model(*args)
        for name, found in (("shardwright", runner(*args)), ("DTensor", dtensor.output())):
            error = (found - expected).abs().max() / expected.abs().max()
            console.print(f"{name} differs from eager by {error:.1e} of the largest value")
        timings = alternate(
            {
                ONE: lambda: [model(*args) for _ in range(CALLS)],
                "shardwright, two": lambda: [runner(*args) for _ in range(CALLS)],
                "shardwright, two, a stream": lambda: list(runner.map([args] * CALLS)),
                "DTensor, two": lambda: dtensor.run(CALLS),
            },
            rounds=rounds,
        )
    print_timings(f"{CALLS} calls", timings, ONE)
    for name in timings.seconds:
        if name != ONE:
            console.print(f"speed of {name} over one process: {1 / timings.ratio(name, ONE):.2f}")


def transform_times() -> Table:
    """Seconds to plan and build, capture excluded."""
    table = Table(title="plan and build, policy tensor", title_justify="left")
    for heading in ("layers", "slots", "plan", "build", "both", "a layer and slot"):
        table.add_column(heading, justify="right")
    cases = [(64, slots) for slots in (1, 2, 4, 8)] + [(layers, 8) for layers in (8, 16, 32)]
    for layers, slots in cases:
        graph = sw.capture(*gpt(layers, heads=8))
        planned, plan = best(
            lambda graph=graph, slots=slots: sw.plan(graph, devices=slots, policy="tensor")
        )
        built, _ = best(lambda graph=graph, plan=plan: sw.build(graph, plan))
        table.add_row(
            str(layers),
            str(slots),
            f"{planned:.2f} s",
            f"{built:.2f} s",
            f"{planned + built:.2f} s",
            f"{1e3 * (planned + built) / layers / slots:.1f} ms",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the comparison")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print_machine()
    two_processes(rounds)
    console.print(transform_times())


if __name__ == "__main__":
    main()
