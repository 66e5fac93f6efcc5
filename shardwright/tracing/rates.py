"""The learning rates of a run: what the optimizers' groups say, as their schedulers change them.

The user's optimizer never steps in a run, the workers do it; but its groups and schedulers live on
here, step for step, and give the rates that the graph takes as inputs. A rate is read before the
step that uses it, and the schedulers step after, as in a loop written by hand.

Invariant: no step runs with other hyper-parameters than the optimizer's groups say. Only the rate
may change; of the others, which are constants of the graph, a change is an InputError.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwright.errors import InputError, WeightError
from shardwright.tracing.step import Rate, momentum_cycle


class _SchedulerState(msgspec.Struct):
    """What a checkpoint keeps of the rates."""

    step: int
    first: dict[str, float]
    rates: dict[str, float]
    schedulers: list[dict[str, Any]]
    changed: dict[str, dict[str, Any]] = {}


Factor = Callable[[int], float]
"""From the number of a step, from 0 on, to what the optimizer's rate is multiplied by."""


class Rates:
    """The rates that a graph reads, by the names of its inputs.

    ``scheduler`` is one of torch's, a sequence of them, a `Factor`, or None; ``called`` are those
    that the step itself calls. Raises InputError.
    """

    def __init__(
        self,
        rates: Sequence[Rate],
        scheduler: LRScheduler | Sequence[LRScheduler] | Factor | None = None,
        called: Sequence[LRScheduler] = (),
    ) -> None:
        self._rates = rates
        self._first = {rate.input: rate.value for rate in rates}
        self._factor: Factor | None = None
        self._step = 0
        given: Sequence[LRScheduler] = ()
        if isinstance(scheduler, LRScheduler):
            given = [scheduler]
        elif isinstance(scheduler, Sequence):
            given = scheduler
        elif callable(scheduler):
            self._factor = scheduler
        elif scheduler is not None:
            raise InputError(
                f"scheduler= is a {type(scheduler).__name__}; give one of "
                "torch.optim.lr_scheduler, or a function from the step to a factor"
            )
        self._schedulers = list({id(item): item for item in (*called, *given)}.values())
        self._check()

    @property
    def values(self) -> dict[str, float]:
        """The rates of the next step."""
        factor = 1.0 if self._factor is None else float(self._factor(self._step))
        current = {rate.input: rate.value for rate in self._rates}
        return current if self._factor is None else {k: v * factor for k, v in self._first.items()}

    def inputs(self) -> dict[str, Tensor]:
        """The rates of the next step as the graph takes them: f64 without dimensions.

        Raises InputError where there is a `change`.
        """
        if change := self.change():
            raise InputError(change)
        return {name: torch.tensor(rate, dtype=torch.float64) for name, rate in self.values.items()}

    def change(self) -> str | None:
        """The first hyper-parameter that is no longer that of the graph, as an error says it."""
        for rate in self._rates:
            for name, found in rate.changed().items():
                return _CHANGE.format(
                    step=self._step + 1,
                    name=name,
                    group=rate.group,
                    optimizer=type(rate.optimizer).__name__,
                    found=found,
                    expected=rate.constants[name],
                )
        return None

    def advance(self) -> None:
        """A step is done, or on its way: let the schedulers step."""
        self._step += 1
        if not self._schedulers:
            return
        with warnings.catch_warnings():
            # The optimizer steps on the workers, where the scheduler does not see it.
            warnings.filterwarnings("ignore", ".*lr_scheduler.step.*before.*optimizer.step")
            for scheduler in self._schedulers:
                scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes to go on from here."""
        return {
            "step": self._step,
            "first": dict(self._first),
            "rates": {rate.input: rate.value for rate in self._rates},
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "changed": {rate.input: rate.changed() for rate in self._rates},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken. Raises InputError where schedulers differ.

        Raises WeightError where it is no such state.
        """
        self._check_state(state)
        if len(state["schedulers"]) != len(self._schedulers):
            raise InputError(
                f"the checkpoint was written with {len(state['schedulers'])} schedulers, this run "
                f"has {len(self._schedulers)}; resume with the same scheduler="
            )
        self._step = state["step"]
        self._first.update(state["first"])
        for rate in self._rates:
            if rate.input in state["rates"]:
                rate.optimizer.param_groups[rate.group]["lr"] = state["rates"][rate.input]
            # What had changed by then has changed here too, so that the next step is refused again.
            changed = state.get("changed", {}).get(rate.input, {})
            rate.optimizer.param_groups[rate.group].update(changed)
        for scheduler, content in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(content)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        try:
            kept = msgspec.convert(state, _SchedulerState)
        except msgspec.ValidationError as error:
            raise WeightError(f"the rates of the checkpoint are damaged: {error}") from None
        for content, scheduler in zip(kept.schedulers, self._schedulers, strict=False):
            ours = scheduler.state_dict()
            wrong = sorted(ours.keys() ^ content.keys()) or [
                name for name in ours if not _is_like(content[name], ours[name])
            ]
            if wrong:
                raise WeightError(
                    f"the checkpoint's {type(scheduler).__name__} has another {wrong[0]!r} than "
                    "this run's; resume with the same scheduler=, or from another checkpoint"
                )

    def _check(self) -> None:
        for scheduler in self._schedulers:
            if isinstance(scheduler, ReduceLROnPlateau):
                raise InputError(
                    "ReduceLROnPlateau follows a number that is known only after a step; give "
                    "scheduler= a function from the step to a factor, or another scheduler"
                )
            if all(scheduler.optimizer is not rate.optimizer for rate in self._rates):
                raise InputError(
                    f"the {type(scheduler).__name__} belongs to an optimizer that the step does "
                    "not use; make it with the optimizer that step_fn steps"
                )
            if cycle := momentum_cycle(scheduler):
                raise InputError(
                    f"{cycle}, and a captured step follows only the learning rate: make the "
                    "scheduler with cycle_momentum=False"
                )


_CHANGE = (
    "before step {step}: {name!r} of parameter group {group} of the {optimizer} is {found}, and "
    "the step was captured with {expected}; of an optimizer's hyper-parameters only the learning "
    "rate may change in a run. Leave {name!r} as it is (cycle_momentum=False in OneCycleLR and "
    "CyclicLR), or end the run before the change with steps= and checkpoint=, and resume with the "
    "new value"
)


def _is_like(found: Any, known: Any) -> bool:
    """Whether what a checkpoint kept could be what a scheduler has."""
    if isinstance(known, float | int) and not isinstance(known, bool):
        return isinstance(found, float | int)
    if isinstance(known, list) and isinstance(found, list):
        alike = len(found) == len(known)
        return alike and all(_is_like(a, b) for a, b in zip(found, known, strict=True))
    return known is None or found is None or type(found) is type(known)
