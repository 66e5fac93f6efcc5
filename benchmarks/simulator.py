"""The simulator against reality: `python -m benchmarks.simulator`.

Training steps of a GPT, of MiniLM and of a ResNet on two processes, by GPipe and 1F1B, in 2 to 16
microbatches. The links are measured once. Of each file the supertasks are measured alone (as
`profile_tasks` does: on both slots at the same time, so that what these share of the machine is in
the times), the file is simulated, and steps are run, in turn, round after round on the same two
processes: machines drift, and a prediction holds for the machine that was measured. Said are
medians of the predicted and the measured time of a step, and of their ratio within a round; and the
memory of the slot that holds most.

Memory is what live tensors need, as the allocator of each worker counts it; for comparison, by how
much the processes grew over those of a step that holds next to nothing. That is more: messages, and
gaps in the heap, which nobody predicts.

Last, one GPT is cut in 20 places: is a cut that is predicted to be faster faster?
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from rich.table import Table
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from benchmarks.experiments.models import SIDE, ResNet
from benchmarks.measure import console, print_machine
from benchmarks.models import loss_of, minilm, training_gpt
from shardwright.ir import IRGraph
from shardwright.layout import Cluster
from shardwright.planning import Plan, step_of
from shardwright.planning.forward import forward_view
from shardwright.planning.simulation.simulated import StepSimulation
from shardwright.planning.training import with_prepared
from shardwright.profiling.links import profile_links
from shardwright.runtime.memory import COUNT_TENSORS, MEMORY, TENSORS
from shardwright.runtime.task_times import times_on

SCHEDULES = ("gpipe", "1f1b")
MICROBATCHES = (2, 4, 8, 16)
STEPS = 3
"""Steps that follow one another, of which a mean is taken."""
WITHIN = 0.10
"""How far a prediction may be off."""
RATE = torch.tensor(1e-3, dtype=torch.float64)


class Program(NamedTuple):
    """A model, a batch, and the loss of a part of it."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


def gpt(layers: int = 4) -> Program:
    """Hidden size 512, vocabulary 8192, 16 sequences of 64."""
    model, ids, labels = training_gpt(layers)
    return Program(model, (ids, labels), lambda ids, labels: loss_of(model(ids), labels))


def sentences() -> Program:
    """MiniLM: 6 layers, hidden size 384, 16 sentences of 64; means are drawn to given places."""
    model, kwargs = minilm(batch=16, length=64)
    places = torch.randn(16, 384)

    def loss(ids: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        found = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.mse_loss(found.mean(1), places)

    return Program(model, (kwargs["input_ids"], kwargs["attention_mask"], places), loss)


def resnet() -> Program:
    """Seven convolutions of 64 to 256 channels, 128 images."""
    torch.manual_seed(0)
    model = ResNet(64)
    batch = torch.randn(128, 1, SIDE, SIDE), torch.randint(10, (128,))
    return Program(model, batch, lambda images, labels: F.cross_entropy(model(images), labels))


MODELS: Mapping[str, Callable[[], Program]] = {"GPT": gpt, "MiniLM": sentences, "ResNet": resnet}


class Found(NamedTuple):
    """A file predicted and measured.

    pairs
        Seconds of a step, predicted and measured, one pair a round.
    simulation
        That of the last round.
    tensors, processes
        Bytes of live tensors, and of processes, by slot.
    """

    pairs: Sequence[tuple[float, float]]
    simulation: StepSimulation
    tensors: Mapping[str, int]
    processes: Mapping[str, int]

    @property
    def seconds(self) -> tuple[float, float]:
        """Medians of what was predicted, and of what was measured."""
        predicted, measured = zip(*self.pairs, strict=True)
        return statistics.median(predicted), statistics.median(measured)

    @property
    def off(self) -> float:
        """How far the prediction is off: the median over rounds, as a fraction."""
        return statistics.median(predicted / measured for predicted, measured in self.pairs) - 1


def step_graph(program: Program, microbatches: int) -> IRGraph:
    """The step of a microbatch."""
    optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-3)

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = program.loss(*batch)
        loss.backward()
        optimizer.step()
        return loss

    rows = len(program.batch[0]) // microbatches
    return sw.compile_ir(step, *(tensor[:rows] for tensor in program.batch))


def found_of(
    pipeline: sw.Pipeline, batch: Sequence[Tensor], cluster: Cluster, rounds: int
) -> Found:
    """Predict and run steps in turn, on two processes of one thread."""

    def run(session: sw.Session) -> float:
        start = time.perf_counter()
        calls = [session.submit(*batch, lr=RATE) for _ in range(STEPS)]
        for call in calls:
            call.result()
        return (time.perf_counter() - start) / STEPS

    with sw.Session(pipeline, threads=1) as session:
        run(session)
        pairs = []
        for _ in range(rounds):
            times = times_on(session, n_iter=STEPS)
            simulation = sw.simulate(pipeline, times, cluster, calls=STEPS)
            pairs.append((simulation.step_time, run(session)))
        processes = session.call_workers(MEMORY)
        session.call_workers(COUNT_TENSORS)
        run(session)
        return Found(pairs, simulation, session.call_workers(TENSORS), processes)


