"""What a run of training leaves: losses, evaluations, and the trained tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shardwright.errors import WeightError
from shardwright.pipeline import Pipeline
from shardwright.planning import Plan
from shardwright.runtime.training_runner import TrainingRunner
from shardwright.training.checkpoint import find_checkpoint, read_manifest
from shardwright.training.dcp import TensorPiece, read_pieces, stored_in
from shardwright.training.logs import StepReport

_STEPS_OWN = ("optimizer.", "grad.")
"""How names of state begin that is not the model's."""


@dataclass(repr=False)
class TrainResult:
    """The result of `train`. Under torchrun, only rank 0 has reports.

    steps
        Number of steps that the model has been trained, including those before a resumed run.
    reports
        One per step of this run, in order.
    plan, pipeline
        How it was run.
    model
        The program's state_dict.
    state
        All state of the step including the optimizers', as global tensors by name.
    """

    plan: Plan
    pipeline: Pipeline
    steps: int = 0
    reports: list[StepReport] = field(default_factory=list)
    model: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        said = f"steps={self.steps}, "
        if self.reports:
            said += f"first_loss={self.losses[0]:.6g}, last_loss={self.losses[-1]:.6g}, "
            said += f"seconds={sum(self.seconds):.3g}, evaluations={len(self.evaluations)}, "
        return f"TrainResult({said}plan={self.plan.policy!r}, slots={len(self.plan.devices)})"

    @property
    def losses(self) -> list[float]:
        """The loss of each step of this run."""
        return [report.loss for report in self.reports]

    @property
    def seconds(self) -> list[float]:
        """The duration of each step of this run, in seconds."""
        return [report.seconds for report in self.reports]

    @property
    def evaluations(self) -> dict[int, dict[str, float]]:
        """The results of evaluations, by the step that they followed."""
        return {r.step: r.evaluation for r in self.reports if r.evaluation is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """The ``state_dict()`` of the trained model, as on one device."""
        return dict(self.model)


def state_dict(source: TrainResult | TrainingRunner | str | Path) -> dict[str, Tensor]:
    """The state_dict of a trained model as on one device: global tensors by original names.

    ``source`` is the result of `train`, a checkpoint, or a directory of checkpoints, of which the
    latest is read. It may also be a `TrainingRunner`, which knows only the tensors of its pipeline:
    it has tied parameters once, and has no tensors that the step does not use.

    Raises WeightError if there is no checkpoint.
    """
    if isinstance(source, TrainResult):
        return source.state_dict()
    if isinstance(source, TrainingRunner):
        state = source.state()
        return {name: state[name] for name in state if not name.startswith(_STEPS_OWN)}
    path = find_checkpoint(source)
    stored, names = stored_in(path), read_manifest(path).model
    if missing := [name for name in names if name not in stored]:
        raise WeightError(
            f"the checkpoint {path} has no {missing[0]!r}, of which it says that the model has it; "
            "it is damaged: take another"
        )
    found = {name: torch.empty(stored[name].shape, dtype=stored[name].dtype) for name in names}
    read_pieces(path, {TensorPiece.whole(name, tensor): tensor for name, tensor in found.items()})
    return found
