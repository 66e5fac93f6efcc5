"""The user's program on one device: its step as a graph, and its tensors by the graph's names.

Input: a step function and the first batch. Output: the graph of one microbatch, what of the
program's state_dict the graph does not hold, and the way back: trained values are written into
the program's parameters, buffers and optimizers, as a loop on one device would have left them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CaptureError, InputError, PlanError
from shardwright.ir import IRGraph
from shardwright.ir.structure import CallArguments, describe_arguments, rebuild_call
from shardwright.planner import AUTO
from shardwright.planner import plan as make_plan
from shardwright.planning import Plan
from shardwright.planning.plan import check_belongs
from shardwright.planning.step import mixing_notes
from shardwright.planning.step_graph import forward_view
from shardwright.tracing import CapturedStep, capture_step
from shardwright.tracing.closures import find_closure
from shardwright.tracing.step import updates_parameters
from shardwright.tracing.step_model import StepModel
from shardwright.training.data import Batch

DRAWS = "rng"
"""The input that counts microbatches for dropout."""


class TrainingProgram:
    """A captured step and the objects it belongs to.

    batch
        The batch that it was captured with.
    graph
        The step on one of its microbatches.
    model
        The program's state_dict: its tensors by name, tied ones under each of their names.
    rest
        Copies of what of it the graph does not hold.
    """

    def __init__(
        self, step_fn: Callable[..., Any], batch: Batch, *, microbatches: int, seed: int
    ) -> None:
        self.batch = batch
        call = first_microbatch(step_fn, batch, microbatches)
        self.captured: CapturedStep = capture_step(step_fn, call.args, call.kwargs, seed=seed)
        self.graph: IRGraph = self.captured.graph
        say_batched(self.graph, step_fn, batch)
        if not updates_parameters(self.graph):
            raise CaptureError(
                "the step changes no parameter, so that there is nothing to train: compute a loss, "
                "call its backward() and then the step() of an optimizer that the step function "
                "closes over"
            )
        self.model = _state_dict(step_fn)
        held = {name for value in self.graph.stored() for name in value.names}
        self.rest = {
            name: tensor.detach().clone() for name, tensor in self.model.items() if name not in held
        }

    @property
    def draws(self) -> bool:
        """Whether the step takes a count for its random numbers."""
        return DRAWS in self._input_names

    @property
    def _input_names(self) -> list[str]:
        return [self.graph.values[value_id].name for value_id in self.graph.inputs]

    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, to the name under which they are stored."""
        return {
            name: value.names[0]
            for value in self.graph.stored()
            for name in value.names[1:]
            if name in self.model
        }

    def state_dict(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's state_dict with the contents ``state``, whole tensors by first names.

        Tied tensors are one, as in a module's own.
        """
        aliases = self.aliases()
        known = {**self.model, **self.rest, **state}
        return {name: known[aliases.get(name, name)].detach() for name in self.model}

    @torch.no_grad()
    def write_back(self, state: Mapping[str, Tensor]) -> None:
        """Give the program's tensors the contents ``state``, whole tensors by their first names."""
        for name, content in self.rest.items():
            self.model[name].copy_(content)
        for value in self.graph.stored():
            own = self.graph.tensors.get(value.id)
            if value.id in self.graph.updates and own is not None:
                own.copy_(state[value.names[0]])
        for name, parameter in self.captured.parameters.items():
            if (gradient := state.get(f"grad.{name}")) is not None:
                parameter.grad = gradient.clone()
        for name, parameter, optimizer in self.captured.optimized():
            for key, content in _state_of(state, name).items():
                found = optimizer.state[parameter].get(key)
                if isinstance(found, Tensor):
                    found.copy_(content)
                else:
                    optimizer.state[parameter][key] = content.clone()


def _state_of(state: Mapping[str, Tensor], parameter: str) -> dict[str, Tensor]:
    prefix = f"optimizer.{parameter}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    }


def _state_dict(step_fn: Callable[..., Any]) -> dict[str, Tensor]:
    """The state_dict of what the step closes over, by the names that its graph uses."""
    found = StepModel(find_closure(step_fn)).state_dict()
    named = {path.partition(".")[::2]: tensor for path, tensor in found.items()}
    return {
        name: tensor
        for (holder, name), tensor in named.items()
        if holder != "warm" and isinstance(tensor, Tensor)
    }


def batch_size(tensors: Sequence[Tensor]) -> int:
    """How many samples: the most frequent first size, of several equally frequent the largest."""
    counts = Counter(tensor.shape[0] for tensor in tensors if tensor.dim())
    return max(counts, key=lambda size: (counts[size], size)) if counts else 1


def say_batched(graph: IRGraph, step_fn: Callable[..., Any], batch: Batch) -> None:
    """Say which inputs are cut from the batch: others may be as long by chance as a microbatch."""
    _, tensors = describe_arguments(step_fn, batch.args, batch.kwargs)
    size = batch_size(tensors)
    for value_id, tensor in zip(graph.inputs, tensors, strict=False):  # then the count of draws
        graph.values[value_id].batched = tensor.shape[:1] == (size,)


def _check_clear(tensors: Sequence[Tensor], size: int, microbatches: int) -> None:
    """Raise InputError where the first tensor may be the batch, and is taken for another."""
    first = next((tensor.shape[0] for tensor in tensors if tensor.dim()), size)
    if microbatches > 1 and first not in (1, size):
        raise InputError(
            f"which inputs are the batch is not clear: the first has {first} rows, most have "
            f"{size}, and it is to be cut in {microbatches} microbatches; pass the batch first, "
            "and let the step read what is no part of it from variables of its own"
        )


def first_microbatch(step_fn: Callable[..., Any], batch: Batch, microbatches: int) -> CallArguments:
    """The first of a batch's equal microbatches.

    Raises InputError where they are not equal, or where it is not sure which tensors have the
    batch's rows: most have as many as the first one, or a guess would train something else.
    """
    arguments, tensors = describe_arguments(step_fn, batch.args, batch.kwargs)
    size = batch_size(tensors)
    _check_clear(tensors, size, microbatches)
    if size % microbatches:
        raise InputError(
            f"a batch of {size} cannot be cut in {microbatches} equal microbatches; choose another "
            "size or number"
        )
    part = size // microbatches
    cut = [t[:part] if t.dim() and t.shape[0] == size else t for t in tensors]
    return rebuild_call(arguments, cut)


# --- its plan -------------------------------------------------------------------------------------


MOST_MICROBATCHES = 64
"""More are not tried unless they are asked for."""


def program_with(
    step_fn: Callable[..., Any],
    batch: Batch,
    asked: Mapping[str, Any],
    *,
    plan: Plan | None = None,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[TrainingProgram, Plan]:
    """The program of a step, captured with one of a batch's microbatches, and its plan.

    ``note`` is told when planning begins.
    ``asked`` are arguments of `plan` by name; those that are None are not asked for. Raises
    PlanError where the plan given is of another graph, or something is asked for beside it.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    if plan is not None:
        return _follow(step_fn, batch, plan, given, seed)
    if given.get("policy") == AUTO and "microbatches" not in given:
        note("planning it in each number of microbatches")
        return _fastest(step_fn, batch, given, seed)
    count = given.get("microbatches", 1)
    program = TrainingProgram(step_fn, batch, microbatches=count, seed=seed)
    note(f"planning it in {_listed(count, 'microbatch', 'microbatches')}")
    return program, make_plan(program.graph, **given)


def _listed(count: int, one: str, several: str) -> str:
    return f"{count} {several if count > 1 else one}"


def _fastest(
    step_fn: Callable[..., Any], batch: Batch, given: Mapping[str, Any], seed: int
) -> tuple[TrainingProgram, Plan]:
    """The program and the plan of as many microbatches as make a step of this batch fastest.

    Only of the whole batch where microbatches would change what is computed; numbers with whose
    microbatches the step cannot be captured are left out. Raises PlanError where none fits.
    """
    found: list[tuple[TrainingProgram, Plan]] = []
    refusals: list[PlanError] = []
    for count in _divisors(batch_size(batch.tensors)):
        try:
            program = TrainingProgram(step_fn, batch, microbatches=count, seed=seed)
        except CaptureError:
            if count == 1:
                raise
            continue
        try:
            found.append((program, make_plan(program.graph, microbatches=count, **given)))
        except PlanError as error:
            refusals.append(error)
        if mixing_notes(forward_view(program.graph), 2, 1):
            break
    if not found:
        raise refusals[0]
    return min(found, key=lambda pair: _step_time(pair[1]))


def _divisors(size: int) -> list[int]:
    return [count for count in range(1, min(size, MOST_MICROBATCHES) + 1) if size % count == 0]


def _step_time(plan: Plan) -> float:
    assert plan.prediction is not None, "a plan that was searched for has a prediction"
    return plan.prediction.step_time


def _follow(
    step_fn: Callable[..., Any], batch: Batch, plan: Plan, given: Mapping[str, Any], seed: int
) -> tuple[TrainingProgram, Plan]:
    """The program with as many microbatches as a plan has, and the plan."""
    check_alone(given)
    if plan.training is None:
        raise PlanError(
            f"the plan for {plan.graph!r} is of a model; plan the training step, from the same "
            "function that is trained"
        )
    program = TrainingProgram(step_fn, batch, microbatches=plan.training.microbatches, seed=seed)
    check_belongs(plan, program.graph)
    return program, plan


def check_alone(given: Mapping[str, Any]) -> None:
    """Raise PlanError where something is asked for beside a plan that is given."""
    if given:
        raise PlanError(
            f"a plan is given, which settles what {', '.join(given)} would; leave that out, or "
            "plan again with it"
        )
