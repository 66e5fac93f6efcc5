"""The learning rates of a run: what the optimizers' groups say, as their schedulers change them.

The user's optimizer never steps in a run, the workers do it; but its groups and schedulers live on
here, step for step, and give the rates that the graph takes as inputs.

What always holds: a rate is read before the step that uses it, and the schedulers step after, as
in a loop written by hand.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardwright.errors import InputError
from shardwright.tracing.step import Rate

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
        """The rates of the next step as the graph takes them: f64 without dimensions."""
        return {name: torch.tensor(rate, dtype=torch.float64) for name, rate in self.values.items()}

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken. Raises InputError where schedulers differ."""
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
        for scheduler, content in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(content)

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
