"""What plans are predicted to take, against their simulation: `python -m benchmarks.prediction`.

Twenty pairs of a training step and a cluster: an MLP, a ResNet, GPTs of 4 and 12 layers and a
Llama, trained by SGD or AdamW, on A100s or CPU cores, by pipeline, data, tensor and mixed meshes.
`sw.predict` sums costs over the plan; `sw.simulate` builds the program of every slot and runs its
schedule on a virtual clock, with the same costs of operators. All is built on meta, and nothing is
timed: both numbers of a pair are the same on every machine. Time should be within 10% in at least
19, and the memory of the fullest slot never more than 2% too low.

`--auto` plans each step on 4 and 8 devices of both clusters by search, in 16 microbatches, and
simulates that plan and those by METIS and PipeDream: none of them should be more than 1% faster.
`--save FILE` writes the tables as Markdown.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from benchmarks.experiments.models import SIDE, ResNet
from benchmarks.measure import console
from benchmarks.models import GPT, loss_of
from benchmarks.planning import A100, NVLINK, LlamaLayer, tokens
from benchmarks.simulator.report import Part, markdown, table_of
from shardwright.clusters import CPU_CORE, GLOO, Cluster
from shardwright.ir import IRGraph

WITHIN, TOO_LOW = 0.10, -0.02
"""How far the time may be off, and how much too low the memory may be, as fractions."""
MESHES: Sequence[Mapping[str, int]] = (
    {"pipeline": 4},
    {"data": 4},
    {"tensor": 4},
    {"pipeline": 2, "data": 2, "tensor": 2},
)
MICROBATCHES = 16
"""Captured batches that a step takes where `auto` is held against others."""
RIVALS = tuple(product(("metis", "pipedream"), ("1f1b", "zb-h1")))
"""Policies and schedules that `auto` is held against."""
SLOWER = 0.01
"""How much slower than the best of them its plan may be simulated to be, as a fraction."""
HEADINGS = (
    "step",
    "nodes",
    "cluster",
    "mesh",
    "time",
    "simulated",
    "off",
    "memory",
    "simulated",
    "off",
)


AUTO_HEADINGS = (
    "step",
    "cluster",
    "devices",
    "plan by search",
    "simulated",
    "best rival",
    "its",
    "off",
)

WORDS = (
    "Made by `{}`: nothing is timed. *Off* is how far a prediction is from the simulation, and how "
    "much slower than the best rival the plan by search is."
)


class Step(NamedTuple):
    """A model on meta, a microbatch, its loss, and the optimizer."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]

    def graph(self) -> IRGraph:
        """The training step of a microbatch."""
        with sw.empty_weights():
            model = self.model()
        optimizer = self.optimizer(model.parameters(), lr=1e-3)

        def step(given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss(model(given), wanted)
            loss.backward()
            optimizer.step()
            return loss

        return sw.compile_ir(step, *self.batch())


class Llama(nn.Module):
    """The shape of Llama at hidden size 1024, 8 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8192, 1024)
        self.layers = nn.ModuleList(LlamaLayer(1024, 16, 8, 2816) for _ in range(8))
        self.norm = nn.RMSNorm(1024)
        self.head = nn.Linear(1024, 8192, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def mlp() -> nn.Module:
    layers = [nn.Linear(1024, 1024) for _ in range(24)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.GELU())))


def text(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels."""
    return tokens(batch, length), tokens(batch, length)


STEPS: Mapping[str, Step] = {
    "MLP, SGD": Step(mlp, lambda: (torch.zeros(64, 1024),) * 2, F.mse_loss, torch.optim.SGD),
    "ResNet, AdamW": Step(
        lambda: ResNet(64),
        lambda: (torch.zeros(32, 1, SIDE, SIDE), torch.zeros(32, dtype=torch.long)),
        F.cross_entropy,
        torch.optim.AdamW,
    ),
    "GPT, 4 layers, SGD": Step(
        lambda: GPT(4, 512, 8, 8192, 64, tied=False),
        lambda: text(8, 64),
        loss_of,
        torch.optim.SGD,
    ),
    "GPT, 12 layers, AdamW": Step(
        lambda: GPT(12, 768, 12, 8192, 128),
        lambda: text(8, 128),
        loss_of,
        torch.optim.AdamW,
    ),
    "Llama, 8 layers, AdamW": Step(Llama, lambda: text(8, 256), loss_of, torch.optim.AdamW),
}


class Pair(NamedTuple):
    """A plan predicted and simulated: seconds of a step, bytes of the fullest slot."""

    step: str
    nodes: int
    cluster: str
    mesh: str
    seconds: tuple[float, float]
    nbytes: tuple[int, int]

    @property
    def off(self) -> tuple[float, float]:
        """By which fractions time and memory are predicted too high."""
        (time, simulated), (memory, held) = self.seconds, self.nbytes
        return time / simulated - 1, memory / held - 1

    @property
    def row(self) -> tuple[str, ...]:
        (time, simulated), (memory, held) = self.seconds, self.nbytes
        seconds = [f"{1e3 * value:.3g} ms" for value in (time, simulated)]
        nbytes = [f"{value / 1e6:.4g} MB" for value in (memory, held)]
        time_off, memory_off = (f"{100 * value:+.1f}%" for value in self.off)
        names = self.step, str(self.nodes), self.cluster, self.mesh
        return (*names, *seconds, time_off, *nbytes, memory_off)


CLUSTERS: Mapping[str, Callable[[int], Cluster]] = {
    "A100": lambda count: Cluster.of(count, device=A100, inside=NVLINK),
    "CPU cores": lambda count: Cluster.of(count, device=CPU_CORE, inside=GLOO),
}


def pairs(steps: Sequence[str]) -> Iterator[Pair]:
    """Steps by meshes, the clusters in turn."""
    graphs = {name: STEPS[name].graph() for name in steps}
    for (i, (name, graph)), (j, mesh) in product(enumerate(graphs.items()), enumerate(MESHES)):
        where, made_of = list(CLUSTERS.items())[(i + j) % len(CLUSTERS)]
        cluster = made_of(math.prod(mesh.values()))
        microbatches = 4 if "pipeline" in mesh else 2
        made = sw.plan(graph, cluster, mesh=mesh, microbatches=microbatches)
        predicted = sw.predict(graph, made, cluster)
        simulated = sw.simulate(graph, made, cluster)
        yield Pair(
            name,
            len(graph.nodes),
            where,
            ", ".join(f"{axis} {size}" for axis, size in mesh.items()),
            (predicted.step_time, simulated.step_time),
            (predicted.peak_memory, max(simulated.peak_memory.values())),
        )


def summary(found: Sequence[Pair]) -> list[str]:
    """How many are within what is wanted."""
    times, memories = zip(*(pair.off for pair in found), strict=True)
    near = sum(abs(off) <= WITHIN for off in times)
    low = sum(off < TOO_LOW for off in memories)
    return [
        f"time within {WITHIN:.0%}: {near} of {len(found)}; furthest {max(times, key=abs):+.1%}",
        f"memory more than {-TOO_LOW:.0%} too low: {low} of {len(found)}; "
        f"lowest {min(memories):+.1%}, highest {max(memories):+.1%}",
    ]


class Contest(NamedTuple):
    """The plan by search and the best other one: milliseconds of a microbatch, simulated."""

    step: str
    cluster: str
    devices: int
    plan: str
    own: float
    rival: str
    best: float

    @property
    def off(self) -> float:
        """By which fraction the plan by search is slower."""
        return self.own / self.best - 1

    @property
    def row(self) -> tuple[str, ...]:
        times = f"{self.own:.4g} ms", self.rival, f"{self.best:.4g} ms"
        names = self.step, self.cluster, str(self.devices), self.plan
        return (*names, *times, f"{100 * self.off:+.1f}%")


def contests(steps: Sequence[str], sizes: Sequence[int] = (4, 8)) -> Iterator[Contest]:
    """Steps by clusters of so many devices."""
    for name, (where, made_of), devices in product(steps, CLUSTERS.items(), sizes):
        graph, cluster = STEPS[name].graph(), made_of(devices)
        made = sw.plan(graph, cluster, "auto", microbatches=MICROBATCHES)
        own = 1e3 * sw.simulate(graph, made, cluster).step_time / MICROBATCHES
        others = {
            f"{policy}, {schedule}": rival(graph, cluster, policy, schedule, MICROBATCHES)
            for policy, schedule in RIVALS
        }
        best = min(others, key=others.__getitem__)
        yield Contest(name, where, devices, str(made.explanation.plan), own, best, others[best])


def rival(graph: IRGraph, cluster: Cluster, policy: str, schedule: str, microbatches: int) -> float:
    """Simulated milliseconds of a microbatch; infinite where the policy has no plan."""
    try:
        made = sw.plan(graph, cluster, policy, microbatches=microbatches, schedule=schedule)
    except sw.PlanError:
        return math.inf
    return 1e3 * sw.simulate(graph, made, cluster).step_time / microbatches


def contest_summary(found: Sequence[Contest]) -> list[str]:
    """How often a rival is faster."""
    slower = sum(contest.off > SLOWER for contest in found)
    offs = [contest.off for contest in found]
    return [
        f"by search more than {SLOWER:.0%} slower than the best rival: {slower} of {len(found)}; "
        f"from {min(offs):+.1%} to {max(offs):+.1%}"
    ]


def main(arguments: Sequence[str]) -> None:
    """Predict and simulate what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    found = list(pairs(options.steps))
    parts = [
        Part("Plans predicted and simulated", HEADINGS, [p.row for p in found], summary(found))
    ]
    if options.auto:
        held = list(contests(options.steps))
        rows, notes = [contest.row for contest in held], contest_summary(held)
        parts.append(Part("Plans by search against others", AUTO_HEADINGS, rows, notes))
    for part in parts:
        console.print(table_of(part), *part.summary, sep="\n")
    if options.save:
        shown = " ".join(word for word in arguments if word not in ("--save", str(options.save)))
        words = WORDS.format(f"python -m benchmarks.prediction {shown}".strip())
        options.save.write_text(markdown(words, parts, "Predictions and plans against simulations"))


if __name__ == "__main__":
    main(sys.argv[1:])
