"""Training steps that are predicted and run: models, and one on two processes beside the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from benchmarks.experiments.models import SIDE, ResNet
from benchmarks.models import loss_of, minilm, training_gpt
from shardwright.clusters import Cluster
from shardwright.ir import IRGraph
from shardwright.runtime.task_times import times_of_rounds
from shardwright.simulation.slot import StepSimulation

STEPS = 3
"""Steps that follow one another, of which a mean is taken."""
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


def take_steps(session: sw.TrainingRunner, batch: Sequence[Tensor]) -> float:
    """Run steps one behind the other; seconds of each."""
    start = time.perf_counter()
    calls = [session.submit(*batch, lr=RATE) for _ in range(STEPS)]
    for call in calls:
        call.result()
    return (time.perf_counter() - start) / STEPS


class Clock:
    """Predicts the steps of a session by what its supertasks take alone at the moment."""

    def __init__(self, session: sw.TrainingRunner, pipeline: sw.Pipeline, cluster: Cluster) -> None:
        self._session, self._pipeline, self._cluster = session, pipeline, cluster
        _, self._longest = times_of_rounds(session, 1)

    def steps(self) -> StepSimulation:
        """As many steps as are run, in simulated time."""
        seconds = STEPS * self._longest
        times, self._longest = times_of_rounds(self._session, STEPS, seconds)
        return sw.simulate(self._pipeline, times, self._cluster, calls=STEPS)


class Rounds(NamedTuple):
    """Seconds of a step, predicted and measured, a pair a round; the last prediction as it is."""

    pairs: Sequence[tuple[float, float]]
    simulation: StepSimulation


def in_turn(
    session: sw.TrainingRunner,
    pipeline: sw.Pipeline,
    cluster: Cluster,
    batch: Sequence[Tensor],
    rounds: int,
) -> Rounds:
    """Predict and run steps in turn.

    A prediction is the mean of one right before the steps and one right behind them: what the
    machine can do drifts meanwhile.
    """
    clock, pairs = Clock(session, pipeline, cluster), []
    simulation = clock.steps()
    for _ in range(rounds):
        before, measured = simulation.step_time, take_steps(session, batch)
        simulation = clock.steps()
        pairs.append(((before + simulation.step_time) / 2, measured))
    return Rounds(pairs, simulation)