def of_tensors(simulation: StepSimulation) -> dict[str, int]:
    """The bytes that each slot's allocator has: all but messages, which stand where slots share."""
    return {slot.slot: slot.memory.total - slot.memory.messages for slot in simulation.slots}


# --- steps of three models ----------------------------------------------------------------------


def cases(models: Iterable[str], microbatches: Sequence[int], rounds: int) -> None:
    """Predict and measure each model, schedule and number of microbatches; print all."""
    cluster = Cluster.of(2, inside=profile_links())
    empty = found_of(tiny(), (torch.zeros(2, 8),), cluster, 1).processes
    table = new_table("model", "schedule", "mb")
    errors: dict[str, list[float]] = {"step time": [], "peak memory": []}
    for name in models:
        program = MODELS[name]()
        for schedule in SCHEDULES:
            for n in microbatches:
                graph = step_graph(program, n)
                plan = sw.plan(graph, mesh={"pipeline": 2}, schedule=schedule, microbatches=n)
                pipeline = sw.build(graph, plan)
                found = found_of(pipeline, program.batch, cluster, rounds)
                row, off = compared(found, empty)
                table.add_row(name, schedule, str(n), *row)
                for key, error in zip(errors, off, strict=True):
                    errors[key].append(error)
    console.print(table)
    for key, values in errors.items():
        good = sum(abs(error) <= WITHIN for error in values)
        console.print(
            f"{key} within {WITHIN:.0%}: {good} of {len(values)}; "
            f"largest error {max(map(abs, values)):.1%}"
        )


def tiny() -> sw.Pipeline:
    """A step whose tensors take next to nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    program = Program(model, (torch.zeros(2, 8),), lambda x: model(x).square().mean())
    graph = step_graph(program, 2)
    return sw.build(graph, sw.plan(graph, mesh={"pipeline": 2}, microbatches=2))


def new_table(*texts: str) -> Table:
    """An empty table of predictions beside measurements; mb are microbatches."""
    table = Table(title="Two processes of one thread: predicted and measured", title_justify="left")
    for heading in texts:
        table.add_column(heading)
    for heading in ("step", "measured", "off", "memory", "measured", "off", "process"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def compared(found: Found, empty: Mapping[str, int]) -> tuple[list[str], tuple[float, float]]:
    """A row of the table, and the two errors, as fractions of what was measured."""
    slot = max(found.tensors, key=lambda name: found.tensors[name])
    held, bytes_ = of_tensors(found.simulation)[slot], found.tensors[slot]
    off = found.off, held / bytes_ - 1
    row = [
        *(f"{1e3 * seconds:.0f} ms" for seconds in found.seconds),
        f"{off[0]:+.1%}",
        f"{held / 1e6:.0f} MB",
        f"{bytes_ / 1e6:.0f} MB",
        f"{off[1]:+.1%}",
        f"{(found.processes[slot] - empty[slot]) / 1e6:.0f} MB",
    ]
    return row, off


# --- cuts of one model --------------------------------------------------------------------------


def cuts(count: int, rounds: int, microbatches: int = 4) -> None:
    """Cut a GPT in so many places, and hold the order of predictions against that of runs."""
    cluster = Cluster.of(2, inside=profile_links())
    program = gpt()
    graph = step_graph(program, microbatches)
    plan = sw.plan(graph, mesh={"pipeline": 2}, microbatches=microbatches)
    pairs = []
    for place in range(1, count + 1):
        pipeline = sw.build(graph, cut_at(graph, plan, place / (count + 1)))
        pairs.append(found_of(pipeline, program.batch, cluster, rounds).seconds)
        console.print(
            f"cut {place} of {count}: {1e3 * pairs[-1][0]:.0f} ms, measured "
            f"{1e3 * pairs[-1][1]:.0f} ms"
        )
    found = spearmanr(*zip(*pairs, strict=True)).statistic
    console.print(f"rank correlation of {count} cuts: {found:.3f}")


def cut_at(graph: IRGraph, plan: Plan, fraction: float) -> Plan:
    """The plan with its two stages cut after such a fraction of the nodes."""
    training = plan.training
    assert training is not None
    step = step_of(graph, plan)
    forward = forward_view(step.graph)
    count = len(forward.nodes) - len(step.prepare)
    stages = with_prepared(forward, [int(i >= round(fraction * count)) for i in range(count)])
    slots = [assignment.mesh.devices for assignment in plan.assignments]
    places = [slots.index(rank) for rank in training.slots]
    return msgspec.structs.replace(
        plan,
        nodes=tuple(places[stage] for stage in stages),
        training=msgspec.structs.replace(training, stages=tuple(stages)),
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--microbatches", type=int, nargs="+", default=list(MICROBATCHES))
    parser.add_argument("--rounds", type=int, default=5, help="of which a median is taken")
    parser.add_argument("--cuts", type=int, default=20, help="0 for none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_machine()
    if options.models:
        cases(options.models, options.microbatches, options.rounds)
    if options.cuts:
        cuts(options.cuts, options.rounds)


if __name__ == "__main__":
    main()
