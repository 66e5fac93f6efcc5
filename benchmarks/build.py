"""How long it takes to turn a model into a pipeline: `python -m benchmarks.build`.

A GPT of hidden size 256 with 8 to 64 layers, for 4 slots. Capture is set against
`torch.export.export` alone; planning and building (check included) against the number of layers.
Then the same of a training step, backward and AdamW, in two stages of 4 microbatches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.table import Table

import shardwright as sw
from benchmarks.measure import alternate, console, print_machine, print_timings
from benchmarks.models import gpt, loss_of

LAYERS = (8, 16, 32, 64)
SLOTS = 4


def best(function, rounds: int = 3):
    """The least time of a few runs, in seconds, and the last result."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return min(times), result


def build_times() -> Table:
    table = Table(title="plan and build, capture excluded", title_justify="left")
    for heading in (
        "layers",
        "nodes",
        "plan",
        "build",
        "both",
        "both / layer",
        "file",
        "graph text",
    ):
        table.add_column(heading, justify="right")
    for layers in LAYERS:
        graph = sw.capture(*gpt(layers))
        planned, plan = best(lambda graph=graph: sw.plan(graph, devices=SLOTS))
        built, pipeline = best(lambda graph=graph, plan=plan: sw.build(graph, plan))
        texts = sum(map(len, (pipeline.blobs or {}).values()))
        texts += sum(len(task.data or "") for task in pipeline.supertasks.values())
        table.add_row(
            str(layers),
            str(len(graph.nodes)),
            f"{1e3 * planned:.0f} ms",
            f"{1e3 * built:.0f} ms",
            f"{1e3 * (planned + built):.0f} ms",
            f"{1e3 * (planned + built) / layers:.2f} ms",
            f"{len(pipeline.to_json()) / 1e3:.0f} kB",
            f"{texts / 1e3:.0f} kB",
        )
    return table


def capture_against_export() -> None:
    model, args = gpt(LAYERS[-1])

    def everything() -> None:
        graph = sw.capture(model, args)
        sw.build(graph, sw.plan(graph, devices=SLOTS))

    timings = alternate(
        {
            "torch.export": lambda: torch.export.export(model, args, strict=False),
            "capture": lambda: sw.capture(model, args),
            "capture, plan and build": everything,
        },
        rounds=5,
    )
    print_timings(f"capture of {LAYERS[-1]} layers", timings, "torch.export")


def training_times() -> Table:
    """Seconds of each step from a training program to its pipeline."""
    table = Table(title="a training step, in two stages of 4 microbatches", title_justify="left")
    for heading in ("layers", "capture", "plan", "build", "all"):
        table.add_column(heading, justify="right")
    for layers in LAYERS:
        step, args = training_step(layers)
        captured, graph = best(lambda step=step, args=args: sw.compile_ir(step, *args))
        planned, plan = best(
            lambda graph=graph: sw.plan(graph, mesh={"pipeline": 2}, microbatches=4)
        )
        built, _ = best(lambda graph=graph, plan=plan: sw.build(graph, plan))
        seconds = (captured, planned, built, captured + planned + built)
        table.add_row(str(layers), *(f"{value:.2f} s" for value in seconds))
    return table


def training_step(layers: int) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:
    """A step of training a GPT, and its arguments."""
    model, (ids,) = gpt(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step, [ids, ids.roll(1)]


def main() -> None:
    torch.set_num_threads(1)
    print_machine()
    console.print(build_times())
    capture_against_export()
    console.print(training_times())


if __name__ == "__main__":
    main()
